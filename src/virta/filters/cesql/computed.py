"""
A CESQL expression as the path of a filter tree: the value that conditions are on.

`CesqlExpression(LENGTH(subject))` is missing where the expression has a problem, so that a condition on it holds only
if the expression has a value. Equal, hashed, named and pickled by its syntax tree; compiled on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virta.filters.cesql import functions, syntax
from virta.filters.cesql.evaluation import Evaluator, compiled
from virta.filters.values import Computed

if TYPE_CHECKING:
    from virta.filters.cesql.values import Value


class CesqlExpression(Computed):
    """The value of an expression for an event, missing where it has a problem."""

    __slots__ = ("_evaluator", "_hash", "expression", "names", "required")

    def __init__(self, expression: syntax.Expression) -> None:
        self.expression = expression
        self.names = tuple(sorted(syntax.attributes(expression)))
        self.required = tuple(sorted(read_always(expression)))
        self._evaluator: Evaluator | None = None
        self._hash = hash(expression)

    def compute(self, obj: Any) -> Value | None:
        if self._evaluator is None:
            self._evaluator = compiled(self.expression)
        value, problem = self._evaluator(obj)
        return value if problem is None else None

    def canonical_json(self) -> Any:
        return {"cesql": syntax.unparse(self.expression)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CesqlExpression) and self.expression == other.expression

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[CesqlExpression], tuple[syntax.Expression]]:
        return CesqlExpression, (self.expression,)

    def __str__(self) -> str:
        return syntax.unparse(self.expression)

    def __repr__(self) -> str:
        return f"CesqlExpression({syntax.unparse(self.expression)!r})"


def read_always(node: syntax.Expression) -> set[str]:
    """Return the attributes that are read whenever the expression is evaluated without a problem."""
    match node:
        case syntax.Attribute(name):
            return {name}
        case syntax.Unary(_, operand) | syntax.Like(operand, _, _):
            return read_always(operand)
        case syntax.In(operand, items, _):
            return read_always(operand) | read_always(items[0])
        case syntax.Chain(first, rest) if rest[0][0] in {"AND", "OR"}:
            return read_always(first)
        case syntax.Chain(first, ((_, second), *_)):
            return read_always(first) | read_always(second)
        case syntax.Call(name, arguments) if functions.find(name, len(arguments)):
            return set().union(*map(read_always, arguments))
        case _:
            return set()
