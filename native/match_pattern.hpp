// JSON patterns: whether a value contains one. The rules are those of `match` in virta.filters.tree.
//
//   pattern    u8 type, then: number f64; string u32, bytes; array u32 count, patterns;
//              object u32 count, each u32, bytes of the name, pattern
#pragma once

#include <vector>

#include "match_event.hpp"
#include "match_hash.hpp"

namespace virta {

constexpr uint32_t kPatternDepthMax = 128;
constexpr uint32_t kPatternSteps = 1 << 14;  // values compared before Python takes over: it has better means

// The end of a pattern, null if it is bad.
inline const char* check_pattern(const char* at, const char* end, uint32_t depth = 0) {
    auto number = [&](uint32_t& out) {
        if (end - at < 4) return false;
        memcpy(&out, at, 4);
        at += 4;
        return true;
    };
    auto text = [&] {
        uint32_t length;
        if (!number(length) || static_cast<size_t>(end - at) < length) return false;
        at += length;
        return true;
    };
    if (at == end || depth > kPatternDepthMax) return nullptr;
    const auto type = static_cast<uint8_t>(*at++);
    if (type >= kNull && type <= kTrue) return at;
    if (type == kNumber) return end - at < 8 ? nullptr : at + 8;
    if (type == kString) return text() ? at : nullptr;
    uint32_t count;
    if ((type != kArray && type != kObject) || !number(count)) return nullptr;
    for (uint32_t i = 0; at && i < count; i++) {
        if (type == kObject && !text()) return nullptr;
        at = check_pattern(at, end, depth + 1);
    }
    return at;
}

template <class Source>
class PatternTest {
  public:
    using Ref = typename Source::Ref;
    explicit PatternTest(Source& source) : source_(source) {}
    bool exhausted() const { return steps_ > kPatternSteps; }

    // Moves `at` behind the pattern only if the value contains it; callers know where each pattern ends.
    bool contains(const char* at, Ref ref) {
        if (++steps_ > kPatternSteps) return false;
        const auto type = static_cast<uint8_t>(*at++);
        const Value value = source_.read(ref);
        if (type != value.type) return false;
        switch (type) {
            case kNumber: {
                double number;
                memcpy(&number, at, 8);
                return ordered(number) == ordered(value.number) && value.number == value.number;
            }
            case kString:
                return word(at) == value.length && same_bytes(at + 4, value.text, value.length);
            case kObject:
                return object(at, ref);
            case kArray:
                return array(at, ref);
            default:
                return true;
        }
    }

  private:
    static uint32_t word(const char* at) {
        uint32_t value;
        memcpy(&value, at, 4);
        return value;
    }

    static const char* skip(const char* at) {
        const auto type = static_cast<uint8_t>(*at++);
        if (type == kNumber) return at + 8;
        if (type == kString) return at + 4 + word(at);
        if (type < kArray) return at;
        const uint32_t count = word(at);
        at += 4;
        for (uint32_t i = 0; i < count; i++) {
            if (type == kObject) at += 4 + word(at);
            at = skip(at);
        }
        return at;
    }

    bool object(const char* at, Ref ref) {
        const uint32_t count = word(at);
        at += 4;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t length = word(at);
            const char* wanted = at + 4;
            at = wanted + length;
            Ref found{};
            bool has = false;
            // A name may be there twice in JSON: the last counts.
            source_.members(ref, [&](const char* name, uint32_t size, Ref member) {
                if (size != length || !same_bytes(name, wanted, length)) return;
                found = member;
                has = true;
            });
            if (!has || !contains(at, found)) return false;
            at = skip(at);
        }
        return true;
    }

    // Each part, in order, takes the first remaining element that contains it.
    bool array(const char* at, Ref ref) {
        const uint32_t count = word(at);
        at += 4;
        std::vector<Ref> items;
        source_.elements(ref, [&](Ref element) {
            items.push_back(element);
            return items.size() <= kPatternSteps;
        });
        if (items.size() > kPatternSteps) {
            steps_ = kPatternSteps + 1;
            return false;
        }
        std::vector<bool> taken(items.size());
        for (uint32_t i = 0; i < count; i++) {
            size_t place = 0;
            while (place < items.size() && (taken[place] || !contains(at, items[place]))) place++;
            if (place == items.size() || exhausted()) return false;
            taken[place] = true;
            at = skip(at);
        }
        return true;
    }

    Source& source_;
    uint32_t steps_ = 0;
};

}  // namespace virta
