"""The price of a filter: how events find it, what runs in Python, and the counts in stats()."""

from __future__ import annotations

import pytest

from virta.errors import FilterError
from virta.filters import Filter, parse
from virta.filters.tree import Condition, Select
from virta.match import FilterCost, Matcher, compile_filter, filter_cost, python_calls

CASES = [
    ("query-string", "status=paid", "indexed", ["eq of data.status"]),
    ("query-string", "status=paid&total=>5", "verified", ["eq of data.status"]),
    ("query-string", "total=>5;total=<2", "indexed", ["range of data.total"]),
    ("query-string", "status=!paid", "scanned", []),
    ("koncorde", {"not": {"equals": {"a": 1}}}, "scanned", []),
    ("koncorde", {"missing": "a"}, "indexed", ["not exists of a"]),
    ("koncorde", {"regexp": {"a": "^x[0-9]"}}, "indexed", ["regexp of a"]),
    ("koncorde", {"regexp": {"a": "^xyz[0-9]"}}, "verified", ["regexp of a"]),
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


AT_TIMES = [
    ("koncorde", {"regexp": {"a": "x[0-9]"}}, "regexp of a: a text not seen before", {"a": "x1"}, "regexp"),
    ("koncorde", {"not": {"regexp": {"a": "x[0-9]"}}}, "regexp_text of a: a value that is no text", {"a": [1]}, "text"),
    ("koncorde", {"select": {"field": "a", "index": 0, "query": {"regexp": {"value": "x[0-9]"}}}},
     "regexp of value: a text not seen before", {"a": ["x1"]}, "regexp"),
    ("koncorde", {"geoDistance": {"a": {"lat": 1, "lon": 2}, "distance": "5km"}},
     "geo_distance of a: a point that is neither {lat, lon} nor [lat, lon] of numbers", {"a": "1, 2"}, "point"),
    ("koncorde", {"match": {"a": [{"x": 1}, {"y": 2}]}}, "match of a: more than 16,384 values to compare",
     {"a": [{"x": 1}] * 20_000 + [{"y": 2}]}, "condition"),
    ("cesql", "n + 1 > 3", "INT(n): an attribute that is an array, an object or no 32-bit Integer", {"n": [1]}, "attribute"),
    ("cesql", "UPPER(s) = 'É'", "UPPER(s): text beyond ASCII", {"s": "é"}, "case"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "source", "named", "event", "kind"),
    AT_TIMES,
    ids=[case[2][:24] for case in AT_TIMES],
)
def test_what_runs_in_python_at_times_is_named_and_counted(
    dialect, source, named, event, kind, native_engine
):
    """The price names the values that need Python, and matching such a value is counted under its kind."""
    cost = filter_cost(source, dialect=dialect)
    assert cost.python == ()
    assert named in cost.python_at_times
    assert f"in Python at times: {named}" in str(cost)
    assert named in cost.to_json()["python_at_times"]

    matcher = Matcher(engine=native_engine)
    matcher.add(source, dialect=dialect)
    before = python_calls()
    matcher.match(event)
    after = python_calls()

    assert kind in {name for name in after if after[name] > before[name]} <= {kind, "regexp"}


@pytest.mark.parametrize("source", ["status=paid", "name=~w", "total=>5;tags=[x", "status=!x"])
def test_what_never_needs_python(source, native_engine):
    """Most filters name nothing, and matching them asks Python nothing."""
    cost = filter_cost(source)
    matcher = Matcher(engine=native_engine)
    matcher.add(source)
    before = python_calls()

    matcher.match({"data": {"status": "é", "name": "w1", "total": 7, "tags": ["x"]}})
    matcher.match(b'{"data": {"status": "paid", "name": [1], "total": 1e300, "tags": "x"}}')

    assert (cost.python, cost.python_at_times) == ((), ())
    assert python_calls() == before


def test_json_that_the_core_leaves_to_python_is_counted(native_engine):
    """A member written twice is read by Python, once an event."""
    matcher = Matcher(engine=native_engine)
    matcher.add("../a=2")
    before = python_calls()["event"]

    assert len(matcher.match(b'{"a": 1, "a": 2}')) == 1
    assert python_calls()["event"] == before + 1


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


@pytest.mark.parametrize(
    ("dialect", "source"),
    [("query-string", "status=paid"), ("cloudevents", {"exact": {"type": "x"}})],
)
def test_sources_are_priced_before_they_are_added(dialect, source):
    """A text or object has the price of its filter, in any dialect; what is no filter has none."""
    assert filter_cost(source, dialect=dialect) == filter_cost(parse(source, dialect))

    with pytest.raises(FilterError, match="did you mean dialect"):
        filter_cost({"equals": {"a": 1}})


def test_the_price_of_a_scanned_filter_is_what_stats_count():
    """Filters that are priced as scanned are those that the index scans, and so for the other kinds."""
    sources = ["status=!x", "status=paid", "total=>5", "status=paid&total=>5", "name=!x;name=!y"]
    matcher = Matcher()
    matcher.add_many(sources)
    kinds = [filter_cost(source).kind for source in sources]

    stats = matcher.stats()
    assert {kind: stats[kind] for kind in ("indexed", "verified", "scanned")} == {
        kind: kinds.count(kind) for kind in ("indexed", "verified", "scanned")
    }
