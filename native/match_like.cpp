// LIKE: the first and last segment are anchored, each between them goes to its leftmost place. Nothing is
// tried twice.

#include <unordered_map>

#include "match_text.hpp"

namespace virta {

namespace {

constexpr char kAny = static_cast<char>(0xff);
constexpr size_t kSimpleWork = 1 << 14;  // byte comparisons that are cheaper than building masks

uint32_t read_char(const char*& at, const char* end) {
    uint32_t value = static_cast<unsigned char>(*at++);
    while (at < end && is_continuation(*at)) value = value << 8 | static_cast<unsigned char>(*at++);
    return value;
}

uint32_t number_at(const char* at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

}  // namespace

bool LikeCode::valid() const {
    const char* at = at_;
    if (end_ - at < 4) return false;
    const uint32_t count = number_at(at);
    at += 4;
    if (!count) return false;
    for (uint32_t i = 0; i < count; i++) {
        if (end_ - at < 4 || static_cast<size_t>(end_ - at - 4) < number_at(at)) return false;
        at += 4 + number_at(at);
    }
    return at == end_;
}

LikeCode::Segment LikeCode::segment(const char*& at) {
    Segment found{at + 4, number_at(at), false};
    found.wild = memchr(found.data, static_cast<unsigned char>(kAny), found.length) != nullptr;
    at = found.data + found.length;
    return found;
}

// Where the text goes on after the segment, null if it does not match here.
const char* LikeCode::match_at(const Segment& segment, const char* at, const char* end) {
    if (!segment.wild) {
        const bool same = static_cast<size_t>(end - at) >= segment.length &&
                          memcmp(at, segment.data, segment.length) == 0;
        return same ? at + segment.length : nullptr;
    }
    for (uint32_t i = 0; i < segment.length; i++) {
        if (at == end) return nullptr;
        if (segment.data[i] == kAny)
            at = next_char(at, end);
        else if (*at++ != segment.data[i])
            return nullptr;
    }
    return at;
}

const char* LikeCode::find(const Segment& segment, const char* at, const char* end) {
    if (!segment.length) return at;
    if (!segment.wild) {
        const auto size = static_cast<size_t>(end - at);
        const auto* found = static_cast<const char*>(memmem(at, size, segment.data, segment.length));
        return found ? found + segment.length : nullptr;
    }
    if (static_cast<size_t>(end - at) * segment.length > kSimpleWork) return find_wild(segment, at, end);
    for (; at < end; at = next_char(at, end))
        if (const char* found = match_at(segment, at, end)) return found;
    return nullptr;
}

// Bit i of the state: the first i + 1 characters of the segment match up to here.
const char* LikeCode::find_wild(const Segment& segment, const char* at, const char* end) {
    const uint32_t size = count_chars(segment.data, segment.length);
    const size_t words = (size + 63) / 64;
    std::vector<uint64_t> any(words), state(words);
    std::unordered_map<uint32_t, std::vector<uint64_t>> masks;
    const char* pattern = segment.data;
    const char* pattern_end = pattern + segment.length;
    std::vector<uint32_t> chars;
    while (pattern < pattern_end) {
        if (*pattern == kAny) {
            any[chars.size() / 64] |= 1ull << (chars.size() & 63);
            chars.push_back(0);
            pattern++;
        } else {
            chars.push_back(read_char(pattern, pattern_end));
        }
    }
    for (size_t i = 0; i < chars.size(); i++)
        if (chars[i]) masks.try_emplace(chars[i], any).first->second[i / 64] |= 1ull << (i & 63);
    // Masks made early lack nothing: `any` was complete before the first.
    while (at < end) {
        const uint32_t found = read_char(at, end);
        const auto known = masks.find(found);
        const std::vector<uint64_t>& mask = known == masks.end() ? any : known->second;
        uint64_t carry = 1;
        for (size_t i = 0; i < words; i++) {
            const uint64_t next = state[i] >> 63;
            state[i] = (state[i] << 1 | carry) & mask[i];
            carry = next;
        }
        if (state[(size - 1) / 64] >> ((size - 1) & 63) & 1) return at;
    }
    return nullptr;
}

bool LikeCode::matches(const char* text, uint32_t length) const {
    const char* at = at_ + 4;
    const char* end = text + length;
    const uint32_t count = number_at(at_);
    text = match_at(segment(at), text, end);
    if (!text || count == 1) return text == end && text;
    std::vector<Segment> rest;
    for (uint32_t i = 1; i < count; i++) rest.push_back(segment(at));
    const Segment last = rest.back();
    const char* stop = end;
    for (uint32_t i = count_chars(last.data, last.length); i; i--) {
        if (stop == text) return false;
        stop = previous_char(stop, text);
    }
    if (match_at(last, stop, end) != end) return false;
    for (size_t i = 0; i + 1 < rest.size(); i++) {
        text = find(rest[i], text, stop);
        if (!text) return false;
    }
    return true;
}

}  // namespace virta
