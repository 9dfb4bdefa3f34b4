"""JavaScript's text of JSON values, and RE2 under it."""

from __future__ import annotations

import pytest

from virta.errors import FilterError
from virta.filters.text import compiled, number_text, search, text_of, well_formed
from virta.filters.tree import Regexp


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (-1.5, "-1.5"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1e20, "100000000000000000000"),
        (1e21, "1e+21"),
        (1.5e300, "1.5e+300"),
        (123456789012345680000, "123456789012345680000"),
        (1152921504606846976, "1152921504606847000"),
        (9007199254740993, "9007199254740992"),
        (0.000001, "0.000001"),
        (1e-7, "1e-7"),
        (-1.25e-9, "-1.25e-9"),
        (5e-324, "5e-324"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (10**400, "Infinity"),
        (-(10**400), "-Infinity"),
        (float("nan"), "NaN"),
    ],
)
def test_number_text(number, text):
    """Numbers as JavaScript writes them."""
    assert number_text(number) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("a", "a"),
        ([], ""),
        ([[]], ""),
        ([None], ""),
        ([1, [2, [3, []]], None, "x"], "1,2,3,,,x"),
        ([False, {}], "false,[object Object]"),
        ({"a": 1}, "[object Object]"),
    ],
)
def test_text_of(value, text):
    """Values as String() writes them."""
    assert text_of(value) == text


def test_bad_patterns_carry_the_engine_s_words():
    """RE2's message is part of the error."""
    with pytest.raises(FilterError, match="missing \\)") as caught:
        compiled(Regexp("(a"))
    assert caught.value.code == "regexp_invalid"


def test_lone_surrogates_are_replaced():
    """UTF-8 has no lone surrogates; the search sees U+FFFD."""
    assert well_formed("a\ud800b\U0001f600") == "a\ufffdb\U0001f600"
    assert search(Regexp("^.\ufffd.$"), "a\udc00b")
    assert search(Regexp("\ud800"), "\udfff")
