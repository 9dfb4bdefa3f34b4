"""
A CESQL expression as a filter tree, so that the matcher can index it.

The tree is exact: for every event it holds if and only if the expression is true without a problem. An
expression has three outcomes (true, false, a problem), a tree two, so each part gets three trees: when it is true, when
it is false, and when it is *defined* (either of them). With short-circuit evaluation, `a OR b` is true when a is, or
when a is defined and b is true: a missing attribute in a fails the filter although b holds.

A comparison with a literal becomes a condition on the value of its other side: an attribute, or a computed path
(`LENGTH(subject) > 5` is a range on `LENGTH(subject)`), so that filters which differ in their literals share one
path. What remains becomes a computed Boolean as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING

from virta.errors import FilterError
from virta.filters.cesql import functions, syntax
from virta.filters.cesql.attributes import (
    one_of,
    present,
    reached,
    text_equals,
    text_path,
    text_prefix,
    text_suffix,
)
from virta.filters.cesql.computed import CesqlExpression
from virta.filters.cesql.integers import integer_tests
from virta.filters.cesql.parser import LEVELS
from virta.filters.cesql.values import (
    DATA_MEMBERS,
    INTEGER_MAX,
    INTEGER_MIN,
    REQUIRED_ATTRIBUTES,
    Value,
    cast,
)
from virta.filters.text import literal, segments
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    Condition,
    LikeText,
    Node,
    Path,
    ValueRange,
    all_of,
    any_of,
    negate,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

# Above these limits a part is computed as a whole: its tree would cost more.
CONDITIONS_MAX = 256
LEVELS_MAX = 40
OPERANDS_MAX = 16  # of one OR over different attributes, each of which nests the next

_MIRRORED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True)
class _Truth:
    """When a part is true, when it is false, and when it is either."""

    true: Node
    false: Callable[[], Node]
    defined: Callable[[], Node]
    subject: Hashable = None  # equal for parts that are defined for the same events


def tree_of(expression: syntax.Expression) -> Node:
    """Return the tree that holds when the expression is the Boolean true without a problem."""
    if isinstance(expression, syntax.Attribute):
        name = expression.name
        return NOTHING if name in DATA_MEMBERS else Condition((name,), "eq", True)
    if static_type(expression) is not bool:
        return NOTHING  # "if the output value is not a Boolean the event MUST NOT pass" (1.2)
    return _truth(expression).true


def static_type(node: syntax.Expression) -> type[Value] | None:
    """Return the type an expression always has, None for an attribute."""
    match node:
        case syntax.Literal():
            return node.kind
        case syntax.Attribute():
            return None
        case syntax.Unary("-", _):
            return int
        case syntax.Chain(_, rest):
            return bool if LEVELS[rest[-1][0]] <= LEVELS["="] else int
        case syntax.Call(name, arguments):
            function = functions.find(name, len(arguments))
            return bool if function is None else function.returns
        case _:
            return bool


def _truth(node: syntax.Expression) -> _Truth:
    """Return the trees of a part, which is cast to Boolean if it has another type."""
    if static_type(node) is not bool:
        return _computed_truth(_cast_to(node, bool))
    try:
        truth = _decomposed(node)
        if truth.true.count <= CONDITIONS_MAX and truth.true.levels <= LEVELS_MAX:
            return truth
    except FilterError:  # the tree's own limits
        pass
    return _computed_truth(node)


def _computed_truth(node: syntax.Expression) -> _Truth:
    """Return the trees of a Boolean expression that is computed as a whole."""
    path = (CesqlExpression(node),)
    true, false = Condition(path, "eq", True), Condition(path, "eq", False)
    return _Truth(true, lambda: false, lambda: Condition(path, "exists"), path)


def _cast_to(node: syntax.Expression, kind: type[Value]) -> syntax.Expression:
    """Return an expression cast to a type."""
    return node if static_type(node) is kind else syntax.Call(_CASTS[kind], (node,))


_CASTS: dict[type[Value], str] = {bool: "BOOL", int: "INT", str: "STRING"}


def _decomposed(node: syntax.Expression) -> _Truth:
    match node:
        case syntax.Literal(bool(value)):
            return _constant(value)
        case syntax.Exists(name):
            tree = EVERYTHING if name in REQUIRED_ATTRIBUTES else present(name)
            return _Truth(tree, lambda: negate(tree), lambda: EVERYTHING)
        case syntax.Unary("NOT", operand) if static_type(operand) is bool:
            inner = _truth(operand)
            return _Truth(inner.false(), lambda: inner.true, inner.defined, inner.subject)
        case syntax.Like(operand, pattern, negated):
            return _like(operand, pattern, negated=negated)
        case syntax.In(operand, items, negated) if all(
            isinstance(x, syntax.Literal) for x in items
        ):
            literals = [x.value for x in items if isinstance(x, syntax.Literal)]
            return _in_truth(node, operand, literals, negated=negated)
        case syntax.Chain(left, ((op, syntax.Literal(value)),)) if op in _MIRRORED:
            return _comparison(node, left, op, value)
        case syntax.Chain(syntax.Literal(value), ((op, right),)) if op in _MIRRORED:
            return _value_first(node, value, op, right)
        case syntax.Chain(first, rest) if LEVELS[rest[0][0]] == LEVELS["AND"]:
            return _logic(node, first, rest)
        case _:
            return _computed_truth(node)


def _constant(value: bool) -> _Truth:  # noqa: FBT001 - the literal itself
    true, false = (EVERYTHING, NOTHING) if value else (NOTHING, EVERYTHING)
    return _Truth(true, lambda: false, lambda: EVERYTHING)


_UNDEFINED = _Truth(NOTHING, lambda: NOTHING, lambda: NOTHING)


# Comparisons.


def _comparison(node: syntax.Expression, left: syntax.Expression, op: str, value: Value) -> _Truth:
    """Return the trees of `left op value`; for = and != the type of the value decides (3.7)."""
    if isinstance(left, syntax.Literal):
        return _computed_truth(node)
    if op in ("=", "!="):
        if isinstance(value, str):
            return _text_test(left, text_equals, "eq", value, negated=op == "!=")
        if isinstance(value, bool):
            inner = _truth(left)
            same = value is (op == "=")
            if same:
                return inner
            return _Truth(inner.false(), lambda: inner.true, inner.defined, inner.subject)
    number, problem = cast(value, int)
    return _UNDEFINED if problem is not None else _integers(left, op, int(number))


def _value_first(
    node: syntax.Expression, value: Value, op: str, right: syntax.Expression
) -> _Truth:
    """Return the trees of `value op right`, where for = and != the type of `right` decides."""
    kind = static_type(right)
    if op in ("=", "!="):
        if kind is None:
            return _in_truth(node, right, [value], negated=op == "!=")
        value, problem = cast(value, kind)
        if problem is not None:
            return _UNDEFINED
    return _comparison(node, right, _MIRRORED[op], value)


def _integers(left: syntax.Expression, op: str, bound: int) -> _Truth:
    below, above = (INTEGER_MIN, bound - 1), (bound + 1, INTEGER_MAX)
    passing = {
        "=": [(bound, bound)],
        "!=": [below, above],
        "<": [below],
        "<=": [(INTEGER_MIN, bound)],
        ">": [above],
        ">=": [(bound, INTEGER_MAX)],
    }[op]
    failing = {
        "=": [below, above],
        "!=": [(bound, bound)],
        "<": [(bound, INTEGER_MAX)],
        "<=": [above],
        ">": [(INTEGER_MIN, bound)],
        ">=": [below],
    }[op]
    base, ranges_of = integer_tests(left)
    path: Path = (CesqlExpression(_cast_to(base, int)),)
    if isinstance(base, syntax.Attribute) and base.name in DATA_MEMBERS:
        return _UNDEFINED

    def tree(wanted: list[tuple[int, int]]) -> Node:
        return any_of(_between(path, *part) for part in ranges_of(wanted))

    everything = [(INTEGER_MIN, INTEGER_MAX)]
    subject = path if base is left else None
    return _Truth(tree(passing), lambda: tree(failing), lambda: tree(everything), subject)


def _between(path: Path, low: int, high: int) -> Node:
    """Return the condition that an Integer lies between two bounds, both included."""
    if low > high:
        return NOTHING
    if low == high:
        return Condition(path, "eq", low)
    if (low, high) == (INTEGER_MIN, INTEGER_MAX):
        return Condition(path, "exists")

    lower = None if low == INTEGER_MIN else low
    return Condition(path, "range", ValueRange(lower, None if high == INTEGER_MAX else high))


def _text_test(
    operand: syntax.Expression,
    test: Callable[[str, str], Node],
    op: str,
    value: str | LikeText,
    *,
    negated: bool,
) -> _Truth:
    """Return the trees of a test on the text of an operand, which fails only if the operand does."""
    if isinstance(operand, syntax.Attribute) and isinstance(value, str):
        return _test_truth(test(operand.name, value), present(operand.name), operand.name, negated)
    path = (CesqlExpression(_cast_to(operand, str)),)
    passes = Condition(path, op, value) if value != "" or op == "eq" else Condition(path, "exists")
    return _test_truth(passes, Condition(path, "exists"), path, negated)


def _test_truth(passes: Node, there: Node, subject: Hashable, negated: bool) -> _Truth:  # noqa: FBT001
    """Return the trees of a test that has a problem only where its operand is not there."""

    def fails() -> Node:
        return all_of([there, negate(passes)])

    if negated:
        return _Truth(fails(), lambda: passes, lambda: there, subject)
    return _Truth(passes, fails, lambda: there, subject)


def _like(operand: syntax.Expression, pattern: str, *, negated: bool) -> _Truth:
    cut = segments(pattern)
    head, tail = literal(cut[0]), literal(cut[-1])
    if len(cut) == 1 and head is not None:
        return _text_test(operand, text_equals, "eq", head, negated=negated)
    inner = any(cut[1:-1])
    if len(cut) > 1 and not inner and head is not None and tail == "":
        return _text_test(operand, text_prefix, "prefix", head, negated=negated)
    if len(cut) > 1 and not inner and head == "" and tail is not None:
        return _text_test(operand, text_suffix, "suffix", tail, negated=negated)
    if not isinstance(operand, syntax.Attribute):
        return _text_test(operand, text_equals, "like", LikeText(pattern), negated=negated)
    return _like_attribute(operand.name, pattern, head, tail, negated=negated)


def _like_attribute(
    name: str, pattern: str, head: str | None, tail: str | None, *, negated: bool
) -> _Truth:
    """Return the trees of a pattern with several parts; what it implies is added, for an index to find it by."""
    if name in DATA_MEMBERS:
        return _UNDEFINED
    ends = [test(name, text) for test, text in ((text_prefix, head), (text_suffix, tail)) if text]
    # Where an end is a condition on the attribute itself, nothing but a string passes.
    strings = any(isinstance(end, Condition) and end.path == (name,) for end in ends)
    like = Condition((name,) if strings else text_path(name), "like", LikeText(pattern))
    whole = _test_truth(like, present(name), name, negated)
    return whole if negated else replace(whole, true=all_of([*ends, like]))


def _in_truth(
    node: syntax.Expression, operand: syntax.Expression, literals: list[Value], *, negated: bool
) -> _Truth:
    """Return the trees of IN; the type of the operand decides, and casts may fail on the way (3.7)."""
    kind = static_type(operand)
    if isinstance(operand, syntax.Attribute):
        return _in_attribute(operand.name, literals, negated=negated)
    if kind is None or isinstance(operand, syntax.Literal):
        return _computed_truth(node)
    values, complete = reached(literals, kind)
    path = (CesqlExpression(operand),)
    passes = Condition(path, "in", tuple(values)) if values else NOTHING
    if complete:
        return _test_truth(passes, Condition(path, "exists"), path, negated)
    if negated:
        return _Truth(NOTHING, lambda: passes, lambda: passes)
    return _Truth(passes, lambda: NOTHING, lambda: passes)


def _in_attribute(name: str, literals: list[Value], *, negated: bool) -> _Truth:
    if name in DATA_MEMBERS:
        return _UNDEFINED
    found = one_of(name, literals)
    # Not found, without a problem: only for types to which every literal can be cast.
    path = (CesqlExpression(syntax.Attribute(name)),)
    kinds = [_JSON_TYPES[kind] for kind in (str, int, bool) if reached(literals, kind)[1]]
    if len(kinds) == len(_JSON_TYPES):
        typed: Node = Condition(path, "exists")
    else:
        typed = any_of(Condition(path, "type", kind) for kind in kinds)

    def missed() -> Node:
        return all_of([typed, negate(found)])

    if negated:
        return _Truth(missed(), lambda: found, lambda: any_of([found, typed]))
    return _Truth(found, missed, lambda: any_of([found, typed]))


_JSON_TYPES: dict[type[Value], str] = {str: "string", int: "number", bool: "boolean"}


# Logic.


def _logic(
    node: syntax.Expression,
    first: syntax.Expression,
    rest: tuple[tuple[str, syntax.Expression], ...],
) -> _Truth:
    """Return the trees of a logical chain; runs of one operator become one node, left to right."""
    if len(rest) >= CONDITIONS_MAX:
        return _computed_truth(node)
    result = _truth(first)
    for op, run in groupby(rest, key=lambda step: step[0]):
        operands = [result, *(_truth(x) for _, x in run)]
        if op == "AND":
            result = _and(operands)
        elif len(operands) > (OPERANDS_MAX if op == "OR" else OPERANDS_MAX // 4) and (
            op == "XOR" or not _have_common_subject(operands)
        ):
            return _computed_truth(node)
        else:
            result = _or(operands) if op == "OR" else reduce(_xor, operands)
    return result


def _and(operands: list[_Truth]) -> _Truth:
    true = all_of(x.true for x in operands)
    if _have_common_subject(operands):
        there = operands[0].defined
        return _Truth(true, lambda: all_of([there(), negate(true)]), there, operands[0].subject)

    def ends(last: Node) -> Node:
        # False at the first operand that is false, if all before it were true.
        return reduce(
            lambda later, x: any_of([x.false(), all_of([x.true, later])]), operands[-2::-1], last
        )

    return _Truth(true, lambda: ends(operands[-1].false()), lambda: ends(operands[-1].defined()))


def _or(operands: list[_Truth]) -> _Truth:
    if _have_common_subject(operands):
        true = any_of(x.true for x in operands)
        there = operands[0].defined
        return _Truth(true, lambda: all_of([there(), negate(true)]), there, operands[0].subject)

    def ends(last: Node, otherwise: Callable[[_Truth], Node]) -> Node:
        return reduce(
            lambda later, x: any_of([x.true, all_of([otherwise(x), later])]), operands[-2::-1], last
        )

    return _Truth(
        ends(operands[-1].true, lambda x: x.defined()),
        lambda: all_of(x.false() for x in operands),
        lambda: ends(operands[-1].defined(), lambda x: x.false()),
    )


def _xor(a: _Truth, b: _Truth) -> _Truth:
    def same() -> Node:
        return any_of([all_of([a.true, b.true]), all_of([a.false(), b.false()])])

    return _Truth(
        any_of([all_of([a.true, b.false()]), all_of([a.false(), b.true])]),
        same,
        lambda: all_of([a.defined(), b.defined()]),
    )


def _have_common_subject(operands: list[_Truth]) -> bool:
    """Return whether all operands are defined for the same events."""
    subjects = {x.subject for x in operands}
    return len(subjects) == 1 and None not in subjects
