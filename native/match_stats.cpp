// Sizes of an index, and how its filters are found.

#include "match_index.hpp"

namespace virta {

Stats Index::stats() {
    Stats stats{};
    stats.filters = filters_.live();
    stats.conjunctions = records_;
    stats.atoms = atoms_.pool.live();
    stats.conditions = conditions_.pool.live();
    stats.paths = paths.live();
    stats.buckets = buckets_.live();
    stats.always = buckets_[always_].size();
    stats.regexps = patterns_;
    stats.redistributed = redistributed_;
    stats.bytes_terms = atoms_.bytes() + conditions_.bytes();
    stats.bytes_records = words_.bytes() + filters_.bytes() + several_.bytes();
    stats.bytes_paths = paths.bytes();
    stats.bytes_places = buckets_.bytes() + range_nodes_.bytes() + ranges_by_place_.bytes() + cells_.bytes() +
                         cells_by_place_.bytes();
    for (uint32_t id = 1; id < buckets_.limit(); id++) stats.bytes_places += buckets_[id].bytes();
    for (uint32_t id = 1; id < range_nodes_.limit(); id++)
        stats.bytes_places += range_nodes_[id].lows.bytes() + range_nodes_[id].highs.bytes() +
                              range_nodes_[id].done_lows.bytes() + range_nodes_[id].done_highs.bytes();
    for (uint32_t id = 1; id < cells_.limit(); id++) stats.bytes_places += cells_[id].tests.bytes();
    // Each kContains has an opaque condition of its own, for values too large to be compared here.
    for (uint32_t id = 1; id < conditions_.pool.limit(); id++) {
        const uint8_t kind = conditions_.pool[id].users ? conditions_.pool[id].kind : 0;
        stats.opaque += (kind == kOpaque) - (kind == kContains);
    }
    count_filters(stats);
    std::lock_guard<std::mutex> guard(contexts_mutex_);
    for (const auto& context : contexts_) stats.bytes_contexts += context_bytes(*context);
    return stats;
}

void Index::count_filters(Stats& stats) const {
    for (uint32_t id = 1; id < filters_.limit(); id++) {
        const Filter& filter = filters_[id];
        if (!filter.records) continue;
        const uint32_t* list = filter.several ? words_[filter.records] : nullptr;
        const uint32_t count = list ? list[0] : 1;
        bool scanned = false, verified = false;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t* record = words_[list ? list[1 + i] : filter.records];
            scanned = scanned || !(record[1] & 0xffff);
            verified = verified || record[1] >> 16;
        }
        (scanned ? stats.scanned : verified ? stats.verified : stats.indexed)++;
    }
}

// What a thread keeps between calls: arrays as large as the index, and the patterns found in recent values.
size_t Index::context_bytes(const Context& context) {
    size_t bytes = sizeof context + context.slots.capacity() * sizeof(Slot) + context.bits.capacity() * 8 +
                   (context.seen.capacity() + context.known.capacity() + context.found.capacity()) * 4;
    if (!context.searched) return bytes;
    bytes += context.searched->bytes() + context.searched_by_text->bytes();
    for (uint32_t id = 1; id < context.searched->limit(); id++) {
        const Context::Searched& known = (*context.searched)[id];
        bytes += known.text.capacity() + known.numbers.capacity() * 4;
    }
    return bytes;
}

}  // namespace virta
