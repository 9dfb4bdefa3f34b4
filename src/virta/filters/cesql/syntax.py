"""
The syntax tree of a CESQL expression, and its canonical text.

Operators of one precedence between the same parentheses are one `Chain`, evaluated left to right, so a
long list of ANDs is wide and not deep. `depth` bounds every walk: no node is deeper than DEPTH_MAX.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from virta.errors import FilterError
from virta.filters.cesql.lexer import quote
from virta.filters.cesql.values import Value, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable

# Levels of an expression; with two Python frames each, far from the interpreter's own limit.
DEPTH_MAX = 100


@dataclass(frozen=True, slots=True)
class Literal:
    value: Value
    kind: type[Value] = field(init=False)  # True == 1 in Python; the kind keeps them apart
    depth: int = field(default=1, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.value.__class__)


@dataclass(frozen=True, slots=True)
class Attribute:
    name: str
    depth: int = field(default=1, init=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Exists:
    name: str
    depth: int = field(default=1, init=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Unary:
    """`op` is NOT or -."""

    op: str
    operand: Expression
    depth: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _set_depth(self, (self.operand,))


@dataclass(frozen=True, slots=True)
class Chain:
    """`first op1 x1 op2 x2 …`, all operators of one precedence."""

    first: Expression
    rest: tuple[tuple[str, Expression], ...]
    depth: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _set_depth(self, (self.first, *(operand for _, operand in self.rest)))


@dataclass(frozen=True, slots=True)
class Like:
    operand: Expression
    pattern: str
    negated: bool = False
    depth: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _set_depth(self, (self.operand,))


@dataclass(frozen=True, slots=True)
class In:
    operand: Expression
    items: tuple[Expression, ...]
    negated: bool = False
    depth: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _set_depth(self, (self.operand, *self.items))


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: tuple[Expression, ...]
    depth: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.arguments)


Expression: TypeAlias = Literal | Attribute | Exists | Unary | Chain | Like | In | Call


def children(node: Expression) -> tuple[Expression, ...]:
    """Return the direct operands of an expression."""
    match node:
        case Unary(_, operand) | Like(operand, _, _):
            return (operand,)
        case Chain(first, rest):
            return (first, *(operand for _, operand in rest))
        case In(operand, items, _):
            return (operand, *items)
        case Call(_, arguments):
            return arguments
        case _:
            return ()


def attributes(node: Expression) -> set[str]:
    """Return the names of all attributes in an expression."""
    if isinstance(node, Attribute | Exists):
        return {node.name}
    return set().union(*map(attributes, children(node)))


def unparse(node: Expression) -> str:
    """Return the expression as text: upper-case keywords, parentheses around every compound operand."""
    match node:
        case Literal(value):
            return _unparse_literal(value)
        case Attribute(name):
            return name
        case Exists(name):
            return f"EXISTS {name}"
        case Unary(op, operand):
            return f"{op} {_operand(operand)}"
        case Chain(first, rest):
            return _operand(first) + "".join(f" {op} {_operand(x)}" for op, x in rest)
        case Like(operand, pattern, negated):
            return f"{_operand(operand)} {'NOT ' * negated}LIKE {_unparse_literal(pattern)}"
        case In(operand, items, negated):
            return f"{_operand(operand)} {'NOT ' * negated}IN ({_unparse_list(items)})"
        case Call(name, arguments):
            return f"{name}({_unparse_list(arguments)})"


def _operand(node: Expression) -> str:
    text = unparse(node)
    return text if isinstance(node, Literal | Attribute | Call) else f"({text})"


def _unparse_list(nodes: Iterable[Expression]) -> str:
    return ", ".join(map(unparse, nodes))


def _unparse_literal(value: Value) -> str:
    if not isinstance(value, str):
        return text_of(value).upper()
    # A text that no literal can express (it ends in a lone backslash) comes from another dialect: it must be
    # unique, not parseable.
    return quote(value) or f"JSON {json.dumps(value)}"


def _set_depth(node: Expression, children: tuple[Expression, ...]) -> None:
    depth = 1 + max((child.depth for child in children), default=0)
    if depth > DEPTH_MAX:
        raise too_deep()
    object.__setattr__(node, "depth", depth)


def too_deep() -> FilterError:
    return FilterError(f"expression nests deeper than {DEPTH_MAX} levels", code="too_complex")
