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
    // No filter is found twice, so there is always room for the next.
    if (context.found.size() < filters_.limit()) context.found.resize(filters_.limit() * 3 / 2 + 16);
}

void Index::match(Context& context) {
    if (++context.epoch == 1u << 31) {
        std::fill(context.seen.begin(), context.seen.end(), 0);
        std::fill(context.known.begin(), context.known.end(), 0);
        context.epoch = 1;
    }
    gather(context);
    if (context.failed) return;
    // Three passes, so that the memory of one bucket arrives while another is asked for. Searches on the way
    // may add atoms, but none that finds anything.
    for (uint32_t node : context.touched)
        if (paths.nodes[node].needs & (kNeedRange | kNeedTextRange)) want_ranges(context, node);
    for (uint32_t atom : context.active) __builtin_prefetch(&buckets_[atoms_.pool[atom].bucket]);
    for (uint32_t atom : context.active) {
        const Bucket& bucket = buckets_[atoms_.pool[atom].bucket];
        __builtin_prefetch(bucket.tests.begin());
        __builtin_prefetch(bucket.done.begin());
        __builtin_prefetch(bucket.ranges.begin());
    }
    for (size_t i = 0; i < context.active.size(); i++)
        run_bucket(context, buckets_[atoms_.pool[context.active[i]].bucket]);
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
    context.elements.clear();
    context.found_count = 0;
    context.clash = false;
}

// What is true.

inline void Index::set_atom(Context& context, uint32_t atom) const {
    uint64_t& word = context.bits[atom >> 6];
    const uint64_t bit = 1ull << (atom & 63);
    if (word & bit) return;
    word |= bit;
    context.atoms.push_back(atom);
    if (atom >> 6 < active_.size() && active_[atom >> 6] & bit) context.active.push_back(atom);
}

inline void Index::want(Context& context, uint32_t node, uint8_t kind, const char* data, uint32_t length) {
    const uint64_t hash = atom_hash(node, kind, data, length);
    atoms_.prefetch(hash);
    context.wanted.push_back({hash, 0, data, node, length, kind});
}

inline void Index::want_scalar(Context& context, uint32_t node, const Value& value, uint8_t element) {
    const uint8_t kind = value.type | element;
    if (value.type == kString) {
        want(context, node, kind, value.text, value.length);
    } else if (value.type == kNumber) {
        const uint64_t number = ordered(value.number);
        const uint64_t hash = atom_hash(node, kind, reinterpret_cast<const char*>(&number), 8);
        atoms_.prefetch(hash);
        context.wanted.push_back({hash, number, nullptr, node, 8, kind});
    } else if (value.type >= kNull && value.type <= kTrue) {
        want(context, node, kind, "", 0);
    }
}

void Index::gather(Context& context) {
    context.wanted.clear();
    for (uint32_t id : context.touched) {
        const Node& node = paths.nodes[id];
        const Slot& slot = context.slots[id];
        if (node.needs & kNeedEqual) {
            if (slot.type == kString) {
                want(context, id, kString, slot.text, slot.length);
            } else if (slot.type == kNumber) {
                const uint64_t hash = atom_hash(id, kNumber, reinterpret_cast<const char*>(&slot.key), 8);
                atoms_.prefetch(hash);
                context.wanted.push_back({hash, slot.key, nullptr, id, 8, kNumber});
            } else if (slot.type <= kTrue) {
                want(context, id, slot.type, "", 0);
            }
        }
        if (!(node.needs & ~kNeedEqual)) continue;
        if (node.needs & kNeedKind) {
            if (node.kinds[0]) set_atom(context, node.kinds[0]);
            // Booleans are one type: both of its values are entered under kTrue.
            const Type type = slot.type == kFalse ? kTrue : slot.type;
            if (type != kOther && node.kinds[type]) set_atom(context, node.kinds[type]);
        }
        if (slot.type != kString) continue;
        if (node.needs & kNeedPrefix)
            for (const auto& [length, users] : node.extra->prefixes.counts)
                if (length <= slot.length) want(context, id, kPrefix, slot.text, length);
        if (node.needs & kNeedSuffix)
            for (const auto& [length, users] : node.extra->suffixes.counts)
                if (length <= slot.length) want(context, id, kSuffix, slot.text + slot.length - length, length);
        if (node.needs & kNeedRegexp && node.extra->regexps_access) {
            context.searches.emplace_back(id, search_hash(context, id));
            if (context.searched_by_text) context.searched_by_text->prefetch(context.searches.back().second);
        }
    }
    for (const auto& [node, value] : context.elements) want_scalar(context, node, value, kElement);
    for (const Context::Wanted& w : context.wanted) {
        const char* data = w.data ? w.data : reinterpret_cast<const char*>(&w.number);
        const uint32_t atom = atoms_.find(w.hash, w.node, w.kind, data, w.length);
        if (!atom) continue;
        set_atom(context, atom);
        if (w.kind < kElement) context.slots[w.node].atom = atom;
    }
    for (const auto& [node, hash] : context.searches) search(context, node, hash);
    context.searches.clear();
}

uint64_t Index::search_hash(const Context& context, uint32_t node) {
    const Slot& slot = context.slots[node];
    return hash_bytes(slot.text, slot.length, 5 + (static_cast<uint64_t>(node) << 32));
}

// The patterns found in a string, remembered for the next event with the same one.
void Index::search(Context& context, uint32_t node, uint64_t hash) {
    const Extra& extra = *paths.nodes[node].extra;
    const Slot& slot = context.slots[node];
    context.slots[node].searched = true;
    if (!context.searched || context.searched->live() >= kRegexpCacheMax) {
        context.searched = std::make_unique<Pool<Context::Searched>>();
        context.searched_by_text = std::make_unique<Table>();
    }
    uint32_t id = context.searched_by_text->find(hash, [&](uint32_t at) {
        const Context::Searched& known = (*context.searched)[at];
        return known.node == node && known.text.size() == slot.length &&
               same_bytes(known.text.data(), slot.text, slot.length);
    });
    if (!id) {
        id = context.searched->take();
        (*context.searched)[id].node = node;
        (*context.searched)[id].text.assign(slot.text, slot.length);
        context.searched_by_text->insert(hash, id);
    }
    Context::Searched& known = (*context.searched)[id];
    if (known.generation != extra.regexps_generation) {
        known.generation = extra.regexps_generation;
        known.upto = 0;
        known.numbers.clear();
    }
    if (known.upto < extra.regexps.size()) {
        if (!context.hooks->search(node, slot.text, slot.length, known.upto, &known.numbers)) {
            context.failed = true;
            return;
        }
        known.upto = static_cast<uint32_t>(extra.regexps.size());
    }
    for (uint32_t number : known.numbers)
        if (number < extra.regexps.size() && extra.regexps[number]) set_atom(context, extra.regexps[number]);
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

void Index::want_interval(Context& context, uint32_t node, bool text, uint64_t key, const Levels& levels) const {
    auto want = [&](uint32_t shift) {
        const uint64_t prefix = shift == 64 ? 0 : key >> shift;
        const uint64_t hash = hash_word(prefix, static_cast<uint64_t>(node) << 9 | text << 8 | shift);
        ranges_by_place_.prefetch(hash);
        context.places.push_back({hash, prefix, key, node, shift, 0, text});
    };
    for (uint64_t mask = levels.mask; mask; mask &= mask - 1)
        want(shift_at(static_cast<uint32_t>(__builtin_ctzll(mask))));
    if (levels.points) want(0);
}

void Index::run_ranges(Context& context) {
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
        const auto first = static_cast<size_t>(std::lower_bound(keys.begin(), keys.end(), key) - keys.begin());
        emit_all(context, place.done_highs.words.begin() + first, keys.size() - first, place.several);
        for (uint32_t i = place.highs.size(); i-- && place.highs[i].key >= key;) hit(place.highs[i]);
    } else {
        const Vec<uint64_t>& keys = place.done_lows.keys;
        const auto count = static_cast<size_t>(std::upper_bound(keys.begin(), keys.end(), key) - keys.begin());
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
        const uint32_t id = cells_by_place_.find(hash_word(key, node), [&](uint32_t cell) {
            return cells_[cell].key == key && cells_[cell].node == node;
        });
        if (id) run_shapes(context, cells_[id].tests, at);
    }
}

void Index::run_shapes(Context& context, const Vec<ShapeTest>& tests, const PointAt& at) {
    const float lat = static_cast<float>(at.point.lat);
    const float lon = static_cast<float>(std::remainder(at.point.lon, 360));
    for (const ShapeTest& test : tests) {
        const float apart = std::fabs(lon - test.lon);
        if (std::fabs(lat - test.lat) > test.lat_half || std::min(apart, 360 - apart) > test.lon_half) continue;
        if (conditions_.pool[test.condition].payload->shape.contains(at.point) && verify(context, test.record, 0))
            emit(context, words_[test.record][0]);
    }
}

// Whether the rest holds.

bool Index::verify(Context& context, uint32_t record, uint32_t skip) {
    const uint32_t* words = words_[record];
    const uint32_t accesses = words[1] & 0xffff, others = words[1] >> 16;
    for (uint32_t i = skip; i < others; i++)
        if (!holds(context, words[2 + accesses + i])) return false;
    return true;
}

inline bool Index::holds(Context& context, Literal literal) {
    const uint32_t id = literal & kTermMask;
    const bool truth =
        literal & kComplex ? condition_holds(context, id) : context.bits[id >> 6] >> (id & 63) & 1;
    return truth != static_cast<bool>(literal & kNegated);
}

bool Index::condition_holds(Context& context, uint32_t id) {
    const Complex& condition = conditions_.pool[id];
    const Slot& slot = context.slots[condition.node];
    if (condition.kind == kRange) return slot.key >= condition.low && slot.key <= condition.high;
    if (condition.kind == kNegativeZero) return slot.negative_zero;
    uint32_t& known = context.known[id];
    if (known >> 1 == context.epoch) return known & 1;
    const bool truth = compute(context, condition, id);
    context.known[id] = context.epoch << 1 | truth;
    return truth;
}

namespace {

int compare_text(const Slot& slot, const std::string& bound) {
    const size_t shared = std::min<size_t>(slot.length, bound.size());
    const int order = memcmp(slot.text, bound.data(), shared);
    if (order) return order;
    return slot.length < bound.size() ? -1 : slot.length > bound.size();
}

bool in_text_range(const Slot& slot, const TextBounds& bounds) {
    if (slot.type != kString) return false;
    if (bounds.has_low) {
        const int order = compare_text(slot, bounds.low);
        if (order < 0 || (order == 0 && bounds.low_open)) return false;
    }
    if (!bounds.has_high) return true;
    const int order = compare_text(slot, bounds.high);
    return order < 0 || (order == 0 && !bounds.high_open);
}

}  // namespace

bool Index::compute(Context& context, const Complex& condition, uint32_t id) {
    const Slot slot = context.slots[condition.node];
    bool truth = false;
    switch (condition.kind) {
        case kTextRange:
            return in_text_range(slot, condition.payload->bounds);
        case kIn: {
            const auto& atoms = condition.payload->words;
            return slot.atom && std::binary_search(atoms.begin(), atoms.end(), slot.atom);
        }
        case kPoint: {
            if (slot.type == kAbsent) return false;
            const PointAt at = point_at(context, condition.node);
            return at.found && condition.payload->shape.contains(at.point);
        }
        case kJunkPoint:
            if (slot.type <= kFalse || (slot.type == kNumber && slot.key == ordered(0)) ||
                (slot.type == kString && !slot.length))
                return false;
            return !point_at(context, condition.node).found;
        case kPattern: {
            if (slot.type != kString) return false;
            if (!slot.searched) search(context, condition.node, search_hash(context, condition.node));
            const uint32_t atom = condition.payload->words[0];
            return context.bits[atom >> 6] >> (atom & 63) & 1;
        }
        case kTextRegexp:
            if (slot.type == kAbsent) return false;
            return holds(context, condition.payload->words[slot.type == kString ? 0 : 1]);
        case kOpaque:
            if (!context.hooks->opaque(static_cast<uint32_t>(condition.low), truth)) context.failed = true;
            return truth;
        default:
            assert(condition.kind == kTree);
            (void)id;
            return tree_holds(context, *condition.payload);
    }
}

bool Index::tree_holds(Context& context, const Payload& tree) {
    std::vector<uint8_t>& stack = context.stack;
    const size_t base = stack.size();
    for (size_t i = 0; i < tree.words.size(); i++) {
        const uint32_t word = tree.words[i];
        if (word != kTreeAnd && word != kTreeOr) {
            stack.push_back(holds(context, word));
            continue;
        }
        const size_t count = tree.words[++i];
        bool all = true, any = false;
        for (size_t k = 0; k < count; k++) {
            all = all && stack.back();
            any = any || stack.back();
            stack.pop_back();
        }
        stack.push_back(word == kTreeAnd ? all : any);
    }
    const bool truth = stack.back();
    stack.resize(base);
    return truth;
}

// Observation.

void Index::sample(Context& context) {
    const uint32_t samples = samples_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (uint32_t id : context.atoms) {
        Atom& atom = atoms_.pool[id];
        const uint32_t hits = __atomic_add_fetch(&atom.hits, 1, __ATOMIC_RELAXED);
        if (!atom.bucket || atom.settled || hits < kSuspectHits) continue;
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
        if (suspects_.size() < kSuspectsMax && std::find(suspects_.begin(), suspects_.end(), id) == suspects_.end())
            suspects_.push_back(id);
    if (!suspects_.empty()) suspects_waiting_ = true;
    context->suspects.clear();
    contexts_.push_back(std::move(context));
}

}  // namespace virta
