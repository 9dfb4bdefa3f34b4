"""Arithmetic solved for its operand: the ranges hold exactly the values for which the comparison is true."""

from __future__ import annotations

import pytest

from virta.filters import parse
from virta.filters.cesql import evaluate, syntax
from virta.filters.cesql.integers import integer_tests
from virta.filters.cesql.parser import parse_expression
from virta.filters.cesql.values import INTEGER_MAX, INTEGER_MIN

EDGES = [
    INTEGER_MIN,
    INTEGER_MIN + 1,
    INTEGER_MIN + 2,
    INTEGER_MAX - 2,
    INTEGER_MAX - 1,
    INTEGER_MAX,
]
VALUES = [
    *range(-40, 41),
    *EDGES,
    1000,
    -1000,
    INTEGER_MAX // 2,
    INTEGER_MIN // 2,
    INTEGER_MAX // 3,
]

ARITHMETIC = [
    "n + 3",
    "3 + n",
    "n - 3",
    "3 - n",
    "n * 2",
    "n * -3",
    "-2 * n",
    "n * 0",
    "n / 3",
    "n / -3",
    "n / 1",
    "n / -1",
    "n / 0",
    "-n",
    "-(-n)",
    "ABS(n)",
    "ABS(n - 5)",
    "ABS(n) * 2 - 1",
    "n * 2 + 1",
    "(n + 1) * 3",
    "(n - 7) / 2",
    "10 - n * 2",
    "n + 2147483647",
    "n - 2147483647",
    "n * 65536",
    "n % 3",
    "n + n",
    "LENGTH(STRING(n)) + 1",
]
COMPARISONS = ["= 0", "= 7", "!= 1", "< 2", "<= 2", "> -3", ">= 4", "= -2147483648", "< 2147483647"]


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_solutions_are_exact(arithmetic, comparison):
    """For every value, edges of 32 bits included, the filter holds as the expression does; so does its negation."""
    expression = f"{arithmetic} {comparison}"
    plain, negated = parse(expression, "cesql"), parse(f"NOT ({expression})", "cesql")
    for value in VALUES:
        event = {"n": value}
        answer, problem = evaluate(expression, event)

        assert plain.matches(event) is (answer is True and problem is None), value
        assert negated.matches(event) is (answer is False and problem is None), value


@pytest.mark.parametrize(
    ("expression", "operand", "wanted", "solved"),
    [
        ("n", "n", (1, 5), [(1, 5)]),
        ("n + 3", "n", (1, 5), [(-2, 2)]),
        ("3 - n", "n", (1, 5), [(-2, 2)]),
        ("n * 2", "n", (1, 5), [(1, 2)]),
        ("n * 2", "n", (3, 3), []),
        ("n * -2", "n", (1, 5), [(-2, -1)]),
        ("n * 0", "n", (1, 5), []),
        ("n * 0", "n", (0, 5), [(INTEGER_MIN, INTEGER_MAX)]),
        ("n / 2", "n", (1, 2), [(2, 5)]),
        ("n / 2", "n", (0, 0), [(-1, 1)]),
        ("n / 2", "n", (-2, -1), [(-5, -2)]),
        ("n / 0", "n", (0, 0), []),
        ("ABS(n)", "n", (2, 3), [(2, 3), (-3, -2)]),
        ("ABS(n)", "n", (-2, 3), [(-3, 3)]),
        ("-n", "n", (INTEGER_MIN, 0), [(0, INTEGER_MAX)]),
        ("n + 1", "n", (INTEGER_MIN, INTEGER_MAX), [(INTEGER_MIN, INTEGER_MAX - 1)]),
        ("n % 3", "n % 3", (0, 0), [(0, 0)]),
        ("n + m", "n + m", (0, 0), [(0, 0)]),
        ("LENGTH(s) * 2", "LENGTH(s)", (4, 4), [(2, 2)]),
        ("TRUE + n", "TRUE + n", (1, 1), [(1, 1)]),
    ],
)
def test_ranges(expression, operand, wanted, solved):
    """The innermost operand and its ranges, within 32 bits; what cannot be solved stays as it is."""
    base, solve = integer_tests(parse_expression(expression))

    assert syntax.unparse(base) == operand
    assert solve([wanted]) == solved


def test_filters_that_differ_in_constants_share_a_path():
    """However it is written, a comparison of n is a condition on the Integer of n; overflow is excluded."""
    texts = ["n > 5", "INT(n) >= 6", "-n < -5", "5 < n"]

    canonical = {parse(text, "cesql").canonical() for text in texts}

    assert canonical == {'{"range":[[{"cesql":"INT(n)"}],{"lower":6}]}'}
    assert parse("n + 1 > 6", "cesql").canonical() == (
        '{"range":[[{"cesql":"INT(n)"}],{"lower":6,"upper":2147483646}]}'
    )
