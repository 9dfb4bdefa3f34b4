"""Indexes of sealed segments: at once or by a thread, and never in the way of an append."""

from __future__ import annotations

import threading

import pytest

import virta
from virta.log.engine import indexer
from virta.log.engine.indexer import Indexer
from virta.log.format.directory import maintenance_lock, topic_index_name
from virta.log.format.topic_index import topics_unindexed
from waiting import wait_until

SEGMENT_BYTES = 64 * 1024


def append(log, count=1000):
    for _ in range(0, count, 50):
        log.append_many([("t", "", b"x" * 200)] * 50)


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=SEGMENT_BYTES) as log:
        yield log


def test_a_rollover_writes_the_indexes(log):
    append(log)

    assert len(log.segments()) > 2
    assert topics_unindexed(log.path) == []


def test_while_another_process_maintains_the_log(log):
    """Appends go on without indexes; the next rollover writes all that is missing."""
    with maintenance_lock(log.path, wait=False) as alone:
        assert alone
        append(log)
        assert len(topics_unindexed(log.path)) == len(log.segments()) - 1
    append(log)

    assert topics_unindexed(log.path) == []


def test_what_a_killed_process_left_is_indexed_at_the_next_opening(log):
    append(log)
    sealed = [segment.base for segment in log.segments()[:-1]]
    for base in sealed:
        (log.path / topic_index_name(base)).unlink()
    assert topics_unindexed(log.path) == sealed
    with virta.open(log.path) as again:
        assert again.next_offset == log.next_offset

    assert topics_unindexed(log.path) == []


def test_large_segments_are_indexed_by_a_thread(log, monkeypatch):
    """The append returns before; closing waits for the segment that is being read."""
    monkeypatch.setattr(indexer, "TOPIC_INDEX_INLINE_BYTES", 0)
    append(log)
    log.close()
    with virta.open(log.path) as again:
        wait_until(lambda: topics_unindexed(log.path) == [], "the indexes")
        assert len(again.segments()) > 2
    assert [one.name for one in threading.enumerate() if one.name == "virta-log-index"] == []


def test_without_a_sealed_segment_nothing_is_read(tmp_path):
    """Also in a directory that is not there: nothing fails before an append does."""
    idle = Indexer(tmp_path / "none")
    idle.run()
    idle.run_after_opening()
    idle.note_sealed()
    idle.run()
    idle.close()
    idle.close()
