// Paths, interned: a graph of nodes that an event is walked along.
//
//   exact space (node 1 is its root)      flat space (node 2 is its root), for Koncorde's dotted names
//
//   (1) --data--> (5) --x--> (6)          (2) --a--> (7) --b--> (8)     {"a": {"b": 1}}
//                  |--[3]--> (9)            |----------a.b-------^      {"a.b": 1}
//
// A dotted name of n parts has an edge for each way a document may spell a piece of it. Members that no
// edge mentions are skipped with all they hold. Where a flat path goes on in exact steps (inside a `match`),
// it does so from the flat node's exact node, which has the same value in exact space. An element that is
// selected is the root of flat names of its own; a node for "each" element has several values and no slot:
// only `contains` is tested on it. An expression makes the value of a computed node (match_expression.hpp).
// Paths are counted; the last user of an edge removes it.
#pragma once

#include "match_expression.hpp"
#include "match_geo.hpp"
#include "match_hash.hpp"
#include "match_store.hpp"

namespace virta {

constexpr uint32_t kExactRoot = 1, kFlatRoot = 2;
constexpr uint32_t kPathStepsMax = 1024, kFlatPartsMax = 24;

// What must be looked up for a node's value.
enum Need : uint32_t {
    kNeedEqual = 1,
    kNeedElement = 2,
    kNeedPrefix = 4,
    kNeedSuffix = 8,
    kNeedRegexp = 16,
    kNeedKind = 32,  // exists and type atoms
    kNeedRange = 64,
    kNeedTextRange = 128,
    kNeedPoint = 256,
    kNeedSubstring = 512,
    kNeedInside = 1024,    // elements of its arrays have paths of their own
    kNeedComputed = 2048,  // expressions are computed from it
};

struct Lengths {  // of prefixes or suffixes in use, with their number
    List<std::pair<uint32_t, uint32_t>> counts;
    void add(uint32_t length) {
        for (auto& c : counts)
            if (c.first == length) return void(c.second++);
        counts.emplace_back(length, 1);
    }
    void remove(uint32_t length) {
        for (auto& c : counts)
            if (c.first == length && --c.second == 0) {
                c = counts.back();
                counts.pop_back();
                return;
            }
    }
};

struct Levels {  // sizes of dyadic intervals, or cells, in use: a bit of the mask and a count for each
    uint64_t mask = 0;
    bool points = false;
    uint32_t counts[65] = {};
    // Places in use by the low bits of their hash: saves the lookup of most missing ones.
    uint32_t hashes[256] = {};
    void add(uint32_t level, uint64_t hash) {
        if (counts[level]++ == 0) level == 64 ? points = true : mask |= 1ull << level;
        hashes[hash & 255]++;
    }
    void remove(uint32_t level, uint64_t hash) {
        if (--counts[level] == 0) level == 64 ? points = false : mask &= ~(1ull << level);
        hashes[hash & 255]--;
    }
};

struct ShapeTest {  // a shape to test, with a rough box round it, and what holds if the point is inside
    uint32_t condition, record;
    RoughBox box;
    bool operator<(const ShapeTest& other) const { return record < other.record; }
};

struct Extra {  // rarely needed parts of a node
    Lengths prefixes, suffixes, substrings;
    Levels numbers, texts;
    Levels cells;                    // of the geo grid
    Vec<ShapeTest> everywhere;       // shapes that fit no cell
    List<uint32_t> regexps;   // pattern number - regexps_first -> atom, 0 when removed
    uint32_t regexps_first = 0, regexps_past = 0;  // number of the first; removed ones it starts with
    uint32_t regexps_live = 0;
    uint32_t regexps_access = 0;     // places that a pattern finds: then every value is searched
    uint32_t regexps_generation = 0;  // changes when the numbers do
    uint64_t low = ~0ull, high = 0;   // finite range bounds seen, to judge how wide a range is
    List<std::pair<uint32_t, uint32_t>> indexes;  // array index -> child
    List<std::pair<int32_t, uint32_t>> selects;   // array index, from the end if negative -> flat child
    uint32_t each = 0;                            // child for every element of an array
    List<uint32_t> dependents;                    // computed nodes that have no value without this one
    Own<Expression> expression;                   // of a computed node

    uint32_t regexps_end() const { return regexps_first + static_cast<uint32_t>(regexps.size()); }
    uint32_t regexp(uint32_t number) const {
        const uint32_t at = number - regexps_first;
        return number >= regexps_first && at < regexps.size() ? regexps[at] : 0;
    }
};

struct Node {
    uint32_t needs = 0;
    uint32_t names = 0;    // edges by name in exact space that leave it
    uint32_t dotted = 0;   // edges in flat space that leave it
    uint32_t incoming = 0;
    uint32_t equals = 0, elements = 0;  // atoms on it
    uint32_t absent = 0;   // bucket of conjunctions found by the path's absence
    uint32_t kinds[9] = {};  // atoms of exists (0) and of each type
    uint32_t kinds_live = 0;
    uint32_t path = 0;     // the path that ends here
    uint32_t exact_node = 0;     // of a flat node: where exact steps go on
    bool flat = false;
    Own<Extra> extra;

    Extra& more() {
        if (!extra) extra = own<Extra>();
        return *extra;
    }
};

class Paths {
  public:
    Paths();
    // The node of an encoded path, counted once more; 0 if the encoding is bad.
    uint32_t acquire(const char* bytes, uint32_t length);
    void retain(uint32_t node) { paths_[nodes[node].path].users++; }
    void release(uint32_t node);

    uint32_t child(uint32_t parent, const char* name, uint32_t length) const {
        return edge_child(parent, name, length, hash_bytes(name, length, parent, seed));
    }

    uint64_t seed = new_seed();  // of every hash in the index
    uint32_t empty_name = 0;  // the flat entry ""
    uint32_t computed = 0;    // nodes with an expression
    List<uint32_t> untriggered;  // those of them that may have a value in any event
    Pool<Node, 4> nodes;
    size_t bytes() const;
    uint32_t live() const { return paths_.live(); }

  private:
    static constexpr int64_t kName = -1, kTwin = -2, kEach = -3, kSelect = -(1ll << 40);
    struct Edge {
        uint64_t hash = 0;
        uint32_t parent = 0, child = 0, users = 0;
        int64_t index = kName;  // an array index, or one of the above; kSelect + a signed index
        String name;
    };
    struct Path {
        uint64_t hash = 0;
        uint32_t node = 0, users = 0;
        String bytes;
        List<uint32_t> edges;
    };

    uint32_t edge_child(uint32_t parent, const char* name, uint32_t length, uint64_t hash) const {
        const uint32_t found = edges_by_name_.find(hash, [&](uint32_t id) {
            const Edge& edge = edges_[id];
            return edge.parent == parent && edge.index == kName && edge.name.size() == length &&
                   same_bytes(edge.name.data(), name, length);
        });
        return found ? edges_[found].child : 0;
    }

    bool build(Path& path);
    bool build_flat(Path& path, const String& name, uint32_t root);
    bool build_computed(Path& path, const char* at, const char* end);
    void drop_computed(uint32_t node);
    uint32_t step(Path& path, uint32_t parent, const String& name, int64_t index, uint32_t child);
    void drop_edges(Path& path);

    Pool<Edge, 4> edges_;
    Pool<Path, 4> paths_;
    Table edges_by_name_, paths_by_bytes_;
};

}  // namespace virta
