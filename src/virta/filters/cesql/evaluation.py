"""
Compile a syntax tree to a function of the event.

Two rules define the value of a failing expression, both taken from the conformance suite:

1. An operand that failed makes its operator fail: the zero value of the operator's return type
   (`1 != 1 / 0` is false), with the operand's problem. The first problem, left to right, is reported.
2. A cast that failed gives the zero value of the target type, and the operator goes on with it
   (`NOT 10` is `NOT false`), with the cast's problem.

NOT takes no Integer, as the suite demands, though the cast table of section 3.7 would allow it; every
other implicit cast follows that table. Sums that leave 32 bits are a math problem worth 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from virta.filters.cesql import functions, syntax
from virta.filters.cesql.values import (
    CAST,
    INTEGER_MAX,
    INTEGER_MIN,
    MATH,
    MISSING_ATTRIBUTE,
    MISSING_FUNCTION,
    ZERO,
    CesqlProblem,
    Result,
    Value,
    attribute,
    cast,
    exists,
    text_of,
)
from virta.filters.text import LikePattern, like

Evaluator: TypeAlias = Callable[[Any], Result]


def compiled(node: syntax.Expression) -> Evaluator:
    """Return the function that computes an expression's value and problem for an event."""
    match node:
        case syntax.Literal(value):
            return lambda _: (value, None)
        case syntax.Attribute(name):
            return _attribute(name)
        case syntax.Exists(name):
            return lambda event: (exists(event, name), None)
        case syntax.Unary("NOT", operand):
            return _not(compiled(operand))
        case syntax.Unary(_, operand):
            return _negative(compiled(operand))
        case syntax.Chain(first, rest):
            return _chain(compiled(first), [(op, compiled(x)) for op, x in rest])
        case syntax.Like(operand, pattern, negated):
            return _like(compiled(operand), like(pattern), negated=negated)
        case syntax.In(operand, items, negated):
            return _evaluate_in(compiled(operand), [compiled(x) for x in items], negated=negated)
        case syntax.Call(name, arguments):
            return _call(name, [compiled(x) for x in arguments])


def _attribute(name: str) -> Evaluator:
    missing = (False, CesqlProblem(MISSING_ATTRIBUTE, f"the event has no attribute {name!r}"))

    def evaluate(event: Any) -> Result:
        value = attribute(event, name)
        return missing if value is None else (value, None)

    return evaluate


# Operators.


def _not(operand: Evaluator) -> Evaluator:
    def evaluate(event: Any) -> Result:
        value, problem = operand(event)
        if problem is not None:
            return False, problem
        if value.__class__ is int:
            return True, CesqlProblem(CAST, f"NOT takes a Boolean, got the Integer {value}")
        value, problem = cast(value, bool)
        return not value, problem

    return evaluate


def _negative(operand: Evaluator) -> Evaluator:
    def evaluate(event: Any) -> Result:
        value, problem = operand(event)
        if problem is not None:
            return 0, problem
        value, problem = cast(value, int)
        return (0, problem) if problem is not None else _in_range(-int(value), "-")

    return evaluate


def _chain(first: Evaluator, rest: list[tuple[str, Evaluator]]) -> Evaluator:
    steps = [(OPERATORS[op], operand) for op, operand in rest]

    def evaluate(event: Any) -> Result:
        result = first(event)
        for operator, operand in steps:
            result = operator(result, operand, event)
        return result

    return evaluate


Operator: TypeAlias = Callable[[Result, Evaluator, Any], Result]


def _logic(name: str) -> Operator:
    # The left value for which the right operand is not evaluated (3.6).
    decisive: bool | None = {"AND": False, "OR": True, "XOR": None}[name]

    def operate(left: Result, operand: Evaluator, event: Any) -> Result:
        x, problem = left
        if problem is not None:
            return False, problem
        x, problem = cast(x, bool)
        if x is decisive and problem is None:
            return x, None
        y, failed = operand(event)
        if failed is not None:
            return False, problem or failed
        y, failed = cast(y, bool)
        value = x is not y if name == "XOR" else (x and y) if name == "AND" else (x or y)
        return value, problem or failed

    return operate


def _equality(*, negated: bool) -> Operator:
    def operate(left: Result, operand: Evaluator, event: Any) -> Result:
        x, problem = left
        y, failed = operand(event)
        if problem is not None or failed is not None:
            return False, problem or failed
        x, problem = cast(x, y.__class__)  # the right operand's type decides (3.7)
        return (x == y) is not negated, problem

    return operate


def _integers(zero: Value, compute: Callable[[int, int], Result]) -> Operator:
    """Return an operator on two Integers whose value is `zero` when an operand failed."""

    def operate(left: Result, operand: Evaluator, event: Any) -> Result:
        x, problem = left
        y, failed = operand(event)
        if problem is not None or failed is not None:
            return zero, problem or failed
        x, problem = cast(x, int)
        y, failed = cast(y, int)
        value, wrong = compute(int(x), int(y))
        return value, problem or failed or wrong

    return operate


def _in_range(value: int, operator: str) -> Result:
    if INTEGER_MIN <= value <= INTEGER_MAX:
        return value, None
    return 0, CesqlProblem(MATH, f"{operator} gives {value}, out of the range of Integer")


def _divided(x: int, y: int) -> Result:
    if y == 0:
        return 0, CesqlProblem(MATH, f"{x} / 0: division by zero")
    quotient = abs(x) // abs(y)  # rounded towards zero, where Python rounds down
    return _in_range(quotient if (x < 0) == (y < 0) else -quotient, "/")


def _remainder(x: int, y: int) -> Result:
    if y == 0:
        return 0, CesqlProblem(MATH, f"{x} % 0: division by zero")
    remainder = abs(x) % abs(y)  # has the sign of the dividend
    return (remainder if x >= 0 else -remainder), None


OPERATORS: dict[str, Operator] = {
    "AND": _logic("AND"),
    "OR": _logic("OR"),
    "XOR": _logic("XOR"),
    "=": _equality(negated=False),
    "!=": _equality(negated=True),
    "<": _integers(False, lambda x, y: (x < y, None)),
    "<=": _integers(False, lambda x, y: (x <= y, None)),
    ">": _integers(False, lambda x, y: (x > y, None)),
    ">=": _integers(False, lambda x, y: (x >= y, None)),
    "+": _integers(0, lambda x, y: _in_range(x + y, "+")),
    "-": _integers(0, lambda x, y: _in_range(x - y, "-")),
    "*": _integers(0, lambda x, y: _in_range(x * y, "*")),
    "/": _integers(0, _divided),
    "%": _integers(0, _remainder),
}


def _like(operand: Evaluator, pattern: LikePattern, *, negated: bool) -> Evaluator:
    def evaluate(event: Any) -> Result:
        value, problem = operand(event)
        if problem is not None:
            return False, problem
        return pattern.matches(text_of(value)) is not negated, None

    return evaluate


def _evaluate_in(operand: Evaluator, items: list[Evaluator], *, negated: bool) -> Evaluator:
    def evaluate(event: Any) -> Result:
        value, problem = operand(event)
        if problem is not None:
            return False, problem
        for item in items:
            element, problem = item(event)
            if problem is None:
                element, problem = cast(element, value.__class__)  # the left type decides (3.7)
            if problem is not None:
                return False, problem
            if element == value:
                return not negated, None
        return negated, None

    return evaluate


def _call(name: str, arguments: list[Evaluator]) -> Evaluator:
    function = functions.find(name, len(arguments))
    if function is None:
        known = ", ".join(functions.FUNCTIONS)
        unknown = CesqlProblem(
            MISSING_FUNCTION,
            f"no function {name} with {len(arguments)} arguments; there are {known}"
            if name not in functions.FUNCTIONS
            else f"{name} does not take {len(arguments)} arguments",
        )
        return lambda _: (False, unknown)
    zero = ZERO[function.returns]
    types = [function.parameter(i) for i in range(len(arguments))]

    def evaluate(event: Any) -> Result:
        values = []
        cast_failed: CesqlProblem | None = None
        for argument, target in zip(arguments, types, strict=True):
            value, problem = argument(event)
            if problem is not None:
                return zero, problem
            if target is not None:
                value, problem = cast(value, target)
                cast_failed = cast_failed or problem
            values.append(value)
        value, problem = function.run(*values)
        return value, cast_failed or problem

    return evaluate
