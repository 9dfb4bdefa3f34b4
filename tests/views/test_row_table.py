"""A row table: what each change does to rows, numbers, memberships and the positions that can be resumed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virta.errors import ViewError
from virta.event.row_changes import DELETE, NONE, SET, TRUNCATE, KeyRule, RowChange
from virta.filters import parse
from virta.views.limits import ViewLimits
from virta.views.tables import table as table_module
from virta.views.tables.index import ENTER, LEAVE, TRUNCATED, UPDATE
from virta.views.tables.table import RowTable
from virta.views.view import View, ViewFilter

pytestmark = pytest.mark.usefixtures("either_step")


class Listener:
    """A consumer that only says that somebody is to get the hits."""


def row(key, status="paid"):
    value = json.dumps({"id": "1", "source": "/", "data": {"status": status}}).encode()
    return RowChange(SET, key, value, value)


def gone(key):
    return RowChange(DELETE, key)


class Table:
    """A table and one view of paid rows, with changes at growing offsets."""

    def __init__(self, **limits):
        self.table = RowTable("orders", KeyRule(), limits=ViewLimits(**limits))
        self.view = self.add("status=paid")

    def add(self, query):
        view = View(self.table, ViewFilter(parse(query)))
        view.exact_since = 0
        view.consumers[Listener()] = None
        self.table.index.add(view)
        return view

    def apply(self, *changes):
        """Apply changes in one step; return the hits of the view as (kind, key, reason)."""
        first = self.table.position
        self.table.apply(list(enumerate(changes, first)), first + len(changes))
        return self.hits()

    def hits(self, view=None):
        view = view or self.view
        hits, view.hits = view.hits, []
        return [(hit.name, hit.key, hit.reason) for hit in hits]

    def rows(self):
        table = self.table
        return {k: table.offsets[n] for n, k in enumerate(table.keys) if table.offsets[n] >= 0}


def test_enter_update_leave_within_one_step():
    """Every record of a step counts, in order, also several of one key."""
    one = Table()

    assert one.apply(row("a"), row("a"), row("a", "new"), row("a"), gone("a")) == [
        (ENTER, "a", ""),
        (UPDATE, "a", ""),
        (LEAVE, "a", "changed"),
        (ENTER, "a", ""),
        (LEAVE, "a", "deleted"),
    ]
    assert (one.view.count, one.table.rows, one.rows()) == (0, 0, {})


def test_views_without_consumers_are_counted_and_get_no_hits():
    """Their memberships have to be right when somebody comes; hits would pile up."""
    one = Table()
    one.view.consumers.clear()

    assert one.apply(row("a"), row("b"), row("a", "new")) == []
    assert one.view.count == 1
    assert one.table.has(one.view, "b")
    assert not one.table.has(one.view, "a")


def test_a_delete_of_an_absent_row_is_nothing():
    one = Table()

    assert one.apply(gone("a")) == []
    assert len(one.table.ring) == 0
    assert one.apply(row("a"), gone("a"), gone("a")) == [(ENTER, "a", ""), (LEAVE, "a", "deleted")]
    assert len(one.table.ring) == 2


def test_records_are_counted_by_whether_they_have_a_key():
    one = Table()
    one.apply(row("a"), RowChange(NONE), gone("b"), RowChange(NONE), RowChange(NONE))

    assert (one.table.keyed, one.table.unkeyed) == (2, 3)


def test_a_truncation_empties_the_table_and_every_view():
    """No position up to it can be resumed: nothing says which rows there were."""
    one = Table()
    other = one.add("")
    one.apply(row("a"), row("b", "new"))
    one.hits(other)
    hits = one.apply(RowChange(TRUNCATE), row("b"))

    assert hits == [(TRUNCATED, "", ""), (ENTER, "b", "")]
    assert one.hits(other) == [(TRUNCATED, "", ""), (ENTER, "b", "")]
    assert one.view.truncated
    assert other.truncated
    assert one.rows() == {"b": 3}
    assert one.table.exact_from == 3
    assert one.view.row_numbers() == [one.table.numbers["b"]]


def test_the_position_only_grows():
    one = Table()
    one.apply(row("a"))
    one.table.apply([], 40)
    one.table.apply([], 10)

    assert one.table.position == 40


@pytest.mark.parametrize(("rows_max", "fits"), [(2, True), (1, False), (0, False)])
def test_the_limit_of_rows_has_a_name(rows_max, fits):
    """Rows that are deleted do not count."""
    one = Table(view_rows_max=rows_max)
    changes = [row("a"), gone("a"), row("b"), row("c")]
    if fits:
        one.apply(*changes)
        assert one.table.rows == 2
        return
    with pytest.raises(ViewError, match="raise view_rows_max") as error:
        one.apply(*changes)
    assert error.value.code == "too-many-rows"


def test_rows_below_the_first_offset_expire():
    one = Table()
    one.apply(row("a"), row("b", "new"), row("c"), row("a"))
    views = one.table.expire(3)

    assert views == [one.view]
    assert one.hits() == [
        (LEAVE, "c", "expired")
    ]  # `a` has a newer event, `b` was not in the result
    assert one.rows() == {"a": 3}
    assert one.table.exact_from == one.table.position + 1
    assert one.table.expire(3) == []  # noticed already
    assert one.table.expire(1) == []


def test_rows_that_the_log_has_lost_expire():
    one = Table()
    one.apply(row("a"), row("b"))

    assert one.table.lose({0, 77}) == [one.view]
    assert one.hits() == [(LEAVE, "a", "expired")]
    assert one.table.lose({77}) == []


def test_an_expiry_that_takes_no_row_keeps_positions_exact():
    one = Table()
    one.apply(row("a"), row("a"))
    one.table.expire(1)

    assert one.table.exact_from == 0
    assert len(one.table.ring) == 2


def test_an_overflow_of_the_ring_moves_the_first_exact_position():
    one = Table(view_ring=2)
    one.apply(row("a"), row("b"))
    assert one.table.exact_from == 0
    one.apply(row("c"))

    assert one.table.exact_from == 1


def test_numbers_of_deleted_rows_are_used_again_when_nothing_refers_to_them():
    """While the ring has a touch of the row its number stays: a resume has to name the key."""
    one = Table(view_ring=2)
    one.apply(row("a"), gone("a"))
    assert one.table.keys == ["a"]
    one.apply(row("b"), row("b"))  # both touches of `a` are forgotten
    assert one.table.keys[0] is None
    one.apply(row("c"))

    assert one.table.keys == ["c", "b"]
    assert one.rows() == {"b": 3, "c": 4}


def test_a_row_that_comes_back_keeps_its_number():
    one = Table(view_ring=2)
    one.apply(row("a"), gone("a"), row("a"), row("b"))

    assert one.table.keys == ["a", "b"]
    assert one.rows() == {"a": 2, "b": 3}


def test_equal_sets_of_views_are_one_object(monkeypatch):
    """Memory of a membership: a reference. Sets that no row has any more are dropped."""
    monkeypatch.setattr(table_module, "INTERNED_MIN", 3)
    one = Table(view_ring=1)
    others = [one.add(f"status=s{n}") for n in range(30)]
    one.apply(*[row(str(n)) for n in range(20)])
    assert len({id(members) for members in one.table.members}) == 1
    for status in range(30):
        one.apply(*[row(str(n), f"s{status}") for n in range(20)])

    assert len({id(members) for members in one.table.members}) == 1
    assert len(one.table._interned) < 12
    assert [view.count for view in (one.view, *others)] == [0] * 30 + [20]


def test_candidates_of_a_view_do_not_grow_without_end():
    """Rows that come and go leave numbers behind; they are cleaned before they are most of them."""
    one = Table()
    for _ in range(300):
        one.apply(row("a"), row("a", "new"))
    one.apply(row("b"))

    assert len(one.view.candidates) < 100
    assert one.view.row_numbers() == [one.table.numbers["b"]]


KEYS = st.sampled_from("abcd")
CHANGES = st.one_of(
    st.builds(row, KEYS, st.sampled_from(["paid", "new"])),
    st.builds(gone, KEYS),
    st.just(RowChange(NONE)),
    st.just(RowChange(TRUNCATE)),
)


@settings(max_examples=80)
@given(
    st.lists(st.lists(CHANGES, max_size=4), max_size=12),
    st.sampled_from([1, 3, 100]),
    st.integers(0, 60),
)
def test_it_is_the_newest_event_of_each_key(steps, ring, expire_at):
    """Rows, counts, hits and numbers agree with a dictionary, for any steps and any size of the ring."""
    one = Table(view_ring=ring)
    everything = one.add("")
    model, members, offset = {}, set(), 0
    for changes in steps:
        for change in changes:
            if change.kind == SET:
                model[change.key] = (offset, b'"paid"' in change.event)
            elif change.kind == DELETE:
                model.pop(change.key, None)
            elif change.kind == TRUNCATE:
                model.clear()
            offset += 1
        for kind, key, _ in one.apply(*changes):
            if kind == TRUNCATED:
                members.clear()
            elif kind == LEAVE:
                members.remove(key)
            else:
                assert (kind == UPDATE) == (key in members)
                members.add(key)
    first = min(expire_at, offset)
    one.table.expire(first)
    for _, key, reason in one.hits():
        assert reason == "expired"
        members.remove(key)
    model = {key: found for key, found in model.items() if found[0] >= first}

    paid = {key for key, (_, is_paid) in model.items() if is_paid}
    assert one.rows() == {key: at for key, (at, _) in model.items()}
    assert members == paid
    assert (one.table.rows, one.view.count, everything.count) == (len(model), len(paid), len(model))
    assert {one.table.keys[n] for n in one.view.row_numbers()} == paid
    in_use = {n for n, key in enumerate(one.table.keys) if key is not None}
    assert in_use == {one.table.numbers[key] for key in one.table.keys if key is not None}
