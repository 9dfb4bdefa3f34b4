// Text as WTF-8: characters, LIKE patterns, and storage for the texts an event's expressions make.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace virta {

inline bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

inline const char* next_char(const char* at, const char* end) {
    at++;
    while (at < end && is_continuation(*at)) at++;
    return at;
}

inline const char* previous_char(const char* at, const char* begin) {
    at--;
    while (at > begin && is_continuation(*at)) at--;
    return at;
}

inline uint32_t count_chars(const char* text, size_t length) {
    uint32_t count = 0;
    for (size_t i = 0; i < length; i++) count += !is_continuation(text[i]);
    return count;
}

inline bool is_ascii(const char* text, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (static_cast<unsigned char>(text[i]) >= 0x80) return false;
    return true;
}

// A LIKE pattern, encoded: u32 segments between the %, each u32 length and bytes, where 0xff is `_`.
class LikeCode {
  public:
    LikeCode(const char* code, size_t length) : at_(code), end_(code + length) {}
    bool valid() const;
    bool matches(const char* text, uint32_t length) const;

  private:
    struct Segment {
        const char* data;
        uint32_t length;
        bool wild;
    };
    static Segment segment(const char*& at);
    static const char* match_at(const Segment& segment, const char* at, const char* end);
    static const char* find(const Segment& segment, const char* at, const char* end);
    static const char* find_wild(const Segment& segment, const char* at, const char* end);

    const char* at_;
    const char* end_;
};

// Bytes that stay until clear().
class TextArena {
  public:
    char* take(size_t length) {
        if (length > kBlock / 4) {
            large_.push_back(std::make_unique<char[]>(length));
            return large_.back().get();
        }
        if (!next_ || used_ + length > kBlock) {
            if (next_ == blocks_.size()) blocks_.push_back(std::make_unique<char[]>(kBlock));
            next_++;
            used_ = 0;
        }
        char* at = blocks_[next_ - 1].get() + used_;
        used_ += length;
        return at;
    }
    const char* copy(const char* text, size_t length) {
        char* at = take(length);
        memcpy(at, text, length);
        return at;
    }
    void clear() {
        if (!next_ && large_.empty()) return;
        large_.clear();
        if (blocks_.size() > kBlocksKept) blocks_.resize(kBlocksKept);
        next_ = 0;
        used_ = kBlock;
    }

  private:
    static constexpr size_t kBlock = 16384, kBlocksKept = 4;
    std::vector<std::unique_ptr<char[]>> blocks_, large_;
    size_t next_ = 0, used_ = kBlock;
};

}  // namespace virta
