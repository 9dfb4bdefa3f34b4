"""Patterns that begin with literal text are found by that text, and never miss a value they occur in."""

from __future__ import annotations

import random

import pytest

from virta.errors import FilterError
from virta.filters import parse
from virta.match import Matcher, pattern_sets

TEXTS = [
    "", "ab", "abc", "abcd", "abcdd", "abce", "xabc", "abc.d", "abc|d", "abc]d", "ABCD", "abc\nabcd", "abc(d", "abc-d",
    "abcé", "abc\ud800d", "x", "d", "ab.d",
]  # fmt: skip
PATTERNS = [
    "^abcd?", "^abc+", "^abcd*", "^abcd{2}", "^abcd{0,1}e", "^abcd|^x", "^(abcd|x)", "^abc|d", "^abc[|]d", "^abc[]|]d",
    "^abc[^]|]d", "^abc[[:alpha:]|]", "^abc\\.d", "^abc\\.*", "^abc\\|d", "^\\Qabc|\\Ed", "^abc(d|e)d|", "^abcd$",
    "^abcd\\b", "^abcd\\d?", "^abcd[)]|x", "^[(]|x", "^abc\\(|x", "^\\x61bcd", "^abcé?", "^abcé", "^abc\ufffdd", "^abc.d",
    "^^abcd", "^*abcd", "^abc??d", "^(?i)abcd", "^abc(?i)D", "^abc\\-d", "^abc-d", "^abc\n", "^abcdabcdabcdabcdabcdabcd",
    "^ab\\.*d", "^ab.{0}",
]  # fmt: skip


def found(patterns, texts, flags, engine):
    """Return the pairs of pattern and text of which the index, and of which the evaluator, says that they match."""
    filters = {}
    for pattern in patterns:
        value = {"value": pattern, "flags": flags} if flags else pattern
        try:
            filter_ = parse({"regexp": {"t": value}}, "koncorde")
        except FilterError:  # not one for RE2
            continue
        filters[filter_.id] = filter_
    matcher = Matcher(engine=engine)
    matcher.add_many(filters.values())
    ours = {(id_, text) for text in texts for id_ in matcher.match({"t": text})}
    wanted = {(id_, text) for text in texts for id_, f in filters.items() if f.matches({"t": text})}
    for id_ in filters:
        assert matcher.remove(id_)
    assert matcher.stats().get("atoms", 0) == 0
    return ours, wanted


@pytest.mark.parametrize("flags", ["", "s", "i", "m"])
def test_no_value_is_missed(flags, engine):
    """Whatever follows the start: repetition, alternatives, classes, escapes, flags."""
    long = "abcd" * 6
    ours, wanted = found(PATTERNS, [*TEXTS, long, long[:-1]], flags, engine)

    assert ours == wanted != set()


@pytest.mark.parametrize("seed", range(5))
def test_random_patterns(seed, engine):
    """Of random texts over RE2's special characters, those that are patterns match as the evaluator says."""
    rng = random.Random(seed)
    pieces = [
        *"aabbc^$.*+?()[]{}|\\-:1,QEx\n",
        "\\.",
        "[^",
        "[[:",
        ":]",
        "(?:",
        "(a",
        "b)",
        "{0}",
        "\\d",
        "^abc",
    ]
    patterns = {
        rng.choice(["^", "^aab", "^aab"]) + "".join(rng.choices(pieces, k=rng.randint(1, 7)))
        for _ in range(1500)
    }
    texts = [
        rng.choice(["", "aab", "aab", "aa"])
        + "".join(rng.choices("abc.1|]-:\n", k=rng.randint(0, 4)))
        for _ in range(150)
    ]

    ours, wanted = found(sorted(patterns), texts, rng.choice(["", "", "s", "m"]), engine)

    assert ours == wanted
    assert len(wanted) > 100


def test_values_that_start_otherwise_are_not_searched(monkeypatch, native_engine):
    """A search is needed only for the values that have the start of some pattern."""
    searched = []

    def search(self, node, text, start, search=pattern_sets.PatternSets.search):
        searched.append(text)
        return search(self, node, text, start)

    monkeypatch.setattr(pattern_sets.PatternSets, "search", search)
    matcher = Matcher(engine=native_engine)
    sources = [{"regexp": {"t": f"^user-{i}-[0-9]+(a|b)$"}} for i in range(300)]
    ids = matcher.add_many(sources, dialect="koncorde")

    assert matcher.match({"t": "order-7-1a"}) == []
    assert searched == []
    assert matcher.match({"t": "user-7-1a"}) == [ids[7]]
    assert searched == ["user-7-1a"]


def test_an_alternative_at_the_top_is_searched_everywhere(engine):
    """A pattern that may begin differently is not found by its first letters."""
    matcher = Matcher(engine=engine)
    id_ = matcher.add({"regexp": {"t": "^abc[0-9]|x"}}, dialect="koncorde")

    assert matcher.match({"t": "zzx"}) == [id_]


def test_sets_stay_few_while_the_background_is_behind(monkeypatch):
    """`add` itself merges the smallest sets, so a search has few of them to run."""
    monkeypatch.setattr(pattern_sets.BUILDER, "submit", lambda _: None)
    patterns = pattern_sets.PatternSets()
    for number in range(5000):
        patterns.change(1, number, f"\0k.*{number}z")
    path = patterns._paths[1]

    merged = pattern_sets.FRESH_MAX * pattern_sets.SMALL_MERGED
    assert len(path.sets) < 5000 / merged + pattern_sets.SMALL_MERGED
    assert [n for part in path.sets for n in part.numbers] + path.fresh == list(range(5000))
    assert sorted(patterns.search(1, "k-4321z", 0)) == [1, 21, 321, 4321]


def test_sets_that_are_being_merged_are_left_alone(monkeypatch):
    """Patterns added and removed while the background merges are all found, or not, afterwards."""
    paths = pattern_sets.PathPatterns()
    begun, inside, made = [], [], pattern_sets._sets_of

    def during(patterns, numbers):
        # While a merge runs, as from another thread: more patterns, whose small sets `add` merges.
        if not inside and len(begun) < 3:
            begun.append(len(numbers))
            inside.append(True)
            first = 2000 + 400 * len(begun)
            for number in range(first, first + 320):
                paths.add(number, f"\0k.*{number}z")
            inside.clear()
        return made(patterns, numbers)

    monkeypatch.setattr(pattern_sets.BUILDER, "submit", lambda _: None)
    for number in range(1200):
        paths.add(number, f"\0k.*{number}z")
    monkeypatch.setattr(pattern_sets, "_sets_of", during)
    while paths.tidy():
        pass

    numbers = [n for part in paths.sets for n in part.numbers] + paths.fresh
    assert begun
    assert numbers == sorted(paths.patterns)
    assert sorted(paths.search("k-2545z", 0)) == [5, 45, 545, 2545]


def test_a_failed_merge_can_be_tried_again(monkeypatch):
    """An error while sets are merged loses no pattern, and does not keep the sets from being merged later."""
    paths = pattern_sets.PathPatterns()
    monkeypatch.setattr(pattern_sets.BUILDER, "submit", lambda _: None)
    for number in range(1200):
        paths.add(number, f"\0k.*{number}z")
    before = len(paths.sets)
    with monkeypatch.context() as patch:
        patch.setattr(pattern_sets, "_sets_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            paths.tidy()

    assert sorted(paths.search("k-599z", 0)) == [9, 99, 599]
    while paths.tidy():
        pass
    assert len(paths.sets) < before
    assert sorted(paths.search("k-599z", 0)) == [9, 99, 599]
