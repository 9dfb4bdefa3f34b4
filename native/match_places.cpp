// Where a conjunction is found: choosing its access literal, entering it there, moving it when events show
// that another would have been better.

#include <cmath>

#include "match_index.hpp"

namespace virta {

namespace {

// Likelihoods before any event was seen. A literal that cannot find anything is above 1.
constexpr double kNoAccess = 2.0;
constexpr double kPriorWeight = 64;  // sampled events a prior is worth
constexpr uint32_t kRedistributeHits = 64, kRedistributeSize = 64;
constexpr double kWorse = 10, kBetter = 4;

uint32_t level_of(uint32_t shift) { return shift == 0 ? 64 : shift == 64 ? 0 : shift; }

uint32_t shift_of(uint64_t low, uint64_t high) {
    return low == high ? 0 : 64 - static_cast<uint32_t>(__builtin_clzll(low ^ high));
}

uint64_t range_hash(uint32_t node, bool text, uint32_t shift, uint64_t prefix, uint64_t seed) {
    return hash_word(prefix, static_cast<uint64_t>(node) << 9 | text << 8 | shift, seed);
}

uint64_t cell_key(uint32_t level, uint32_t column, int32_t row) {
    return static_cast<uint64_t>(level) << 58 | static_cast<uint64_t>(column) << 32 |
           static_cast<uint32_t>(row);
}

}  // namespace

Index::Index() { always_ = buckets_.take(); }

uint32_t Index::write_record(uint32_t word, std::vector<Literal>& literals) {
    const uint32_t accesses = choose(literals);
    const uint32_t size = static_cast<uint32_t>(literals.size());
    const uint32_t record = words_.take(2 + size);
    uint32_t* words = words_[record];
    words[0] = word;
    words[1] = accesses | (size - accesses) << 16;
    std::copy(literals.begin(), literals.end(), words + 2);
    place(record);
    records_++;
    return record;
}

void Index::drop_record(uint32_t record) {
    unplace(record);
    const uint32_t* words = words_[record];
    const uint32_t size = (words[1] & 0xffff) + (words[1] >> 16);
    for (uint32_t i = 0; i < size; i++) release(words[2 + i]);
    words_.give(record, 2 + size);
    records_--;
}

// Access.

double Index::likelihood(Literal literal) const {
    const uint32_t id = literal & kTermMask;
    if (literal & kComplex) {
        const Complex& condition = conditions_.pool[id];
        if (literal & kNegated) return kNoAccess;
        if (condition.kind == kRange) {
            const Extra* extra = paths.nodes[condition.node].extra.get();
            const bool half = condition.low == kOrderedMin || condition.high == kOrderedMax;
            if (!extra || extra->low >= extra->high) return half ? 0.5 : 0.2;
            const double low = std::max(unordered(condition.low), unordered(extra->low));
            const double high = std::min(unordered(condition.high), unordered(extra->high));
            const double range = unordered(extra->high) - unordered(extra->low);
            return std::min(1.0, 0.02 + std::max(0.0, (high - low) / range));
        }
        if (condition.kind == kTextRange) return 0.4;
        if (condition.of_atom()) return likelihood(static_cast<uint32_t>(condition.low));
        if (condition.kind == kPoint) return condition.payload->shape->bounds.usable ? 0.01 : 0.6;
        if (condition.kind != kIn) return kNoAccess;
        double sum = 0;
        for (uint32_t atom : condition.payload->words) {
            sum += likelihood(atom);
            if (sum > 1) return 1;
        }
        return sum;
    }
    const Atom& atom = atoms_.pool[id];
    const Node& node = paths.nodes[atom.node];
    if (literal & kNegated) return atom.kind == kKind ? 0.3 : kNoAccess;
    double prior = 0.15;
    if (atom.kind < kElement)
        prior = 1.0 / (200 + node.equals);
    else if (atom.kind < kPrefix)
        prior = 2.0 / (50 + node.elements);
    else if (atom.kind < kRegexp || atom.kind == kSubstring)
        prior = 1.0 / (50 + 8 * std::min<uint32_t>(atom.length, 32));
    else if (atom.kind >= kKind)
        prior = atom.kind == kKind ? 0.9 : 0.7;
    // An atom that finds nothing is not looked up, so it has no count.
    const bool counted = atom.bucket || atom.kind < kPrefix || atom.kind >= kKind;
    const double seen = counted ? samples_.load(std::memory_order_relaxed) - atom.born : 0;
    return (kPriorWeight * prior + atom.hits) / (kPriorWeight + seen);
}

// Puts the access literals in front, what is verified behind them in the order in which it is likely to fail
// early, and says how many are in front. Literals it repeats are retained.
uint32_t Index::choose(std::vector<Literal>& literals) {
    double best = kNoAccess;
    size_t at = 0;
    std::vector<std::pair<double, Literal>> order;
    order.reserve(literals.size());
    for (Literal literal : literals) {
        // One of these buckets will be written to, at the end.
        const uint32_t bucket = literal & (kComplex | kNegated) ? 0 : bucket_of(atoms_.pool[literal]);
        if (bucket) {
            __builtin_prefetch(buckets_[bucket].tests.end(), 1);
            __builtin_prefetch(buckets_[bucket].ranges.end(), 1);
        }
        const double truth = likelihood(literal);
        if (truth < best) {
            best = truth;
            at = order.size();
        }
        double rank = truth <= 1 ? truth : 1;
        if (literal & kComplex) {
            const uint8_t kind = conditions_.pool[literal & kTermMask].kind;
            const bool cheap = kind == kRange || kind == kIn || kind == kNegativeZero || kind == kAffix;
            rank += cheap ? 0 : kind == kOpaque ? 8 : kind == kContains ? 4 : 2;
        }
        order.emplace_back(rank, literal);
    }
    std::vector<Literal> access;
    if (best <= 1) {
        access.push_back(order[at].second);
        // The first bytes of a string only find candidates: the range itself is still to be verified.
        if (access[0] & kComplex && conditions_.pool[access[0] & kTermMask].kind == kTextRange)
            retain(access[0]);
        else
            order.erase(order.begin() + static_cast<ptrdiff_t>(at));
    }
    for (const auto& [rank, literal] : order) {
        if (!(literal & kComplex) || (literal & kNegated)) continue;
        const Complex& condition = conditions_.pool[literal & kTermMask];
        std::vector<Literal> found;
        if (condition.kind != kTree) continue;
        const double truth = cover(*condition.payload, found);
        if (truth >= best || found.size() > 0xffff) continue;
        for (Literal one : found) retain(one);
        // What was in front goes back among the verified, unless it is there anyway.
        for (Literal one : access) {
            if (std::none_of(order.begin(), order.end(), [&](auto& o) { return o.second == one; }))
                order.emplace_back(best, one);
            else
                release(one);
        }
        access = found;
        best = truth;
        break;
    }
    std::stable_sort(order.begin(), order.end(), [](auto& a, auto& b) { return a.first < b.first; });
    literals = access;
    for (const auto& entry : order) literals.push_back(entry.second);
    return static_cast<uint32_t>(access.size());
}

// Literals one of which is true whenever the tree is, and how likely that is.
double Index::cover(const Payload& tree, std::vector<Literal>& literals) const {
    std::vector<std::pair<double, std::vector<Literal>>> stack;
    for (size_t i = 0; i < tree.words.size(); i++) {
        const uint32_t word = tree.words[i];
        if (word != kTreeAnd && word != kTreeOr) {
            const bool text = word & kComplex && conditions_.pool[word & kTermMask].kind == kTree;
            stack.push_back({text ? kNoAccess : likelihood(word), {word}});
            continue;
        }
        const size_t count = tree.words[++i];
        const size_t first = stack.size() - count;
        std::pair<double, std::vector<Literal>> joined{word == kTreeAnd ? 2 * kNoAccess : 0, {}};
        for (size_t k = first; k < stack.size(); k++) {
            if (word == kTreeAnd) {
                if (stack[k].first < joined.first) joined = std::move(stack[k]);
            } else {
                joined.first += stack[k].first > 1 ? kNoAccess : stack[k].first;
                joined.second.insert(joined.second.end(), stack[k].second.begin(), stack[k].second.end());
            }
        }
        stack.resize(first);
        stack.push_back(std::move(joined));
    }
    if (stack.size() != 1 || stack[0].first >= kNoAccess) return kNoAccess;
    literals = std::move(stack[0].second);
    std::sort(literals.begin(), literals.end());
    literals.erase(std::unique(literals.begin(), literals.end()), literals.end());
    return std::min(1.0, stack[0].first);
}

// Entering and leaving.

void Index::place(uint32_t record) {
    const uint32_t accesses = words_[record][1] & 0xffff;
    if (!accesses) change_bucket(always_, record, true);
    for (uint32_t i = 0; i < accesses; i++) place_at(words_[record][2 + i], record, true);
}

void Index::unplace(uint32_t record) {
    const uint32_t accesses = words_[record][1] & 0xffff;
    if (!accesses) change_bucket(always_, record, false);
    for (uint32_t i = 0; i < accesses; i++) place_at(words_[record][2 + i], record, false);
}

void Index::place_at(Literal access, uint32_t record, bool present) {
    const uint32_t id = access & kTermMask;
    if (!(access & kComplex)) {
        Atom& atom = atoms_.pool[id];
        if (!(access & kNegated)) return change_atom(id, record, present);
        Node& node = paths.nodes[atom.node];
        const bool before = node.absent;
        change_bucket(node.absent, record, present);
        if (!before) absents_.push_back(atom.node);
        if (!node.absent) absents_.erase(std::find(absents_.begin(), absents_.end(), atom.node));
        return;
    }
    const Complex& condition = conditions_.pool[id];
    if (condition.kind == kRange) {
        change_range(condition.node, false, condition.low, condition.high, record, present);
    } else if (condition.kind == kTextRange) {
        const TextBounds& bounds = *condition.payload->bounds;
        const uint64_t low = bounds.has_low ? string_key(bounds.low.data(), bounds.low.size()) : 0;
        const uint64_t high = bounds.has_high ? string_key(bounds.high.data(), bounds.high.size()) : ~0ull;
        change_range(condition.node, true, low, high, record, present);
    } else if (condition.kind == kPattern) {
        paths.nodes[condition.node].more().regexps_access += present ? 1 : -1;
        change_atom(static_cast<uint32_t>(condition.low), record, present);
    } else if (condition.kind == kAffix) {
        change_affix(static_cast<uint32_t>(condition.low), record, present);
    } else if (condition.kind == kIn) {
        for (uint32_t atom : condition.payload->words) change_atom(atom, record, present);
    } else {
        assert(condition.kind == kPoint);
        change_cells(id, record, present);
    }
}

// An event is looked up under the lengths of those that find something.
void Index::change_affix(uint32_t id, uint32_t record, bool present) {
    const Atom& atom = atoms_.pool[id];
    Node& node = paths.nodes[atom.node];
    Extra& extra = node.more();
    const bool prefix = atom.kind == kPrefix, suffix = atom.kind == kSuffix;
    Lengths& lengths = prefix ? extra.prefixes : suffix ? extra.suffixes : extra.substrings;
    const uint32_t need = prefix ? kNeedPrefix : suffix ? kNeedSuffix : kNeedSubstring;
    present ? lengths.add(atom.length) : lengths.remove(atom.length);
    node.needs = lengths.counts.empty() ? node.needs & ~need : node.needs | need;
    change_atom(id, record, present);
}

void Index::change_atom(uint32_t atom, uint32_t record, bool present) {
    uint32_t& bucket = atoms_.pool[atom].bucket;
    const Test test = next_test(record);
    const uint32_t only = test.literal || test.target & kSeveral ? 0 : test.target | kOnly;
    if (present && only && !bucket) {
        bucket = only;
    } else if (!present && only && bucket == only) {
        bucket = 0;
    } else {
        if (bucket & kOnly) {  // no longer alone
            const uint32_t word = bucket ^ kOnly;
            bucket = buckets_.take();
            buckets_[bucket].done.insert_sorted(word);
        }
        change_bucket(bucket, record, present);
    }
    if (active_.size() <= atom >> 6) active_.resize((atom >> 6) * 3 / 2 + 1);
    const uint64_t bit = 1ull << (atom & 63);
    active_[atom >> 6] = bucket ? active_[atom >> 6] | bit : active_[atom >> 6] & ~bit;
}

// The first literal to verify, and what holds, or is to be verified, after it.
Test Index::next_test(uint32_t record) const {
    const uint32_t* words = words_[record];
    const uint32_t others = words[1] >> 16;
    if (!others) return {0, words[0]};
    const Literal next = words[2 + (words[1] & 0xffff)];
    return others == 1 ? Test{next | kLast, words[0]} : Test{next, record};
}

void Index::change_bucket(uint32_t& bucket, uint32_t record, bool present) {
    if (!bucket) bucket = buckets_.take();
    Bucket& place = buckets_[bucket];
    const Test test = next_test(record);
    const uint32_t id = test.literal & kTermMask;
    if (!test.literal) {
        present ? place.done.insert_sorted(test.target) : void(place.done.erase_sorted(test.target));
    } else if ((test.literal & (kComplex | kNegated)) == kComplex && conditions_.pool[id].kind == kRange) {
        const Complex& range = conditions_.pool[id];
        const RangeTest inside{range.node | (test.literal & kLast), test.target, range.low, range.high};
        present ? place.ranges.insert_sorted(inside) : void(place.ranges.erase_sorted(inside));
    } else {
        present ? place.tests.insert_sorted(test) : void(place.tests.erase_sorted(test));
    }
    if (!place.size() && bucket != always_) {
        buckets_.give(bucket);
        bucket = 0;
    }
}

void Index::change_range(uint32_t node, bool text, uint64_t low, uint64_t high, uint32_t record,
                         bool present) {
    if (low > high) return;  // open ends of neighbouring doubles: nothing lies between
    const uint32_t shift = shift_of(low, high);
    const uint64_t prefix = shift == 64 ? 0 : low >> shift;
    const uint64_t hash = range_hash(node, text, shift, prefix, paths.seed);
    uint32_t id = ranges_by_place_.find(hash, [&](uint32_t at) {
        const RangeNode& found = range_nodes_[at];
        return found.prefix == prefix && found.node == node && found.shift == shift && found.text == text;
    });
    Extra& extra = paths.nodes[node].more();
    Levels& levels = text ? extra.texts : extra.numbers;
    if (!id) {
        id = range_nodes_.take();
        RangeNode& made = range_nodes_[id];
        made.prefix = prefix, made.hash = hash, made.node = node, made.text = text;
        made.shift = static_cast<uint8_t>(shift);
        ranges_by_place_.insert(hash, id);
        levels.add(level_of(shift), hash);
        paths.nodes[node].needs |= text ? kNeedTextRange : kNeedRange;
    }
    RangeNode& place = range_nodes_[id];
    const Test test = next_test(record);
    if (!test.literal) {
        place.several += test.target & kSeveral ? present ? 1 : -1 : 0;
        present ? place.done_lows.insert(low, test.target) : place.done_lows.erase(low, test.target);
        present ? place.done_highs.insert(high, test.target) : place.done_highs.erase(high, test.target);
    } else if (present) {
        place.lows.insert_sorted({low, test});
        place.highs.insert_sorted({high, test});
    } else {
        place.lows.erase_sorted({low, test});
        place.highs.erase_sorted({high, test});
    }
    if (!place.empty()) return;
    ranges_by_place_.erase(hash, id);
    range_nodes_.give(id);
    levels.remove(level_of(shift), hash);
    if (!levels.mask && !levels.points) paths.nodes[node].needs &= ~(text ? kNeedTextRange : kNeedRange);
}

void Index::change_cells(uint32_t condition, uint32_t record, bool present) {
    const uint32_t node = conditions_.pool[condition].node;
    const Shape& shape = *conditions_.pool[condition].payload->shape;
    Extra& extra = paths.nodes[node].more();
    const ShapeTest test{condition, record, RoughBox(shape.bounds)};
    Cells cells;
    if (!cells_of(shape.bounds, cells)) {
        present ? extra.everywhere.insert_sorted(test) : void(extra.everywhere.erase_sorted(test));
        return;
    }
    for (uint32_t i = 0; i < cells.columns * cells.rows; i++) {
        const uint32_t column = (cells.west + i % cells.columns) & ((1u << cells.level) - 1);
        const uint64_t key =
            cell_key(cells.level, column, cells.south + static_cast<int32_t>(i / cells.columns));
        const uint64_t hash = hash_word(key, node, paths.seed);
        uint32_t id = cells_by_place_.find(
            hash, [&](uint32_t at) { return cells_[at].key == key && cells_[at].node == node; });
        if (!id) {
            id = cells_.take();
            cells_[id].key = key, cells_[id].hash = hash, cells_[id].node = node;
            cells_by_place_.insert(hash, id);
            extra.cells.add(cells.level, hash);
        }
        present ? cells_[id].tests.insert_sorted(test) : void(cells_[id].tests.erase_sorted(test));
        if (cells_[id].tests.size()) continue;
        cells_by_place_.erase(hash, id);
        cells_.give(id);
        extra.cells.remove(cells.level, hash);
    }
}

// Moving.

void Index::redistribute(uint32_t steps_max) {
    uint32_t atom;
    {
        std::lock_guard<std::mutex> guard(contexts_mutex_);
        if (suspects_.empty()) return void(suspects_waiting_ = false);
        atom = suspects_.back();
        suspects_.pop_back();
        suspects_waiting_ = !suspects_.empty();
    }
    const uint32_t bucket = atom < atoms_.pool.limit() ? bucket_of(atoms_.pool[atom]) : 0;
    std::vector<uint32_t> records;
    auto add = [&](bool last, uint32_t target) {
        if (!last) return records.push_back(target);
        const Filter& filter = filters_[target & kSeveral ? several_[target ^ kSeveral] : target];
        if (!filter.several) return records.push_back(filter.records);
        const uint32_t* list = words_[filter.records];
        records.insert(records.end(), list + 1, list + 1 + list[0]);
    };
    if (bucket && !atoms_.pool[atom].redistributed) {
        for (const Test& test : buckets_[bucket].tests) add(test.literal & kLast, test.target);
        for (const RangeTest& test : buckets_[bucket].ranges) add(test.node & kLast, test.target);
    }
    // From the end, where entries leave a sorted vector cheaply.
    uint32_t moved = 0;
    while (!records.empty() && moved < steps_max) {
        moved += move(records.back(), atom);
        records.pop_back();
    }
    redistributed_ += moved;
    if (records.empty()) {
        if (bucket) atoms_.pool[atom].redistributed = true;
        return;
    }
    std::lock_guard<std::mutex> guard(contexts_mutex_);
    suspects_.push_back(atom);
    suspects_waiting_ = true;
}

// Whether the atom is what an access literal is looked up by.
bool Index::is_found_by(Literal access, uint32_t atom) const {
    if (!(access & kComplex)) return access == atom;
    const Complex& condition = conditions_.pool[access & kTermMask];
    return condition.of_atom() && condition.low == atom;
}

// Gives a record found by the atom `from` a much better access, if it has one.
bool Index::move(uint32_t record, Literal from) {
    uint32_t* words = words_[record];
    if ((words[1] & 0xffff) != 1 || !is_found_by(words[2], from)) return false;
    const uint32_t others = words[1] >> 16;
    double best = likelihood(from) / kBetter;
    uint32_t at = 0;
    for (uint32_t i = 0; i < others; i++) {
        const Literal literal = words[3 + i];
        if (literal & kComplex && conditions_.pool[literal & kTermMask].kind == kTextRange) continue;
        const double truth = likelihood(literal);
        if (truth < best) {
            best = truth;
            at = i + 1;
        }
    }
    if (!at) return false;
    unplace(record);
    std::swap(words[2], words[2 + at]);
    // The old access is often true: verify it last of the cheap ones, where it now stands or later.
    if (at == 1 && others > 1 && !(words[4] & kComplex)) std::swap(words[3], words[4]);
    place(record);
    return true;
}

}  // namespace virta
