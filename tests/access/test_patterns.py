"""Patterns over names."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.access.patterns import PATTERN_CHARS_MAX, NamePattern
from virta.errors import AccessError


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("orders", ["orders"], ["order", "orders.eu", "Orders", ""]),
        ("orders.*", ["orders.eu", "orders."], ["orders", "orders.eu.de", "orders.a/b"]),
        ("orders.**", ["orders.eu", "orders.eu.de", "orders.a/b"], ["orders"]),
        ("*", ["orders", "a-b"], ["a.b", "a/b", "a:b"]),
        ("**", ["orders", "a.b/c:d", ""], []),
        ("*.eu", ["orders.eu"], ["a.b.eu", "orders.us"]),
        ("a*c", ["ac", "abc", "abbc"], ["a.c", "abd"]),
        ("a***c", ["a.b.c"], ["a.b.d"]),
        ("index/*", ["index/collection"], ["index/a/b"]),
        ("room:*", ["room:1"], ["room:1:2"]),
        ("a+b(c", ["a+b(c"], ["aab(c"]),
    ],
)
def test_patterns(pattern, matching, others):
    """One star stays within a part, two do not; everything else stands for itself."""
    compiled = NamePattern(pattern)

    assert [name for name in matching if not compiled.matches(name)] == []
    assert [name for name in others if compiled.matches(name)] == []


LETTERS = st.text("ab.:/*", max_size=12)


@given(LETTERS.filter(bool), st.text("ab.:/", max_size=12))
def test_patterns_are_what_a_regular_expression_says(pattern, name):
    """An independent implementation gives the same answers."""
    text = re.sub(r"\*\*+", "\0", pattern)
    regex = "".join(
        "(?s:.*)" if c == "\0" else "[^./:]*" if c == "*" else re.escape(c) for c in text
    )

    assert NamePattern(pattern).matches(name) == bool(re.fullmatch(regex, name))


def test_matching_is_not_exponential():
    """A pattern that makes backtracking matchers hang takes milliseconds."""
    began = time.process_time()

    assert not NamePattern("a*" * 128).matches("a" * 1024 + ".")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [("a:**", True), ("a**", True), ("**", True), ("a", False), ("a:*", False), ("a:*:*", False)],
)
def test_covering_what_is_below(pattern, covered):
    """A subscription to a stream gets all streams below it, so the pattern has to fit those, too."""
    assert NamePattern(pattern).covers("a") is covered


@pytest.mark.parametrize("text", ["", "x" * (PATTERN_CHARS_MAX + 1), "a\0b"])
def test_invalid_patterns(text):
    """The message says how long one may be."""
    with pytest.raises(AccessError, match="is not a pattern: it has 1 to 256 characters"):
        NamePattern(text)
