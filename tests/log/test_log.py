"""The log as its user meets it: append, read, reopen, roll over, follow."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

import virta
from virta import errors
from virta.log.record import Name, timestamp_of

pytestmark = pytest.mark.usefixtures("either_kernel")


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log") as handle:
        yield handle


def fill(log, count, start=0, **options):
    for i in range(start, start + count):
        log.append("t", f"k{i % 7}", b"%d" % i, **options)


def test_append_returns_the_offset_and_what_was_met(log):
    """The result is the offset, and says how many, when, and how durable."""
    first = log.append("orders", "42", b"{}")
    rest = log.append_many([("orders", "", b"1"), (b"other", b"", b"2")], durability="none")

    assert first == 0
    assert (first.offset, first.count, first.durability) == (0, 1, "group")
    assert (rest, rest.count, rest.durability) == (1, 2, "none")
    assert first.timestamp <= rest.timestamp
    assert log.next_offset == 3


@pytest.mark.parametrize("durability", ["none", "interval", "group", "fsync"])
def test_every_durability_is_readable_at_once(tmp_path, durability):
    """Whatever an append waited for, a read afterwards sees it."""
    with virta.open(tmp_path / "log") as log:
        assert log.append("t", "k", b"v", durability=durability).durability == durability
        assert [r.value for r in log.read()] == [b"v"]


def test_group_and_fsync_are_durable_on_return(log):
    """The durable offset covers the append when it returns."""
    for level in ("group", "fsync"):
        offset = log.append("t", "", b"", durability=level)
        assert log.durable_offset == offset + 1
    log.append("t", "", b"", durability="none")
    log.flush()
    assert log.durable_offset == log.next_offset


def test_records_have_topic_key_value_offset_and_time(log):
    """Bytes come out as they went in; topic and key also compare as text."""
    before = datetime.now(UTC) - timedelta(seconds=1)
    log.append("tö", b"\xff\x00", b"\x00value")

    (record,) = log.read()

    assert record.topic == "tö"
    assert record.topic == "tö".encode()
    assert record.topic != "other"
    assert str(record.topic) == "tö"
    assert record.key == b"\xff\x00"
    assert record.value == b"\x00value"
    assert record.offset == 0
    assert before < record.time < before + timedelta(minutes=1)
    assert isinstance(record.topic, Name)
    assert hash(record.topic) == hash("tö".encode())


def test_empty_topic_key_and_value_are_legal(log):
    """The seed allows all three to be empty."""
    log.append("", "", b"")
    assert [tuple(r)[:3] for r in log.read()] == [(b"", b"", b"")]


def test_reopen_continues(tmp_path):
    """Closing and opening changes nothing; offsets continue."""
    path = tmp_path / "log"
    with virta.open(path) as log:
        fill(log, 5)
        identity = log.id
    with virta.open(path) as log:
        fill(log, 5, start=5)
        assert log.id == identity
        assert [int(r.value) for r in log.read()] == list(range(10))


def test_two_handles_see_each_other(tmp_path):
    """Handles share the directory, not state."""
    with virta.open(tmp_path / "log") as one, virta.open(tmp_path / "log") as two:
        for i in range(20):
            (one if i % 2 else two).append("t", "", b"%d" % i)
        assert [int(r.value) for r in one.read()] == list(range(20))
        assert [int(r.value) for r in two.read()] == list(range(20))


def test_rollover_keeps_offsets_dense(tmp_path):
    """Small segments: many files, one sequence; indexes are written and used."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        fill(log, 400)
        segments = log.segments()
        assert len(segments) > 5
        assert [s.base for s in segments[1:]] == [s.next for s in segments[:-1]]
        assert [s.sealed for s in segments] == [True] * (len(segments) - 1) + [False]
        assert [r.offset for r in log.read()] == list(range(400))
        assert [r.offset for r in log.read(start=333)] == list(range(333, 400))
        assert len(list((tmp_path / "log").glob("*.pidx"))) == len(segments) - 1
        assert log.bytes == sum(s.bytes for s in segments)


def test_a_batch_larger_than_a_segment_gets_its_own(tmp_path):
    """The limit of a segment never refuses a batch."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        log.append("t", "", bytes(100))
        log.append_many([("t", "", bytes(3000))] * 5)
        log.append("t", "", bytes(100))
        assert [len(r.value) for r in log.read()] == [100, *[3000] * 5, 100]
        assert len(log.segments()) == 3


def test_start_and_end_points(tmp_path):
    """earliest, latest, an offset, a time; the end is exclusive."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        fill(log, 300)
        times = [r.timestamp for r in log.read()]
        cut = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=times[150])
        first = times.index(timestamp_of(cut))
        assert next(log.read(start=cut)).offset == first
        assert [r.offset for r in log.read(start=10, end=13)] == [10, 11, 12]
        assert [r.offset for r in log.read(end=cut)] == list(range(first))
        assert list(log.read(start="latest")) == []
        assert list(log.read(start=datetime.now(UTC) + timedelta(days=1))) == []
        assert next(log.read(start=datetime(2020, 1, 1, tzinfo=UTC))).offset == 0
        assert list(log.read(start=1000)) == []
        fill(log, 1, start=300)
        assert [r.offset for r in log.read(start="latest", end="latest")] == []


def test_topics_are_selected(log):
    """One topic, several, as text or bytes."""
    log.append_many([("a", "", b"1"), ("b", "", b"2"), ("c", "", b"3"), ("a", "", b"4")])
    assert [r.value for r in log.read("a")] == [b"1", b"4"]
    assert [r.value for r in log.read(topics=["b", b"c"])] == [b"2", b"3"]
    assert list(log.read("nothing")) == []


def test_a_read_ends_at_the_present_end(log):
    """Records appended while reading are returned by the next read."""
    fill(log, 3)
    reader = log.read()
    assert next(reader).offset == 0
    fill(log, 3, start=3)
    assert [r.offset for r in reader] == [1, 2]
    assert reader.position == 3


def test_follow_sees_what_comes(log):
    """A follower gets appends of another handle as they happen, and ends after its idle time."""
    got = []

    def write():
        with virta.open(log.path) as other:
            fill(other, 50)

    writer = threading.Thread(target=write)
    reader = log.read(follow=True, timeout=60)
    writer.start()
    for record in reader:
        got.append(record.offset)
        if len(got) == 50:
            break
    writer.join()
    reader.close()
    assert got == list(range(50))
    assert [r.offset for r in log.read(start=49, follow=True, timeout=0.01)] == [49]


def test_follow_crosses_rollovers(tmp_path):
    """A follower moves on to new segments."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        reader = log.read(follow=True, timeout=60)
        seen = []
        for start in range(0, 300, 30):
            fill(log, 30, start=start)
            while len(seen) < start + 30:
                seen.append(next(reader).offset)
        reader.close()
        assert seen == list(range(300))


def test_batches_come_whole_and_in_lists(log):
    """batches() is the quick way: lists instead of single records."""
    log.append_many([("t", "", b"%d" % i) for i in range(100)])
    assert [[r.offset for r in batch] for batch in log.read().batches()] == [list(range(100))]


def test_large_values_are_read_in_one_piece(log):
    """A value larger than the reader's buffer."""
    big = bytes(range(256)) * 16384
    log.append("t", "k", big)
    log.append("t", "k", b"after")
    assert [r.value for r in log.read()] == [big, b"after"]


def test_idempotent_producers(tmp_path):
    """A producer's batch is in the log once, whichever handle retries it and when."""
    path = tmp_path / "log"
    with virta.open(path, segment_bytes=4096) as log:
        first = log.append_many([("t", "", b"a"), ("t", "", b"b")], producer=(77, 3))
        again = log.append_many([("t", "", b"a"), ("t", "", b"b")], producer=(77, 3))
        older = log.append_many([("t", "", b"x")], producer=(77, 2))
        log.append_many([("t", "", b"c")], producer=(78, 0))
        assert (first.duplicate, again.duplicate, older.duplicate) == (False, True, True)
        assert again == first
        fill(log, 300, durability="none")  # rolls over: the table must come from the indexes
    with virta.open(path) as log:
        assert log.append_many([("t", "", b"a")], producer=(77, 3)).duplicate
        assert log.append_many([("t", "", b"c")], producer=(78, 0)).duplicate
        assert not log.append_many([("t", "", b"d")], producer=(78, 1)).duplicate
        assert [r.value for r in log.read()].count(b"d") == 1
        assert log.next_offset == 304


def test_waiting_for_creation(tmp_path):
    """A reader may wait for a log that does not exist yet; after the timeout it raises."""
    path = tmp_path / "later"
    with pytest.raises(errors.LogNotFoundError, match="within"):
        virta.open(path, wait=0.02)
    opened = threading.Event()

    def make():
        opened.wait()
        virta.open(path).close()

    maker = threading.Thread(target=make)
    maker.start()
    opened.set()
    with virta.open(path, wait=30) as log:
        assert log.next_offset == 0
    maker.join()


def test_read_only_needs_no_right_to_write(tmp_path):
    """A read-only handle creates and locks nothing; it follows by polling."""
    path = tmp_path / "log"
    with virta.open(path) as log:
        fill(log, 3)
        (path / "control").unlink()
        before = sorted(p.name for p in path.iterdir())
        with virta.open(path, read_only=True) as reader:
            assert [int(r.value) for r in reader.read()] == [0, 1, 2]
            assert [int(r.value) for r in reader.read(follow=True, timeout=0.01)] == [0, 1, 2]
            assert reader.next_offset == 3
            with pytest.raises(errors.LogReadOnlyError):
                reader.append("t", "", b"")
        assert sorted(p.name for p in path.iterdir()) == before


def test_an_unpublished_batch_is_not_seen_and_then_adopted(tmp_path):
    """A writer that died between its write and publishing: readers wait, the next writer adopts the batch."""
    path = tmp_path / "log"
    with virta.open(path) as log:
        log.append("t", "", b"one")
        control = (path / "control").read_bytes()
        log.append("t", "", b"two")
    (path / "control").write_bytes(control)
    with virta.open(path, read_only=True) as reader:
        assert [r.value for r in reader.read()] == [b"one"]
    with virta.open(path) as log:
        assert [r.value for r in log.read()] == [b"one", b"two"]
        assert log.append("t", "", b"three") == 2


def test_a_lost_control_page_costs_nothing(tmp_path):
    """Without the control page nothing is lost: it is a hint."""
    path = tmp_path / "log"
    with virta.open(path, segment_bytes=4096) as log:
        fill(log, 200, durability="none")
    (path / "control").unlink()
    with virta.open(path) as log:
        assert [int(r.value) for r in log.read()] == list(range(200))
        assert log.append("t", "", b"") == 200
        assert log.recovered == []


def test_a_torn_tail_is_cut_and_kept(tmp_path):
    """Half a batch after the end is cut off by the next writer, copied to quarantine and never delivered."""
    path = tmp_path / "log"
    with virta.open(path) as log:
        fill(log, 3)
    (segment,) = path.glob("*.puro")
    whole = segment.read_bytes()
    with segment.open("ab") as file:
        file.write(whole[64:100])
    with virta.open(path) as log:
        assert log.append("t", "", b"next") == 3
        assert [r.offset for r in log.read()] == [0, 1, 2, 3]
        assert [p.reason for p in log.recovered] == ["short"]
        assert log.verify().problems == []
    (kept,) = (path / "quarantine").glob("*.bin")
    assert kept.read_bytes() == whole[64:100]


def test_a_finished_seal_without_a_successor_is_completed(tmp_path):
    """A writer that died in mid-rollover: the next one makes the segment that was to follow."""
    path = tmp_path / "log"
    with virta.open(path, segment_bytes=4096) as log:
        fill(log, 100, durability="none")
        last = log.segments()[-1]
    if last.next > last.base:
        fresh = path / f"{last.base:020d}.puro"
    fresh.unlink()
    (path / "control").unlink()  # it has the published offsets, which are never reused
    with virta.open(path) as log:
        assert log.next_offset == last.base
        assert log.append("t", "", b"") == last.base
        assert [r.offset for r in log.read()] == list(range(last.base + 1))


def test_repr_and_close_twice(log):
    """Closing twice is fine; a closed log says so."""
    assert str(log.path) in repr(log)
    log.close()
    log.close()
    assert "closed" in repr(log)
