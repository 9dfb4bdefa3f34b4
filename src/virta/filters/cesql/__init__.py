"""
CloudEvents SQL 1.0.0: expressions over the context attributes of an event.

`parse` gives a filter, which an event passes when the expression is the Boolean true and nothing went
wrong on the way (section 1.2); `evaluate` gives what the language itself defines, a value of any type
and the problem met, if any. Nothing here sees an event's data.
"""

from __future__ import annotations

from typing import Any

from virta.errors import FilterError
from virta.filters.cesql.evaluation import compiled
from virta.filters.cesql.parser import parse_expression
from virta.filters.cesql.trees import tree_of
from virta.filters.cesql.values import PARSE, Problem, Value
from virta.filters.filter import Filter

__all__ = ["Problem", "Value", "evaluate", "parse"]


def parse(source: str) -> Filter:
    """The filter an expression says; FilterError with the place where it is not one."""
    return Filter(tree_of(parse_expression(source)), dialect="cesql")


def evaluate(expression: str, event: Any) -> tuple[Value, Problem | None]:
    """
    The value of an expression for an event (its JSON object), and the first problem met or None.

    An expression that cannot be parsed is worth false, with a problem of kind `parse`.
    """
    try:
        tree = parse_expression(expression)
    except FilterError as error:
        return False, Problem(PARSE, error.message)
    return compiled(tree)(event)
