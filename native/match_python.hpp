// Python's side of the matcher: events that are Python objects, and questions that only Python can answer.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <atomic>

#include "match_ids.hpp"
#include "match_json.hpp"
#include "match_pattern.hpp"
#include "match_walk.hpp"

namespace virta {

// Events as dicts and lists. Strings that have no UTF-8 form are kept alive in `owned`.
class ObjectSource {
  public:
    using Ref = PyObject*;
    ~ObjectSource() { clear(); }
    void clear() {
        for (PyObject* object : owned_) Py_DECREF(object);
        owned_.clear();
    }

    static Ref ref(const void* handle) { return static_cast<Ref>(const_cast<void*>(handle)); }

    bool text(PyObject* string, const char*& data, uint32_t& length) {
        Py_ssize_t size = 0;
        if (PyUnicode_IS_COMPACT_ASCII(string)) {
            data = static_cast<const char*>(PyUnicode_DATA(string));
            size = PyUnicode_GET_LENGTH(string);
        } else {
            data = PyUnicode_AsUTF8AndSize(string, &size);
            if (!data) {
                PyErr_Clear();
                PyObject* encoded = PyUnicode_AsEncodedString(string, "utf-8", "surrogatepass");
                if (!encoded) {
                    PyErr_Clear();
                    return false;
                }
                owned_.push_back(encoded);
                data = PyBytes_AS_STRING(encoded);
                size = PyBytes_GET_SIZE(encoded);
            }
        }
        if (size > INT32_MAX) return false;
        length = static_cast<uint32_t>(size);
        return true;
    }

    Value read(PyObject* object) {
        Value out;
        out.ref = object;
        out.type = kOther;
        if (PyUnicode_Check(object)) {
            if (text(object, out.text, out.length)) out.type = kString;
        } else if (PyBool_Check(object)) {
            out.type = object == Py_True ? kTrue : kFalse;
        } else if (PyLong_Check(object)) {
            out.type = kNumber;
            out.number = PyLong_AsDouble(object);
            if (out.number == -1 && PyErr_Occurred()) {
                PyErr_Clear();
                int overflow = 0;
                PyLong_AsLongLongAndOverflow(object, &overflow);
                out.number = overflow < 0 ? -HUGE_VAL : HUGE_VAL;
            }
        } else if (PyFloat_Check(object)) {
            out.type = kNumber;
            out.number = PyFloat_AS_DOUBLE(object);
            out.negative_zero = out.number == 0 && std::signbit(out.number);
        } else if (object == Py_None) {
            out.type = kNull;
        } else if (PyDict_Check(object)) {
            out.type = kObject;
        } else if (PyList_Check(object) || PyTuple_Check(object)) {
            out.type = kArray;
        }
        return out;
    }

    template <class F>
    void members(PyObject* object, F&& f) {
        Py_ssize_t position = 0;
        PyObject *key, *value;
        while (PyDict_Next(object, &position, &key, &value)) {
            const char* name;
            uint32_t length;
            if (PyUnicode_Check(key) && text(key, name, length)) f(name, length, value);
        }
    }

    template <class F>
    void elements(PyObject* object, F&& f) {
        const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
        PyObject** items = PySequence_Fast_ITEMS(object);
        for (Py_ssize_t i = 0; i < count; i++) {
            // Each element is a cache miss in a long array.
            if (i + 16 < count) __builtin_prefetch(items[i + 16]);
            if (!f(items[i])) return;
        }
    }

  private:
    std::vector<PyObject*> owned_;
};

// Callables the index was made with; see _core.pyi.
struct Callbacks {
    PyObject* search = nullptr;
    PyObject* patterns = nullptr;
    PyObject* point = nullptr;
    PyObject* holds = nullptr;
    PyObject* parse = nullptr;
    PyObject* attribute = nullptr;
    PyObject* text = nullptr;
    std::array<PyObject*, 7> all() const { return {search, patterns, point, holds, parse, attribute, text}; }
};

// What Python was asked for in this process, by kind: `python_calls` of the module.
enum Asked : size_t { kRegexps, kConditions, kPoints, kAttributes, kCases, kTexts, kEvents, kAskedKinds };
inline constexpr std::array<const char*, kAskedKinds> kAskedNames = {
    "regexp", "condition", "point", "attribute", "case", "text", "event"};
inline std::array<std::atomic<uint64_t>, kAskedKinds> asked_of_python{};

inline void count_asked(Asked kind) { asked_of_python[kind].fetch_add(1, std::memory_order_relaxed); }

// Answers the core's questions about the present event, taking the GIL if the caller gave it away.
class PythonHooks : public Hooks {
  public:
    PythonHooks(const Callbacks& callbacks, const std::vector<PyObject*>& opaques)
        : callbacks_(callbacks), opaques_(opaques) {}
    ~PythonHooks() override { assert(!object_); }

    void begin_object(PyObject* object) {
        object_ = object;
        json_ = nullptr;
        Py_INCREF(object_);
    }
    void begin_json(const char* text, size_t length, Py_ssize_t position) {
        json_ = text;
        length_ = length;
        position_ = position;
    }
    void end() {
        if (!object_) return;
        const bool taken = take();
        Py_CLEAR(object_);
        give(taken);
    }
    // The event as a Python object; null, with an exception, when it is none. Needs the GIL.
    PyObject* object() {
        if (!object_) {
            const auto length = static_cast<Py_ssize_t>(length_);
            object_ = PyObject_CallFunction(callbacks_.parse, "y#n", json_, length, position_);
        }
        return object_;
    }

    bool search(uint32_t node, const char* text, uint32_t length, uint32_t from, void* numbers) override;
    bool opaque(uint32_t number, bool& holds) override;
    bool point(uint32_t node, bool& found, double& lat, double& lon) override;
    bool attribute(const char* name, size_t length, std::string& text) override;
    bool fold(bool upper, const char* text, size_t length, std::string& folded) override;
    bool text(uint32_t node, std::string& text) override;
    bool contains(uint32_t node, const char* pattern, bool& known, bool& holds) override;

    PyThreadState* away = nullptr;  // set while the GIL is given away
    Context* context = nullptr;

    bool take() {
        if (!away) return false;
        PyEval_RestoreThread(away);
        away = nullptr;
        return true;
    }
    void give(bool taken) {
        if (taken) away = PyEval_SaveThread();
    }

  private:
    PyObject* value_at(uint32_t node);
    static bool copy_text(PyObject* answer, std::string& text);

    const Callbacks& callbacks_;
    const std::vector<PyObject*>& opaques_;
    PyObject* object_ = nullptr;
    const char* json_ = nullptr;
    size_t length_ = 0;
    Py_ssize_t position_ = 0;
};

}  // namespace virta
