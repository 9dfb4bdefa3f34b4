"""
One form for all spellings of a filter, and its hash.

`canonicalise` keeps the meaning of a tree for every object and makes

* negation stand only on conditions, `And` and `Or` alternate, children sorted by their text, no repeats;
* conditions on one path join where one condition is equivalent: or of equalities becomes `in`, and of
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
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from math import isfinite
from typing import TYPE_CHECKING, Any

from virta.filters.evaluate import TESTS
from virta.filters.limits import CONJUNCTIONS_MAX, IN_VALUES_MAX
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    And,
    Computed,
    Condition,
    Everything,
    Flat,
    JsonPattern,
    Node,
    Not,
    Nothing,
    Or,
    Scalar,
    Select,
    ValueRange,
)
from virta.filters.values import FIELD_PATHS_MAX, Circle, Regexp, json_text

if TYPE_CHECKING:
    from virta.filters.values import Path

# A conjunction: conditions and negated conditions, all of which must hold.
Conjunction = tuple[Condition | Not, ...]


def canonicalise(node: Node) -> Node:
    """Return the canonical tree with the same meaning."""
    return canonical_form(node).node


def canonical_text(node: Node) -> str:
    """Return the JSON text of the canonical tree: what is hashed."""
    return canonical_form(node).text


def canonical_form(node: Node) -> Form:
    """Return the canonical tree and its text."""
    return _push(node, negated=False)


def digest(text: str) -> str:
    """Return the id of a canonical text: 64 hex characters."""
    return hashlib.sha256(text.encode()).hexdigest()


def conjunctions(node: Node, limit: int = CONJUNCTIONS_MAX) -> list[Conjunction] | None:
    """
    Return the disjunctive normal form of a tree, or None when it has more than `limit` terms.

    Terms that cannot hold are left out ([] is Nothing); the empty conjunction, alone, is Everything.
    """
    return form_conjunctions(canonical_form(node), limit)


def form_conjunctions(form: Form, limit: int = CONJUNCTIONS_MAX) -> list[Conjunction] | None:
    """Return the disjunctive normal form of a canonical form; see `conjunctions`."""
    if _terms(form.node) > limit:
        return None
    found: dict[str, Conjunction] = {}
    for term in _distribute(form):
        joined = _join(And, term)
        if isinstance(joined.node, Everything):
            return [()]
        if not isinstance(joined.node, Nothing):
            members = joined.node.children if isinstance(joined.node, And) else (joined.node,)
            found[joined.text] = members  # type: ignore[assignment]  # only literals went in
    return list(found.values())


class Form:
    """
    A canonical node with its text; equal nodes have equal texts.

    `parts` are the forms of the children of an `And` or `Or`, `path` the text of a condition's path.
    Texts are made once, bottom up: hashing a subtree at every level above it would cost its size times its
    depth.
    """

    __slots__ = ("node", "parts", "path", "text")

    def __init__(
        self, node: Node, text: str, *, parts: tuple[Form, ...] = (), path: str = ""
    ) -> None:
        self.node = node
        self.text = text
        self.parts = parts
        self.path = path


_EVERYTHING = Form(EVERYTHING, '"everything"')
_NOTHING = Form(NOTHING, '"nothing"')


def _literal_form(condition: Condition, *, negated: bool) -> Form:
    path = path_json(condition.path)
    text = f'{{"{condition.op}":[{path},{value_text(condition.value)}]}}'
    if negated:
        return Form(Not(condition), f'{{"not":{text}}}', path=path)
    return Form(condition, text, path=path)


# Pushing negation down.


def _push(node: Node, *, negated: bool) -> Form:
    if isinstance(node, Not):
        return _push(node.child, negated=not negated)
    if isinstance(node, And | Or):
        kind: type[And | Or] = And if isinstance(node, And) is not negated else Or
        return _join(kind, [_push(child, negated=negated) for child in node.children])
    if isinstance(node, Everything | Nothing):
        return _EVERYTHING if isinstance(node, Everything) is not negated else _NOTHING
    simple = _simplest(node)
    if isinstance(simple, Nothing):
        return _EVERYTHING if negated else _NOTHING
    return _literal_form(simple, negated=negated)


def _simplest(condition: Condition) -> Condition | Nothing:
    """Return the simplest equivalent condition."""
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
    bounds: ValueRange = condition.value
    if bounds.lower is None or bounds.upper is None:
        return condition
    if bounds.lower == bounds.upper and not (bounds.lower_open or bounds.upper_open):
        return Condition(condition.path, "eq", bounds.lower)
    # Both bounds have one type: ValueRange checks it.
    return NOTHING if bounds.lower >= bounds.upper else condition  # type: ignore[operator]


# Joining neighbours.


def _join(kind: type[And | Or], children: list[Form]) -> Form:
    """Return the canonical `kind` of canonical children."""
    neutral, absorbing = (_EVERYTHING, _NOTHING) if kind is And else (_NOTHING, _EVERYTHING)
    flat: dict[str, Form] = {}
    for child in children:
        for part in child.parts if isinstance(child.node, kind) else (child,):
            flat[part.text] = part
    flat.pop(neutral.text, None)
    if absorbing.text in flat:
        return absorbing
    literals = _join_literals(kind, [form for form in flat.values() if not form.parts])
    if literals is None:
        return absorbing
    # x and (x or y) is x; dually x or (x and y).
    texts = {form.text for form in literals}
    compounds = [form for form in flat.values() if form.parts]
    kept = [form for form in compounds if texts.isdisjoint(part.text for part in form.parts)]
    members = sorted([*literals, *kept], key=lambda form: form.text)
    if len(members) <= 1:
        return members[0] if members else neutral
    name = "and" if kind is And else "or"
    return Form(
        kind(tuple(form.node for form in members)),
        f'{{"{name}":[{",".join(form.text for form in members)}]}}',
        parts=tuple(members),
    )


def _join_literals(kind: type[And | Or], forms: list[Form]) -> list[Form] | None:
    """Return the literals with those of one path joined; None if they decide the whole."""
    by_path: dict[str, list[Form]] = {}
    for form in forms:
        by_path.setdefault(form.path, []).append(form)
    if len(by_path) == len(forms):
        return forms
    literals: list[Form] = []
    for group in by_path.values():
        if len(group) == 1:
            literals += group
            continue
        joined = _conjoin([_signed(form.node, kind) for form in group])
        if joined is None:
            return None
        literals += [_literal_form(c, negated=wanted is not (kind is And)) for c, wanted in joined]
    return literals


def _signed(literal: Any, kind: type[And | Or]) -> tuple[Condition, bool]:
    """Return a condition and its sign; `Or` is the negated `And` of the negations, so one set of rules serves both."""
    negated = isinstance(literal, Not)
    return (literal.child if negated else literal), negated is not (kind is And)


def _conjoin(group: list[tuple[Condition, bool]]) -> list[tuple[Condition, bool]] | None:
    """Return the shortest conjunction of conditions on one path; None if it cannot hold."""
    wanted = {c for c, positive in group if positive}
    refused = {c for c, positive in group if not positive}
    if wanted & refused or (wanted and any(c.op == "exists" for c in refused)):
        return None
    absent = next((c for c in refused if c.op == "exists"), None)
    if absent is not None:
        # A missing value satisfies no condition, so the other negations follow, except opaque ones.
        return [(absent, False), *((c, False) for c in refused if c.op == "opaque")]
    path = group[0][0].path
    ranges = _joined_ranges(wanted)
    if ranges is None:
        return None
    wanted = {c for c in wanted if c.op != "range"} | ranges
    values = _common_values(wanted)
    excluded = _excluded_values(refused)
    if values is not None:
        return _conjoin_values(path, values, wanted, refused)
    if len(wanted) > 1:
        wanted = {c for c in wanted if c.op != "exists"}
    if 0 < len(excluded) <= IN_VALUES_MAX:
        refused = {c for c in refused if c.op not in ("eq", "in")} | {_one_of(path, excluded)}
    return [*((c, True) for c in wanted), *((c, False) for c in refused)]


def _conjoin_values(
    path: Path, values: list[Scalar], wanted: set[Condition], refused: set[Condition]
) -> list[tuple[Condition, bool]] | None:
    """Return the conjunction when the value is one of few: conditions on the value alone are decided here."""
    signed = [(c, True) for c in wanted] + [(c, False) for c in refused]
    decided = [(c, sign) for c, sign in signed if c.op not in ("opaque", "negative_zero")]
    kept = [v for v in values if all(TESTS[c.op](c.value, v) is sign for c, sign in decided)]
    # Zero stands for 0.0 and -0.0, which only `negative_zero` distinguishes.
    zeros: list[Scalar] = [v for v in kept if v == 0 and not isinstance(v, bool)]
    if any(c.op == "negative_zero" for c in wanted):
        kept = zeros
    if not kept:
        return None
    open_ops = ("opaque", "negative_zero") if zeros else ("opaque",)
    return [(_one_of(path, kept), True), *((c, sign) for c, sign in signed if c.op in open_ops)]


def _one_of(path: Any, values: list[Scalar]) -> Condition:
    return Condition(path, "in", values) if len(values) > 1 else Condition(path, "eq", values[0])


def _common_values(wanted: set[Condition]) -> list[Scalar] | None:
    """Return the values of the narrowest eq or in of the set, None if there is none."""
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
    """Return all ranges of one path as one condition, None if their intersection is empty."""
    ranges = [c for c in wanted if c.op == "range"]
    if len(ranges) < 2:
        return set(ranges)
    bounds: ValueRange = ranges[0].value
    for other in ranges[1:]:
        if other.value.kind != bounds.kind:
            return None
        bounds = _intersection(bounds, other.value)
    joined = _simplest_range(Condition(ranges[0].path, "range", bounds))
    return None if isinstance(joined, Nothing) else {joined}


def _intersection(one: Any, two: Any) -> ValueRange:
    lower, lower_open = one.lower, one.lower_open
    if lower is None or (two.lower is not None and two.lower >= lower):
        lower_open = two.lower_open or (lower == two.lower and lower_open)
        lower = two.lower
    upper, upper_open = one.upper, one.upper_open
    if upper is None or (two.upper is not None and two.upper <= upper):
        upper_open = two.upper_open or (upper == two.upper and upper_open)
        upper = two.upper
    return ValueRange(lower, upper, lower_open=lower_open, upper_open=upper_open)


# Distribution.


def _terms(node: Node) -> int:
    """Return the number of terms that distribution produces."""
    if isinstance(node, Or):
        return sum(_terms(child) for child in node.children)
    product = 1
    if isinstance(node, And):
        for child in node.children:
            product *= _terms(child)
    return product


def _distribute(form: Form) -> list[list[Form]]:
    if isinstance(form.node, Or):
        return [term for part in form.parts for term in _distribute(part)]
    if isinstance(form.node, And):
        terms: list[list[Form]] = [[]]
        for part in form.parts:
            terms = [head + tail for head in terms for tail in _distribute(part)]
        return terms
    if isinstance(form.node, Everything):
        return [[]]
    return [] if isinstance(form.node, Nothing) else [[form]]


# Text.


@lru_cache(maxsize=FIELD_PATHS_MAX)
def path_json(path: Path) -> str:
    """Return a path as it stands in a canonical text."""
    steps = (
        f'{{"flat":{encode_basestring_ascii(step.name)}}}'
        if isinstance(step, Flat)
        else encode_basestring_ascii(step)
        if isinstance(step, str)
        else json_text(step.canonical_json())
        if isinstance(step, Computed)
        else str(step)
        for step in path
    )
    return f"[{','.join(steps)}]"


def value_text(value: Any) -> str:
    """Return the value of a condition as it stands in a canonical text."""
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, JsonPattern):
        return value.text
    if isinstance(value, Select):
        return f'{{"index":{value.index},"tree":{canonical_text(value.tree)}}}'
    if hasattr(value, "canonical_json"):
        return json_text(value.canonical_json())
    # The two most frequent shapes, as below and three times as fast.
    if isinstance(value, Regexp):
        flags, pattern = map(encode_basestring_ascii, (value.flags, value.pattern))
        return f'{{"flags":{flags},"pattern":{pattern}}}'
    if isinstance(value, Circle) and isfinite(value.lat + value.lon + value.radius):
        return f'{{"lat":{value.lat!r},"lon":{value.lon!r},"radius":{value.radius!r}}}'
    if is_dataclass(value):
        shape = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, ValueRange):
            shape = {k: v for k, v in shape.items() if v is not None and (v or "open" not in k)}
        return json_text(shape)
    return json_text(value)
