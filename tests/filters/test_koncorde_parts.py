"""Parts of Koncorde's reader: JavaScript patterns in RE2's syntax, and places in error messages."""

from __future__ import annotations

import pytest

from virta.errors import FilterError
from virta.filters.koncorde.checks import Place
from virta.filters.koncorde.regexp import translate
from virta.filters.text import search
from virta.filters.values import Regexp


@pytest.mark.parametrize(
    ("pattern", "translated", "text"),
    [
        (r"\u00e9", r"\x{00e9}", "zoé"),
        (r"\u{e9}", r"\x{e9}", "zoé"),
        (r"\cJ", r"\x0a", "a\nb"),
        (r"(?<year>[0-9]+)", r"(?P<year>[0-9]+)", "in 2024"),
        (r"\d+\.", r"\d+\.", "3.5"),
        (r"\\u00e9", r"\\u00e9", r"\u00e9"),
        ("plain", "plain", "plainly"),
    ],
)
def test_patterns_are_translated(pattern, translated, text):
    """Escapes and named groups that RE2 spells differently are rewritten, everything else stays."""
    assert translate(pattern) == translated
    assert search(Regexp(translated), text)


@pytest.mark.parametrize("pattern", ["(?<=a)b", "(?<!a)b", "(?=a)"])
def test_look_around_stays_and_is_refused(pattern):
    """RE2 has no look-around: the pattern is left as it is, and RE2's refusal is the error."""
    assert translate(pattern) == pattern
    with pytest.raises(FilterError) as caught:
        search(Regexp(translate(pattern)), "ab")
    assert caught.value.code == "regexp_invalid"


def test_places():
    """A place names the keyword being read and the path to it; the root has neither."""
    root = Place()
    place = root.enter("and").enter("equals").at("name")

    assert (root.path, root.depth) == (None, 0)
    assert (place.path, place.keyword, place.depth) == ("and.equals.name", "equals", 3)
    with pytest.raises(FilterError) as caught:
        place.refuse("must be a text", code="bad")
    assert caught.value.message == '"and.equals.name": must be a text'
    assert (caught.value.code, caught.value.keyword) == ("bad", "equals")
    with pytest.raises(FilterError, match=r"^no filter$"):
        root.refuse("no filter")
