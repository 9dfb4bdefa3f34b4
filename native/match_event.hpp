// One event as the index sees it: a value for each path that some filter mentions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

namespace virta {

enum Type : uint8_t { kAbsent, kNull, kFalse, kTrue, kNumber, kString, kArray, kObject, kOther };

struct Value {
    Type type = kAbsent;
    bool negative_zero = false;
    uint32_t length = 0;         // of text
    double number = 0;           // kNumber
    const char* text = nullptr;  // kString: WTF-8
    const void* ref = nullptr;   // the source's own handle, for arrays and objects
};

// Doubles in an order that unsigned integers share; -0.0 is 0, NaN is 0: below every bound.
inline uint64_t ordered(double number) {
    if (number != number) return 0;
    if (number == 0) number = 0;
    uint64_t bits;
    memcpy(&bits, &number, 8);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

constexpr uint64_t kOrderedMin = 0x000fffffffffffffull;  // ordered(-inf)
constexpr uint64_t kOrderedMax = 0xfff0000000000000ull;  // ordered(+inf)

inline double unordered(uint64_t key) {
    const uint64_t bits = key >> 63 ? key & ~(1ull << 63) : ~key;
    double number;
    memcpy(&number, &bits, 8);
    return number;
}

// The first eight bytes of a string, as a number in the same order: finds candidates, decides nothing.
inline uint64_t string_key(const char* text, size_t length) {
    uint64_t key = 0;
    memcpy(&key, text, length < 8 ? length : 8);
    return __builtin_bswap64(key);
}

struct Slot {
    uint64_t key = 0;  // ordered(number); 0 for whatever is no number
    const char* text = nullptr;
    const void* ref = nullptr;
    uint32_t length = 0;
    uint32_t atom = 0;  // the equality atom of a scalar, if some filter has it
    Type type = kAbsent;
    bool negative_zero = false;
    bool searched = false;  // for patterns
};

// Callbacks for what the core cannot do itself.
// All return false after a failure that ends the call.
class Hooks {
  public:
    virtual ~Hooks() = default;
    // Patterns of the node, numbered from `from`, that are found in the text: their numbers.
    virtual bool search(uint32_t node, const char* text, uint32_t length, uint32_t from, void* numbers) = 0;
    // Whether an opaque condition holds for the present event.
    virtual bool opaque(uint32_t number, bool& holds) = 0;
    // The text of an attribute of the event that is neither string, boolean nor Integer.
    virtual bool attribute(const char* name, size_t length, std::string& text) = 0;
    // A text in upper or lower case, by the rules of Unicode.
    virtual bool fold(bool upper, const char* text, size_t length, std::string& folded) = 0;
    // The text of any value at a node, as JavaScript writes it.
    virtual bool text(uint32_t node, std::string& text) = 0;
    // Whether the value at a node contains a JSON pattern; `known` is false if that takes too long here.
    virtual bool contains(uint32_t node, const char* pattern, bool& known, bool& holds) = 0;
    // The geopoint at a node when it is none of the plain forms.
    virtual bool point(uint32_t node, bool& found, double& lat, double& lon) = 0;
};

}  // namespace virta
