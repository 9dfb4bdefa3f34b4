"""`log.topics()`: what a plain count of all records says, at the cost of reading what is new."""

from __future__ import annotations

import os
import random
import threading

import pytest

import virta
from virta import errors
from virta.log import reader, topics
from virta.log.limits import TOPICS_MAX


def counted(log, start="earliest"):
    """Return the expected counts, by reading every record."""
    found = {}
    for record in log.read(start=start, visibility="committed"):
        size = len(record.key) + len(record.value)
        row = found.setdefault(bytes(record.topic), [0, 0, record.offset, 0, record.timestamp, 0])
        row[0] += 1
        row[1] += size
        row[3], row[5] = record.offset, record.timestamp
    return [(topic, *row) for topic, row in sorted(found.items())]


def reported(log, **options):
    return [(bytes(info.topic), *info[1:]) for info in log.topics(**options)]


@pytest.fixture
def steps(monkeypatch):
    """How many chunks readers have decoded."""
    count = [0]
    real = reader.Reader._step

    def step(self):
        count[0] += 1
        return real(self)

    monkeypatch.setattr(reader.Reader, "_step", step)
    return count


@pytest.fixture
def log(tmp_path, either_kernel):
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as made:
        yield made


def fill(log, number, names=8, seed=0):
    randoms = random.Random(seed)
    for _ in range(number):
        batch = [
            (
                f"t{randoms.randrange(names)}",
                "k" * randoms.randrange(3),
                bytes(randoms.randrange(90)),
            )
            for _ in range(randoms.randrange(1, 6))
        ]
        log.append_many(batch)


def test_topics_of_a_growing_log(log):
    """At any time the counts are those of all records: over rollovers, in the active segment, for another handle."""
    assert log.topics() == []
    for seed in range(6):
        fill(log, 40, names=2 + seed * 3, seed=seed)
        assert reported(log) == counted(log)
    assert len(log.segments()) > 5
    with virta.open(log.path, read_only=True) as other:
        assert reported(other) == counted(log)
    info = log.topics()[0]
    assert (info.topic, str(info.topic)) == ("t0", "t0")
    assert info == virta.log.TopicInfo(*info)


def test_only_what_is_new_is_read(log, steps):
    """A second call reads nothing, and after an append only the end of the active segment."""
    fill(log, 200)
    for index in log.path.glob("*.ptix"):
        index.unlink()
    log.topics()
    first, steps[0] = steps[0], 0
    log.topics()
    assert (first > 10, steps[0]) == (True, 0)
    log.append("new", "", b"v")
    assert [i.records for i in log.topics() if i.topic == "new"] == [1]
    assert steps[0] <= 3


def test_sealed_segments_are_counted_by_their_indexes(log, steps):
    """With topic indexes only the active segment is read, with the same result."""
    fill(log, 200)
    found = reported(log)

    assert steps[0] <= 3
    assert found == counted(log)


def test_retention_compaction_and_repair(log):
    """Removed records are no longer counted."""
    fill(log, 200)
    log.topics()
    log.compact()
    assert reported(log) == counted(log)
    fill(log, 50, seed=9)
    log.retain(max_bytes=12_000)
    assert reported(log) == counted(log)

    damaged = log.segments()[1]
    with open(damaged.path, "r+b") as file:
        file.seek(damaged.bytes // 2)
        file.write(os.urandom(64))
    log.repair()
    at_end = log.read(on_gap="skip")
    assert sum(i.records for i in log.topics()) == sum(1 for _ in at_end)


def test_damage_is_passed_over(log):
    """A segment that cannot be read costs its own records only."""
    fill(log, 200)
    whole = sum(info.records for info in log.topics())
    lost = log.segments()[1]
    with open(lost.path, "r+b") as file:
        file.write(bytes(64))
    with virta.open(log.path, read_only=True) as other:
        assert sum(info.records for info in other.topics()) == whole - (lost.next - lost.base)


def test_pages(log):
    """`after` and `limit` give the same topics in pages, in order of their bytes."""
    fill(log, 100, names=60)
    log.append_many([(b"\xff\xfe", "", b""), (b"\x00a", "", b""), ("ä", "", b"")])
    everything = reported(log)
    assert everything == counted(log)
    pages, after = [], None
    while page := log.topics(after=after, limit=7):
        assert len(page) <= 7
        pages += page
        after = page[-1].topic
    assert [(bytes(i.topic), *i[1:]) for i in pages] == everything
    assert [i.topic for i in log.topics(after="t59")] == ["t6", "t7", "t8", "t9", "ä", b"\xff\xfe"]


def test_more_topics_than_are_remembered(log, monkeypatch):
    """With little memory the same answers, by reading again what did not fit."""
    fill(log, 300, names=200)
    monkeypatch.setattr(topics, "TOPIC_COUNTS_MAX", 30)
    assert reported(log) == counted(log)
    assert reported(log, limit=3) == counted(log)[:3]
    assert (
        reported(log, after="t150", limit=3)
        == [row for row in counted(log) if row[0] > b"t150"][:3]
    )
    assert sum(len(one.table) for one in log._topics._segments.values()) <= 30
    fill(log, 30, names=200, seed=3)
    assert reported(log) == counted(log)


def test_threads_and_a_fork(log):
    """Threads may call it at once, and a forked child counts for itself."""
    fill(log, 200)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(reported(log))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [counted(log)] * 4
    pid = os.fork()
    if pid == 0:
        os._exit(0 if reported(log) == counted(log) else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("limit", [0, -1, TOPICS_MAX + 1, True, 1.5, "3"])
def test_invalid_limits_are_refused(log, limit):
    with pytest.raises(errors.LogLimitError, match="limit is"):
        log.topics(limit=limit)


def test_what_is_no_topic(log):
    with pytest.raises(errors.LogTypeError, match="after"):
        log.topics(after=7)
    log.close()
    with pytest.raises(errors.LogClosedError):
        log.topics()
