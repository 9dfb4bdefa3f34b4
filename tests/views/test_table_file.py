"""Table files: what they keep, and that anything wrong with one leads to a rebuild, never to wrong rows."""

from __future__ import annotations

import json
import logging
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import virta
from virta.errors import ViewError
from virta.event.row_changes import KeyRule
from virta.views.limits import ViewLimits
from virta.views.tables import table_file
from virta.views.tables.table_file import (
    HEAD_AT,
    MAGIC,
    check_keyed,
    load_table,
    open_table,
    read_on,
    save_table,
    table_path,
)

RULE = KeyRule()


def event(n):
    return {"id": str(n), "source": "/s", "type": "t", "data": {"n": n}}


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log") as opened:
        yield opened


def filled(log, count=12):
    for n in range(count):
        log.append("orders", str(n % 5), event(n) if n % 4 else b"", durability="none")
        log.append("other", "x", event(n), durability="none")
    return open_table(log, "orders", RULE)


def state(table):
    """Return everything that a file has to keep, independent of how rows are numbered."""
    offsets = {key: table.offsets[n] for n, key in enumerate(table.keys) if key is not None}
    touches = [(t.offset, table.keys[t.number], t.previous) for t in table.ring.since(0)]
    counts = (table.position, table.exact_from, table.first_offset, table.rows, table.keyed, table.unkeyed)  # fmt: skip
    return offsets, touches, counts


def test_a_file_keeps_rows_touches_and_counts(log, tmp_path):
    """Also rows that were deleted while the ring refers to them, and keys that are no ASCII."""
    filled(log)
    log.append("orders", "\u00e4\U0001f600", event(1))
    log.append("orders", "", event(2))  # no key
    table = open_table(log, "orders", RULE)
    save_table(log, table, tmp_path / "views")
    loaded = load_table(table_path(tmp_path / "views", "orders", RULE), log, "orders", RULE)

    assert state(loaded) == state(table)
    assert loaded.unkeyed == 1


def test_numbers_are_packed(log, tmp_path):
    """A table with many freed numbers has a small file, and its touches still name the right rows."""
    limits = ViewLimits(view_ring=6)
    records = [("orders", str(n), event(n)) for n in range(10)]
    records += [("orders", str(n), b"") for n in range(9)]
    records += [("orders", "9", event(n)) for n in range(7)]  # the ring forgets the deletes
    log.append_many(records)
    table = open_table(log, "orders", RULE, limits=limits)
    assert table.keys.count(None) == 9
    save_table(log, table, tmp_path)
    loaded = load_table(table_path(tmp_path, "orders", RULE), log, "orders", RULE, limits)

    assert None not in loaded.keys
    assert state(loaded) == state(table)


def test_the_log_is_read_on_from_the_file(log, tmp_path, monkeypatch):
    """Only records behind the file's position are read."""
    save_table(log, filled(log), tmp_path)
    position = log.next_offset
    log.append("orders", "new", event(99))
    starts = []
    real = type(log).read
    monkeypatch.setattr(
        type(log),
        "read",
        lambda self, *a, **k: starts.append(k.get("start")) or real(self, *a, **k),
    )
    table = open_table(log, "orders", RULE, directory=tmp_path)

    assert starts == [position]
    assert state(table) == state(open_table(log, "orders", RULE))


def test_a_smaller_ring_than_the_file_forgets_the_oldest(log, tmp_path):
    """The limit was lowered between two starts: positions that need the rest cannot be resumed."""
    table = filled(log)
    save_table(log, table, tmp_path)
    loaded = load_table(
        table_path(tmp_path, "orders", RULE), log, "orders", RULE, ViewLimits(view_ring=2)
    )
    last = [touch.offset for touch in table.ring.since(0)][-2:]

    assert [touch.offset for touch in loaded.ring.since(0)] == last
    assert table.exact_from < loaded.exact_from <= last[0]


def test_each_channel_and_key_rule_has_a_file_of_its_own(tmp_path):
    rules = [RULE, KeyRule("/data/id"), KeyRule("/data/n")]
    paths = {table_path(tmp_path, channel, rule) for channel in ("a", "b") for rule in rules}

    assert len(paths) == 6
    assert all(path.suffix == ".rows" and len(path.name) == 45 for path in paths)


@pytest.mark.parametrize(
    ("channel", "rule", "words"),
    [("other", RULE, "its channel is 'orders'"), ("orders", KeyRule("/data/n"), "its key is ''")],
)
def test_a_file_of_another_table_is_ignored(log, tmp_path, caplog, channel, rule, words):
    """Whatever its name is."""
    save_table(log, filled(log), tmp_path)
    path = table_path(tmp_path, "orders", RULE)

    assert load_table(path, log, channel, rule) is None
    assert words in caplog.text


def test_a_file_of_another_epoch_is_ignored(log, tmp_path, monkeypatch):
    """The log was restored or repaired: offsets may mean other records."""
    save_table(log, filled(log), tmp_path)
    path = table_path(tmp_path, "orders", RULE)
    assert load_table(path, log, "orders", RULE) is not None
    monkeypatch.setattr(type(log), "epoch", property(lambda _: 77))

    assert load_table(path, log, "orders", RULE) is None


def test_a_file_that_cannot_be_read_is_ignored(log, tmp_path, caplog):
    table_path(tmp_path, "orders", RULE).mkdir()
    filled(log)
    with caplog.at_level(logging.WARNING):
        table = open_table(log, "orders", RULE, directory=tmp_path)

    assert table.rows > 0
    assert "table_file_unreadable" in caplog.text


def test_no_file_is_no_warning(log, tmp_path, caplog):
    assert load_table(tmp_path / "nothing.rows", log, "orders", RULE) is None
    assert caplog.text == ""


@settings(max_examples=60)
@given(at=st.floats(0, 1), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_file_is_ignored_wherever_it_is_damaged(tmp_path_factory, at, bit, cut):
    """One flipped bit or a missing end, at any place of the file."""
    folder = tmp_path_factory.mktemp("damage")
    with virta.open(folder / "log") as log:
        table = filled(log)
        save_table(log, table, folder)
        path = table_path(folder, "orders", RULE)
        data = bytearray(path.read_bytes())
        place = min(int(at * len(data)), len(data) - 1)
        if cut:
            del data[place:]
        else:
            data[place] ^= 1 << bit
        path.write_bytes(data)

        assert load_table(path, log, "orders", RULE) is None
        assert state(open_table(log, "orders", RULE, directory=folder)) == state(table)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 1},
        {"touches": 1},
        {"rows": 10**9},
        {"position": "7"},
        {"byteorder": "big"},
        {"log": None},
    ],
)
def test_a_head_that_does_not_fit_is_ignored(log, tmp_path, change):
    """Even with a right checksum: a file of another version of Virta."""
    save_table(log, filled(log), tmp_path)
    path = table_path(tmp_path, "orders", RULE)
    data = path.read_bytes()
    end = HEAD_AT + int.from_bytes(data[12:16], "little")
    head = json.dumps(json.loads(data[HEAD_AT:end]) | change).encode()
    body = len(head).to_bytes(4, "little") + head + data[end:]
    crc = table_file.kernel.crc32c(body).to_bytes(4, "little")
    path.write_bytes(MAGIC + crc + body)

    assert load_table(path, log, "orders", RULE) is None
    assert open_table(log, "orders", RULE, directory=tmp_path).rows > 0


def test_a_file_from_before_a_compaction_is_ignored(tmp_path):
    """Compaction may have removed a delete that follows the file's position."""
    with virta.open(tmp_path / "log", segment_bytes=65536) as log:
        for n in range(300):
            log.append("orders", str(n % 9), event(n), durability="none")
        save_table(log, open_table(log, "orders", RULE), tmp_path)
        path = table_path(tmp_path, "orders", RULE)
        assert load_table(path, log, "orders", RULE) is not None
        log.append("orders", "1", b"")
        for n in range(3000):
            log.append("orders", str(n % 9 + 2), event("x" * 60), durability="none")
        assert log.compact().segments > 0

        assert load_table(path, log, "orders", RULE) is None
        table = open_table(log, "orders", RULE, directory=tmp_path)
        assert "1" not in {key for n, key in enumerate(table.keys) if table.offsets[n] >= 0}
        assert table.exact_from > 0  # positions below the compacted end cannot be resumed


def test_a_file_from_before_retention_drops_what_expired(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=65536) as log:
        for n in range(1500):
            log.append("orders", str(n), event("x" * 60), durability="none")
        save_table(log, open_table(log, "orders", RULE), tmp_path)
        log.retain(max_bytes=100_000)
        table = open_table(log, "orders", RULE, directory=tmp_path)
        assert log.first_offset > 0

        assert min(offset for offset in table.offsets if offset >= 0) == log.first_offset
        assert table.rows == log.next_offset - log.first_offset
        assert table.exact_from == table.position + 1


def test_rebuilding_stops_when_the_server_does(log):
    """A rebuild of millions of records must not delay the end."""
    for n in range(200):
        log.append("orders", str(n), event(n), durability="none")
    stops = iter([False, True])
    fresh = open_table(log, "orders", RULE)
    table = type(fresh)("orders", RULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_file, "BUILD_RECORDS", 1)
        read_on(log, table, log.next_offset, lambda: next(stops))

    assert table.rows == 2


@pytest.mark.parametrize(
    ("rule", "words"),
    [(RULE, "publish events with a partitionkey"), (KeyRule("/data/id"), "at /data/id")],
)
def test_a_channel_without_keys_is_a_sentence(rule, words):
    check_keyed("orders", rule, 0, 0)  # nothing yet
    check_keyed("orders", rule, 1, 99)
    with pytest.raises(ViewError, match=words) as error:
        check_keyed("orders", rule, 0, 4)
    assert error.value.code == "view-unkeyed"


def test_offsets_are_kept_as_64_bits(log, tmp_path):
    """A log has more than 2**32 records in its life."""
    table = filled(log)
    table.offsets = array("q", [offset + 2**40 if offset >= 0 else offset for offset in table.offsets])  # fmt: skip
    save_table(log, table, tmp_path)
    loaded = load_table(table_path(tmp_path, "orders", RULE), log, "orders", RULE)

    assert max(loaded.offsets) > 2**40
