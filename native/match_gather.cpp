// What is true in an event: its values hashed and looked up, and the patterns found in its strings.

#include "match_index.hpp"

namespace virta {

inline void Index::set_atom(Context& context, uint32_t atom) const {
    uint64_t& word = context.bits[atom >> 6];
    const uint64_t bit = 1ull << (atom & 63);
    if (word & bit) return;
    word |= bit;
    context.atoms.push_back(atom);
    if (atom >> 6 < active_.size() && active_[atom >> 6] & bit) context.active.push_back(atom);
}

inline void Index::want(Context& context, uint32_t node, uint8_t kind, const char* data, uint32_t length) {
    const uint64_t hash = atom_hash(node, kind, data, length, paths.seed);
    atoms_.prefetch(hash);
    context.wanted.push_back({hash, 0, data, node, length, kind});
}

void Index::gather(Context& context) {
    for (uint32_t id : context.touched) {
        const Node& node = paths.nodes[id];
        const Slot& slot = context.slots[id];
        if (node.needs & kNeedEqual) {
            if (slot.type == kString) {
                want(context, id, kString, slot.text, slot.length);
            } else if (slot.type == kNumber) {
                const uint64_t hash =
                    atom_hash(id, kNumber, reinterpret_cast<const char*>(&slot.key), 8, paths.seed);
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
                if (length <= slot.length)
                    want(context, id, kSuffix, slot.text + slot.length - length, length);
        if (node.needs & kNeedSubstring)
            for (const auto& [length, users] : node.extra->substrings.counts)
                for (uint32_t at = 0; at + length <= slot.length; at++)
                    want(context, id, kSubstring, slot.text + at, length);
        if (node.needs & kNeedRegexp && node.extra->regexps_access) {
            context.searches.push_back({search_hash(context, id), id, 0});
            if (context.searched_by_text) context.searched_by_text->prefetch(context.searches.back().hash);
        }
    }
    for (const Context::Wanted& w : context.wanted) atoms_.prefetch_atom(w.hash);
    for (const Context::Wanted& w : context.wanted) {
        const char* data = w.data ? w.data : reinterpret_cast<const char*>(&w.number);
        const uint32_t atom = atoms_.find(w.hash, w.node, w.kind, data, w.length);
        if (!atom) continue;
        set_atom(context, atom);
        if (w.kind < kElement) context.slots[w.node].atom = atom;
    }
    if (!context.searches.empty()) search_all(context);
}

uint64_t Index::search_hash(const Context& context, uint32_t node) const {
    const Slot& slot = context.slots[node];
    return hash_bytes(slot.text, slot.length, 5 + (static_cast<uint64_t>(node) << 32), paths.seed);
}

// The patterns found in strings, remembered for the next event with the same one.
void Index::search_all(Context& context) {
    // Prefetch first, use later.
    if (context.searched)
        for (const Context::Search& one : context.searches)
            if (const uint32_t id = context.searched_by_text->peek(one.hash))
                __builtin_prefetch(&(*context.searched)[id]);
    reserve_searches(context);
    // In groups: an event may have more texts than there are places.
    std::vector<Context::Search>& all = context.searches;
    for (size_t from = 0; from < all.size(); from += kSearchesAtOnce) {
        const size_t end = std::min(from + kSearchesAtOnce, all.size());
        for (size_t i = from; i < end; i++) {
            all[i].id = find_search(context, all[i].node, all[i].hash);
            Context::Searched& found = (*context.searched)[all[i].id];
            found.in_use = true;
            __builtin_prefetch(found.numbers.data());
        }
        for (size_t i = from; i < end; i++) {
            apply_search(context, all[i].node, all[i].id);
            (*context.searched)[all[i].id].in_use = false;
        }
    }
    all.clear();
}

void Index::search(Context& context, uint32_t node) {
    reserve_searches(context);
    apply_search(context, node, find_search(context, node, search_hash(context, node)));
}

void Index::reserve_searches(Context& context) {
    if (context.searched) return;
    context.searched = std::make_unique<Pool<Context::Searched>>();
    context.searched_by_text = std::make_unique<Table>();
}

// A place for a text. When all are taken they are reused in turn: to drop all at once takes milliseconds.
uint32_t Index::searched_place(Context& context) {
    Pool<Context::Searched>& all = *context.searched;
    if (all.live() < kRegexpCacheMax) return all.take();
    do
        context.searched_next = context.searched_next % kRegexpCacheMax + 1;
    while (all[context.searched_next].in_use);
    const uint32_t id = context.searched_next;
    context.searched_by_text->erase(all[id].hash, id);
    return id;
}

uint32_t Index::find_search(Context& context, uint32_t node, uint64_t hash) {
    const Slot& slot = context.slots[node];
    uint32_t id = context.searched_by_text->find(hash, [&](uint32_t at) {
        const Context::Searched& known = (*context.searched)[at];
        return known.node == node && known.text.size() == slot.length &&
               same_bytes(known.text.data(), slot.text, slot.length);
    });
    if (!id) {
        id = searched_place(context);
        Context::Searched& made = (*context.searched)[id];
        made.hash = hash;
        made.node = node;
        // Swapped, not assigned: a place would keep the memory of the longest text that was ever there.
        std::string(slot.text, slot.length).swap(made.text);
        std::vector<uint32_t>().swap(made.numbers);
        made.upto = 0;
        context.searched_by_text->insert(hash, id);
    }
    return id;
}

void Index::apply_search(Context& context, uint32_t node, uint32_t id) {
    context.slots[node].searched = true;
    complete_search(context, node, id);
    const Extra& extra = *paths.nodes[node].extra;
    for (uint32_t number : (*context.searched)[id].numbers)
        if (const uint32_t atom = extra.regexp(number)) set_atom(context, atom);
}

// Whether a pattern is in the text of any value. No atom is set: a pattern finds only strings.
bool Index::text_has(Context& context, uint32_t node, uint32_t atom) {
    Slot& slot = context.slots[node];
    if (!slot.searched) {
        std::string text;
        if (!context.hooks->text(node, text)) {
            context.failed = true;
            return false;
        }
        slot.length = static_cast<uint32_t>(text.size());
        slot.text = context.texts.copy(text.data(), text.size());
        slot.searched = true;
    }
    reserve_searches(context);
    const uint32_t id = find_search(context, node, search_hash(context, node));
    complete_search(context, node, id);
    const std::vector<uint32_t>& numbers = (*context.searched)[id].numbers;
    return std::binary_search(numbers.begin(), numbers.end(), atoms_.pool[atom].number);
}

// Search for the patterns that are newer than what is known of the text.
void Index::complete_search(Context& context, uint32_t node, uint32_t id) {
    const Extra& extra = *paths.nodes[node].extra;
    const Slot& slot = context.slots[node];
    Context::Searched& known = (*context.searched)[id];
    if (known.generation != extra.regexps_generation) {
        known.generation = extra.regexps_generation;
        known.upto = 0;
        known.numbers.clear();
    }
    if (known.upto < extra.regexps_end()) {
        if (!context.hooks->search(node, slot.text, slot.length, known.upto, &known.numbers)) {
            context.failed = true;
            return;
        }
        known.upto = extra.regexps_end();
        std::sort(known.numbers.begin(), known.numbers.end());
    }
}

}  // namespace virta
