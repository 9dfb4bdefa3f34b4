// Filters by their ids: SHA-256 digests, 32 bytes each, with how often each was added.
#pragma once

#include "match_hash.hpp"
#include "match_store.hpp"

namespace virta {

struct Digest {
    char bytes[32] = {};
    uint32_t users = 0;
};

class Ids {
  public:
    uint32_t find(const char* digest) const {
        return table_.find(key(digest),
                           [&](uint32_t at) { return memcmp(pool_[at].bytes, digest, 32) == 0; });
    }
    void prefetch(const char* digest) const { table_.prefetch(key(digest)); }
    Digest& operator[](uint32_t filter) { return pool_[filter]; }

    void insert(const char* digest, uint32_t filter) {
        pool_.reach(filter);
        memcpy(pool_[filter].bytes, digest, 32);
        pool_[filter].users = 1;
        table_.insert(key(digest), filter);
        if (filter >= limit_) limit_ = filter + 1;
        live_++;
    }

    // The digest can still be read until its number is used again.
    void erase(uint32_t filter) {
        table_.erase(key(pool_[filter].bytes), filter);
        pool_[filter].users = 0;
        live_--;
    }

    // 0 is no filter, and an empty pool has no entry for it.
    bool has(uint32_t filter) const { return filter && filter < limit_ && pool_[filter].users; }
    uint32_t limit() const { return limit_; }
    uint32_t live() const { return live_; }
    size_t bytes() const { return pool_.bytes() + table_.bytes(); }

  private:
    // The digest is uniform already, but not secret: the author of a filter could choose it.
    uint64_t key(const char* digest) const { return hash_word(read_word(digest), 11, seed_); }

    uint64_t seed_ = new_seed();
    Pool<Digest> pool_;
    Table table_;
    uint32_t limit_ = 1, live_ = 0;
};

}  // namespace virta
