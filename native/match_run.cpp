// Matching one event: what is true in it, what that finds, and whether the rest holds too.

#include "match_index.hpp"

namespace virta {

namespace {

constexpr double kWorse = 10;  // observed against expected, before a bucket is redistributed
constexpr uint32_t kSuspectHits = 64, kSuspectSize = 64;

uint32_t shift_at(uint32_t level) { return level == 64 ? 0 : level == 0 ? 64 : level; }

}  // namespace

void Index::begin(Context& context) {
    if (context.slots.size() < paths.nodes.limit()) context.slots.resize(paths.nodes.limit() * 3 / 2 + 16);
    const size_t words = atoms_.pool.limit() / 64 + 1;
    if (context.bits.size() < words) context.bits.resize(words * 3 / 2);
    if (context.seen.size() < several_.limit()) context.seen.resize(several_.limit() * 3 / 2 + 16);
    if (context.known.size() < conditions_.pool.limit())
        context.known.resize(conditions_.pool.limit() * 3 / 2 + 16);
    // No filter is found twice, so there is always space for the next.
    if (context.found.size() < filters_.limit()) context.found.resize(filters_.limit() * 3 / 2 + 16);
}

void Index::match(Context& context) {
    if (++context.epoch == 1u << 31) {
        std::fill(context.seen.begin(), context.seen.end(), 0);
        std::fill(context.known.begin(), context.known.end(), 0);
        context.epoch = 1;
    }
    if (paths.computed) compute_paths(context);
    gather(context);
    if (context.failed) return;
    // Three passes, so that one bucket arrives while the next is prefetched. Searches on the way
    // may add atoms, but none that finds anything.
    for (uint32_t node : context.touched)
        if (paths.nodes[node].needs & (kNeedRange | kNeedTextRange)) want_ranges(context, node);
    for (uint32_t atom : context.active) {
        const uint32_t bucket = atoms_.pool[atom].bucket;
        if (bucket & kOnly) {
            context.found[context.found_count++] = bucket ^ kOnly;
        } else {
            __builtin_prefetch(&buckets_[bucket]);
            context.buckets.push_back(bucket);
        }
    }
    for (uint32_t id : context.buckets) {
        const Bucket& bucket = buckets_[id];
        // A line of memory holds eight tests; after four the hardware has seen where this leads.
        for (uint32_t i = 0; i < 32 && i < bucket.tests.size(); i += 8) __builtin_prefetch(&bucket.tests[i]);
        __builtin_prefetch(bucket.done.begin());
        __builtin_prefetch(bucket.ranges.begin());
    }
    for (uint32_t bucket : context.buckets) run_bucket(context, buckets_[bucket]);
    context.buckets.clear();
    for (uint32_t node : context.touched) {
        const uint32_t needs = paths.nodes[node].needs;
        if (needs & kNeedPoint) run_cells(context, node);
    }
    run_ranges(context);
    for (uint32_t node : absents_)
        if (context.slots[node].type == kAbsent) run_bucket(context, buckets_[paths.nodes[node].absent]);
    run_bucket(context, buckets_[always_]);
    finish(context);
    if (++context.events % kSampleEvery == 0) sample(context);
}

void Index::clear(Context& context) {
    for (uint32_t atom : context.atoms) context.bits[atom >> 6] = 0;
    for (uint32_t node : context.touched) context.slots[node] = Slot();
    context.atoms.clear();
    context.active.clear();
    context.touched.clear();
    context.points.clear();
    context.wanted.clear();
    context.found_count = 0;
    context.clash = false;
    context.texts.clear();
    context.odd_texts.clear();
    context.folded.clear();
}

// What it finds.

inline void Index::emit(Context& context, uint32_t word) {
    if (word & kSeveral) {
        uint32_t& seen = context.seen[word ^ kSeveral];
        if (seen == context.epoch) return;
        seen = context.epoch;
        word = several_[word ^ kSeveral];
    }
    context.found[context.found_count++] = word;
}

inline void Index::emit_all(Context& context, const uint32_t* words, size_t count, bool several) {
    if (several) {
        for (size_t i = 0; i < count; i++) emit(context, words[i]);
    } else if (count) {
        memcpy(&context.found[context.found_count], words, count * 4);
        context.found_count += static_cast<uint32_t>(count);
    }
}

// Tests whose memory is elsewhere are put off until it has come: first the conditions, then the records.
inline void Index::test_later(Context& context, Test test) const {
    if (test.literal & kComplex) __builtin_prefetch(&conditions_.pool[test.literal & kTermMask]);
    context.waiting.push_back(test);
}

inline void Index::verify_later(Context& context, uint32_t target, bool last) {
    if (last) return emit(context, target);
    __builtin_prefetch(words_[target]);
    context.records.push_back(target);
}

void Index::finish(Context& context) {
    for (const Test& test : context.waiting)
        if (holds(context, test.literal)) verify_later(context, test.target, test.literal & kLast);
    for (uint32_t record : context.records)
        if (verify(context, record, 1)) emit(context, words_[record][0]);
    context.waiting.clear();
    context.records.clear();
}

void Index::run_bucket(Context& context, const Bucket& bucket) {
    const uint32_t done = bucket.done.size();
    // Words are in order, those with kSeveral last.
    if (done) emit_all(context, bucket.done.begin(), done, bucket.done[done - 1] & kSeveral);
    const uint64_t* bits = context.bits.data();
    for (const Test& test : bucket.tests) {
        const uint32_t atom = test.literal & kTermMask;
        if (test.literal & kComplex)
            test_later(context, test);
        else if ((bits[atom >> 6] >> (atom & 63) & 1) != test.literal >> 31)
            verify_later(context, test.target, test.literal & kLast);
    }
    const Slot* slots = context.slots.data();
    for (const RangeTest& test : bucket.ranges) {
        const uint64_t key = slots[test.node & kTermMask].key;
        if (key >= test.low && key <= test.high) verify_later(context, test.target, test.node & kLast);
    }
}

void Index::want_ranges(Context& context, uint32_t node) const {
    const Slot& slot = context.slots[node];
    const Extra& extra = *paths.nodes[node].extra;
    if (slot.type == kNumber && slot.key)
        want_interval(context, node, false, slot.key, extra.numbers);
    else if (slot.type == kString)
        want_interval(context, node, true, string_key(slot.text, slot.length), extra.texts);
}

void Index::want_interval(Context& context, uint32_t node, bool text, uint64_t key,
                          const Levels& levels) const {
    auto want = [&](uint32_t shift) {
        const uint64_t prefix = shift == 64 ? 0 : key >> shift;
        const uint64_t hash =
            hash_word(prefix, static_cast<uint64_t>(node) << 9 | text << 8 | shift, paths.seed);
        if (!levels.hashes[hash & 255]) return;
        ranges_by_place_.prefetch(hash);
        context.places.push_back({hash, prefix, key, node, shift, 0, text});
    };
    for (uint64_t mask = levels.mask; mask; mask &= mask - 1)
        want(shift_at(static_cast<uint32_t>(__builtin_ctzll(mask))));
    if (levels.points) want(0);
}

void Index::run_ranges(Context& context) {
    for (const Context::Place& at : context.places)
        if (const uint32_t id = ranges_by_place_.peek(at.hash)) __builtin_prefetch(&range_nodes_[id]);
    for (Context::Place& at : context.places) {
        at.id = ranges_by_place_.find(at.hash, [&](uint32_t id) {
            const RangeNode& found = range_nodes_[id];
            return found.hash == at.hash && found.prefix == at.prefix && found.node == at.node &&
                   found.shift == at.shift && found.text == at.text;
        });
        if (!at.id) continue;
        const RangeNode& found = range_nodes_[at.id];
        __builtin_prefetch(found.done_lows.keys.begin());
        __builtin_prefetch(found.done_highs.keys.begin());
    }
    for (const Context::Place& at : context.places)
        if (at.id) run_range(context, at);
    context.places.clear();
}

void Index::run_range(Context& context, const Context::Place& at) {
    auto hit = [&](const Bound& bound) {
        const Literal literal = bound.test.literal;
        if (literal & kComplex)
            test_later(context, bound.test);
        else if (holds(context, literal))
            verify_later(context, bound.test.target, literal & kLast);
    };
    const RangeNode& place = range_nodes_[at.id];
    const uint64_t key = at.key;
    // All intervals here hold the middle: left of it only their low ends matter, right of it the high ones.
    if (at.shift == 0 || key >> (at.shift - 1) & 1) {
        const Vec<uint64_t>& keys = place.done_highs.keys;
        const auto found = std::lower_bound(keys.begin(), keys.end(), key);
        const auto first = static_cast<size_t>(found - keys.begin());
        emit_all(context, place.done_highs.words.begin() + first, keys.size() - first, place.several);
        for (uint32_t i = place.highs.size(); i-- && place.highs[i].key >= key;) hit(place.highs[i]);
    } else {
        const Vec<uint64_t>& keys = place.done_lows.keys;
        const auto found = std::upper_bound(keys.begin(), keys.end(), key);
        const auto count = static_cast<size_t>(found - keys.begin());
        emit_all(context, place.done_lows.words.begin(), count, place.several);
        for (const Bound& bound : place.lows) {
            if (bound.key > key) break;
            hit(bound);
        }
    }
}

const PointAt& Index::point_at(Context& context, uint32_t node) {
    for (PointAt& at : context.points) {
        if (at.node != node) continue;
        if (!at.ready) at.point = Point(at.point.lat, at.point.lon);
        at.ready = true;
        return at;
    }
    PointAt at{node, false, true, Point()};
    const Type type = context.slots[node].type;
    if (type >= kString) {
        double lat = 0, lon = 0;
        if (!context.hooks->point(node, at.found, lat, lon))
            context.failed = true;
        else if (at.found)
            at.point = Point(lat, lon);
    }
    context.points.push_back(at);
    return context.points.back();
}

void Index::run_cells(Context& context, uint32_t node) {
    const Extra* extra = paths.nodes[node].extra.get();
    if (!extra || (!extra->cells.mask && !extra->everywhere.size())) return;
    const PointAt at = point_at(context, node);
    if (!at.found) return;
    run_shapes(context, extra->everywhere, at);
    if (!at.point.finite() || std::fabs(at.point.lat) > 720) return;
    for (uint64_t mask = extra->cells.mask; mask; mask &= mask - 1) {
        const uint32_t level = static_cast<uint32_t>(__builtin_ctzll(mask));
        const uint64_t key = static_cast<uint64_t>(level) << 58 |
                             static_cast<uint64_t>(grid_column(at.point.lon, level)) << 32 |
                             static_cast<uint32_t>(grid_row(at.point.lat, level));
        const uint64_t hash = hash_word(key, node, paths.seed);
        if (!extra->cells.hashes[hash & 255]) continue;
        const uint32_t id = cells_by_place_.find(hash, [&](uint32_t cell) {
            return cells_[cell].key == key && cells_[cell].node == node;
        });
        if (id) run_shapes(context, cells_[id].tests, at);
    }
}

void Index::run_shapes(Context& context, const Vec<ShapeTest>& tests, const PointAt& at) {
    for (const ShapeTest& test : tests) {
        if (test.box.excludes(at.point)) continue;
        if (conditions_.pool[test.condition].payload->shape->contains(at.point) &&
            verify(context, test.record, 0))
            emit(context, words_[test.record][0]);
    }
}

// Observation.

void Index::sample(Context& context) {
    const uint32_t samples = samples_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (uint32_t id : context.atoms) {
        Atom& atom = atoms_.pool[id];
        const uint32_t hits = __atomic_add_fetch(&atom.hits, 1, __ATOMIC_RELAXED);
        if (!bucket_of(atom) || atom.redistributed || hits < kSuspectHits) continue;
        const Bucket& bucket = buckets_[atom.bucket];
        if (bucket.tests.size() + bucket.ranges.size() < kSuspectSize) continue;
        const double rate = static_cast<double>(hits) / (samples - atom.born + 1);
        if (rate * (200 + paths.nodes[atom.node].equals) > kWorse && context.suspects.size() < kSuspectsMax)
            context.suspects.push_back(id);
    }
}

std::unique_ptr<Context> Index::take_context() {
    std::lock_guard<std::mutex> guard(contexts_mutex_);
    if (contexts_.empty()) return std::make_unique<Context>();
    std::unique_ptr<Context> context = std::move(contexts_.back());
    contexts_.pop_back();
    return context;
}

void Index::give_context(std::unique_ptr<Context> context) {
    context->failed = false;
    context->hooks = nullptr;
    std::lock_guard<std::mutex> guard(contexts_mutex_);
    for (uint32_t id : context->suspects)
        if (suspects_.size() < kSuspectsMax &&
            std::find(suspects_.begin(), suspects_.end(), id) == suspects_.end())
            suspects_.push_back(id);
    if (!suspects_.empty()) suspects_waiting_ = true;
    context->suspects.clear();
    contexts_.push_back(std::move(context));
}

}  // namespace virta
