// Conditions that are computed when a candidate needs them, most of them once an event.

#include "match_index.hpp"

namespace virta {

namespace {

bool has_affix(const Slot& slot, const Atom& atom) {
    if (slot.type != kString || slot.length < atom.length) return false;
    if (atom.kind == kSubstring) return memmem(slot.text, slot.length, atom.data(), atom.length);
    const char* from = atom.kind == kPrefix ? slot.text : slot.text + (slot.length - atom.length);
    return same_bytes(from, atom.data(), atom.length);
}

}  // namespace

bool Index::verify(Context& context, uint32_t record, uint32_t skip) {
    const uint32_t* words = words_[record];
    const uint32_t accesses = words[1] & 0xffff, others = words[1] >> 16;
    for (uint32_t i = skip; i < others; i++)
        if (!holds(context, words[2 + accesses + i])) return false;
    return true;
}

bool Index::condition_holds(Context& context, uint32_t id) {
    const Complex& condition = conditions_.pool[id];
    const Slot& slot = context.slots[condition.node];
    if (condition.kind == kRange) return slot.key >= condition.low && slot.key <= condition.high;
    if (condition.kind == kNegativeZero) return slot.negative_zero;
    if (condition.kind == kAffix) return has_affix(slot, atoms_.pool[static_cast<uint32_t>(condition.low)]);
    if (condition.kind == kPoint) {
        if (slot.type == kAbsent) return false;
        const PointAt& at = point_at(context, condition.node);
        if (!at.found) return false;
        RoughBox box;
        memcpy(&box.lat, &condition.low, 8);
        memcpy(&box.lat_half, &condition.high, 8);
        if (box.excludes(at.point)) return false;
    }
    uint32_t& known = context.known[id];
    if (known >> 1 == context.epoch) return known & 1;
    const bool truth = compute(context, condition);
    context.known[id] = context.epoch << 1 | truth;
    return truth;
}

namespace {

int compare_text(const Slot& slot, const String& bound) {
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

bool Index::compute(Context& context, const Complex& condition) {
    const Slot slot = context.slots[condition.node];
    bool truth = false;
    switch (condition.kind) {
        case kTextRange:
            return in_text_range(slot, *condition.payload->bounds);
        case kIn: {
            const auto& atoms = condition.payload->words;
            return slot.atom && std::binary_search(atoms.begin(), atoms.end(), slot.atom);
        }
        case kPoint:
            return condition.payload->shape->contains(point_at(context, condition.node).point);
        case kJunkPoint:
            if (slot.type <= kFalse || (slot.type == kNumber && slot.key == ordered(0)) ||
                (slot.type == kString && !slot.length))
                return false;
            return !point_at(context, condition.node).found;
        case kPattern: {
            if (slot.type != kString) return false;
            if (!slot.searched) search(context, condition.node);
            const auto atom = static_cast<uint32_t>(condition.low);
            return context.bits[atom >> 6] >> (atom & 63) & 1;
        }
        case kTextRegexp:
            if (slot.type == kAbsent) return false;
            if (slot.type == kString) return holds(context, condition.payload->words[0]);
            return text_has(
                context, condition.node,
                static_cast<uint32_t>(conditions_.pool[condition.payload->words[0] & kTermMask].low));
        case kLikePattern: {
            if (slot.type != kString) return false;
            const String& code = condition.payload->key;
            return LikeCode(code.data(), code.size()).matches(slot.text, slot.length);
        }
        case kContains: {
            if (slot.type == kAbsent) return false;
            bool known = true;
            const char* pattern = condition.payload->key.data();
            if (!context.hooks->contains(condition.node, pattern, known, truth)) context.failed = true;
            return known ? truth : holds(context, condition.payload->words[0]);
        }
        case kOpaque:
            if (!context.hooks->opaque(static_cast<uint32_t>(condition.low), truth)) context.failed = true;
            return truth;
        default: {
            assert(condition.kind == kTree);
            size_t end = condition.payload->words.size();
            return tree_holds(context, condition.payload->words, end, false);
        }
    }
}

// Postfix, read from its end: `end` moves before the subtree. Operands that cannot change the result are
// skipped.
bool Index::tree_holds(Context& context, const List<uint32_t>& words, size_t& end, bool skip) {
    if (end < 2 || (words[end - 2] != kTreeAnd && words[end - 2] != kTreeOr)) {
        end--;
        return !skip && holds(context, words[end]);
    }
    const bool all = words[end - 2] == kTreeAnd;
    uint32_t count = words[end - 1];
    end -= 2;
    bool truth = all;
    for (; count; count--) {
        const bool decided = skip || truth != all;
        const bool one = tree_holds(context, words, end, decided);
        if (!decided) truth = one;
    }
    return truth;
}

}  // namespace virta
