"""
One form for all spellings of a filter, and its hash.

`canonicalise` keeps the meaning of a tree for every object and makes

* negation stand only on conditions, `And` and `Or` alternate, children sorted by their text, no repeats;
* conditions on one path join where one condition says the same: or of equalities becomes `in`, and of
  ranges one range, and of two `in` lists their common part, a list of one an equality;
* what cannot hold become `Nothing`, what must hold become `Everything`, and what follows from a
  neighbour disappear (`exists a` beside `a = 1`; `x or y` beside `x`).

It never distributes `And` over `Or`, so its result is no larger than its input and its time is linear, but
for sorting. Two filters with one canonical form mean the same; the reverse is not promised.
`conjunctions` does distribute, for the index, and gives up at a limit instead of exploding.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from virta.filters.evaluate import TESTS
from virta.filters.limits import CONJUNCTIONS_MAX
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    And,
    Condition,
    Everything,
    Flat,
    Node,
    Not,
    Nothing,
    Or,
    Pattern,
    Range,
    Scalar,
    Select,
)
from virta.filters.values import json_text

if TYPE_CHECKING:
    from collections.abc import Iterable

# A conjunction: conditions and negated conditions, all of which must hold.
Conjunction = tuple[Condition | Not, ...]


def canonicalise(node: Node) -> Node:
    """The canonical tree with the same meaning."""
    return _push(node, negated=False)


def canonical_text(node: Node) -> str:
    """The JSON text of a tree; of a canonical tree: what is hashed."""
    if isinstance(node, Condition):
        return f"{{{json_text(node.op)}:[{json_text(_path_json(node.path))},{_value_text(node.value)}]}}"
    if isinstance(node, Not):
        return f'{{"not":{canonical_text(node.child)}}}'
    if isinstance(node, And | Or):
        name = "and" if isinstance(node, And) else "or"
        return f'{{"{name}":[{",".join(canonical_text(child) for child in node.children)}]}}'
    return '"everything"' if isinstance(node, Everything) else '"nothing"'


def digest(text: str) -> str:
    """The id of a canonical text: 64 hex characters."""
    return hashlib.sha256(text.encode()).hexdigest()


def conjunctions(node: Node, limit: int = CONJUNCTIONS_MAX) -> list[Conjunction] | None:
    """
    The disjunctive normal form of a canonical tree, or None when it has more than `limit` terms.

    Terms that cannot hold are left out ([] is Nothing); the empty conjunction, alone, is Everything.
    """
    if _terms(node) > limit:
        return None
    found: dict[Conjunction, None] = {}
    for term in _distribute(node):
        joined = _join(And, [*dict.fromkeys(term)])
        if isinstance(joined, Everything):
            return [()]
        if not isinstance(joined, Nothing):
            members = joined.children if isinstance(joined, And) else (joined,)
            found[members] = None  # type: ignore[index]  # only literals went in
    return list(found)


# Pushing negation down.


def _push(node: Node, *, negated: bool) -> Node:
    if isinstance(node, Not):
        return _push(node.child, negated=not negated)
    if isinstance(node, And | Or):
        kind: type[And | Or] = And if isinstance(node, And) is not negated else Or
        return _join(kind, [_push(child, negated=negated) for child in node.children])
    if isinstance(node, Everything | Nothing):
        return EVERYTHING if isinstance(node, Everything) is not negated else NOTHING
    simple = _simplest(node)
    if isinstance(simple, Nothing):
        return EVERYTHING if negated else NOTHING
    return Not(simple) if negated else simple


def _simplest(condition: Condition) -> Condition | Nothing:
    """The plainest condition that says the same."""
    path, op, value = condition.path, condition.op, condition.value
    if op == "in" and len(value) == 1:
        return Condition(path, "eq", value[0])
    if op == "type" and value == "null":
        return Condition(path, "eq", None)
    if op in ("prefix", "suffix") and not value:
        return Condition(path, "type", "string")
    if op == "range":
        return _simplest_range(condition)
    if op == "select":
        tree = canonicalise(value.tree)
        return NOTHING if tree == NOTHING else Condition(path, op, Select(value.index, tree))
    return condition


def _simplest_range(condition: Condition) -> Condition | Nothing:
    bounds: Range = condition.value
    if bounds.lower is None or bounds.upper is None:
        return condition
    if bounds.lower == bounds.upper and not (bounds.lower_open or bounds.upper_open):
        return Condition(condition.path, "eq", bounds.lower)
    # Bounds of one kind compare; Range saw to it.
    return NOTHING if bounds.lower >= bounds.upper else condition  # type: ignore[operator]


# Joining neighbours.


def _join(kind: type[And | Or], children: list[Node]) -> Node:
    """The canonical `kind` of canonical children."""
    neutral, absorbing = (EVERYTHING, NOTHING) if kind is And else (NOTHING, EVERYTHING)
    flat: dict[Node, None] = {}
    for child in children:
        flat.update(dict.fromkeys(child.children if isinstance(child, kind) else (child,)))
    flat.pop(neutral, None)
    if absorbing in flat:
        return absorbing
    literals, compounds = _join_literals(kind, flat)
    if literals is None:
        return absorbing
    # x and (x or y) is x; dually x or (x and y).
    present = set(literals)
    kept = [c for c in compounds if present.isdisjoint(c.children)]
    members: list[Node] = [*literals, *kept]
    if len(members) == 1:
        return members[0]
    return kind(tuple(sorted(members, key=canonical_text))) if members else neutral


def _join_literals(
    kind: type[And | Or], members: Iterable[Node]
) -> tuple[list[Node] | None, list[And | Or]]:
    """Literals of one path joined (None when they decide the whole), and the compounds as they were."""
    by_path: dict[Any, list[tuple[Condition, bool]]] = {}
    compounds: list[And | Or] = []
    for member in members:
        if isinstance(member, And | Or):
            compounds.append(member)
        else:
            literal = member.child if isinstance(member, Not) else member
            assert isinstance(literal, Condition)
            # Or is the And of the negations, negated: one set of rules serves both.
            positive = isinstance(member, Condition) is (kind is And)
            by_path.setdefault(literal.path, []).append((literal, positive))
    literals: list[Node] = []
    for group in by_path.values():
        joined = _conjoin(group) if len(group) > 1 else group
        if joined is None:
            return None, compounds
        literals += [c if positive is (kind is And) else Not(c) for c, positive in joined]
    return literals, compounds


def _conjoin(group: list[tuple[Condition, bool]]) -> list[tuple[Condition, bool]] | None:
    """The conjunction of conditions on one path, in fewest; None when it cannot hold."""
    wanted = {c for c, positive in group if positive}
    refused = {c for c, positive in group if not positive}
    if wanted & refused or (wanted and any(c.op == "exists" for c in refused)):
        return None
    absent = next((c for c in refused if c.op == "exists"), None)
    if absent is not None:
        # A missing value satisfies no condition: the other refusals follow. Opaque ones look elsewhere.
        return [(absent, False), *((c, False) for c in refused if c.op == "opaque")]
    path = group[0][0].path
    ranges = _joined_ranges(wanted)
    if ranges is None:
        return None
    wanted = {c for c in wanted if c.op != "range"} | ranges
    values = _common_values(wanted)
    excluded = _excluded_values(refused)
    if values is not None:
        # The value is one of few: everything that looks only at a scalar can be decided now.
        rest = {c for c in wanted if c.op == "opaque"}
        tests = [(c, True) for c in wanted - rest] + [
            (c, False) for c in refused if c.op != "opaque"
        ]
        values = [v for v in values if all(TESTS[c.op](c.value, v) is sign for c, sign in tests)]
        if not values:
            return None
        opaque = [(c, False) for c in refused if c.op == "opaque"]
        return [(_one_of(path, values), True), *((c, True) for c in rest), *opaque]
    if len(wanted) > 1:
        wanted = {c for c in wanted if c.op != "exists"}
    kept = {c for c in refused if c.op not in ("eq", "in")}
    if excluded:
        kept.add(_one_of(path, excluded))
    return [*((c, True) for c in wanted), *((c, False) for c in kept)]


def _one_of(path: Any, values: list[Scalar]) -> Condition:
    return Condition(path, "in", values) if len(values) > 1 else Condition(path, "eq", values[0])


def _common_values(wanted: set[Condition]) -> list[Scalar] | None:
    """The values that every eq and in of the set allows at most; None when there is no such condition."""
    first = min((c for c in wanted if c.op in ("eq", "in")), key=_breadth, default=None)
    if first is None:
        return None
    return [first.value] if first.op == "eq" else list(first.value)


def _breadth(condition: Condition) -> int:
    return 1 if condition.op == "eq" else len(condition.value)


def _excluded_values(refused: set[Condition]) -> list[Scalar]:
    values: list[Scalar] = []
    for condition in refused:
        if condition.op == "eq":
            values.append(condition.value)
        elif condition.op == "in":
            values += condition.value
    return values


def _joined_ranges(wanted: set[Condition]) -> set[Condition] | None:
    """All ranges of one path as one condition; None when nothing lies in all of them."""
    ranges = [c for c in wanted if c.op == "range"]
    if len(ranges) < 2:
        return set(ranges)
    bounds: Range = ranges[0].value
    for other in ranges[1:]:
        if other.value.kind != bounds.kind:
            return None
        bounds = _intersection(bounds, other.value)
    joined = _simplest_range(Condition(ranges[0].path, "range", bounds))
    return None if isinstance(joined, Nothing) else {joined}


def _intersection(one: Any, two: Any) -> Range:
    lower, lower_open = one.lower, one.lower_open
    if lower is None or (two.lower is not None and two.lower >= lower):
        lower_open = two.lower_open or (lower == two.lower and lower_open)
        lower = two.lower
    upper, upper_open = one.upper, one.upper_open
    if upper is None or (two.upper is not None and two.upper <= upper):
        upper_open = two.upper_open or (upper == two.upper and upper_open)
        upper = two.upper
    return Range(lower, upper, lower_open=lower_open, upper_open=upper_open)


# Distribution.


def _terms(node: Node) -> int:
    """How many terms plain distribution gives."""
    if isinstance(node, Or):
        return sum(_terms(child) for child in node.children)
    product = 1
    if isinstance(node, And):
        for child in node.children:
            product *= _terms(child)
    return product


def _distribute(node: Node) -> list[list[Node]]:
    if isinstance(node, Or):
        return [term for child in node.children for term in _distribute(child)]
    if isinstance(node, And):
        terms: list[list[Node]] = [[]]
        for child in node.children:
            terms = [head + tail for head in terms for tail in _distribute(child)]
        return terms
    if isinstance(node, Everything):
        return [[]]
    return [] if isinstance(node, Nothing) else [[node]]


# Text.


def _path_json(path: Any) -> list[Any]:
    return [{"flat": step.name} if isinstance(step, Flat) else step for step in path]


def _value_text(value: Any) -> str:
    if isinstance(value, Pattern):
        return value.text
    if isinstance(value, Select):
        return f'{{"index":{value.index},"tree":{canonical_text(value.tree)}}}'
    if hasattr(value, "canonical_json"):
        return json_text(value.canonical_json())
    if is_dataclass(value):
        shape = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, Range):
            shape = {k: v for k, v in shape.items() if v is not None and (v or "open" not in k)}
        return json_text(shape)
    return json_text(value)
