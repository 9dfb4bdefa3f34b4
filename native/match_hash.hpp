// Hashing and the one open-addressing table of the matcher.
//
// Events are hostile input and so, in a server, are filters: the hash is seeded per index. A table
// maps 64-bit hashes to non-zero 32-bit ids; whether an id is the right one is the caller's to say. It is
// cut into shards that grow one by one, so that no insertion ever moves more than a sixty-fourth.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>

#include "match_memory.hpp"

namespace virta {

inline uint64_t hash_mix(uint64_t a, uint64_t b) {
    __uint128_t product = static_cast<__uint128_t>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t new_seed() {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
}

inline uint64_t read_tail(const char* p, size_t n) {
    uint64_t word = 0;
    memcpy(&word, p, n);
    return word;
}

inline uint64_t read_word(const char* p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

// memcmp() == 0 without the call: most names and values are short.
inline bool same_bytes(const char* a, const char* b, size_t n) {
    if (n > 16) return memcmp(a, b, n) == 0;
    if (n >= 8) return read_word(a) == read_word(b) && read_word(a + n - 8) == read_word(b + n - 8);
    if (n >= 4) {
        uint32_t a1, b1, a2, b2;
        memcpy(&a1, a, 4), memcpy(&b1, b, 4), memcpy(&a2, a + n - 4, 4), memcpy(&b2, b + n - 4, 4);
        return a1 == b1 && a2 == b2;
    }
    return n == 0 || (a[0] == b[0] && a[n >> 1] == b[n >> 1] && a[n - 1] == b[n - 1]);
}

inline uint64_t hash_word(uint64_t word, uint64_t salt, uint64_t seed) {
    return hash_mix(word ^ 0xa0761d6478bd642full, salt ^ seed);
}

inline uint64_t hash_bytes(const char* p, size_t n, uint64_t salt, uint64_t seed) {
    uint64_t state = seed ^ salt;
    const uint64_t length = n;
    while (n > 16) {
        state = hash_mix(read_word(p) ^ 0xa0761d6478bd642full, read_word(p + 8) ^ state);
        p += 16;
        n -= 16;
    }
    uint64_t a = 0, b = 0;
    if (n >= 8) {
        a = read_word(p);
        b = read_word(p + n - 8);
    } else if (n >= 4) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + n - 4, 4);
        a = low;
        b = high;
    } else if (n > 0) {
        a = static_cast<unsigned char>(p[0]) |
            static_cast<uint64_t>(static_cast<unsigned char>(p[n >> 1])) << 8 |
            static_cast<uint64_t>(static_cast<unsigned char>(p[n - 1])) << 16;
    }
    return hash_mix(hash_mix(a ^ 0xe7037ed1a0b428dbull, b ^ state), length ^ 0x8ebc6af09c88c6e3ull);
}

// With kMarked, a table also says of most missing hashes that they are missing, from an eighth of the memory.
template <bool kMarked>
class HashTable {
  public:
    bool may_have(uint64_t hash) const {
        static_assert(kMarked, "only a marked table has marks");
        const Shard& shard = shards_[hash >> 58];
        if (!shard.mask) return false;
        const uint32_t bit = mark_of(shard, static_cast<uint32_t>(hash));
        return shard.marks[bit >> 6] >> (bit & 63) & 1;
    }

    void prefetch(uint64_t hash) const {
        const Shard& shard = shards_[hash >> 58];
        if (shard.mask) __builtin_prefetch(&shard.slots[static_cast<uint32_t>(hash) & shard.mask]);
    }

    // The id that find() probably compares first, to prefetch its object; 0 if there is none.
    uint32_t peek(uint64_t hash) const {
        const Shard& shard = shards_[hash >> 58];
        return shard.mask ? shard.slots[static_cast<uint32_t>(hash) & shard.mask].id : 0;
    }

    // The id stored under the hash for which same(id) holds, or 0.
    template <class Same>
    uint32_t find(uint64_t hash, Same&& same) const {
        const Shard& shard = shards_[hash >> 58];
        if (!shard.mask) return 0;
        const uint32_t tag = static_cast<uint32_t>(hash);
        for (uint32_t at = tag & shard.mask;; at = (at + 1) & shard.mask) {
            const Slot slot = shard.slots[at];
            if (!slot.id) return 0;
            if (slot.tag == tag && same(slot.id)) return slot.id;
        }
    }

    void insert(uint64_t hash, uint32_t id) {
        Shard& shard = shards_[hash >> 58];
        if ((shard.count + 1) * 4ull > (shard.mask + 1ull) * 3 || !shard.mask) grow(shard);
        place(shard, {static_cast<uint32_t>(hash), id});
        if (kMarked) mark(shard, static_cast<uint32_t>(hash));
        shard.count++;
    }

    void erase(uint64_t hash, uint32_t id) {
        Shard& shard = shards_[hash >> 58];
        if (!shard.mask) return;
        uint32_t hole = static_cast<uint32_t>(hash) & shard.mask;
        while (shard.slots[hole].id != id) {
            if (!shard.slots[hole].id) return;
            hole = (hole + 1) & shard.mask;
        }
        shard.count--;
        // Backward shift: no tombstones, so lookups stay short however much comes and goes.
        for (uint32_t at = (hole + 1) & shard.mask; shard.slots[at].id; at = (at + 1) & shard.mask) {
            const uint32_t home = shard.slots[at].tag & shard.mask;
            if (((at - home) & shard.mask) >= ((at - hole) & shard.mask)) {
                shard.slots[hole] = shard.slots[at];
                hole = at;
            }
        }
        shard.slots[hole] = {0, 0};
        // The mark may be another's, too: it stays until half of them may be out of date.
        if (kMarked && ++shard.stale > shard.mask / 2) mark_all(shard);
    }

    size_t bytes() const {
        size_t total = sizeof(*this);
        for (const Shard& shard : shards_)
            total += shard.slots.capacity() * sizeof(Slot) + shard.marks.capacity() * sizeof(uint64_t);
        return total;
    }

  private:
    struct Slot {
        uint32_t tag, id;
    };
    struct Shard {
        List<Slot> slots;
        List<uint64_t> marks;  // a bit for each of eight times as many low parts of hashes as there are slots
        uint32_t mask = 0, count = 0;
        uint32_t stale = 0;  // entries removed since the marks were made
    };
    static constexpr uint32_t kShardSlotsMin = 8;

    static void place(Shard& shard, Slot slot) {
        uint32_t at = slot.tag & shard.mask;
        while (shard.slots[at].id) at = (at + 1) & shard.mask;
        shard.slots[at] = slot;
    }

    static void grow(Shard& shard) {
        List<Slot> old(shard.mask ? (shard.mask + 1ull) * 2 : kShardSlotsMin, Slot{0, 0});
        old.swap(shard.slots);
        shard.mask = static_cast<uint32_t>(shard.slots.size() - 1);
        for (const Slot& slot : old)
            if (slot.id) place(shard, slot);
        if (kMarked) mark_all(shard);
    }

    static uint32_t mark_of(const Shard& shard, uint32_t tag) { return tag & (shard.mask << 3 | 7); }

    static void mark(Shard& shard, uint32_t tag) {
        const uint32_t bit = mark_of(shard, tag);
        shard.marks[bit >> 6] |= 1ull << (bit & 63);
    }

    static void mark_all(Shard& shard) {
        shard.stale = 0;
        shard.marks.assign((shard.mask + 1ull) / 8, 0);
        for (const Slot& slot : shard.slots)
            if (slot.id) mark(shard, slot.tag);
    }

    Shard shards_[64];
};

using Table = HashTable<false>;
using MarkedTable = HashTable<true>;

}  // namespace virta
