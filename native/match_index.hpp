// The index: which of many filters hold for an event.
//
// A filter is a few conjunctions of literals. Each conjunction sits in one place only, that of its *access*
// literal, the one least likely to be true; an event visits the places of what is true in it, and verifies
// the rest of what it finds there.
//
//   record of a conjunction (words):  [filter] [accesses | others << 16] [access literals] [other literals]
//   bucket of an atom:   done    filters with nothing left to verify; one alone is in the atom itself
//                        tests   (next literal, target)       8 bytes: mostly one bit test
//                        ranges  (path, target, low, high)    the next literal is a range
//   range node:          the same, under both ends of the interval that found it
//
// Places for access: an atom's bucket, an `in` list's several; the dyadic node of a range; cells of the geo
// grid; a path's absence; and, for what nothing finds, the bucket that every event visits.
//
// Readers hold `lock` for a few events, writers for one change. No Python in here: see Hooks.
#pragma once

#include <mutex>

#include "match_lock.hpp"
#include "match_terms.hpp"
#include "match_text.hpp"

namespace virta {

constexpr uint32_t kSeveral = 1u << 31;  // of a filter word: an index into `several`, may be found twice
constexpr uint32_t kOnly = 1u << 31;     // of an atom's bucket: the one filter found there, nothing to verify
constexpr uint32_t kSampleEvery = 16;    // events between two that are counted for selectivity
constexpr uint32_t kRegexpCacheMax = 1u << 16;  // values a context remembers the patterns of
constexpr size_t kSearchesAtOnce = 256;  // far fewer than these: their places are not reused meanwhile
constexpr uint32_t kSuspectsMax = 64;
constexpr uint32_t kPatternNumbersMax = 1u << 31;  // then the patterns of a path are numbered anew

// `target` is a record, or, when nothing is left to verify after this literal (kLast), the filter word.
struct Test {
    Literal literal;
    uint32_t target;
    bool operator<(const Test& other) const {
        return target != other.target ? target < other.target : literal < other.literal;
    }
};

struct RangeTest {
    uint32_t node, target;  // node with kLast
    uint64_t low, high;
    bool operator<(const RangeTest& other) const {
        return target != other.target ? target < other.target
               : node != other.node   ? node < other.node
                                      : low != other.low ? low < other.low : high < other.high;
    }
};

struct Bucket {
    Vec<uint32_t> done;
    Vec<Test> tests;
    Vec<RangeTest> ranges;
    size_t size() const { return static_cast<size_t>(done.size()) + tests.size() + ranges.size(); }
    size_t bytes() const { return done.bytes() + tests.bytes() + ranges.bytes(); }
};

// Ends of intervals with nothing left to verify: keys in order, and the filter words beside them.
struct Ends {
    Vec<uint64_t> keys;
    Vec<uint32_t> words;
    uint32_t find(uint64_t key, uint32_t word) const {
        const auto equal = std::equal_range(keys.begin(), keys.end(), key);
        const uint32_t* from = words.begin() + (equal.first - keys.begin());
        const uint32_t* to = words.begin() + (equal.second - keys.begin());
        return static_cast<uint32_t>(std::lower_bound(from, to, word) - words.begin());
    }
    void insert(uint64_t key, uint32_t word) {
        const uint32_t at = find(key, word);
        keys.insert(at, key);
        words.insert(at, word);
    }
    void erase(uint64_t key, uint32_t word) {
        const uint32_t at = find(key, word);
        keys.erase(at);
        words.erase(at);
    }
    size_t bytes() const { return keys.bytes() + words.bytes(); }
};

// An interval under one of its ends, and what to test.
struct Bound {
    uint64_t key;
    Test test;
    bool operator<(const Bound& other) const {
        return key != other.key ? key < other.key : test < other.test;
    }
};

// Intervals that agree in all but `shift` low bits and lie on both sides of the middle. shift 0: points.
struct RangeNode {
    uint64_t prefix = 0, hash = 0;
    uint32_t node = 0;
    uint8_t shift = 0;
    bool text = false;
    uint32_t several = 0;         // words in `done` with kSeveral
    Ends done_lows, done_highs;   // nothing left to verify
    Vec<Bound> lows, highs;
    bool empty() const { return !lows.size() && !done_lows.keys.size(); }
};

struct Cell {
    uint64_t key = 0, hash = 0;
    uint32_t node = 0;
    Vec<ShapeTest> tests;
};

struct PointAt {
    uint32_t node;
    bool found, ready;  // not ready: its vector is still to be computed
    Point point;
};

struct ExpressionValue {  // on the stack of match_expression.cpp
    uint8_t type;
    int32_t number;  // of an Integer or Boolean
    uint32_t length;
    const char* text;
};

// What one matching thread needs; taken from the index for a call and given back.
struct Context {
    std::vector<Slot> slots;
    std::vector<uint32_t> touched;  // nodes with a value
    std::vector<uint64_t> bits;     // of true atoms
    std::vector<uint32_t> atoms;    // true atoms
    std::vector<uint32_t> active;   // those of them that find something
    std::vector<uint32_t> buckets;  // where they do
    std::vector<uint32_t> seen;     // epoch in which a filter of several conjunctions was found
    std::vector<uint32_t> known;    // epoch * 2 + result of a costly condition
    std::vector<uint32_t> found;    // filters of this event: the first found_count; space for every filter
    uint32_t found_count = 0;
    struct Place {                  // a range node to look up
        uint64_t hash, prefix, key;
        uint32_t node, shift, id;
        bool text;
    };
    std::vector<Place> places;
    struct Search {                 // a value to search for patterns
        uint64_t hash;
        uint32_t node, id;
    };
    std::vector<Search> searches;
    std::vector<Test> waiting;      // for a condition that was prefetched
    std::vector<uint32_t> records;  // to verify, prefetched too
    std::vector<PointAt> points;
    struct Wanted {  // an atom to look up
        uint64_t hash, number;
        const char* data;  // null: the number
        uint32_t node, length;
        uint8_t kind;
    };
    std::vector<Wanted> wanted;
    struct Searched {  // the patterns found in a value, by number, below `upto`
        uint64_t hash = 0;
        uint32_t node = 0, generation = 0, upto = 0;
        bool in_use = false;  // by a group of searches, until it is done
        std::string text;
        std::vector<uint32_t> numbers;
    };
    std::unique_ptr<Pool<Searched>> searched;
    std::unique_ptr<Table> searched_by_text;
    uint32_t searched_next = 0;  // the place that was reused last
    std::vector<uint32_t> suspects;
    std::vector<ExpressionValue> values;  // of expressions
    TextArena texts;                      // made for this event
    struct OddText {  // the text of an attribute that is no string
        uint32_t node, length;
        const char* text;
    };
    std::vector<OddText> odd_texts;
    struct Folded {  // a text in upper or lower case
        const char *text, *result;
        uint32_t length, result_length;
        bool upper, valid;
    };
    std::vector<Folded> folded;
    Hooks* hooks = nullptr;
    uint32_t epoch = 0, events = 0;
    bool failed = false, sampled = false, clash = false;
};

struct Stats {
    size_t filters, conjunctions, atoms, conditions, paths, buckets, always, regexps, redistributed;
    size_t indexed, verified, scanned;  // filters: found by a condition, tested further, tried every time
    size_t opaque;                      // conditions that are evaluated in Python
    size_t bytes_terms, bytes_places, bytes_records, bytes_paths, bytes_contexts;
};

class Index {
  public:
    Index();
    Lock lock;

    // Writers: call under lock.write(). 0 is a program that makes no sense.
    uint32_t add(const char* program, size_t length, const uint32_t* opaques, size_t opaque_count);
    void remove(uint32_t filter);
    void retire(uint32_t filter) { filters_.give(filter); }  // its number may be used again
    void redistribute(uint32_t steps_max);

    // Readers: call under lock.read(), with the event in the context's slots.
    void begin(Context& context);             // size the context for this index
    void match(Context& context);             // fills context.found; check context.failed
    static void clear(Context& context);      // forget the event
    void want_element(Context& context, uint32_t node, const Value& value) const;  // while it is walked

    std::unique_ptr<Context> take_context();
    void give_context(std::unique_ptr<Context> context);
    bool restless() const { return suspects_waiting_.load(std::memory_order_relaxed); }

    Stats stats();
    void report_all_patterns();  // as changes, after an image was opened
    bool is_fresh() const {  // nothing of it lies on the heap
        return !contexts_.capacity() && !suspects_.capacity() && !pattern_changes.capacity() &&
               !opaque_dropped.capacity();
    }
    Paths paths;

    // Changes to the patterns of a node, for the feeder to follow; drained after each change.
    struct PatternChange {
        enum What { kAdded, kRemoved, kCleared } what;
        uint32_t node, number;
        std::string pattern;  // flags, NUL, pattern
    };
    std::vector<PatternChange> pattern_changes;
    std::vector<uint32_t> opaque_dropped;  // numbers of opaque conditions no longer used

  private:
    friend class ProgramReader;

    // Terms (match_terms.cpp).
    Literal atom_literal(uint64_t hash, uint32_t node, uint8_t kind, const char* data, uint32_t length);
    Literal complex_literal(uint64_t hash, Complex&& condition);
    void retain(Literal literal);
    void release(Literal literal);
    void release_parts(const Complex& condition);
    void release_words(const List<uint32_t>& words);
    void release_atom(uint32_t id);
    void atom_made(uint32_t id);
    void atom_gone(uint32_t id);
    void move_patterns(uint32_t node);
    void renumber_patterns(uint32_t node);

    // Places (match_places.cpp).
    void place(uint32_t record);
    void unplace(uint32_t record);
    void place_at(Literal access, uint32_t record, bool present);
    Test next_test(uint32_t record) const;
    void change_affix(uint32_t id, uint32_t record, bool present);
    void change_atom(uint32_t atom, uint32_t record, bool present);
    void change_bucket(uint32_t& bucket, uint32_t record, bool present);
    static uint32_t bucket_of(const Atom& atom) { return atom.bucket & kOnly ? 0 : atom.bucket; }
    void change_range(uint32_t node, bool text, uint64_t low, uint64_t high, uint32_t record, bool present);
    void change_cells(uint32_t condition, uint32_t record, bool present);
    uint32_t write_record(uint32_t word, std::vector<Literal>& literals);
    void drop_record(uint32_t record);
    uint32_t choose(std::vector<Literal>& literals);
    bool is_found_by(Literal access, uint32_t atom) const;
    bool move(uint32_t record, Literal from);
    double likelihood(Literal literal) const;
    double cover(const Payload& tree, std::vector<Literal>& literals) const;

    // Matching (match_run.cpp).
    void compute_paths(Context& context) const;
    void compute_path(Context& context, uint32_t id) const;
    void gather(Context& context);
    void want(Context& context, uint32_t node, uint8_t kind, const char* data, uint32_t length);
    void set_atom(Context& context, uint32_t atom) const;
    uint64_t search_hash(const Context& context, uint32_t node) const;
    void search_all(Context& context);
    uint32_t find_search(Context& context, uint32_t node, uint64_t hash);
    void apply_search(Context& context, uint32_t node, uint32_t id);
    void complete_search(Context& context, uint32_t node, uint32_t id);
    bool text_has(Context& context, uint32_t node, uint32_t atom);
    void search(Context& context, uint32_t node);
    static void reserve_searches(Context& context);
    static uint32_t searched_place(Context& context);
    void run_bucket(Context& context, const Bucket& bucket);
    void run_ranges(Context& context);
    void want_interval(Context& context, uint32_t node, bool text, uint64_t key, const Levels& levels) const;
    void want_ranges(Context& context, uint32_t node) const;
    void run_range(Context& context, const Context::Place& at);
    void run_cells(Context& context, uint32_t node);
    void run_shapes(Context& context, const Vec<ShapeTest>& tests, const PointAt& at);
    const PointAt& point_at(Context& context, uint32_t node);
    void emit(Context& context, uint32_t word);
    void emit_all(Context& context, const uint32_t* words, size_t count, bool several);
    bool holds(Context& context, Literal literal) {
        const uint32_t id = literal & kTermMask;
        const bool truth =
            literal & kComplex ? condition_holds(context, id) : context.bits[id >> 6] >> (id & 63) & 1;
        return truth != static_cast<bool>(literal & kNegated);
    }
    bool condition_holds(Context& context, uint32_t id);
    bool compute(Context& context, const Complex& condition);
    bool tree_holds(Context& context, const List<uint32_t>& words, size_t& end, bool skip);
    void test_later(Context& context, Test test) const;
    void verify_later(Context& context, uint32_t target, bool last);
    void finish(Context& context);
    bool verify(Context& context, uint32_t record, uint32_t skip);
    void sample(Context& context);
    void count_filters(Stats& stats) const;
    static size_t context_bytes(const Context& context);

    Atoms atoms_;
    Conditions conditions_;
    Words words_;
    Pool<Bucket, 9> buckets_;
    Pool<RangeNode, 5> range_nodes_;
    Table ranges_by_place_;
    Pool<Cell, 5> cells_;
    Table cells_by_place_;
    struct Filter {
        uint32_t records = 0;  // its one record, or a list: [n] [record…]
        uint32_t several = 0;  // its place in `several_`, when there is a list
    };
    Pool<Filter> filters_;
    Pool<uint32_t, 5> several_;   // filters of several conjunctions -> filter
    uint32_t always_ = 0;      // bucket
    List<uint32_t> absents_;  // nodes with a bucket for their absence
    List<uint64_t> active_;   // bits of atoms that have a bucket: read for every true atom
    uint32_t records_ = 0, patterns_ = 0, generations_ = 0;
    size_t redistributed_ = 0;

    std::atomic<uint32_t> samples_{0};
    std::atomic<bool> suspects_waiting_{false};
    std::mutex contexts_mutex_;
    std::vector<std::unique_ptr<Context>> contexts_;
    std::vector<uint32_t> suspects_;
};

// Most elements of a long array are asked for by no filter: they end here.
inline void Index::want_element(Context& context, uint32_t node, const Value& value) const {
    const uint8_t kind = value.type | kElement;
    const uint64_t number = value.type == kNumber ? ordered(value.number) : 0;
    uint64_t hash;
    if (value.type == kNumber)
        hash = atom_hash(node, kind, reinterpret_cast<const char*>(&number), 8, paths.seed);
    else if (value.type == kString)
        hash = atom_hash(node, kind, value.text, value.length, paths.seed);
    else if (value.type >= kNull && value.type <= kTrue)
        hash = atom_hash(node, kind, "", 0, paths.seed);
    else
        return;
    if (!atoms_.may_have(hash)) return;
    atoms_.prefetch(hash);
    if (value.type == kNumber)
        context.wanted.push_back({hash, number, nullptr, node, 8, kind});
    else
        context.wanted.push_back({hash, 0, value.text ? value.text : "", node, value.length, kind});
}

}  // namespace virta
