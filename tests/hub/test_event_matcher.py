"""The matcher of live delivery, replay and webhooks: roots, row filters, and events that cannot be read."""

from __future__ import annotations

import json
import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.filters import parse
from virta.hub.delivery import Delivery
from virta.hub.event_batch import split_batch
from virta.hub.event_matcher import (
    DOCUMENT,
    EVENT,
    EventMatcher,
    all_satisfy,
    matches_everything,
    restrict,
    root_of,
    single_matcher,
)

EVERYTHING = parse("", "query-string")
QUERIES = ["a=1", "a=2", "b=x", "a=1&b=x", "b"]
DOCUMENTS = [
    {"equals": {"a": 1}},
    {"equals": {"b": "x"}},
    {"exists": "b"},
    {"not": {"exists": "a"}},
]

data = st.fixed_dictionaries({}, optional={"a": st.integers(0, 3), "b": st.sampled_from("xyz")})
filters = st.one_of(
    st.sampled_from(QUERIES).map(lambda text: parse(text, "query-string")),
    st.sampled_from(DOCUMENTS).map(lambda tree: parse(tree, "koncorde")),
    st.just(EVERYTHING),
)


def event(number, content=None):
    value = {"specversion": "1.0", "id": str(number), "source": "s", "type": "t", "data": content}
    return Delivery("c", "s", str(number), json.dumps(value).encode())


def matched(filter_, events):
    """Return which events one filter alone matches."""
    if matches_everything(filter_):
        return [True] * len(events)
    return [bool(ids) for ids in single_matcher(filter_, root_of(filter_)).match(events)]


def test_the_root_of_a_filter():
    """Koncorde's filters see the document, all others the event; what matches everything needs none."""
    assert root_of(parse({"exists": "a"}, "koncorde")) == DOCUMENT
    assert root_of(parse("a=1", "query-string")) == EVENT
    assert root_of(EVERYTHING) == EVENT
    assert matches_everything(EVERYTHING)
    assert not matches_everything(parse("a=1", "query-string"))


@given(filters, filters, st.lists(data, min_size=1, max_size=5))
def test_a_restricted_filter_holds_where_both_hold(own, row_filter, contents):
    """Whether both become one tree, or the row filter is checked after the other."""
    events = [event(number, content) for number, content in enumerate(contents)]

    first, second = restrict(own, row_filter)

    found = matched(first, events)
    if second is not None:
        found = [a and b for a, b in zip(found, matched(second, events), strict=True)]
    both = zip(matched(own, events), matched(row_filter, events), strict=True)
    assert found == [a and b for a, b in both]


@given(filters)
def test_without_a_row_filter_nothing_changes(own):
    assert restrict(own, None) == (own, None)
    assert restrict(own, EVERYTHING) == (own, None)


@given(filters, st.lists(data, max_size=5))
def test_all_satisfy(row_filter, contents):
    events = [event(number, content) for number, content in enumerate(contents)]

    assert all_satisfy(row_filter, events) == all(matched(row_filter, events))


@pytest.mark.parametrize("tenants", [{1}, {2}, {1, 2}])
@pytest.mark.parametrize(
    "row_filter", [parse("tenant=1", "query-string"), parse({"equals": {"tenant": 1}}, "koncorde")]
)
def test_all_satisfy_in_a_batch(row_filter, tenants, monkeypatch):
    """A batch is judged as its events are; a filter of events decodes none of them."""
    events = [event(n, {"tenant": t}) for n, t in enumerate(sorted(tenants) * 20)]
    body = b"[%b]" % b",".join(one.value for one in events)
    batch = split_batch("c", body, 0, events_max=100, event_bytes_max=10_000)
    if batch is None:
        pytest.skip("there are no batches without the native module")
    if root_of(row_filter) == EVENT:
        monkeypatch.setattr("virta.hub.event_batch.decode_head", None)

    assert all_satisfy(row_filter, batch) == all_satisfy(row_filter, events) == (tenants == {1})


def numbers_of(matcher, events):
    """Return the numbers of the filters that each event satisfies."""
    numbers, ends = matcher.match_numbers([one.value for one in events])
    if not numbers:  # then there may be no ends
        return [()] * len(events)
    return [tuple(numbers[start:end]) for start, end in pairwise(ends)]


@given(st.lists(data, min_size=1, max_size=6))
def test_numbers_stand_for_the_ids_of_each_event(contents):
    """A number stands for one filter."""
    matcher = EventMatcher(EVENT)
    for query in QUERIES:
        matcher.add(parse(query, "query-string"))
    events = [event(number, content) for number, content in enumerate(contents)]

    ids, found = matcher.match(events), numbers_of(matcher, events)

    assert [sorted(matcher.ids_of(numbers)) for numbers in found] == [sorted(one) for one in ids]
    for numbers in found:
        assert [matcher.ids_of(number) for number in numbers] == [
            [id_] for id_ in matcher.ids_of(numbers)
        ]


def test_a_removed_filter_matches_nothing():
    matcher = EventMatcher(EVENT)
    id_ = matcher.add(parse("a=1", "query-string"))
    assert matcher.match([event(1, {"a": 1})]) == [[id_]]

    matcher.remove(id_)

    assert matcher.match([event(1, {"a": 1})]) == [[]]
    assert numbers_of(matcher, [event(1, {"a": 1})]) == [()]


def test_an_event_that_cannot_be_read_harms_no_other(caplog):
    """It satisfies no filter, and says so; the events beside it are matched."""
    matcher = EventMatcher(EVENT)
    id_ = matcher.add(parse("a=1", "query-string"))
    broken = Delivery("c", "s", "x", b'{"id":"x","source":"s","data":{"a":1}')
    events = [event(1, {"a": 1}), broken, event(2, {"a": 1})]
    with caplog.at_level(logging.WARNING, "virta.hub"):
        found = [matcher.ids_of(numbers) for numbers in numbers_of(matcher, events)]
        assert matcher.match(events) == found

    assert found[0] == found[2] == [id_]
    assert found[1] == []
    assert "event_unreadable" in caplog.text


def test_hits_in_a_batch():
    """A batch that is not decoded event by event has the same hits."""
    contents = [{"a": number % 4, "b": "xy"[number % 2]} for number in range(40)]
    events = [event(number, content) for number, content in enumerate(contents)]
    body = b"[%b]" % b",".join([one.value for one in events])
    batch = split_batch("c", body, 0, events_max=100, event_bytes_max=10_000)
    if batch is None:
        pytest.skip("event batches need the native module")
    matcher = EventMatcher(EVENT)
    assert matcher.match_batch(batch) == []
    for query in QUERIES:
        matcher.add(parse(query, "query-string"))

    hits = matcher.match_batch(batch)

    one_by_one = matcher.match(events)
    assert sorted(hits) == sorted((n, id_) for n, ids in enumerate(one_by_one) for id_ in ids)


def test_single_matchers_are_shared():
    """Consumers with one filter share its matcher; each root has its own."""
    filter_ = parse("a=1", "query-string")

    assert single_matcher(filter_, EVENT) is single_matcher(parse("a=1", "query-string"), EVENT)
    assert single_matcher(filter_, EVENT) is not single_matcher(filter_, DOCUMENT)
