"""
Comparisons of arithmetic with a literal, solved for the attribute: `n * 2 + 1 > 9` is `n > 4`.

Filters that differ only in their constants then share one path, the Integer of the attribute, and one index of
ranges. Exact in 32 bits: a sum that overflows is a problem in CESQL, so values for which it would are in no range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from virta.filters.cesql import syntax
from virta.filters.cesql.values import INTEGER_MAX, INTEGER_MIN

Range: TypeAlias = tuple[int, int]  # both ends included; empty if low > high
Solver: TypeAlias = Callable[[list[Range]], list[Range]]


def integer_tests(node: syntax.Expression) -> tuple[syntax.Expression, Solver]:
    """
    Return the innermost operand of an Integer expression, and a function from ranges of results to ranges of it.

    The operand itself, as an Integer, has the value of the expression if nothing can be solved.
    """
    steps: list[Callable[[int, int], list[Range]]] = []
    while True:
        peeled = _peel(node)
        if peeled is None:
            break
        node, step = peeled
        steps.append(step)

    def solve(ranges: list[Range]) -> list[Range]:
        for step in steps:
            ranges = [
                (max(low, INTEGER_MIN), min(high, INTEGER_MAX))
                for part in ranges
                if part[0] <= part[1]
                for low, high in step(*part)
            ]
        return [part for part in ranges if part[0] <= part[1]]

    return node, solve


def _peel(
    node: syntax.Expression,
) -> tuple[syntax.Expression, Callable[[int, int], list[Range]]] | None:
    """Return the operand of the outermost operator, and the solution of the operator for it."""
    match node:
        case syntax.Unary("-", operand):
            return operand, lambda low, high: [(-high, -low)]
        case syntax.Call("ABS", (operand,)):
            return operand, _absolute
        case syntax.Chain(syntax.Literal(int(number)), ((op, operand),)) if op in ("+", "-", "*"):
            return None if number.__class__ is bool else (operand, _from_left(op, number))
        case syntax.Chain(first, (*rest, (op, syntax.Literal(int(number))))) if op in _SOLVED:
            if number.__class__ is bool:
                return None
            operand = syntax.Chain(first, tuple(rest)) if rest else first
            return operand, lambda low, high: _SOLVED[op](number, low, high)
    return None


def _absolute(low: int, high: int) -> list[Range]:
    if low <= 0:
        return [(-high, high)]
    return [(low, high), (-high, -low)]


def _from_left(op: str, number: int) -> Callable[[int, int], list[Range]]:
    if op == "-":
        return lambda low, high: [(number - high, number - low)]
    return lambda low, high: _SOLVED[op](number, low, high)


def _times(number: int, low: int, high: int) -> list[Range]:
    if number == 0:
        return [(INTEGER_MIN, INTEGER_MAX)] if low <= 0 <= high else []
    if number < 0:
        number, low, high = -number, -high, -low
    return [(-(-low // number), high // number)]


def _divided(number: int, low: int, high: int) -> list[Range]:
    """Solve `x / number`, which rounds towards zero."""
    if number == 0:
        return []
    if number < 0:
        number, low, high = -number, -high, -low
    more = number - 1
    return [(low * number - (more if low <= 0 else 0), high * number + (more if high >= 0 else 0))]


_SOLVED: dict[str, Callable[[int, int, int], list[Range]]] = {
    "+": lambda number, low, high: [(low - number, high - number)],
    "-": lambda number, low, high: [(low + number, high + number)],
    "*": _times,
    "/": _divided,
}
