// Memory of an index: the heap, or an arena at an address of its own while an image is made.
//
// An image is the arena as a file. A process that maps it at the same address has the index with its
// pointers, and shares its pages with all others; changes are private (copy on write). So memory in the
// window of arenas is never passed to free(): an arena is unmapped as a whole, and reuses released memory
// while it grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace virta {

// Far from where Linux puts programs, heaps, libraries and stacks.
constexpr uintptr_t kWindow = 0x210000000000;
constexpr size_t kArenaBytesMax = 8ull << 30;
constexpr uint32_t kArenas = 1024;

inline bool in_window(const void* at) {
    return reinterpret_cast<uintptr_t>(at) - kWindow < kArenaBytesMax * kArenas;
}

class Arena {
  public:
    Arena(char* base, size_t used) : base_(base), used_(used) {}

    void* take(size_t bytes) {
        const size_t size = rounded(bytes);
        Hole*& list = lists_[bin(size)];
        if (list) {
            Hole* found = list;
            list = found->next;
            memset(static_cast<void*>(found), 0, sizeof *found);
            return found;
        }
        if (size > kArenaBytesMax - used_) throw std::bad_alloc();
        void* at = base_ + used_;
        used_ += size;
        return at;
    }
    void give(void* at, size_t bytes) {
        Hole*& list = lists_[bin(rounded(bytes))];
        list = new (at) Hole{list};
    }
    char* base() const { return base_; }
    size_t used() const { return used_; }

  private:
    struct Hole {
        Hole* next;
    };
    static constexpr size_t kSmall = 1024, kStep = 16;
    // By steps, and from kSmall on by powers of two: freed blocks fit later requests.
    static size_t rounded(size_t bytes) {
        if (bytes <= kSmall) return bytes ? (bytes + kStep - 1) / kStep * kStep : kStep;
        return size_t{1} << (64 - __builtin_clzll(bytes - 1));
    }
    static size_t bin(size_t size) {
        return size <= kSmall ? size / kStep : kSmall / kStep + static_cast<size_t>(__builtin_ctzll(size));
    }

    char* base_;
    size_t used_;
    Hole* lists_[kSmall / kStep + 64] = {};
};

// The arena that this thread builds in; null is the heap.
inline thread_local Arena* building = nullptr;

struct Building {
    explicit Building(Arena* arena) { building = arena; }
    ~Building() { building = nullptr; }
};

inline void* take_memory(size_t bytes) {
    if (building) return building->take(bytes);
    void* at = malloc(bytes);
    if (!at) throw std::bad_alloc();
    return at;
}

inline void give_memory(void* at, size_t bytes) {
    if (!in_window(at)) return free(at);
    if (building) building->give(at, bytes);
}

inline void* grow_memory(void* at, size_t old_bytes, size_t bytes) {
    if (!building && !in_window(at)) {
        void* grown = realloc(at, bytes);
        if (!grown) throw std::bad_alloc();
        return grown;
    }
    void* grown = take_memory(bytes);
    if (!at) return grown;
    memcpy(grown, at, old_bytes);
    give_memory(at, old_bytes);
    return grown;
}

template <class T>
struct Allocator {
    using value_type = T;
    Allocator() = default;
    template <class U>
    Allocator(const Allocator<U>&) {}
    T* allocate(size_t count) { return static_cast<T*>(take_memory(count * sizeof(T))); }
    void deallocate(T* at, size_t count) { give_memory(at, count * sizeof(T)); }
    template <class U>
    bool operator==(const Allocator<U>&) const { return true; }
    template <class U>
    bool operator!=(const Allocator<U>&) const { return false; }
};

template <class T>
using List = std::vector<T, Allocator<T>>;
using String = std::basic_string<char, std::char_traits<char>, Allocator<char>>;

template <class T, size_t kCount>
struct Drop {
    void operator()(T* at) const {
        for (size_t i = 0; i < kCount; i++) at[i].~T();
        give_memory(at, kCount * sizeof(T));
    }
};

template <class T>
using Own = std::unique_ptr<T, Drop<T, 1>>;

template <class T, size_t kCount>
using OwnArray = std::unique_ptr<T[], Drop<T, kCount>>;

template <class T>
Own<T> own() {
    return Own<T>(new (take_memory(sizeof(T))) T());
}

template <class T, size_t kCount>
OwnArray<T, kCount> own_array() {
    T* at = static_cast<T*>(take_memory(kCount * sizeof(T)));
    for (size_t i = 0; i < kCount; i++) new (at + i) T();
    return OwnArray<T, kCount>(at);
}

}  // namespace virta
