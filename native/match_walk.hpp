// Walking an event along the paths of the index, whatever it is made of.
//
// A Source says what a value is and lists the members of objects and the elements of arrays:
//   Value read(Ref)   members(Ref, f(name, length, Ref))   elements(Ref, f(Ref) -> bool go on)
#pragma once

#include "match_index.hpp"

namespace virta {

constexpr uint32_t kEmptyNamesMax = 1000;  // {"": {"": …}}: the only walk that goes deeper than a path

template <class Source>
class Walk {
  public:
    using Ref = typename Source::Ref;

    Walk(const Index& index, Context& context, Source& source)
        : index_(index), paths_(index.paths), context_(context), source_(source) {}

    // False: nested too deep. context.clash is set if a member came twice, or two gave one dotted path;
    // the later has won, which is right for sources whose members are unique and in order.
    bool run(Ref root) {
        const Value value = source_.read(root);
        if (paths_.nodes[kExactRoot].path) record(kExactRoot, value);
        exact(root, value.type, kExactRoot);
        if (value.type == kObject && (paths_.nodes[kFlatRoot].dotted || paths_.empty_name))
            flat(root, kFlatRoot, 0);
        // Selected elements and exact nodes add to the list that is walked here.
        for (size_t i = 0; i < context_.touched.size(); i++) {
            const uint32_t id = context_.touched[i];
            const Node& node = paths_.nodes[id];
            const Slot slot = context_.slots[id];
            if (node.flat && node.exact_node) exact(Source::ref(slot.ref), slot.type, node.exact_node);
            if (node.needs & (kNeedElement | kNeedPoint | kNeedInside)) look_inside(id, node.needs);
        }
        return !deep_;
    }

  private:
    void record(uint32_t node, const Value& value) {
        Slot& slot = context_.slots[node];
        if (slot.type != kAbsent)
            context_.clash = true;
        else
            context_.touched.push_back(node);
        slot.type = value.type;
        slot.ref = value.ref;
        slot.key = value.type == kNumber ? ordered(value.number) : 0;
        slot.text = value.text;
        slot.length = value.length;
        slot.negative_zero = value.negative_zero;
    }

    void flat(Ref object, uint32_t parent, uint32_t depth) {
        source_.members(object, [&](const char* name, uint32_t length, Ref member) {
            uint32_t child;
            if (length == 0 && parent == kFlatRoot) {
                // The root's member "" is an entry, and its members count as the root's.
                const Value value = source_.read(member);
                if (paths_.empty_name && depth == 0) record(paths_.empty_name, value);
                if (value.type != kObject) return;
                if (depth == kEmptyNamesMax)
                    deep_ = true;
                else
                    flat(member, kFlatRoot, depth + 1);
                return;
            }
            child = paths_.child(parent, name, length);
            if (!child) return;
            const Value value = source_.read(member);
            record(child, value);
            if (value.type == kObject && paths_.nodes[child].dotted) flat(member, child, depth);
        });
    }

    void exact(Ref ref, Type type, uint32_t parent) {
        const Node& node = paths_.nodes[parent];
        const bool indexed = node.extra && !node.extra->indexes.empty();
        if (type == kObject && (node.names || indexed)) {
            source_.members(ref, [&](const char* name, uint32_t length, Ref member) {
                const uint32_t child = node.names ? paths_.child(parent, name, length) : 0;
                if (child) enter(child, member);
                if (!indexed) return;
                for (const auto& [index, at] : node.extra->indexes)
                    if (std::to_string(index) == std::string(name, length)) enter(at, member);
            });
        } else if (type == kArray && indexed) {
            uint32_t last = 0, position = 0;
            for (const auto& entry : node.extra->indexes) last = std::max(last, entry.first);
            source_.elements(ref, [&](Ref element) {
                for (const auto& [index, at] : node.extra->indexes)
                    if (index == position) enter(at, element);
                return position++ < last;
            });
        }
    }

    void enter(uint32_t child, Ref ref) {
        const Value value = source_.read(ref);
        record(child, value);
        exact(ref, value.type, child);
    }

    void select(const Extra& extra, const Slot& slot) {
        int64_t count = 0, position = 0, last = -1;
        bool backward = false;
        for (const auto& [index, child] : extra.selects) {
            backward = backward || index < 0;
            last = std::max<int64_t>(last, index);
        }
        if (backward) {
            source_.elements(Source::ref(slot.ref), [&](Ref) { return ++count > 0; });
            last = count - 1;
        }
        source_.elements(Source::ref(slot.ref), [&](Ref element) {
            for (const auto& [index, child] : extra.selects) {
                if (index != position && (!backward || index + count != position)) continue;
                const Value value = source_.read(element);
                record(child, value);
                if (value.type == kObject && paths_.nodes[child].dotted) flat(element, child, 0);
            }
            return position++ < last;
        });
    }

    // The scalars of every element, under the names that are wanted.
    void each(Ref element, uint32_t node, uint32_t depth) {
        const Value value = source_.read(element);
        const Node& at = paths_.nodes[node];
        if (value.type == kObject && at.names) {
            source_.members(element, [&](const char* name, uint32_t length, Ref member) {
                const uint32_t child = paths_.child(node, name, length);
                if (child) each(member, child, depth + 1);
            });
        } else if (depth == 0 && value.type == kArray && at.needs & kNeedElement) {
            source_.elements(element, [&](Ref inner) {
                const Value scalar = source_.read(inner);
                if (scalar.type < kArray) index_.want_element(context_, node, scalar);
                return true;
            });
        } else if (depth && value.type < kArray && at.needs & kNeedElement) {
            index_.want_element(context_, node, value);
        }
    }

    void look_inside(uint32_t node, uint32_t needs) {
        const Slot slot = context_.slots[node];
        if (needs & kNeedInside && slot.type == kArray) {
            const Extra& extra = *paths_.nodes[node].extra;
            if (!extra.selects.empty()) select(extra, slot);
            if (extra.each)
                source_.elements(Source::ref(slot.ref), [&](Ref element) {
                    each(element, extra.each, 0);
                    return true;
                });
        }
        if (needs & kNeedElement && slot.type == kArray)
            source_.elements(Source::ref(slot.ref), [&](Ref element) {
                const Value value = source_.read(element);
                if (value.type < kArray) index_.want_element(context_, node, value);
                return true;
            });
        if (needs & kNeedPoint && (slot.type == kArray || slot.type == kObject)) plain_point(node, slot);
    }

    // {"lat": number, "lon": number} and [number, number]; Python reads the other spellings when needed.
    void plain_point(uint32_t node, const Slot& slot) {
        double lat = 0, lon = 0;
        uint32_t found = 0, count = 0;
        auto take = [&](Ref ref, double& into, uint32_t bit) {
            const Value value = source_.read(ref);
            into = value.number;
            found = value.type == kNumber && value.number == value.number ? found | bit : found & ~bit;
        };
        if (slot.type == kObject) {
            source_.members(Source::ref(slot.ref), [&](const char* name, uint32_t length, Ref member) {
                if (length != 3 || name[0] != 'l') return;
                if (name[1] == 'a' && name[2] == 't') take(member, lat, 1);
                if (name[1] == 'o' && name[2] == 'n') take(member, lon, 2);
            });
        } else {
            source_.elements(Source::ref(slot.ref), [&](Ref element) {
                if (count == 0) take(element, lat, 1);
                if (count == 1) take(element, lon, 2);
                return ++count < 3;
            });
            if (count != 2) found = 0;
        }
        if (found != 3) return;
        context_.points.push_back({node, true, false, Point()});
        context_.points.back().point.lat = lat;
        context_.points.back().point.lon = lon;
    }

    const Index& index_;
    const Paths& paths_;
    Context& context_;
    Source& source_;
    bool deep_ = false;
};

}  // namespace virta
