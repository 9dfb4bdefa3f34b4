"""CESQL's values: casts between its types, attributes of odd JSON types, and functions on them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from virta.filters.cesql.attributes import (
    one_of,
    present,
    reached,
    text_equals,
    text_prefix,
    text_suffix,
)
from virta.filters.cesql.functions import FUNCTIONS, STRING_CHARS_MAX, find
from virta.filters.cesql.values import (
    CAST,
    FUNCTION_EVALUATION,
    MATH,
    CesqlProblem,
    attribute,
    attribute_text,
    boolean_of,
    cast,
    exists,
    integer_of,
    shown,
    text_of,
)
from virta.filters.evaluate import holds
from virta.filters.tree import NOTHING


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-0", 0),
        ("+7", 7),
        ("007", 7),
        ("-0000000000000000005", -5),
        ("2147483647", 2147483647),
        ("-2147483648", -2147483648),
        ("2147483648", None),
        ("-2147483649", None),
        ("99999999999", None),
        ("", None),
        ("+", None),
        ("1.0", None),
        (" 1", None),
        ("1e3", None),
        ("\u0661", None),
    ],
)
def test_integers_from_text(text, number):
    """A text is an Integer if it is a decimal number of 32 bits, with zeros and a sign before it."""
    assert integer_of(text) == number
    value, problem = cast(text, int)
    assert value == (number or 0)
    assert (problem is None) is (number is not None)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("true", True),
        ("TRUE", True),
        ("fAlSe", False),
        ("1", None),
        ("", None),
        ("truee", None),
        ("\u017false", None),
    ],
)
def test_booleans_from_text(text, truth):
    """Only the two words, in any case, are Booleans."""
    assert boolean_of(text) is truth
    assert cast(text, bool)[0] is bool(truth)


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        (5, str, "5"),
        (True, str, "true"),
        (False, int, 0),
        (True, int, 1),
        (0, bool, False),
        (-3, bool, True),
        ("a", str, "a"),
        (7, int, 7),
    ],
)
def test_casts_that_never_fail(value, kind, result):
    """Integers and Booleans become each other and text."""
    found, problem = cast(value, kind)

    assert (found, found.__class__, problem) == (result, kind, None)


def test_problems_name_the_value():
    """A cast that fails says what it got, cut to a readable length."""
    _, problem = cast("x" * 100, int)

    assert problem.kind == CAST
    assert "a 32-bit integer" in str(problem)
    assert len(str(problem)) < 150
    assert shown(True) == "true"
    assert isinstance(problem, CesqlProblem)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, None),
        ("a", "a"),
        (True, True),
        (5, 5),
        (5.0, 5),
        (-0.0, 0),
        (1.5, "1.5"),
        (2**31, "2147483648"),
        (1e21, "1000000000000000000000"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (math.nan, "NaN"),
        (1 << 5000, "Infinity"),
        (-(1 << 5000), "-Infinity"),
        ([1, "é"], '[1,"é"]'),
        ({"a": None}, '{"a":null}'),
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00+00:00"),
        ({1, 2}, "[…]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_attributes_of_any_type(value, read):
    """Whatever an event holds is a String, Integer or Boolean; null is unset."""
    event = {"n": value, "data": value}

    assert attribute(event, "n") == read
    assert attribute(event, "n").__class__ is read.__class__
    assert attribute(event, "data") is None
    assert exists(event, "n") is (read is not None)
    assert exists(event, "type")
    if read is not None:
        assert attribute_text(event, "n") == text_of(read)


CALLS = [
    ("ABS", (-5,), 5, None),
    ("ABS", (-2147483648,), 2147483647, MATH),
    ("CONCAT", (), "", None),
    ("CONCAT", ("a", "b"), "ab", None),
    ("CONCAT_WS", ("-",), "", None),
    ("CONCAT_WS", ("-", "a", "b", "c"), "a-b-c", None),
    ("LEFT", ("zoé", 2), "zo", None),
    ("LEFT", ("zoé", 9), "zoé", None),
    ("LEFT", ("zoé", -1), "zoé", FUNCTION_EVALUATION),
    ("RIGHT", ("zoé", 2), "oé", None),
    ("RIGHT", ("zoé", 0), "", None),
    ("RIGHT", ("zoé", -1), "zoé", FUNCTION_EVALUATION),
    ("SUBSTRING", ("zoé", 2), "oé", None),
    ("SUBSTRING", ("zoé", -1), "é", None),
    ("SUBSTRING", ("zoé", 0), "", None),
    ("SUBSTRING", ("zoé", 4), "", FUNCTION_EVALUATION),
    ("SUBSTRING", ("zoé", 1, 2), "zo", None),
    ("SUBSTRING", ("zoé", 1, -2), "", FUNCTION_EVALUATION),
    ("TRIM", (" \u2003a\x1c ",), "a\x1c", None),
    ("LOWER", ("ÀΣ",), "àς", None),
    ("UPPER", ("ß",), "SS", None),
    ("LENGTH", ("zoé",), 3, None),
    ("IS_INT", ("x",), False, None),
    ("IS_BOOL", ("TRUE",), True, None),
]


@pytest.mark.parametrize(("name", "arguments", "result", "problem"), CALLS)
def test_functions(name, arguments, result, problem):
    """Each function returns a value of its type, with a problem where the specification names one."""
    function = find(name, len(arguments))

    value, found = function.run(*arguments)

    assert value == result
    assert value.__class__ is function.returns
    assert (found and found.kind) == problem


def test_calls_that_have_no_function():
    """The number of arguments must fit an overload."""
    assert find("NOPE", 1) is None
    assert find("LEFT", 1) is None
    assert find("SUBSTRING", 4) is None
    assert find("CONCAT_WS", 0) is None
    assert all(overloads for overloads in FUNCTIONS.values())


def test_built_texts_are_bounded():
    """A function that would build more than the limit has a problem and no text."""
    half = "x" * (STRING_CHARS_MAX // 2 + 1)

    for name, arguments in (
        ("CONCAT", (half, half)),
        ("CONCAT_WS", (half, "", "", "")),
        ("UPPER", ("ß" * len(half),)),
    ):
        value, problem = find(name, len(arguments)).run(*arguments)
        assert (value, problem.kind) == ("", FUNCTION_EVALUATION)


TEXTS = [
    "a",
    "",
    "5",
    "05",
    "true",
    "-",
    "1.5",
    "[",
    "x.v1",
    "Infinity",
    "alse",
    "e",
    "2024-01-01",
    "{}",
]
EVENTS = [
    {},
    {"n": None},
    *({"n": value} for value in [*TEXTS, 5, 15, True, False, 1.5, 2**40, [1], {}, "x5"]),
]


@pytest.mark.parametrize("text", TEXTS)
def test_tests_on_the_text_of_an_attribute(text):
    """Equality, prefix and suffix hold for exactly the values whose text passes."""
    for event in EVENTS:
        value = attribute(event, "n")
        string = None if value is None else text_of(value)
        assert holds(text_equals("n", text), event) is (string == text), event
        assert holds(text_prefix("n", text), event) is (
            string is not None and string.startswith(text)
        ), event
        assert holds(text_suffix("n", text), event) is (
            string is not None and string.endswith(text)
        ), event
    assert (
        text_equals("data", text)
        == text_prefix("data", text)
        == text_suffix("data", text)
        == NOTHING
    )


@pytest.mark.parametrize(
    "literals", [[5], ["5"], ["x", 5], [True], ["1.5"], ["true", 0], ["2024-01-01", "a"]]
)
def test_lists_of_literals(literals):
    """IN casts each literal to the type of the attribute, in order, and stops at the first that fails."""
    for event in EVENTS:
        value = attribute(event, "n")
        wanted = False
        for literal in literals if value is not None else ():
            element, problem = cast(literal, value.__class__)
            if problem is not None:
                break
            wanted = wanted or element == value
        assert holds(one_of("n", literals), event) is wanted, event
    assert one_of("data", literals) == NOTHING


def test_literals_reached():
    """The literals of a list as one type, up to the first that cannot be cast."""
    assert reached([1, "2", "x", 3], int) == ([1, 2], False)
    assert reached([1, "2"], str) == (["1", "2"], True)
    assert reached(["x"], bool) == ([], False)


def test_presence():
    """null is unset, and data is no attribute."""
    assert holds(present("n"), {"n": 0})
    assert not holds(present("n"), {"n": None})
    assert not holds(present("n"), {})
    assert present("data") == NOTHING
