// Filters come in as programs: bytes that virta.match.compile.program writes and this file reads.
//
//   program      u32 conjunctions, each: u32 literals, each literal
//   literal      u8 operation (+ 128 when negated), path (not for the last two), operands
//   path         u32 length, bytes (see Paths::build)
//   text         u32 length, bytes
//   scalar       u8 type, then for a number f64, for a string text
//
//    1 exists      -                            9 suffix       text
//    2 type        u8                          10 regexp       text: flags NUL pattern
//    3 equals      scalar                      11 point        u8 kind, u32 count, f64…
//    4 contains    scalar                      12 junk point   -
//    5 in          u32 count, scalars          13 negative zero -
//    6 range       u8 flags, f64 low, f64 high 14 text regexp  text
//    7 text range  u8 flags, text low, high    15 opaque       u32 opaque
//    8 prefix      text                        16 tree         u32 count, items: literal | 17 and, 18 or
//   19 like        text: a LikeCode            20 match        text: a pattern, u32 opaque
//   21 substring   text
//
// Flags of ranges: 1 has low, 2 has high, 4 low is open, 8 high is open. Opaque conditions are numbered
// within the program and translated by the list that comes with it. Little-endian, nothing is aligned.
//
// In a large index each lookup of a term waits for memory. So the atoms and ranges of conjunctions are put
// off: all are hashed and prefetched first, then looked up.

#include "match_index.hpp"
#include "match_pattern.hpp"
#include "match_regexp.hpp"

namespace virta {

class ProgramReader {
  public:
    ProgramReader(Index& index, const char* at, size_t length, const uint32_t* opaques, size_t opaque_count)
        : index_(index), at_(at), end_(at + length), opaques_(opaques), opaque_count_(opaque_count) {}

    bool read(std::vector<std::vector<Literal>>& conjunctions) {
        const uint32_t count = number<uint32_t>();
        for (uint32_t i = 0; ok_ && i < count; i++) {
            conjunctions.emplace_back();
            const uint32_t literals = number<uint32_t>();
            if (literals > kLiteralsMax) ok_ = false;
            for (uint32_t k = 0; ok_ && k < literals; k++) {
                defer_ = true;
                const uint8_t byte = number<uint8_t>();
                const Literal one = literal(byte);
                if (!ok_) break;
                if (byte == kOpRegexp) note_start(one);
                if (one == kDeferred || one == (kDeferred | kNegated)) {
                    deferred_.back().conjunction = i;
                    deferred_.back().at = k;
                }
                conjunctions.back().push_back(one);
            }
            if (ok_) add_starts(conjunctions.back());
        }
        ok_ = ok_ && at_ == end_;
        resolve(conjunctions);
        return ok_;
    }

  private:
    void note_start(Literal pattern) {
        const Complex& condition = index_.conditions_.pool[pattern & kTermMask];
        const Atom& atom = index_.atoms_.pool[static_cast<uint32_t>(condition.low)];
        std::string start = literal_start(atom.data(), atom.length);
        if (!start.empty()) starts_.emplace_back(condition.node, std::move(start));
    }

    // A value is searched for patterns only if it starts as one of them must.
    void add_starts(std::vector<Literal>& literals) {
        defer_ = false;
        for (const auto& [node, start] : starts_) {
            if (literals.size() == kLiteralsMax) break;
            index_.paths.retain(node);
            literals.push_back(affix_of(node, kPrefix, start.data(), static_cast<uint32_t>(start.size())));
        }
        starts_.clear();
    }

    static constexpr uint32_t kLiteralsMax = 0xfffe;  // of a conjunction: a record counts them in 16 bits
    static constexpr uint32_t kTreeLevelsMax = 400;  // trees are walked recursively
    // No term has it as its id.
    static constexpr Literal kDeferred = kTermMask;

    struct Deferred {
        uint64_t hash, low, high;  // of an atom that is a number: low
        const char* data;          // of an atom that is none
        uint32_t node, length;
        uint8_t kind;
        bool range;
        uint32_t conjunction, at;
    };

    // In place of each deferred literal the term; or, when the program is bad, nothing.
    void resolve(std::vector<std::vector<Literal>>& conjunctions) {
        if (ok_)
            for (const Deferred& d : deferred_)
                d.range ? index_.conditions_.prefetch_condition(d.hash) : index_.atoms_.prefetch_atom(d.hash);
        for (const Deferred& d : deferred_) {
            Literal& place = conjunctions[d.conjunction][d.at];
            if (!ok_) {
                index_.paths.release(d.node);
                place = 0;
                continue;
            }
            place &= kNegated;
            if (!d.range) {
                const char* data = d.data ? d.data : reinterpret_cast<const char*>(&d.low);
                place |= index_.atom_literal(d.hash, d.node, d.kind, data, d.length);
                continue;
            }
            Complex condition;
            condition.kind = kRange;
            condition.node = d.node;
            condition.low = d.low;
            condition.high = d.high;
            place |= index_.complex_literal(d.hash, std::move(condition));
        }
    }

    // `data` must lie in the program, or be null: then the atom is the number.
    Literal atom(uint32_t node, uint8_t kind, const char* data, uint32_t length, uint64_t number = 0) {
        const char* bytes = data ? data : reinterpret_cast<const char*>(&number);
        const uint64_t hash = atom_hash(node, kind, bytes, length, index_.paths.seed);
        if (!defer_) return index_.atom_literal(hash, node, kind, bytes, length);
        index_.atoms_.prefetch(hash);
        deferred_.push_back({hash, number, 0, data, node, length, kind, false, 0, 0});
        return kDeferred;
    }

    enum Operation : uint8_t {
        kOpExists = 1,
        kOpType,
        kOpEquals,
        kOpContains,
        kOpIn,
        kOpRange,
        kOpTextRange,
        kOpPrefix,
        kOpSuffix,
        kOpRegexp,
        kOpPoint,
        kOpJunkPoint,
        kOpNegativeZero,
        kOpTextRegexp,
        kOpOpaque,
        kOpTree,
        kOpAnd,
        kOpOr,
        kOpLike,
        kOpMatch,
        kOpSubstring,
    };

    template <class T>
    T number() {
        T value{};
        if (static_cast<size_t>(end_ - at_) < sizeof value) {
            ok_ = false;
            return value;
        }
        memcpy(&value, at_, sizeof value);
        at_ += sizeof value;
        return value;
    }

    struct Text {
        const char* data;
        uint32_t length;
    };

    Text text() {
        const uint32_t length = number<uint32_t>();
        if (!ok_ || static_cast<size_t>(end_ - at_) < length) {
            ok_ = false;
            return {"", 0};
        }
        const char* data = at_;
        at_ += length;
        return {data, length};
    }

    Literal literal(uint8_t byte) {
        const uint8_t operation = byte & 127;
        const Literal sign = byte & 128 ? kNegated : 0;
        if (!ok_) return 0;
        if (operation == kOpOpaque) return opaque() | sign;
        if (operation == kOpTree) return tree() | sign;
        defer_ &= operation <= kOpContains || operation == kOpRange;
        const Text path = text();
        const uint32_t node = ok_ ? index_.paths.acquire(path.data, path.length) : 0;
        if (!node) {
            ok_ = false;
            return 0;
        }
        const Literal made = term(operation, node);
        if (!made) {
            ok_ = false;
            index_.paths.release(node);
        }
        return made | sign;
    }

    // 0 when it cannot be read; the path is then still the caller's.
    Literal term(uint8_t operation, uint32_t node) {
        switch (operation) {
            case kOpExists:
                return atom(node, kKind, "", 0);
            case kOpType: {
                const uint8_t type = number<uint8_t>();
                if (!ok_ || type < kNull || type > kObject) return 0;
                return atom(node, static_cast<uint8_t>(kKind + type), "", 0);
            }
            case kOpEquals:
                return scalar(node, 0);
            case kOpContains:
                return scalar(node, kElement);
            case kOpIn:
                return in(node);
            case kOpRange:
                return range(node);
            case kOpTextRange:
                return text_range(node);
            case kOpPrefix:
            case kOpSuffix:
                return affix(node, operation == kOpPrefix ? kPrefix : kSuffix);
            case kOpRegexp:
                return regexp(node);
            case kOpPoint:
                return point(node);
            case kOpJunkPoint:
            case kOpNegativeZero: {
                Complex condition;
                condition.kind = operation == kOpJunkPoint ? kJunkPoint : kNegativeZero;
                condition.node = node;
                return made(std::move(condition));
            }
            case kOpTextRegexp:
                return text_regexp(node);
            case kOpLike:
                return like(node);
            case kOpMatch:
                return match(node);
            case kOpSubstring:
                return affix(node, kSubstring);
            default:
                return 0;
        }
    }

    Literal scalar(uint32_t node, uint8_t element) {
        const uint8_t type = number<uint8_t>();
        if (type == kString) {
            const Text value = text();
            return ok_ ? atom(node, type | element, value.data, value.length) : 0;
        }
        if (type == kNumber) {
            const uint64_t key = ordered(number<double>());
            return ok_ ? atom(node, type | element, nullptr, 8, key) : 0;
        }
        return ok_ && type >= kNull && type <= kTrue ? atom(node, type | element, "", 0) : 0;
    }

    Literal in(uint32_t node) {
        const uint32_t count = number<uint32_t>();
        List<uint32_t> values, atoms;
        for (uint32_t i = 0; ok_ && i < count; i++) {
            index_.paths.retain(node);
            const Literal one = scalar(node, 0);
            if (one)
                values.push_back(one);
            else {
                index_.paths.release(node);
                ok_ = false;
            }
        }
        if (!ok_ || values.empty()) {
            index_.release_words(values);
            return 0;
        }
        // A value twice would find its filter twice.
        std::sort(values.begin(), values.end());
        atoms.reserve(values.size());
        for (uint32_t atom : values) {
            if (atoms.empty() || atoms.back() != atom)
                atoms.push_back(atom);
            else
                index_.release(atom);
        }
        return of_words(kIn, node, std::move(atoms));
    }

    Literal range(uint32_t node) {
        const uint8_t flags = number<uint8_t>();
        const double low = number<double>(), high = number<double>();
        if (!ok_) return 0;
        Complex condition;
        condition.kind = kRange;
        condition.node = node;
        condition.low = flags & 1 ? ordered(low) + (flags >> 2 & 1) : kOrderedMin;
        condition.high = flags & 2 ? ordered(high) - (flags >> 3 & 1) : kOrderedMax;
        const uint64_t hash = Conditions::hash_of(condition, index_.paths.seed);
        Extra& extra = index_.paths.nodes[node].more();
        for (int side = 0; side < 2; side++) {
            if (!(flags & (1 << side)) || !std::isfinite(side ? high : low)) continue;
            extra.low = std::min(extra.low, side ? condition.high : condition.low);
            extra.high = std::max(extra.high, side ? condition.high : condition.low);
        }
        if (!defer_) return index_.complex_literal(hash, std::move(condition));
        index_.conditions_.prefetch(hash);
        deferred_.push_back({hash, condition.low, condition.high, nullptr, node, 0, kRange, true, 0, 0});
        return kDeferred;
    }

    Literal text_range(uint32_t node) {
        const char* from = at_;
        const uint8_t flags = number<uint8_t>();
        const Text low = text(), high = text();
        if (!ok_) return 0;
        Complex condition;
        condition.kind = kTextRange;
        condition.node = node;
        condition.payload = own<Payload>();
        condition.payload->key.assign(from, static_cast<size_t>(at_ - from));
        condition.payload->bounds = own<TextBounds>();
        TextBounds& bounds = *condition.payload->bounds;
        bounds.low.assign(low.data, low.length);
        bounds.high.assign(high.data, high.length);
        bounds.has_low = flags & 1, bounds.has_high = flags & 2;
        bounds.low_open = flags & 4, bounds.high_open = flags & 8;
        return made(std::move(condition));
    }

    Literal point(uint32_t node) {
        const char* from = at_;
        const uint8_t kind = number<uint8_t>();
        const uint32_t count = number<uint32_t>();
        if (!ok_ || static_cast<size_t>(end_ - at_) / 8 < count || kind < kCircle || kind > kPolygon)
            return 0;
        std::vector<double> numbers(count);
        for (double& value : numbers) value = number<double>();
        Complex condition;
        condition.kind = kPoint;
        condition.node = node;
        condition.payload = own<Payload>();
        condition.payload->key.assign(from, static_cast<size_t>(at_ - from));
        condition.payload->shape = own<Shape>();
        Shape& shape = *condition.payload->shape;
        shape.kind = static_cast<ShapeKind>(kind);
        if (!shape.prepare(numbers.data(), count)) return 0;
        const RoughBox box(shape.bounds);
        static_assert(sizeof box == sizeof condition.low + sizeof condition.high,
                      "the box takes the place of the bounds");
        memcpy(&condition.low, &box.lat, sizeof condition.low);
        memcpy(&condition.high, &box.lat_half, sizeof condition.high);
        return made(std::move(condition));
    }

    Literal affix(uint32_t node, uint8_t kind) {
        const Text value = text();
        return ok_ ? affix_of(node, kind, value.data, value.length) : 0;
    }

    Literal affix_of(uint32_t node, uint8_t kind, const char* data, uint32_t length) {
        index_.paths.retain(node);
        return of_atom(kAffix, node, atom(node, kind, data, length));
    }

    Literal regexp(uint32_t node) {
        const Text pattern = text();
        if (!ok_) return 0;
        index_.paths.retain(node);
        return of_atom(kPattern, node, atom(node, kRegexp, pattern.data, pattern.length));
    }

    Literal text_regexp(uint32_t node) {
        index_.paths.retain(node);
        const Literal pattern = regexp(node);
        if (!pattern) {
            index_.paths.release(node);
            return 0;
        }
        return of_words(kTextRegexp, node, {pattern});
    }

    Literal like(uint32_t node) {
        const Text code = text();
        if (!ok_ || !LikeCode(code.data, code.length).valid()) return 0;
        Complex condition;
        condition.kind = kLikePattern;
        condition.node = node;
        condition.payload = own<Payload>();
        condition.payload->key.assign(code.data, code.length);
        return made(std::move(condition));
    }

    Literal match(uint32_t node) {
        const Text pattern = text();
        const char* end = pattern.data + pattern.length;
        if (!ok_ || check_pattern(pattern.data, end) != end) return 0;
        const Literal fallback = opaque();
        if (!ok_) return 0;
        Complex condition;
        condition.kind = kContains;
        condition.node = node;
        condition.payload = own<Payload>();
        condition.payload->key.assign(pattern.data, pattern.length);
        condition.payload->words = {fallback};
        return made(std::move(condition));
    }

    Literal made(Complex&& condition) {
        const uint64_t hash = Conditions::hash_of(condition, index_.paths.seed);
        return index_.complex_literal(hash, std::move(condition));
    }

    Literal of_atom(ConditionKind kind, uint32_t node, Literal atom) {
        Complex condition;
        condition.kind = kind;
        condition.node = node;
        condition.low = atom;
        return made(std::move(condition));
    }

    Literal of_words(ConditionKind kind, uint32_t node, List<uint32_t> words) {
        Complex condition;
        condition.kind = kind;
        condition.node = node;
        condition.payload = own<Payload>();
        condition.payload->words = std::move(words);
        return made(std::move(condition));
    }

    Literal opaque() {
        const uint32_t at = number<uint32_t>();
        if (!ok_ || at >= opaque_count_) {
            ok_ = false;
            return 0;
        }
        Complex condition;
        condition.kind = kOpaque;
        condition.low = opaques_[at];
        return made(std::move(condition));
    }

    Literal tree() {
        const uint32_t count = number<uint32_t>();
        List<uint32_t> words;
        uint32_t depth = 0;
        std::vector<uint32_t> levels;  // of the operands waiting
        for (uint32_t i = 0; ok_ && i < count; i++) {
            const uint8_t byte = number<uint8_t>();
            if (byte == kOpAnd || byte == kOpOr) {
                const uint32_t operands = number<uint32_t>();
                if (!ok_ || operands == 0 || operands > depth) {
                    ok_ = false;
                    break;
                }
                words.push_back(byte == kOpAnd ? kTreeAnd : kTreeOr);
                words.push_back(operands);
                depth -= operands - 1;
                const uint32_t level = 1 + *std::max_element(levels.end() - operands, levels.end());
                levels.resize(depth - 1);
                levels.push_back(level);
                if (level > kTreeLevelsMax) ok_ = false;
            } else if ((byte & 127) == kOpTree) {
                ok_ = false;  // trees do not nest: postfix needs no nesting
            } else {
                defer_ = false;
                const Literal one = literal(byte);
                if (ok_) words.push_back(one);
                levels.push_back(1);
                depth++;
            }
        }
        if (!ok_ || depth != 1) {
            ok_ = false;
            index_.release_words(words);
            return 0;
        }
        return of_words(kTree, 0, std::move(words));
    }

    Index& index_;
    const char* at_;
    const char* end_;
    const uint32_t* opaques_;
    size_t opaque_count_;
    std::vector<Deferred> deferred_;
    std::vector<std::pair<uint32_t, std::string>> starts_;  // of the conjunction's patterns, with their nodes
    bool ok_ = true;
    bool defer_ = false;  // the literal being read may be put off
};

uint32_t Index::add(const char* program, size_t length, const uint32_t* opaques, size_t opaque_count) {
    std::vector<std::vector<Literal>> conjunctions;
    if (!ProgramReader(*this, program, length, opaques, opaque_count).read(conjunctions)) {
        for (const auto& literals : conjunctions)
            for (Literal literal : literals)
                if (literal) release(literal);
        return 0;
    }
    const uint32_t filter = filters_.take();
    bool several = conjunctions.size() > 1;
    // A tree may be found by several of its literals.
    for (const auto& literals : conjunctions)
        for (Literal literal : literals)
            several |= literal & kComplex && conditions_.pool[literal & kTermMask].kind == kTree;
    if (!several) {
        filters_[filter] = {conjunctions.empty() ? 0 : write_record(filter, conjunctions[0]), 0};
        return filter;
    }
    const uint32_t place = several_.take();
    several_[place] = filter;
    const uint32_t count = static_cast<uint32_t>(conjunctions.size());
    const uint32_t list = words_.take(1 + count);
    words_[list][0] = count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t record = write_record(kSeveral | place, conjunctions[i]);
        words_[list][1 + i] = record;
    }
    filters_[filter] = {list, place};
    return filter;
}

void Index::remove(uint32_t filter) {
    const Filter dropped = filters_[filter];
    filters_[filter] = {};
    if (!dropped.several) {
        if (dropped.records) drop_record(dropped.records);
        return;
    }
    const uint32_t count = words_[dropped.records][0];
    for (uint32_t i = 0; i < count; i++) drop_record(words_[dropped.records][1 + i]);
    words_.give(dropped.records, 1 + count);
    several_.give(dropped.several);
}

}  // namespace virta
