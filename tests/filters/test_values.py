"""Values of conditions: one spelling for each meaning, and clear errors for what is none."""

from __future__ import annotations

import math
import pickle

import pytest

from virta.errors import FilterError
from virta.filters.limits import (
    FIELD_CHARS_MAX,
    IN_VALUES_MAX,
    PATTERN_COMPOUNDS_MAX,
    PATTERN_DEPTH_MAX,
    PATTERN_VALUES_MAX,
    POLYGON_POINTS_MAX,
    REGEXP_CHARS_MAX,
)
from virta.filters.text import LikePattern, like, literal, segments
from virta.filters.values import (
    Computed,
    Flat,
    JsonPattern,
    LikeText,
    Polygon,
    Regexp,
    ValueRange,
    field_path,
    number,
    scalar,
    scalar_key,
    scalar_set,
    type_name,
)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (1.0, 1),
        (-0.0, 0),
        (2**53 + 1, 2**53),
        (1.5, 1.5),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (1e300, 1e300),
    ],
)
def test_numbers(given, kept):
    """Numbers are the doubles they are; whole ones are integers."""
    assert number(given) == kept
    assert type(number(given)) is type(kept)
    assert scalar(given) == kept


@pytest.mark.parametrize("bad", [math.nan, [], {}, b"x", object(), 1j])
def test_what_is_no_scalar(bad):
    """Only null, booleans, numbers and strings are scalars, and NaN is none."""
    with pytest.raises(FilterError):
        scalar(bad)


def test_types():
    """JSON types of Python values; what has none is an error."""
    values = [None, True, 1, 1.5, "a", [], (), {}]

    assert [type_name(value) for value in values] == [
        "null",
        "boolean",
        "number",
        "number",
        "string",
        "array",
        "array",
        "object",
    ]
    with pytest.raises(FilterError, match="is not a JSON value"):
        type_name({1, 2})


def test_lists_of_scalars():
    """Sorted, without repeats, bounded, at least one."""
    assert scalar_set(["b", "a", "b"]) == ("a", "b")
    assert scalar_set([True, 1, 1.0, None, "1"]) == (True, None, 1, "1")
    assert scalar_key(None) < scalar_key(1) < scalar_key("1")
    for bad in ([], "abc", 5, range(IN_VALUES_MAX + 1)):
        with pytest.raises(FilterError):
            scalar_set(bad)


def test_ranges():
    """Bounds have one type, and an absent bound is neither open nor closed."""
    assert ValueRange(1, None, upper_open=True) == ValueRange(1.0)
    assert ValueRange(False, True) != ValueRange(0, 1)
    assert ValueRange("a", "b").kind == "string"
    assert hash(ValueRange(1, 2)) == hash(ValueRange(1.0, 2.0))
    for bad in ((None, None), (1, "a"), ([], None), (True, 1)):
        with pytest.raises(FilterError):
            ValueRange(*bad)


def test_regexps():
    """Flags are sorted and known; long patterns are refused before they are parsed."""
    assert Regexp("a", "mi") == Regexp("a", "im")
    with pytest.raises(FilterError, match="only i, m and s"):
        Regexp("a", "g")
    with pytest.raises(FilterError, match="at most"):
        Regexp("a" * (REGEXP_CHARS_MAX + 1))


def test_patterns():
    """Patterns compare by their canonical JSON and are bounded in values, depth and compounds."""
    assert JsonPattern.of({"b": 1.0, "a": [2]}) == JsonPattern.of({"a": [2], "b": 1})
    assert JsonPattern.of({"a": 1}).value == {"a": 1}
    deep: object = 1
    for _ in range(PATTERN_DEPTH_MAX + 1):
        deep = [deep]
    for bad in (
        [0] * (PATTERN_VALUES_MAX + 1),
        deep,
        [[]] * (PATTERN_COMPOUNDS_MAX + 1),
        [math.nan],
    ):
        with pytest.raises(FilterError):
            JsonPattern.of(bad)


def test_names_and_shapes():
    """Names of fields and polygons are bounded; paths of fields are shared."""
    assert field_path("a.b") is field_path("a.b")
    for bad in (5, "a" * (FIELD_CHARS_MAX + 1), "." * 200):
        with pytest.raises(FilterError):
            Flat(bad)
    with pytest.raises(FilterError):
        Polygon(((0.0, 0.0),) * (POLYGON_POINTS_MAX + 1))


def test_computed_is_for_dialects():
    """The base of computed steps computes nothing itself."""
    with pytest.raises(NotImplementedError):
        Computed().compute({})
    with pytest.raises(NotImplementedError):
        Computed().canonical_json()


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("", [""], ["a"]),
        ("%", ["", "abc"], []),
        ("a%", ["a", "ab"], ["ba", ""]),
        ("%a", ["a", "ba"], ["ab"]),
        ("%a%", ["a", "bab"], ["b"]),
        ("a_c", ["abc", "aéc"], ["ac", "abbc"]),
        ("_%_", ["ab", "abc"], ["a", ""]),
        ("a%b%c", ["abc", "a1b2c"], ["acb", "ab"]),
        ("%ab%ab%", ["abab", "xabyabz"], ["ab", "aab"]),
        ("%_b_%", ["abc", "xabc"], ["bc", "ab"]),
        (r"\%\_", ["%_"], ["ab", r"\%\_"]),
        (r"a\b", [r"a\b"], ["ab"]),
        ("ab%bc", ["abbc", "ab-bc"], ["abc"]),
    ],
)
def test_like(pattern, good, bad):
    """`%` is any text, `_` one character; the ends are anchored and do not overlap."""
    assert all(LikePattern(pattern).matches(text) for text in good)
    assert not any(like(pattern).matches(text) for text in bad)
    assert like(pattern) is like(pattern)
    assert pickle.loads(pickle.dumps(LikeText(pattern))) == LikeText(pattern)


def test_segments():
    """A pattern is cut at its wildcards; a segment with `_` has no text."""
    assert segments(r"a\%_%b") == [("a", "%", None), ("b",)]
    assert literal(("a", "%")) == "a%"
    assert literal(("a", None)) is None
