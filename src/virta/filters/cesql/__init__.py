"""
CloudEvents SQL 1.0.0: expressions over the context attributes of an event.

`parse` returns a filter, which an event passes when the expression is the Boolean true without a problem (section
1.2); `evaluate` returns what the language itself defines, a value of any type and the first problem, if any. An
event's data is never read.
"""

from __future__ import annotations

from typing import Any

from virta.errors import FilterError
from virta.filters.cesql.computed import CesqlExpression
from virta.filters.cesql.evaluation import compiled
from virta.filters.cesql.parser import parse_expression
from virta.filters.cesql.trees import tree_of
from virta.filters.cesql.values import PARSE, CesqlProblem, Value
from virta.filters.filter import Filter

__all__ = ["CesqlProblem", "Value", "computed_expression", "evaluate", "parse"]


def parse(source: str) -> Filter:
    """Return the filter of an expression; raise FilterError with the place of a syntax error."""
    return Filter(tree_of(parse_expression(source)), dialect="cesql")


def computed_expression(source: str) -> CesqlExpression:
    """Return the step of a path that computes an expression; raise FilterError with the place of a syntax error."""
    return CesqlExpression(parse_expression(source))


def evaluate(expression: str, event: Any) -> tuple[Value, CesqlProblem | None]:
    """
    Return the value of an expression for an event (its JSON object), and the first problem or None.

    An expression that cannot be parsed is false, with a problem of kind `parse`.
    """
    try:
        tree = parse_expression(expression)
    except FilterError as error:
        return False, CesqlProblem(PARSE, error.message)
    return compiled(tree)(event)
