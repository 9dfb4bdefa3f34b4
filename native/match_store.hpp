// Storage that never moves its content: pools of chunks, records of words, short sorted vectors.
//
// Ids start at 1, so that 0 can mean "none" everywhere. Freed places are handed out again.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "match_memory.hpp"

namespace virta {

// Objects by id, in chunks of 2^kBits: growing copies no object. Small chunks keep small
// indexes small, of which there may be thousands; large ones keep the list of chunks in the cache.
template <class T, uint32_t kBits = 7>
class Pool {
  public:
    T& operator[](uint32_t id) { return chunks_[id >> kBits][id & kMask]; }
    const T& operator[](uint32_t id) const { return chunks_[id >> kBits][id & kMask]; }

    uint32_t take() {
        live_++;
        if (!free_.empty()) {
            const uint32_t id = free_.back();
            free_.pop_back();
            return id;
        }
        if ((next_ >> kBits) >= chunks_.size()) chunks_.push_back(own_array<T, kMask + 1>());
        return next_++;
    }

    void give(uint32_t id) {
        (*this)[id] = T();
        free_.push_back(id);
        live_--;
    }

    // For ids that another pool hands out.
    void reach(uint32_t id) {
        while ((id >> kBits) >= chunks_.size()) chunks_.push_back(own_array<T, kMask + 1>());
    }

    uint32_t limit() const { return next_; }  // all ids are below it
    uint32_t live() const { return live_; }
    size_t bytes() const { return chunks_.size() * (kMask + 1) * sizeof(T) + free_.capacity() * 4; }

  private:
    static constexpr uint32_t kMask = (1u << kBits) - 1;
    List<OwnArray<T, kMask + 1>> chunks_;
    List<uint32_t> free_;
    uint32_t next_ = 1, live_ = 0;
};

// Records of n words, addressed by number. Short ones live in chunks and are recycled by size; long ones
// (rare: `in` lists, big trees) have storage of their own and a number with the top bit set.
class Words {
  public:
    uint32_t* operator[](uint32_t at) {
        return at & kLong ? long_[at ^ kLong].data() : chunks_[at >> kBits].get() + (at & kMask);
    }
    const uint32_t* operator[](uint32_t at) const {
        return at & kLong ? long_[at ^ kLong].data() : chunks_[at >> kBits].get() + (at & kMask);
    }

    uint32_t take(uint32_t size) {
        if (size >= kSizes) {
            const uint32_t at = long_.take();
            long_[at].resize(size);
            long_words_ += size;
            return at | kLong;
        }
        if (!free_[size].empty()) {
            const uint32_t at = free_[size].back();
            free_[size].pop_back();
            return at;
        }
        if (((next_ + size) >> kBits) >= chunks_.size()) {
            next_ = std::max<uint32_t>(1, static_cast<uint32_t>(chunks_.size()) << kBits);
            chunks_.push_back(own_array<uint32_t, kMask + 1>());
        }
        const uint32_t at = next_;
        next_ += size;
        return at;
    }

    void give(uint32_t at, uint32_t size) {
        if (at & kLong) {
            long_words_ -= size;
            long_.give(at ^ kLong);
        } else {
            free_[size].push_back(at);
        }
    }

    size_t bytes() const {
        size_t total = (chunks_.size() * (kMask + 1) + long_words_) * 4 + long_.bytes();
        for (const auto& list : free_) total += list.capacity() * 4;
        return total;
    }

  private:
    static constexpr uint32_t kLong = 1u << 31, kBits = 12, kMask = (1u << kBits) - 1, kSizes = 64;
    List<OwnArray<uint32_t, kMask + 1>> chunks_;
    List<uint32_t> free_[kSizes];
    Pool<List<uint32_t>, 3> long_;
    uint32_t next_ = 1;
    size_t long_words_ = 0;
};

// A vector of plain data in 16 bytes: most buckets hold one or two entries, which are in the vector itself if
// they are small.
template <class T>
class Vec {
  public:
    Vec() = default;
    Vec(const Vec&) = delete;
    Vec& operator=(const Vec&) = delete;
    Vec& operator=(Vec&& other) noexcept {
        std::swap(place_, other.place_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
        return *this;
    }
    ~Vec() {
        if (is_away()) give_memory(away(), bytes());
    }

    T* begin() const { return is_away() ? away() : here(); }
    T* end() const { return begin() + size_; }
    T& operator[](uint32_t at) const { return begin()[at]; }
    uint32_t size() const { return size_; }
    size_t bytes() const { return is_away() ? capacity_ * sizeof(T) : 0; }

    void insert(uint32_t at, const T& item) {
        if (size_ == capacity_) grow();
        T* items = begin();
        memmove(items + at + 1, items + at, (size_ - at) * sizeof(T));
        items[at] = item;
        size_++;
    }

    void erase(uint32_t at) {
        T* items = begin();
        memmove(items + at, items + at + 1, (size_ - at - 1) * sizeof(T));
        size_--;
        if (size_ || !is_away()) return;
        give_memory(away(), bytes());
        capacity_ = kHere;
    }

    // Sorted use: T has operator<.
    void insert_sorted(const T& item) {
        const uint32_t at = size_ && !(item < begin()[size_ - 1])
                                ? size_
                                : static_cast<uint32_t>(std::lower_bound(begin(), end(), item) - begin());
        insert(at, item);
    }

    bool erase_sorted(const T& item) {
        T* found = std::lower_bound(begin(), end(), item);
        if (found == end() || item < *found) return false;
        erase(static_cast<uint32_t>(found - begin()));
        return true;
    }

  private:
    static constexpr uint32_t kHere = sizeof(T*) / sizeof(T);  // entries that fit into the place of a pointer

    bool is_away() const { return capacity_ > kHere; }
    T* here() const { return reinterpret_cast<T*>(const_cast<unsigned char*>(place_)); }
    T* away() const {
        T* at;
        memcpy(&at, place_, sizeof at);
        return at;
    }

    void grow() {
        const uint32_t capacity = capacity_ + 1 + capacity_ / (capacity_ < 4 ? 2 : 4);
        const size_t wanted = capacity * sizeof(T);
        T* grown = static_cast<T*>(is_away() ? grow_memory(away(), bytes(), wanted) : take_memory(wanted));
        if (!is_away()) memcpy(static_cast<void*>(grown), place_, size_ * sizeof(T));
        memcpy(place_, &grown, sizeof grown);
        capacity_ = capacity;
    }

    alignas(T*) unsigned char place_[sizeof(T*)] = {};
    uint32_t size_ = 0, capacity_ = kHere;
};

}  // namespace virta
