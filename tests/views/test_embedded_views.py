"""Live views over a real log, without a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

import virta
from virta import views
from virta.errors import FilterError, ViewError
from virta.event.row_changes import DELETE, NONE, SET, TRUNCATE, KeyRule, read_event_change
from virta.filters import parse
from virta.views import embedded
from virta.views.limits import ViewLimits
from virta.views.tables import values
from virta.views.tables.table_file import load_table, open_table, save_table, table_path


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log") as opened:
        yield opened


def event(id_=1, *, subject=None, type_="order", **data):
    made = {"specversion": "1.0", "id": str(id_), "source": "/s", "type": type_, "data": data}
    return made | ({} if subject is None else {"subject": subject})


def kinds(updates):
    return [(update.kind, update.key) for update in updates]


def test_a_view_is_a_snapshot_and_then_enter_update_leave(log):
    log.append("orders", "1", event(status="paid"))
    log.append("orders", "2", event(status="new"))
    with views.open(log, "orders", "status=paid") as view:
        assert kinds(view.refresh()) == [("row", "1")]
        log.append("orders", "2", event(status="paid"))
        log.append("orders", "2", event(status="paid", total=2))
        log.append("orders", "1", event(status="new"))
        log.append("orders", "2", b"")
        updates = view.refresh()

    assert kinds(updates) == [("enter", "2"), ("update", "2"), ("leave", "1"), ("leave", "2")]
    assert [u.reason for u in updates] == ["", "", "changed", "deleted"]
    assert updates[2].event["data"] == {"status": "new"}  # the row that no longer matches
    assert view.rows == {}


def test_follow_waits_for_another_thread(log):
    view = views.open(log, "orders", "status=paid")
    with virta.open(log.path) as other:
        timer = threading.Timer(0.05, other.append, ("orders", "7", event(status="paid")))
        timer.start()
        found = next(view.changes(follow=True, timeout=20))
        timer.join()
    assert (found.kind, found.key) == ("enter", "7")
    assert list(view.changes(follow=True, timeout=0.01)) == []


def test_resume_gives_what_changed_while_away(log, tmp_path):
    for key in "abc":
        log.append("orders", key, event(status="paid"))
    with views.open(log, "orders", "status=paid", table_dir=tmp_path / "views") as view:
        position = view.position
    log.append("orders", "a", event(status="new"))
    log.append("orders", "b", event(status="paid", total=1))
    log.append("orders", "d", event(status="paid"))
    log.append("orders", "e", event(status="new"))

    # From the table file, and from the log alone.
    for directory in (tmp_path / "views", None):
        again = views.open(log, "orders", "status=paid", since=position, table_dir=directory)
        assert kinds(again.refresh()) == [("leave", "a"), ("update", "b"), ("enter", "d")]


def test_a_position_of_another_filter_is_reset(log):
    log.append("orders", "a", event(status="paid"))
    position = views.open(log, "orders", "status=paid").position
    for filter_, row_filter in (("status=new", None), ("status=paid", parse("tenant=1"))):
        again = views.open(log, "orders", filter_, since=position, row_filter=row_filter)
        first = again.refresh()[0]
        assert (first.kind, first.reason) == ("reset", "unknown-position")


def test_a_row_filter_limits_rows_and_what_a_leave_shows(log):
    mine = parse("tenant=1")
    log.append("orders", "a", event(status="paid", tenant=1))
    log.append("orders", "b", event(status="paid", tenant=2))
    own = (
        {"equals": {"status": "paid"}},
        "koncorde",
    )  # sees the document, the row filter the event
    for filter_, dialect in (own, ("status=paid", "query-string")):
        view = views.open(log, "orders", filter_, dialect=dialect, row_filter=mine)
        assert kinds(view.refresh()) == [("row", "a")]
        log.append("orders", "a", event(status="paid", tenant=2))
        log.append("orders", "a", event(status="paid", tenant=1))
        log.append("orders", "a", event(status="new", tenant=1))
        updates = view.refresh()
        assert [(u.kind, u.event and u.event["data"]["tenant"]) for u in updates] == [
            ("leave", None),
            ("enter", 1),
            ("leave", 1),
        ]
        log.append("orders", "a", event(status="paid", tenant=1))


def test_debezium_rows(log):
    def change(op, before, after, key="1"):
        data = {"op": op, "source": {"table": "t"}, "before": before, "after": after}
        log.append("db", key, {"id": "1", "source": "/d", "type": "change", "data": data})

    change("r", None, {"id": 1, "status": "paid"})
    row = views.open(log, "db", "status=paid")
    raw = views.open(log, "db", "/op=r", row="event")
    keyed = views.open(
        log, "db", {"equals": {"status": "paid"}}, dialect="koncorde", key="/data/id"
    )
    assert row.rows["1"]["data"] == {"id": 1, "status": "paid"}
    assert raw.rows["1"]["data"]["op"] == "r"
    assert keyed.rows["1"]["data"] == {"id": 1, "status": "paid"}
    change("u", {"id": 1, "status": "paid"}, {"id": 1, "status": "new"})
    assert [u.kind for v in (row, raw, keyed) for u in v.refresh()[1:]] == ["leave"] * 3
    change("u", {"id": 1, "status": "new"}, {"id": 1, "status": "paid"})
    change("d", {"id": 1, "status": "paid"}, None)
    assert kinds(keyed.refresh()) == [("enter", "1"), ("leave", "1")]
    change("c", None, {"id": 2, "status": "paid"}, "2")
    change("t", None, None, "")
    row.refresh()
    assert row.rows == {}
    assert [(u.kind, u.reason) for u in keyed.refresh()][-1] == ("reset", "truncated")


@pytest.mark.parametrize(
    ("key", "value", "rule", "expected"),
    [
        (b"k", {"data": 1}, "", (SET, "k")),
        (b"", {"subject": "s", "data": 1}, "", (SET, "s")),
        (b"", {"data": 1}, "", (NONE, None)),
        (b"\xff", {"subject": "s"}, "", (NONE, None)),
        (b"k" * 1025, {}, "", (NONE, None)),
        (b"k", {"data": None}, "", (DELETE, "k")),
        (b"k", {"type": "deleted"}, "", (DELETE, "k")),
        (b"k", {"type": "order.deleted"}, "", (DELETE, "k")),
        (b"k", {"type": "undeleted"}, "", (SET, "k")),
        (b"k", {"data_base64": ""}, "", (SET, "k")),
        (b"k", {"data": {"op": "d"}}, "", (SET, "k")),
        (b"k", {"data": {"op": "d", "source": {}, "before": {}}}, "", (DELETE, "k")),
        (b"k", {"data": {"op": "t", "source": {}, "after": None}}, "", (TRUNCATE, None)),
        (b"k", {"data": {"id": "x"}}, "/data/id", (SET, "x")),
        (b"k", {"data": {"id": 1.50}}, "/data/id", (SET, "1.5")),
        (b"k", {"data": {"id": True}}, "/data/id", (SET, "true")),
        (b"k", {"data": {"id": None}}, "/data/id", (NONE, None)),
        (b"k", {"data": {"id": [1]}}, "/data/id", (NONE, None)),
        (b"k", {"data": {"id": [1]}}, "/data/id/0", (SET, "1")),
        (b"k", {"data": {"a/b": {"~": "z"}}}, "/data/a~1b/~0", (SET, "z")),
        (b"k", {"data": {"op": "u", "source": {}, "before": {"id": 1}, "after": {"id": 2}}}, "/data/id", (SET, "2")),
        (b"k", {"data": {"op": "d", "source": {}, "before": {"id": 1}, "after": None}}, "/data/id", (DELETE, "1")),
    ],
)  # fmt: skip
def test_keys_and_deletes(key, value, rule, expected):
    change = read_event_change(
        key, json.dumps({"id": "1", "source": "/"} | value).encode(), KeyRule(rule)
    )
    assert (change.kind, change.key) == expected


def test_records_that_are_no_events_are_rows_too(log):
    log.append("raw", "a", b"\x00binary")
    log.append("raw", "b", {"status": "paid"})
    assert set(views.open(log, "raw").rows) == {"a", "b"}
    assert list(views.open(log, "raw", "status=paid").rows) == ["b"]


# Aggregates.


def test_aggregates_follow_the_rows(log):
    for number in range(6):
        log.append(
            "orders", str(number), event(country="FI" if number % 2 else "SE", total=number / 10)
        )
    view = views.open(
        log, "orders", select="count,sum(/data/total),min(/data/total),max(/data/total)",
        group="/data/country",
    )  # fmt: skip
    assert sorted(view.aggregate(), key=lambda g: g["group"]) == [
        {"group": "FI", "count": 3, "sum": 0.9, "min": 0.1, "max": 0.5},
        {"group": "SE", "count": 3, "sum": 0.6, "min": 0, "max": 0.4},
    ]
    log.append("orders", "5", event(country="SE", total=7))
    log.append("orders", "1", b"")
    log.append("orders", "3", event(country="FI", total="many"))
    view.refresh()
    assert sorted(view.aggregate(), key=lambda g: g["group"]) == [
        {"group": "FI", "count": 1, "sum": 0, "min": None, "max": None},
        {"group": "SE", "count": 4, "sum": 7.6, "min": 0, "max": 7},
    ]


def test_aggregates_that_go_on_have_all_rows(log):
    """They have no history: a position gives no fewer rows than none."""
    for number in range(3):
        log.append("orders", str(number), event(total=number))
    with views.open(log, "orders", select="count,sum(/data/total)") as view:
        position = view.position
    log.append("orders", "9", event(total=4))
    again = views.open(log, "orders", select="count,sum(/data/total)", since=position)
    assert again.aggregate() == [{"group": None, "count": 4, "sum": 7}]
    assert len(again.rows) == 4


def test_a_sum_does_not_drift(log):
    log.append("orders", "big", event(total=1e16))
    view = views.open(log, "orders", select="sum(/data/total)")
    for _ in range(10):
        log.append("orders", "small", event(total=0.1))
        log.append("orders", "small", b"")
    log.append("orders", "big", event(total=0.3))
    view.refresh()
    assert view.aggregate() == [{"group": None, "sum": 0.3}]


# What cannot be opened.


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"key": "/data/nothing"}, "view-unkeyed", "none of the 1 records of channel 'orders' has a text"),
        ({"key": "id"}, "invalid-pointer", "write a JSON pointer"),
        ({"row": "before"}, "invalid-row", "write auto or event"),
        ({"select": "avg(/data/x)"}, "invalid-select", "sum(POINTER)"),
        ({"select": "sum(/data/status)"}, "aggregate-not-a-number", "1 rows have something else"),
        ({"limits": ViewLimits(view_rows_max=0)}, "too-many-rows", "raise view_rows_max"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(log, options, code, words):
    log.append("orders", "1", event(status="paid"))
    with pytest.raises(ViewError) as error:
        views.open(log, "orders", **options)
    assert error.value.code == code
    assert words in error.value.message


def test_a_channel_without_keys_is_a_sentence(log):
    log.append("orders", "", event(status="paid"))
    with pytest.raises(ViewError, match="publish events with a partitionkey or a subject") as error:
        views.open(log, "orders")
    assert error.value.code == "view-unkeyed"
    assert views.open(log, "nothing-yet").rows == {}


def test_a_bad_filter_is_a_sentence(log):
    with pytest.raises(FilterError):
        views.open(log, "orders", {"equals": 1}, dialect="koncorde")


# Upkeep of the log.


def small_segments(tmp_path):
    return virta.open(tmp_path / "small", segment_bytes=65536)


def test_rows_that_retention_removed_expire(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "EXPIRY_S", 0.0)
    with small_segments(tmp_path) as log:
        for number in range(2000):
            log.append(
                "orders", str(number), event(status="paid", text="x" * 100), durability="none"
            )
        view = views.open(log, "orders", "status=paid")
        assert len(view.rows) == 2000
        position = view.position
        view.refresh()
        log.retain(max_bytes=100_000)
        assert log.first_offset > 0
        updates = view.refresh()
        assert {u.reason for u in updates} == {"expired"}
        assert set(view.rows) == {str(n) for n in range(log.first_offset, 2000)}
        # The position from before cannot be resumed: nothing says which rows expired since.
        again = views.open(log, "orders", "status=paid", since=position)
        assert again.refresh()[0].reason == "gap"


def test_a_pointer_key_is_refused_on_compacted_segments(tmp_path):
    with small_segments(tmp_path) as log:
        for number in range(2000):
            log.append(
                "orders", str(number % 5), event(id=number % 7, text="x" * 100), durability="none"
            )
        assert log.compact().segments > 0
        assert len(views.open(log, "orders").rows) == 5
        with pytest.raises(ViewError) as error:
            views.open(log, "orders", key="/data/id")
        assert error.value.code == "view-key-compacted"


def test_a_delete_in_the_active_segment_takes_nothing_from_older_ones(tmp_path):
    """A table that is rebuilt later has to know that the key was there."""
    with small_segments(tmp_path) as log:
        log.append("orders", "kept", event(status="paid"))
        for number in range(2000):
            log.append("orders", str(number % 5), event(text="x" * 100), durability="none")
        position = views.open(log, "orders", "status=paid").position
        log.append("orders", "kept", b"")
        log.compact()
        assert kinds(views.open(log, "orders", "status=paid", since=position).refresh()) == [
            ("leave", "kept")
        ]


def test_values_beyond_the_cache_are_read_from_the_log(log):
    for number in range(300):
        log.append("orders", str(number), event(n=number), durability="none")
    view = views.open(log, "orders", limits=ViewLimits(view_cache_bytes_max=1000))
    assert [view.rows[str(n)]["data"]["n"] for n in range(300)] == list(range(300))


def test_reads_far_apart_use_several_readers(log, monkeypatch):
    monkeypatch.setattr(values, "SKIP_RECORDS_MAX", 3)
    for number in range(50):
        log.append("orders", str(number), event(n=number), durability="none")
    found = values.read_values(log, "orders", [40, 1, 2, 20, 99])
    assert {o: json.loads(v)["data"]["n"] for o, v in found.items()} == {1: 1, 2: 2, 20: 20, 40: 40}


# Table files.


@pytest.mark.parametrize("damage", ["flip", "short", "empty", "other log", "beyond"])
def test_a_wrong_table_file_is_ignored(log, tmp_path, damage, request):
    for number in range(10):
        log.append("orders", str(number % 3), event(n=number))
    rule, directory = KeyRule(), tmp_path / "views"
    save_table(log, open_table(log, "orders", rule), directory)
    path = table_path(directory, "orders", rule)
    assert load_table(path, log, "orders", rule) is not None
    data = bytearray(path.read_bytes())
    source = log
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "short":
        del data[-5:]
    elif damage == "empty":
        data = bytearray()
    elif damage == "other log":
        source = virta.open(tmp_path / "other")
        request.addfinalizer(source.close)
    else:
        table = open_table(log, "orders", rule)
        table.position += 1000
        save_table(log, table, directory)
        data = bytearray(path.read_bytes())
    path.write_bytes(data)
    assert load_table(path, source, "orders", rule) is None
    if source is log:
        assert len(open_table(log, "orders", rule, directory=directory).numbers) == 3


CHILD = """
import sys, virta
from virta.event.row_changes import KeyRule
from virta.views.tables.table_file import open_table, save_table, read_on
from pathlib import Path
log = virta.open(sys.argv[1])
directory = Path(sys.argv[2])
table = open_table(log, "orders", KeyRule(), directory=directory)
number = log.next_offset
while True:
    log.append("orders", str(number % 50), {"id": str(number), "source": "/", "data": {"n": number}}, durability="none")
    number += 1
    if number % 20 == 0:
        read_on(log, table, log.next_offset)
        save_table(log, table, directory)
        print(number, flush=True)
"""


def test_a_kill_around_the_table_file_loses_nothing(tmp_path):
    """SIGKILL at any time: the next table, from the file or not, equals one rebuilt from the log."""
    directory, path = tmp_path / "views", tmp_path / "log"
    virta.open(path).close()
    for round_ in range(4):
        command = [sys.executable, "-c", CHILD, str(path), str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(3 + round_):
                child.stdout.readline()
            os.kill(child.pid, signal.SIGKILL)
        with virta.open(path) as log:
            fresh = open_table(log, "orders", KeyRule())
            loaded = open_table(log, "orders", KeyRule(), directory=directory)
            rows = [{k: t.offsets[n] for n, k in enumerate(t.keys)} for t in (fresh, loaded)]
            assert rows[0] == rows[1]
            touches = [[(x.offset, x.previous) for x in t.ring.since(0)] for t in (fresh, loaded)]
            assert touches[0] == touches[1]
