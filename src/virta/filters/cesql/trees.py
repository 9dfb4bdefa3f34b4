"""
A CESQL expression as a filter tree, so that the matcher can index it.

The tree is exact: for every event it holds if and only if the expression is true without a problem. An
expression has three outcomes (true, false, a problem), a tree two, so each part gets three trees: when it is true, when it is false, and when it is *defined* (either of them). With
short-circuit evaluation, `a OR b` is true when a is, or when a is defined and b is true: a missing
attribute in a fails the filter although b holds.

A part without an exactly equivalent tree becomes an opaque condition, next to the cheap conditions it implies.
Under AND the other operands keep their trees; under OR, XOR and NOT the whole part becomes opaque.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING

from virta.errors import FilterError
from virta.filters.cesql import functions, syntax
from virta.filters.cesql.attributes import (
    necessary,
    one_of,
    present,
    text_equals,
    text_prefix,
    text_suffix,
)
from virta.filters.cesql.like import literal, segments
from virta.filters.cesql.opaque import OpaqueExpression
from virta.filters.cesql.parser import LEVELS
from virta.filters.cesql.values import DATA_MEMBERS, REQUIRED_ATTRIBUTES, Value
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    Condition,
    Node,
    all_of,
    any_of,
    negate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Above these limits a part is evaluated as an expression: its tree would cost more.
CONDITIONS_MAX = 256
LEVELS_MAX = 40
OPERANDS_MAX = 16  # of one OR over different attributes, each of which nests the next


@dataclass(frozen=True, slots=True)
class _Truth:
    """When a part is true; `false` and `defined` only for parts that are exact without opaque ones."""

    true: Node
    exact: bool = False
    false: Callable[[], Node] = lambda: NOTHING
    defined: Callable[[], Node] = lambda: NOTHING
    attribute: str | None = None  # the one attribute whose presence `defined` tests


def tree_of(expression: syntax.Expression) -> Node:
    """Return the tree that holds when the expression is the Boolean true without a problem."""
    if isinstance(expression, syntax.Attribute):
        name = expression.name
        return NOTHING if name in DATA_MEMBERS else Condition((name,), "eq", True)
    if returns(expression) is not bool:
        return NOTHING  # "if the output value is not a Boolean the event MUST NOT pass" (1.2)
    return _truth(expression).true


def opaque(expression: syntax.Expression) -> Node:
    """Return the expression as one opaque condition, after the conditions it implies."""
    implied = necessary(_read_when_true(expression))
    return all_of([implied, Condition((), "opaque", OpaqueExpression(expression))])


def returns(node: syntax.Expression) -> type[Value] | None:
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
    """Return the trees of a part whose type is Boolean."""
    try:
        truth = _exact(node)
    except FilterError:  # the tree's own limits
        truth = None
    if truth is None or truth.true.count > CONDITIONS_MAX or truth.true.levels > LEVELS_MAX:
        return _Truth(opaque(node))
    return truth


def _exact(node: syntax.Expression) -> _Truth | None:
    match node:
        case syntax.Literal(bool(value)):
            return _constant(value)
        case syntax.Exists(name):
            tree = EVERYTHING if name in REQUIRED_ATTRIBUTES else present(name)
            return _Truth(tree, True, lambda: negate(tree), lambda: EVERYTHING)
        case syntax.Unary("NOT", operand) if returns(operand) is bool:
            return _not(_truth(operand))
        case syntax.Like(syntax.Attribute(name), pattern, negated):
            return _like(name, pattern, negated=negated)
        case syntax.In(syntax.Attribute(name), items, False) if all(
            isinstance(x, syntax.Literal) for x in items
        ):
            found = one_of(name, [x.value for x in items if isinstance(x, syntax.Literal)])
            return None if found is None else _Truth(found)
        case syntax.Chain(syntax.Attribute(name), (("=" | "!=" as op, syntax.Literal(str(text))),)):
            return _on_attribute(name, text_equals(name, text), negated=op == "!=")
        case syntax.Chain(first, rest) if LEVELS[rest[0][0]] == LEVELS["AND"]:
            return _logic(first, rest)
        case _:
            return None


def _constant(value: bool) -> _Truth:  # noqa: FBT001 - the literal itself
    true, false = (EVERYTHING, NOTHING) if value else (NOTHING, EVERYTHING)
    return _Truth(true, True, lambda: false, lambda: EVERYTHING)


def _on_attribute(name: str, passes: Node | None, *, negated: bool) -> _Truth | None:
    """Return the trees of a test on one attribute's text, which has a problem only if it is missing."""
    if passes is None:
        return None
    there = present(name)

    def fails() -> Node:
        return all_of([there, negate(passes)])

    if negated:
        return _Truth(fails(), True, lambda: passes, lambda: there, name)
    return _Truth(passes, True, fails, lambda: there, name)


def _like(name: str, pattern: str, *, negated: bool) -> _Truth | None:
    cut = segments(pattern)
    head, tail = literal(cut[0]), literal(cut[-1])
    if len(cut) == 1 and head is not None:
        return _on_attribute(name, text_equals(name, head), negated=negated)
    inner = any(cut[1:-1])
    if len(cut) > 1 and not inner and head is not None and tail == "":
        return _on_attribute(name, text_prefix(name, head), negated=negated)
    if len(cut) > 1 and not inner and head == "" and tail is not None:
        return _on_attribute(name, text_suffix(name, tail), negated=negated)
    if negated:
        return None
    ends = [text_prefix(name, head) if head else None, text_suffix(name, tail) if tail else None]
    whole = opaque(syntax.Like(syntax.Attribute(name), pattern))
    return _Truth(all_of([*(end for end in ends if end is not None), whole]))


def _not(operand: _Truth) -> _Truth | None:
    if not operand.exact:
        return None
    return _Truth(operand.false(), True, lambda: operand.true, operand.defined, operand.attribute)


def _logic(
    first: syntax.Expression, rest: tuple[tuple[str, syntax.Expression], ...]
) -> _Truth | None:
    """Return the trees of a logical chain; runs of one operator become one node, left to right."""
    if len(rest) >= CONDITIONS_MAX:
        return None
    if any(returns(x) is not bool for x in (first, *(x for _, x in rest))):
        return None  # a String or Integer operand is cast to Boolean, which may fail
    result: _Truth | None = _truth(first)
    for op, run in groupby(rest, key=lambda step: step[0]):
        assert result is not None
        operands = [result, *(_truth(x) for _, x in run)]
        result = _and(operands) if op == "AND" else _or(operands) if op == "OR" else _xor(operands)
        if result is None:
            return None
    return result


def _and(operands: list[_Truth]) -> _Truth:
    true = all_of(x.true for x in operands)
    if not all(x.exact for x in operands):
        return _Truth(true)
    attribute = _common(operands)

    def ends(last: Node) -> Node:
        # False at the first operand that is false, if all before it were true.
        return reduce(
            lambda later, x: any_of([x.false(), all_of([x.true, later])]), operands[-2::-1], last
        )

    if attribute is not None:
        there = operands[0].defined
        return _Truth(true, True, lambda: all_of([there(), negate(true)]), there, attribute)
    return _Truth(
        true,
        True,
        lambda: ends(operands[-1].false()),
        lambda: ends(operands[-1].defined()),
    )


def _or(operands: list[_Truth]) -> _Truth | None:
    if not all(x.exact for x in operands):
        return None
    attribute = _common(operands)
    if attribute is not None:
        true = any_of(x.true for x in operands)
        there = operands[0].defined
        return _Truth(true, True, lambda: all_of([there(), negate(true)]), there, attribute)
    if len(operands) > OPERANDS_MAX:
        return None

    def ends(last: Node, otherwise: Callable[[_Truth], Node]) -> Node:
        return reduce(
            lambda later, x: any_of([x.true, all_of([otherwise(x), later])]), operands[-2::-1], last
        )

    return _Truth(
        ends(operands[-1].true, lambda x: x.defined()),
        True,
        lambda: all_of(x.false() for x in operands),
        lambda: ends(operands[-1].defined(), lambda x: x.false()),
    )


def _xor(operands: list[_Truth]) -> _Truth | None:
    if not all(x.exact for x in operands):
        return None

    def both(a: _Truth, b: _Truth) -> _Truth:
        def same() -> Node:
            return any_of([all_of([a.true, b.true]), all_of([a.false(), b.false()])])

        return _Truth(
            any_of([all_of([a.true, b.false()]), all_of([a.false(), b.true])]),
            True,
            same,
            lambda: all_of([a.defined(), b.defined()]),
        )

    return reduce(both, operands) if len(operands) <= OPERANDS_MAX // 4 else None


def _common(operands: list[_Truth]) -> str | None:
    """Return the attribute that all operands test, None if there is more than one."""
    names = {x.attribute for x in operands}
    return names.pop() if len(names) == 1 else None


def _read_when_true(node: syntax.Expression) -> set[str]:
    """Return the attributes that are read whenever the expression is true, which must be set then."""
    match node:
        case syntax.Chain(first, rest) if all(op == "AND" for op, _ in rest):
            return set().union(_read_when_true(first), *(_read_when_true(x) for _, x in rest))
        case _:
            return _read(node)


def _read(node: syntax.Expression) -> set[str]:
    """Return the attributes that are read whenever the expression is evaluated without a problem."""
    match node:
        case syntax.Attribute(name):
            return {name}
        case syntax.Unary(_, operand) | syntax.Like(operand, _, _):
            return _read(operand)
        case syntax.In(operand, items, _):
            return _read(operand) | _read(items[0])
        case syntax.Chain(first, rest) if rest[0][0] in {"AND", "OR"}:
            return _read(first)
        case syntax.Chain(first, ((_, second), *_)):
            return _read(first) | _read(second)
        case syntax.Call(name, arguments) if functions.find(name, len(arguments)):
            return set().union(*map(_read, arguments))
        case _:
            return set()
