"""Filters of views: which views a row satisfies, with dialects, roots and row filters mixed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virta.event.row_changes import ROOT_AUTO, ROOT_EVENT, KeyRule, row_of
from virta.filters import parse
from virta.views.tables.index import ViewFilters
from virta.views.tables.table import RowTable
from virta.views.view import View, ViewFilter, view_tag

PAID = parse("status=paid")
KONCORDE = parse({"equals": {"status": "paid"}}, "koncorde")
TENANT = parse("tenant=1")
CESQL = parse("type = 'order'", "cesql")
CLOUDEVENTS = parse([{"prefix": {"type": "or"}}], "cloudevents")
IDS = parse({"ids": {"values": ["7"]}}, "koncorde")
FILTERS = [parse(""), PAID, KONCORDE, TENANT, CESQL, CLOUDEVENTS, IDS, parse("total=>3")]


def event(id_="1", type_="order", **data):
    return {"id": id_, "source": "/s", "type": type_, "data": data}


def views_of(*filters):
    table = RowTable("orders", KeyRule())
    return [View(table, one) for one in filters]


def matched(views, *events):
    filters = ViewFilters()
    for view in views:
        filters.add(view)
    raw = [json.dumps(one).encode() for one in events]
    found = filters.match(raw, [row_of(value) for value in raw])
    return [[at for at, view in enumerate(views) if view.number in one] for one in found]


def test_every_dialect_in_one_pass():
    views = views_of(*[ViewFilter(one) for one in FILTERS])
    found = matched(views, event("7", status="paid", tenant=1, total=4), event(type_="x", total=1))

    assert found == [[0, 1, 2, 3, 4, 5, 6, 7], [0]]


def test_a_row_filter_and_a_filter_that_see_different_things_must_both_hold():
    """Koncorde's document and the event of a query string: one index each, and the views that both found."""
    views = views_of(ViewFilter(KONCORDE, TENANT), ViewFilter(PAID, TENANT), ViewFilter(KONCORDE))
    events = [
        event(status="paid", tenant=1),
        event(status="paid", tenant=2),
        event(status="new", tenant=1),
    ]

    assert matched(views, *events) == [[0, 1, 2], [2], []]


def test_the_row_or_the_event():
    """Debezium's change: `auto` sees the row, `event` the change itself."""
    change = {"op": "u", "source": {}, "before": None, "after": {"status": "paid"}}
    views = views_of(
        ViewFilter(PAID, None, ROOT_AUTO),
        ViewFilter(PAID, None, ROOT_EVENT),
        ViewFilter(parse("/op=u"), None, ROOT_EVENT),
        ViewFilter(parse("/op=u"), None, ROOT_AUTO),
        ViewFilter(KONCORDE, None, ROOT_AUTO),
    )

    assert matched(views, event() | {"data": change}) == [[0, 2, 4]]


def test_views_come_and_go():
    """Equal filters share an entry of the index, which stays until the last one is removed."""
    table = RowTable("orders", KeyRule())
    views = [View(table, ViewFilter(PAID, row)) for row in (None, None, TENANT)]
    filters = ViewFilters()
    for view in views:
        filters.add(view)
    value = json.dumps(event(status="paid", tenant=1)).encode()
    numbers = [view.number for view in views]

    assert filters.match([value], [value]) == [set(numbers)]
    filters.remove(views[0])
    assert filters.match([value], [value]) == [set(numbers[1:])]
    filters.remove(views[2])
    filters.remove(views[1])
    assert filters.match([value], [value]) == [frozenset()]
    assert filters.match([], []) == []


def test_results_are_interned():
    """Equal sets are one object, so that an unchanged row is recognised by identity."""
    known = {}
    filters = ViewFilters(lambda members: known.setdefault(members, members))
    for view in views_of(ViewFilter(PAID), ViewFilter(TENANT)):
        filters.add(view)
    value = json.dumps(event(status="paid", tenant=1)).encode()
    first, second = filters.match([value] * 2, [value] * 2)

    assert first is second is known[first]


def test_what_the_matcher_cannot_read_satisfies_nothing_but_everything():
    deep = b'{"id":"1","source":"/","data":' + b"[" * 5000 + b"]" * 5000 + b"}"
    table = RowTable("orders", KeyRule())
    everything, paid = (View(table, ViewFilter(one)) for one in (parse(""), PAID))
    filters = ViewFilters()
    filters.add(everything)
    filters.add(paid)

    assert filters.match([deep], [deep]) == [{everything.number}]


class TestIdentity:
    """Views are shared, and positions are valid, for equal filters only."""

    def test_equal_filters_are_one_view(self):
        same = [parse("status=paid&total=>3"), parse("total=>3&status=paid")]
        assert len({ViewFilter(one).id for one in same}) == 1

    def test_root_row_filter_and_dialect_count(self):
        filters = [
            ViewFilter(PAID),
            ViewFilter(PAID, None, ROOT_EVENT),
            ViewFilter(PAID, TENANT),
            ViewFilter(TENANT, PAID),  # the same rows, but a `leave` shows others
            ViewFilter(KONCORDE),
            ViewFilter(KONCORDE, TENANT),
        ]
        assert len({one.id for one in filters}) == len(filters)

    def test_equal_texts_that_see_different_things_are_different(self):
        """`equals status` of a document, and of an event, may have one canonical id."""
        document = parse({"equals": {"status": "paid"}}, "koncorde")
        assert ViewFilter(document).parts[0][0] == "document"
        assert ViewFilter(PAID).parts[0][0] == "event"

    @pytest.mark.parametrize(
        "other",
        [
            {"log_id": "b"},
            {"epoch": 2},
            {"channel": "x"},
            {"rule": KeyRule("/data/id")},
            {"filter_": ViewFilter(TENANT)},
            {"filter_": ViewFilter(PAID, TENANT)},
            {"filter_": ViewFilter(PAID, None, ROOT_EVENT)},
            {"fields": "/data/a"},
            {"select": "count|"},
            {"fields": "count|"},
        ],
    )
    def test_a_tag_is_everything_that_decides_what_a_consumer_gets(self, other):
        given_ = {"log_id": "a", "epoch": 1, "channel": "c", "rule": KeyRule(), "filter_": ViewFilter(PAID)}  # fmt: skip
        tag = view_tag(**given_)

        assert tag == view_tag(**given_)
        assert len(tag) == 12
        assert tag != view_tag(**(given_ | other))


def holds(filter_, one):
    if filter_.dialect != "koncorde":
        return filter_.matches(one)
    return filter_.matches({"_id": one.get("subject") or one["id"]} | one["data"])


EVENTS = st.builds(
    event,
    st.sampled_from(["1", "7"]),
    st.sampled_from(["order", "other", "x"]),
    status=st.sampled_from(["paid", "new"]),
    tenant=st.integers(1, 2),
    total=st.integers(0, 6),
)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(FILTERS), st.one_of(st.none(), st.sampled_from(FILTERS))),
        max_size=8,
    ),
    st.lists(EVENTS, min_size=1, max_size=5),
)
def test_both_filters_decide(pairs, events):
    """Any filters with any row filters: as the reference evaluator says, one by one."""
    found = matched(views_of(*[ViewFilter(own, row) for own, row in pairs]), *events)

    for one, numbers in zip(events, found, strict=True):
        wanted = [
            at
            for at, (own, row) in enumerate(pairs)
            if holds(own, one) and (row is None or holds(row, one))
        ]
        assert numbers == wanted
