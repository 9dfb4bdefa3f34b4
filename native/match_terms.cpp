// Terms made, shared and dropped.

#include "match_index.hpp"

namespace virta {

// The caller has one reference to the path; the term keeps it, or releases it if it is known already.
Literal Index::atom_literal(uint64_t hash, uint32_t node, uint8_t kind, const char* data, uint32_t length) {
    uint32_t id = atoms_.find(hash, node, kind, data, length);
    if (id) {
        paths.release(node);
    } else {
        id = atoms_.make(hash, node, kind, data, length);
        atom_made(id);
    }
    Atom& atom = atoms_.pool[id];
    atom.users++;
    // A conjunction made of it is probably indexed there.
    if (const uint32_t bucket = bucket_of(atom)) __builtin_prefetch(&buckets_[bucket]);
    return id;
}

void Index::atom_made(uint32_t id) {
    Atom& atom = atoms_.pool[id];
    Node& node = paths.nodes[atom.node];
    atom.born = samples_.load(std::memory_order_relaxed);
    if (atom.kind < kElement) {
        node.equals++;
        node.needs |= kNeedEqual;
    } else if (atom.kind < kPrefix) {
        node.elements++;
        node.needs |= kNeedElement;
    } else if (atom.kind == kRegexp) {
        Extra& extra = node.more();
        if (!extra.regexps_live++) extra.regexps_generation = ++generations_;
        atom.number = extra.regexps_end();
        extra.regexps.push_back(id);
        node.needs |= kNeedRegexp;
        patterns_++;
        pattern_changes.push_back(
            {PatternChange::kAdded, atom.node, atom.number, std::string(atom.data(), atom.length)});
    } else if (atom.kind >= kKind) {
        node.kinds[atom.kind - kKind] = id;
        node.kinds_live++;
        node.needs |= kNeedKind;
    }
}

void Index::atom_gone(uint32_t id) {
    Atom& atom = atoms_.pool[id];
    Node& node = paths.nodes[atom.node];
    auto update_need = [&](bool still, uint32_t need) {
        if (!still) node.needs &= ~need;
    };
    if (atom.kind < kElement) {
        update_need(--node.equals, kNeedEqual);
    } else if (atom.kind < kPrefix) {
        update_need(--node.elements, kNeedElement);
    } else if (atom.kind == kRegexp) {
        Extra& extra = *node.extra;
        extra.regexps[atom.number - extra.regexps_first] = 0;
        extra.regexps_live--;
        patterns_--;
        pattern_changes.push_back({PatternChange::kRemoved, atom.node, atom.number, {}});
        update_need(extra.regexps_live, kNeedRegexp);
        // Numbers are not reused: a cached search would refer to another pattern.
        if (!extra.regexps_live || extra.regexps_end() > kPatternNumbersMax)
            renumber_patterns(atom.node);
        else if (extra.regexps.size() - extra.regexps_past > 2ull * extra.regexps_live + 1024)
            move_patterns(atom.node);
    } else if (atom.kind >= kKind) {
        node.kinds[atom.kind - kKind] = 0;
        update_need(--node.kinds_live, kNeedKind);
    }
}

// Most numbers are of removed patterns: give the two oldest that are left the newest numbers. A removal costs
// no more than that, and the front, which is empty in the end, can be dropped.
void Index::move_patterns(uint32_t node) {
    Extra& extra = *paths.nodes[node].extra;
    for (int moved = 0; moved < 2; moved++) {
        while (!extra.regexps[extra.regexps_past]) extra.regexps_past++;
        const uint32_t id = extra.regexps[extra.regexps_past];
        extra.regexps[extra.regexps_past] = 0;
        Atom& atom = atoms_.pool[id];
        pattern_changes.push_back({PatternChange::kRemoved, node, atom.number, {}});
        atom.number = extra.regexps_end();
        extra.regexps.push_back(id);
        pattern_changes.push_back(
            {PatternChange::kAdded, node, atom.number, std::string(atom.data(), atom.length)});
    }
    if (extra.regexps_past <= extra.regexps.size() / 2) return;
    extra.regexps.erase(extra.regexps.begin(), extra.regexps.begin() + extra.regexps_past);
    extra.regexps_first += extra.regexps_past;
    extra.regexps_past = 0;
}

void Index::renumber_patterns(uint32_t node) {
    Extra& extra = *paths.nodes[node].extra;
    List<uint32_t> old;
    old.swap(extra.regexps);
    extra.regexps_first = extra.regexps_past = 0;
    extra.regexps_generation = ++generations_;
    pattern_changes.push_back({PatternChange::kCleared, node, 0, {}});
    for (uint32_t id : old) {
        if (!id) continue;
        Atom& atom = atoms_.pool[id];
        atom.number = static_cast<uint32_t>(extra.regexps.size());
        extra.regexps.push_back(id);
        pattern_changes.push_back(
            {PatternChange::kAdded, node, atom.number, std::string(atom.data(), atom.length)});
    }
}

void Index::report_all_patterns() {
    for (uint32_t node = 1; node < paths.nodes.limit(); node++) {
        if (!paths.nodes[node].extra) continue;
        for (uint32_t id : paths.nodes[node].extra->regexps) {
            if (!id) continue;
            const Atom& atom = atoms_.pool[id];
            pattern_changes.push_back(
                {PatternChange::kAdded, node, atom.number, std::string(atom.data(), atom.length)});
        }
    }
}

// As atom_literal. The caller's references to its parts are kept or released alike.
Literal Index::complex_literal(uint64_t hash, Complex&& condition) {
    uint32_t id = conditions_.find(hash, condition);
    if (id) {
        if (condition.node) paths.release(condition.node);
        release_parts(condition);
    } else {
        if (condition.kind == kPoint || condition.kind == kJunkPoint)
            paths.nodes[condition.node].needs |= kNeedPoint;
        id = conditions_.make(hash, std::move(condition));
    }
    conditions_.pool[id].users++;
    return id | kComplex;
}

void Index::retain(Literal literal) {
    const uint32_t id = literal & kTermMask;
    if (literal & kComplex)
        conditions_.pool[id].users++;
    else
        atoms_.pool[id].users++;
}

void Index::release(Literal literal) {
    const uint32_t id = literal & kTermMask;
    if (!(literal & kComplex)) return release_atom(id);
    Complex& condition = conditions_.pool[id];
    if (--condition.users) return;
    const Complex dropped = conditions_.drop(id);
    if (dropped.kind == kOpaque) opaque_dropped.push_back(static_cast<uint32_t>(dropped.low));
    release_parts(dropped);
    if (dropped.node) paths.release(dropped.node);
}

void Index::release_parts(const Complex& condition) {
    if (condition.of_atom()) release_atom(static_cast<uint32_t>(condition.low));
    if (condition.payload) release_words(condition.payload->words);
}

void Index::release_words(const List<uint32_t>& words) {
    for (size_t i = 0; i < words.size(); i++) {
        if (words[i] == kTreeAnd || words[i] == kTreeOr)
            i++;  // its count of operands
        else
            release(words[i]);
    }
}

void Index::release_atom(uint32_t id) {
    Atom& atom = atoms_.pool[id];
    if (--atom.users) return;
    const uint32_t node = atom.node;
    atom_gone(id);
    atoms_.drop(id);
    paths.release(node);
}

}  // namespace virta
