// Terms: the conditions of filters, each kept once and counted.
//
// An *atom* is a condition whose truth is found by hashing a value of the event: equality, an element of an
// array, presence, type, prefix, suffix, substring, pattern. An event sets one bit for each true atom, and
// testing it elsewhere is a bit test. Everything else is a *condition*: computed when a candidate needs it.
//
// A literal is a term in 32 bits: the id, whether it is an atom or a condition, and whether it is negated.
#pragma once

#include <memory>
#include <string>

#include "match_event.hpp"
#include "match_geo.hpp"
#include "match_paths.hpp"
#include "match_store.hpp"

namespace virta {

using Literal = uint32_t;
constexpr Literal kNegated = 1u << 31, kComplex = 1u << 30;
constexpr Literal kLast = 1u << 29;  // where literals wait for a test: nothing comes after this one
constexpr Literal kTermMask = kLast - 1;

// What an atom tests. The first five are Type's, for equality with a scalar; +kElement for one of an array.
enum AtomKind : uint8_t {
    kElement = 16,
    kPrefix = 32,
    kSuffix = 33,
    kRegexp = 34,
    kSubstring = 35,
    kKind = 64,  // + Type; kKind + 0 is exists
};

struct Atom {
    uint64_t hash = 0;
    uint32_t node = 0;
    uint32_t users = 0;
    uint32_t bucket = 0;  // or a filter with kOnly
    uint32_t hits = 0, born = 0;  // sampled events it was true in, and the sample count when it came
    uint32_t length = 0;
    uint32_t number = 0;  // of a pattern, on its node
    uint8_t kind = 0;
    bool redistributed = false;  // its bucket was
    union {
        char here[8];
        char* away;
    };
    Atom() : away(nullptr) {}
    Atom(const Atom&) = delete;
    Atom& operator=(Atom&& other) noexcept {
        if (length > sizeof here) give_memory(away, length);
        memcpy(static_cast<void*>(this), static_cast<void*>(&other), sizeof *this);
        other.length = 0;
        return *this;
    }
    ~Atom() {
        if (length > sizeof here) give_memory(away, length);
    }
    const char* data() const { return length > sizeof here ? away : here; }
};

inline uint64_t atom_hash(uint32_t node, uint8_t kind, const char* data, uint32_t length, uint64_t seed) {
    return hash_bytes(data, length, static_cast<uint64_t>(kind) << 32 | node, seed);
}

class Atoms {
  public:
    uint32_t find(uint64_t hash, uint32_t node, uint8_t kind, const char* data, uint32_t length) const {
        return table_.find(hash, [&](uint32_t id) {
            const Atom& atom = pool[id];
            return atom.hash == hash && atom.node == node && atom.kind == kind && atom.length == length &&
                   same_bytes(atom.data(), data, length);
        });
    }
    bool may_have(uint64_t hash) const { return table_.may_have(hash); }
    void prefetch(uint64_t hash) const { table_.prefetch(hash); }
    void prefetch_atom(uint64_t hash) const {
        const uint32_t id = table_.peek(hash);
        if (id) __builtin_prefetch(&pool[id]);
    }

    uint32_t make(uint64_t hash, uint32_t node, uint8_t kind, const char* data, uint32_t length) {
        const uint32_t id = pool.take();
        Atom& atom = pool[id];
        if (length > sizeof atom.here) {
            char* copy = static_cast<char*>(take_memory(length));
            memcpy(copy, data, length);
            atom.away = copy;
            away_bytes_ += length + 16;
        } else {
            memcpy(atom.here, data, length);
        }
        atom.hash = hash;
        atom.node = node;
        atom.kind = kind;
        atom.length = length;
        table_.insert(hash, id);
        return id;
    }

    void drop(uint32_t id) {
        Atom& atom = pool[id];
        if (atom.length > sizeof atom.here) away_bytes_ -= atom.length + 16;
        table_.erase(atom.hash, id);
        pool.give(id);
    }

    size_t bytes() const { return pool.bytes() + table_.bytes() + away_bytes_; }
    Pool<Atom, 9> pool;

  private:
    MarkedTable table_;
    size_t away_bytes_ = 0;
};

enum ConditionKind : uint8_t {
    kRange = 1,     // low, high: ordered numbers, inclusive
    kTextRange,     // payload: bounds
    kIn,            // payload: sorted atoms
    kPoint,         // payload: shape; low, high: its rough box
    kJunkPoint,     // nothing
    kNegativeZero,  // nothing
    kPattern,       // low: atom; values are searched on first use
    kAffix,         // low: atom of a prefix, suffix or substring; looked up where it finds something
    kTextRegexp,    // payload: pattern
    kLikePattern,   // payload: LikeCode as key
    kContains,      // payload: JSON pattern as key; opaque, for what is too large
    kOpaque,        // low: number given by the feeder
    kTree,          // payload: literals and operators, postfix
};

struct TextBounds {
    String low, high;
    bool has_low = false, has_high = false, low_open = false, high_open = false;
};

// `key` and `words` make equal payloads equal; `bounds` and `shape` are made from the key.
struct Payload {
    String key;
    List<uint32_t> words;
    Own<TextBounds> bounds;
    Own<Shape> shape;
    bool operator==(const Payload& other) const { return key == other.key && words == other.words; }
};

struct Complex {
    uint64_t hash = 0, low = 0, high = 0;
    uint32_t node = 0, users = 0;
    uint8_t kind = 0;
    Own<Payload> payload;
    bool of_atom() const { return kind == kPattern || kind == kAffix; }
};

class Conditions {
  public:
    static uint64_t hash_of(const Complex& c, uint64_t seed) {
        const uint64_t hash = hash_mix(hash_word(c.low, c.node, seed), hash_word(c.high, c.kind, seed));
        if (!c.payload) return hash;
        const Payload& p = *c.payload;
        const auto* words = reinterpret_cast<const char*>(p.words.data());
        return hash ^ hash_bytes(p.key.data(), p.key.size(), c.kind, seed) ^
               hash_bytes(words, p.words.size() * sizeof(uint32_t), ~uint64_t{c.kind}, seed);
    }
    void prefetch(uint64_t hash) const { table_.prefetch(hash); }
    void prefetch_condition(uint64_t hash) const {
        const uint32_t id = table_.peek(hash);
        if (id) __builtin_prefetch(&pool[id]);
    }
    uint32_t find(uint64_t hash, const Complex& wanted) const {
        return table_.find(hash, [&](uint32_t id) {
            const Complex& c = pool[id];
            return c.hash == hash && c.kind == wanted.kind && c.node == wanted.node && c.low == wanted.low &&
                   c.high == wanted.high && (!c.payload || *c.payload == *wanted.payload);
        });
    }
    uint32_t make(uint64_t hash, Complex&& condition) {
        const uint32_t id = pool.take();
        pool[id] = std::move(condition);
        pool[id].hash = hash;
        table_.insert(hash, id);
        if (pool[id].payload) payload_bytes_ += payload_size(*pool[id].payload);
        return id;
    }
    Complex drop(uint32_t id) {
        if (pool[id].payload) payload_bytes_ -= payload_size(*pool[id].payload);
        table_.erase(pool[id].hash, id);
        Complex dropped = std::move(pool[id]);
        pool.give(id);
        return dropped;
    }
    size_t bytes() const { return pool.bytes() + table_.bytes() + payload_bytes_; }
    Pool<Complex, 8> pool;

  private:
    static size_t payload_size(const Payload& p) {
        size_t size = sizeof p + p.key.capacity() + p.words.capacity() * sizeof(uint32_t);
        if (p.bounds) size += sizeof *p.bounds + p.bounds->low.capacity() + p.bounds->high.capacity();
        if (p.shape) size += sizeof *p.shape + p.shape->points.capacity() * sizeof p.shape->points[0];
        return size;
    }
    Table table_;
    size_t payload_bytes_ = 0;
};

// Operators of kTree's postfix program, distinguished from literals by kComplex with an id no condition has.
constexpr uint32_t kTreeAnd = kComplex | (kTermMask - 1), kTreeOr = kComplex | (kTermMask - 2);

}  // namespace virta
