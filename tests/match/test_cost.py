"""The price of a filter: how events find it, what runs in Python, and the counts in stats()."""

from __future__ import annotations

import pytest

from virta.filters import Filter, parse
from virta.filters.tree import Condition, Select
from virta.match import FilterCost, Matcher, compile_filter, filter_cost

CASES = [
    ("query-string", "status=paid", "indexed", ["eq of data.status"]),
    ("query-string", "status=paid&total=>5", "verified", ["eq of data.status"]),
    ("query-string", "total=>5;total=<2", "indexed", ["range of data.total"]),
    ("query-string", "status=!paid", "scanned", []),
    ("koncorde", {"not": {"equals": {"a": 1}}}, "scanned", []),
    ("koncorde", {"missing": "a"}, "indexed", ["not exists of a"]),
    ("koncorde", {"regexp": {"a": "^x[0-9]"}}, "indexed", ["regexp of a"]),
    ("cesql", "LENGTH(subject) > 5", "indexed", ["range of LENGTH(subject)"]),
    ("cesql", "n = 5 AND type LIKE '%a%b'", "verified", ["eq of INT(n)"]),
]


@pytest.mark.parametrize(("dialect", "source", "kind", "found_by"), CASES)
def test_kind_and_access(engine, dialect, source, kind, found_by):
    """A filter is indexed, verified or scanned, and the condition that finds it is named."""
    cost = filter_cost(parse(source, dialect), engine=engine)

    assert isinstance(cost, FilterCost)
    if engine == "native" or kind == "scanned":
        assert cost.kind == kind
    assert list(cost.found_by) == found_by
    assert cost.python == ()
    assert (cost.event_ns > 0) == (kind == "scanned")
    assert cost.bytes > 0
    assert cost.to_json()["kind"] == cost.kind
    assert str(cost).startswith(cost.kind)


def test_conditions_in_python_are_named():
    """What the native engine leaves to Python is listed, and dear if every event evaluates it."""
    select = Select(0, Condition((), "exists"))
    compiled = compile_filter(Filter(Condition(("a",), "select", select)))

    cost = filter_cost(compiled)

    assert cost.python == ("select of a",)
    assert "in Python: select of a" in str(cost)


def test_stats_count_by_kind(engine):
    """stats() counts the filters of each kind and goes back to none."""
    matcher = Matcher(engine=engine)
    ids = matcher.add_many(["status=paid", "status=open&total=5", "status=!x"])

    stats = matcher.stats()

    assert stats["filters"] == stats["indexed"] + stats["verified"] + stats["scanned"] == 3
    assert stats["scanned"] == 1
    for id_ in ids:
        matcher.remove(id_)
    stats = matcher.stats()
    assert (stats["indexed"], stats["verified"], stats["scanned"]) == (0, 0, 0)


def test_memory_has_patterns_and_names(engine):
    """Regular expressions and names are in the sum of bytes."""
    matcher = Matcher(engine=engine)
    before = matcher.stats()["bytes"]
    matcher.add_many(
        [{"regexp": {"name": f"^x{i}.*[a-z]{{3}}$"}} for i in range(200)], dialect="koncorde"
    )
    matcher.add("a=1", id="mine")

    stats = matcher.stats()

    assert stats["bytes_patterns"] > 200 * 100
    assert stats["bytes_names"] > 200 * 100
    assert stats["bytes"] > before + stats["bytes_patterns"]
