#include "match_paths.hpp"

namespace virta {

namespace {

uint64_t edge_hash(uint32_t parent, const String& name, int64_t index, uint64_t seed) {
    const uint64_t hash = hash_bytes(name.data(), name.size(), parent, seed);
    return index == -1 ? hash : hash_mix(hash, static_cast<uint64_t>(index) + 0x9e3779b97f4a7c15ull);
}

}  // namespace

Paths::Paths() {
    const uint32_t exact = nodes.take(), flat = nodes.take();
    assert(exact == kExactRoot && flat == kFlatRoot);
    (void)exact;
    nodes[flat].flat = true;
    nodes[exact].incoming = nodes[flat].incoming = 1;  // roots stay
}

uint32_t Paths::acquire(const char* bytes, uint32_t length) {
    const uint64_t hash = hash_bytes(bytes, length, 3, seed);
    uint32_t id = paths_by_bytes_.find(hash, [&](uint32_t at) {
        const String& known = paths_[at].bytes;
        return known.size() == length && memcmp(known.data(), bytes, length) == 0;
    });
    if (!id) {
        id = paths_.take();
        Path& path = paths_[id];
        path.bytes.assign(bytes, length);
        path.hash = hash;
        if (!build(path)) {
            drop_edges(path);
            paths_.give(id);
            return 0;
        }
        nodes[path.node].path = id;
        paths_by_bytes_.insert(hash, id);
    }
    paths_[id].users++;
    return paths_[id].node;
}

void Paths::release(uint32_t node) {
    const uint32_t id = nodes[node].path;
    Path& path = paths_[id];
    if (--path.users) return;
    nodes[node].path = 0;
    if (node == empty_name) empty_name = 0;
    paths_by_bytes_.erase(path.hash, id);
    if (nodes[node].extra && nodes[node].extra->expression) drop_computed(node);
    drop_edges(path);
    if (path.edges.empty() && node != kExactRoot && nodes[node].incoming == 0) nodes.give(node);
    paths_.give(id);
}

// Encoded: 'C' and an expression; or 'E', or 'F' u32 length name, then steps
//   'N' u32 length name    member              'S' i32 index   element, the root of flat names
//   'I' u32 index          element or member   'F' u32 length name   after 'S': dotted name in it
//   'A'                    every element
bool Paths::build(Path& path) {
    const char* at = path.bytes.data();
    const char* end = at + path.bytes.size();
    auto text = [&](String& out) {
        uint32_t length;
        if (end - at < 4) return false;
        memcpy(&length, at, 4);
        at += 4;
        if (static_cast<size_t>(end - at) < length) return false;
        out.assign(at, length);
        at += length;
        return true;
    };
    if (at == end) return false;
    String name;
    const char space = *at++;
    if (space == 'C') return build_computed(path, at, end);
    if (space == 'F') {
        if (!text(name) || !build_flat(path, name, kFlatRoot)) return false;
    } else if (space == 'E') {
        path.node = kExactRoot;
    } else {
        return false;
    }
    bool selected = false;
    for (uint32_t steps = 0; at != end; steps++) {
        if (steps == kPathStepsMax) return false;
        const char kind = *at++;
        // The entry "" has no edge that would keep its node for these steps.
        if ((kind == 'S' || kind == 'A') && path.node == empty_name) return false;
        if (kind == 'F') {
            if (!selected || !text(name) || !build_flat(path, name, path.node)) return false;
            selected = false;
            continue;
        }
        selected = kind == 'S';
        if (selected) {
            int32_t index;
            if (end - at < 4) return false;
            memcpy(&index, at, 4);
            at += 4;
            path.node = step(path, path.node, std::to_string(index).c_str(), kSelect + index, 0);
            nodes[path.node].flat = true;
            continue;
        }
        if (nodes[path.node].flat && kind != 'A') path.node = step(path, path.node, "", kTwin, 0);
        if (kind == 'N') {
            if (!text(name)) return false;
            path.node = step(path, path.node, name, kName, 0);
        } else if (kind == 'I' && end - at >= 4) {
            uint32_t index;
            memcpy(&index, at, 4);
            at += 4;
            path.node = step(path, path.node, std::to_string(index).c_str(), index, 0);
        } else if (kind == 'A') {
            path.node = step(path, path.node, "", kEach, 0);
        } else {
            return false;
        }
    }
    return true;
}

bool Paths::build_flat(Path& path, const String& name, uint32_t root) {
    if (name.empty() && root == kFlatRoot) {
        // Found through the root's member "", which is walked apart: it has no edge.
        if (!empty_name) {
            empty_name = nodes.take();
            nodes[empty_name].flat = true;
        }
        path.node = empty_name;
        return true;
    }
    std::vector<size_t> cuts{0};  // where each part begins
    for (size_t i = 0; i < name.size(); i++)
        if (name[i] == '.') cuts.push_back(i + 1);
    const size_t parts = cuts.size();
    if (parts > kFlatPartsMax) return false;
    cuts.push_back(name.size() + 1);
    std::vector<uint32_t> prefix(parts + 1, 0);
    prefix[0] = root;
    for (size_t to = 1; to <= parts; to++)
        for (size_t from = 0; from < to; from++) {
            // The root's member "" gives no prefix, so nothing is reached through an empty first part.
            if (!prefix[from] || (cuts[to] - 1 == 0 && root == kFlatRoot)) continue;
            const String piece = name.substr(cuts[from], cuts[to] - 1 - cuts[from]);
            prefix[to] = step(path, prefix[from], piece, kName, prefix[to]);
            nodes[prefix[to]].flat = true;
        }
    path.node = prefix[parts];
    return true;
}

// The child by a step, made if need be: `child` says which node it must lead to, when that is known.
uint32_t Paths::step(Path& path, uint32_t parent, const String& name, int64_t index, uint32_t child) {
    const uint64_t hash = edge_hash(parent, name, index, seed);
    uint32_t id = edges_by_name_.find(hash, [&](uint32_t at) {
        return edges_[at].parent == parent && edges_[at].index == index && edges_[at].name == name;
    });
    if (!id) {
        id = edges_.take();
        if (!child) child = nodes.take();
        Edge& edge = edges_[id];
        edge.hash = hash;
        edge.parent = parent;
        edge.child = child;
        edge.index = index;
        edge.name = name;
        nodes[child].incoming++;
        if (index == kEach || index < kSelect / 2) {
            Extra& extra = nodes[parent].more();
            if (index == kEach)
                extra.each = child;
            else
                extra.selects.emplace_back(static_cast<int32_t>(index - kSelect), child);
            nodes[parent].needs |= kNeedInside;
        } else if (index >= 0)
            nodes[parent].more().indexes.emplace_back(static_cast<uint32_t>(index), child);
        else if (index == kTwin)
            nodes[parent].exact_node = child;
        else if (nodes[parent].flat)
            nodes[parent].dotted++;
        else
            nodes[parent].names++;
        edges_by_name_.insert(hash, id);
    }
    edges_[id].users++;
    path.edges.push_back(id);
    return edges_[id].child;
}

void Paths::drop_edges(Path& path) {
    for (auto at = path.edges.rbegin(); at != path.edges.rend(); ++at) {
        Edge& edge = edges_[*at];
        if (--edge.users) continue;
        edges_by_name_.erase(edge.hash, *at);
        Node& parent = nodes[edge.parent];
        if (edge.index == kEach || edge.index < kSelect / 2) {
            Extra& extra = *parent.extra;
            const auto index = static_cast<int32_t>(edge.index - kSelect);
            if (edge.index == kEach)
                extra.each = 0;
            else
                extra.selects.erase(
                    std::find(extra.selects.begin(), extra.selects.end(), std::make_pair(index, edge.child)));
            if (!extra.each && extra.selects.empty()) parent.needs &= ~kNeedInside;
        } else if (edge.index >= 0) {
            auto& list = parent.extra->indexes;
            list.erase(std::find(list.begin(), list.end(),
                                 std::make_pair(static_cast<uint32_t>(edge.index), edge.child)));
        } else if (edge.index == kTwin) {
            parent.exact_node = 0;
        } else if (parent.flat) {
            parent.dotted--;
        } else {
            parent.names--;
        }
        if (--nodes[edge.child].incoming == 0 && nodes[edge.child].path == 0) nodes.give(edge.child);
        edges_.give(*at);
    }
}

bool Paths::build_computed(Path& path, const char* at, const char* end) {
    auto number = [&](uint32_t& out) {
        if (end - at < 4) return false;
        memcpy(&out, at, 4);
        at += 4;
        return true;
    };
    uint32_t trigger, count;
    if (!number(trigger) || !number(count) || count > kExpressionInputsMax) return false;
    auto expression = own<Expression>();
    bool ok = trigger < count || trigger == ~0u;
    for (uint32_t i = 0; ok && i < count; i++) {
        uint32_t length;
        ok = number(length) && static_cast<size_t>(end - at) >= length && length > 6 && at[0] == 'E';
        const uint32_t node = ok ? acquire(at, length) : 0;
        ok = node;
        if (!ok) break;
        expression->inputs.push_back(node);
        expression->names.emplace_back(at + 6, length - 6);  // after 'E', 'N' and the length
        at += length;
    }
    if (ok) {
        expression->depth = check_expression(at, static_cast<size_t>(end - at), count);
        expression->code.assign(at, static_cast<size_t>(end - at));
    }
    if (!ok || !expression->depth) {
        for (uint32_t node : expression->inputs) release(node);
        return false;
    }
    path.node = nodes.take();
    computed++;
    if (trigger != ~0u) {
        Node& first = nodes[expression->inputs[trigger]];
        first.more().dependents.push_back(path.node);
        first.needs |= kNeedComputed;
        expression->trigger = expression->inputs[trigger];
    } else {
        untriggered.push_back(path.node);
    }
    nodes[path.node].more().expression = std::move(expression);
    return true;
}

void Paths::drop_computed(uint32_t node) {
    const Own<Expression> expression = std::move(nodes[node].extra->expression);
    computed--;
    List<uint32_t>& list =
        expression->trigger ? nodes[expression->trigger].extra->dependents : untriggered;
    *std::find(list.begin(), list.end(), node) = list.back();
    list.pop_back();
    if (expression->trigger && list.empty()) nodes[expression->trigger].needs &= ~kNeedComputed;
    for (uint32_t input : expression->inputs) release(input);
}

size_t Paths::bytes() const {
    return nodes.bytes() + edges_.bytes() + paths_.bytes() + edges_by_name_.bytes() + paths_by_bytes_.bytes();
}

}  // namespace virta
