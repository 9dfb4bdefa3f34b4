"""
An expression inside a tree, evaluated as a whole where no tree of conditions is exactly equivalent.

Equal, hashed, named and pickled by its syntax tree; compiled on first use.
"""

from __future__ import annotations

from typing import Any

from virta.filters.cesql.evaluation import Evaluator, compiled
from virta.filters.cesql.syntax import Expression, unparse


class OpaqueExpression:
    """Holds when the expression is the Boolean true without a problem (CESQL 1.2)."""

    __slots__ = ("_evaluator", "expression")

    def __init__(self, expression: Expression) -> None:
        self.expression = expression
        self._evaluator: Evaluator | None = None

    def evaluate(self, obj: Any) -> bool:
        if self._evaluator is None:
            self._evaluator = compiled(self.expression)
        value, problem = self._evaluator(obj)
        return value is True and problem is None

    def canonical_json(self) -> Any:
        return {"cesql": unparse(self.expression)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueExpression) and self.expression == other.expression

    def __hash__(self) -> int:
        return hash(self.expression)

    def __reduce__(self) -> tuple[type[OpaqueExpression], tuple[Expression]]:
        return OpaqueExpression, (self.expression,)

    def __repr__(self) -> str:
        return f"OpaqueExpression({unparse(self.expression)!r})"
