// Filters of the common forms, from their source to a canonical text and a program.
//
// virta.match.compile.source has the plain engine of the same interface (parse, canonicalise, encode) and
// passes to it whatever is refused here. So nothing here reports an error: `false` means "not a common form".
// What is accepted has the canonical text and the program that the plain engine makes of it, byte for byte;
// tests/match/test_source.py compares.
//
// The spelling of paths (pointers, flattened names, computed attributes) stays in Python: `Sources::path`
// asks once a name and remembers.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace virta {

using Text = std::string_view;

constexpr size_t kSourceBytesMax = 16384;  // of a source: CESQL's own limit, the smallest of the four
constexpr size_t kSourcePartsMax = 64;  // of one conjunction or disjunction: joining compares each with each
constexpr size_t kSourceTermsMax = 64;  // conjunctions of a filter, as in virta.filters.limits
constexpr int kSourceDepthMax = 16;
constexpr size_t kSourcePathsMax = 1 << 14;       // remembered paths
constexpr size_t kSourcePatternsMax = 1 << 13;    // remembered regular expressions, and
constexpr size_t kSourcePatternBytesMax = 256;    // the longest of them
constexpr double kExactMax = 9007199254740992.0;  // doubles represent every integer up to here

// As in virta.match.compile.program.
enum SourceOp : uint8_t {
    kExistsOp = 1,
    kEqualsOp = 3,
    kContainsOp = 4,
    kInOp = 5,
    kRangeOp = 6,
    kTextRangeOp = 7,
    kPrefixOp = 8,
    kSuffixOp = 9,
    kPointOp = 11,
    kNegativeZeroOp = 13,
    kOtherOp = 0,
};
constexpr uint8_t kNegatedOp = 128;

// A scalar; types are numbered as in a program and sort as in a canonical `in`.
struct SourceScalar {
    enum Type : uint8_t { kNullType = 1, kFalseType = 2, kTrueType = 3, kNumberType = 4, kTextType = 5 };
    Type type = kNullType;
    double number = 0;
    std::string text;

    static SourceScalar of(bool value) { return {value ? kTrueType : kFalseType, 0, {}}; }
    static SourceScalar of(double value) { return {kNumberType, value == 0 ? 0.0 : value, {}}; }
    static SourceScalar of(Text value) { return {kTextType, 0, std::string(value)}; }
    bool operator<(const SourceScalar& other) const;
    bool operator==(const SourceScalar& other) const;
};

struct SourceBounds {
    bool has_lower = false, has_upper = false, lower_open = false, upper_open = false;
    SourceScalar lower, upper;
};

struct SourcePath {
    std::string text;  // in a canonical form
    std::string code;  // in a program
};
using PathRef = std::shared_ptr<const SourcePath>;

// A regular expression that RE2 accepts; anchored literals are another operation.
struct SourcePattern {
    std::string text;  // in a canonical form
    uint8_t op = kOtherOp;
    std::string operand;  // in a program
};
using PatternRef = std::shared_ptr<const SourcePattern>;

// A canonical node: a literal, a conjunction or disjunction of parts, or what never holds.
struct SourceForm {
    enum Kind : uint8_t { kLiteral, kAnd, kOr, kNothing };
    Kind kind = kLiteral;
    std::string text;
    std::vector<SourceForm> parts;
    // Of a literal.
    PathRef path;
    uint8_t op = kOtherOp;
    bool negated = false;
    uint32_t count = 1;  // literals of the program in `code`
    std::string code;
    std::vector<SourceScalar> values;  // of equals and in
    SourceBounds bounds;               // of a range
};

// Values by text. When it is full the oldest goes: to drop or rehash all at once would take milliseconds.
template <class Value>
class Remembered {
  public:
    explicit Remembered(size_t size_max) : size_max_(size_max) { values_.reserve(size_max); }
    const Value* find(const std::string& key) const {
        const auto found = values_.find(key);
        return found == values_.end() ? nullptr : &found->second;
    }
    void put(const std::string& key, const Value& value) {
        if (!values_.emplace(key, value).second) return;
        if (order_.size() < size_max_) return order_.push_back(key);
        values_.erase(order_[oldest_]);
        order_[oldest_] = key;
        oldest_ = (oldest_ + 1) % size_max_;
    }

  private:
    size_t size_max_, oldest_ = 0;
    std::unordered_map<std::string, Value> values_;
    std::vector<std::string> order_;
};

class Sources;

// Makes literals; `form` is what it was given and nothing else.
SourceForm literal_form(const PathRef& path, SourceOp op, bool negated = false);
SourceForm value_form(const PathRef& path, SourceOp op, const SourceScalar& value, bool negated = false);
SourceForm text_form(const PathRef& path, SourceOp op, Text value, bool negated = false);  // prefix, suffix
// `in`, or an equality where the values are one; they are sorted here. Not empty.
SourceForm in_form(const PathRef& path, std::vector<SourceScalar> values, bool negated = false);
// A range, an equality where the bounds are one value, or nothing; false for the negation of the latter two.
bool range_form(const PathRef& path, const SourceBounds& bounds, bool negated, SourceForm& out);

bool join_forms(SourceForm::Kind kind, std::vector<SourceForm>&& children, SourceForm& out);
// The program of a canonical form, false if it has too many conjunctions.
bool program_of(const SourceForm& form, std::string& program);

void append_json(std::string& out, Text text);
void append_length(std::string& out, size_t length);
void append_scalar_json(std::string& out, const SourceScalar& value);
void append_scalar_code(std::string& out, const SourceScalar& value);
void append_literal_code(std::string& out, uint8_t op, Text path, Text operand);

// The dialects.
bool read_query_string(Sources& sources, Text source, SourceForm& out);
bool read_cesql(Sources& sources, Text source, SourceForm& out);
bool read_koncorde(Sources& sources, PyObject* source, SourceForm& out);
bool read_circle(Sources& sources, PyObject* value, SourceForm& out);  // geoDistance
bool read_regexp(Sources& sources, PyObject* value, SourceForm& out);
bool read_cloudevents(Sources& sources, PyObject* source, SourceForm& out);
// Comparisons of an attribute's text, for CESQL and CloudEvents.
bool text_equals(Sources& sources, Text name, Text text, bool negated, SourceForm& out);
bool text_starts(Sources& sources, Text name, Text text, SourceForm& out);
bool text_ends(Sources& sources, Text name, Text text, SourceForm& out);

// Python's part: how paths are spelled, and conditions without a native form. An exception of a callback
// makes everything return false, and stays set.
class Sources {
  public:
    Sources(PyObject* path, PyObject* pattern, PyObject* leaf)
        : path_(path), pattern_(pattern), leaf_(leaf) {}
    // Kinds: q a query string's key, f a field of Koncorde's, a an attribute, t its text, i its Integer.
    PathRef path(char kind, Text name);
    PatternRef pattern(Text pattern, Text flags);
    bool leaf(PyObject* keyword, PyObject* value, bool positive, SourceForm& out);

  private:
    PyObject* path_;
    PyObject* pattern_;
    PyObject* leaf_;
    Remembered<PathRef> paths_{kSourcePathsMax};
    Remembered<PatternRef> patterns_{kSourcePatternsMax};
};

// Keeps an object alive while a callback may run: another thread might change the source meanwhile.
class Kept {
  public:
    explicit Kept(PyObject* object) : object_(object) { Py_INCREF(object_); }
    ~Kept() { Py_DECREF(object_); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

  private:
    PyObject* object_;
};

// The single member of an object.
inline bool one_member(PyObject* object, PyObject*& key, PyObject*& value) {
    if (!PyDict_CheckExact(object) || PyDict_GET_SIZE(object) != 1) return false;
    Py_ssize_t at = 0;
    return PyDict_Next(object, &at, &key, &value) && PyUnicode_CheckExact(key);
}

inline bool is_text(PyObject* object, const char* text) {
    return PyUnicode_CompareWithASCIIString(object, text) == 0;
}

// A finite number as Python writes it.
inline void append_digits(std::string& out, double number) {
    char* digits = PyOS_double_to_string(number, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
    if (!digits) throw std::bad_alloc();
    out += digits;
    PyMem_Free(digits);
}

// A number as a program has it.
inline void append_double(std::string& out, double number) {
    char bytes[sizeof number];
    std::memcpy(bytes, &number, sizeof number);
    out.append(bytes, sizeof bytes);
}

// A number that doubles represent exactly, and no NaN.
bool number_of(PyObject* object, double& out);

// The UTF-8 of a Python string; false if it has none (lone surrogates).
inline bool utf8(PyObject* string, Text& out) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(string, &size);
    if (!data) {
        PyErr_Clear();
        return false;
    }
    out = Text(data, static_cast<size_t>(size));
    return true;
}

// match_source_module.cpp
extern PyType_Spec sources_spec;

}  // namespace virta
