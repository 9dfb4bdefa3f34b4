"""Logs that older releases wrote are read, appended to and verified; newer ones are refused with a clear error."""

from __future__ import annotations

import base64
import json
import tarfile
from pathlib import Path

import pytest

import virta
from virta import errors

VECTORS = Path(__file__).parent.parent / "vectors"
EXPECTED = json.loads((VECTORS / "log-format-1.json").read_text())
RECORDS = [(*(base64.b64decode(text) for text in row[:3]), *row[3:]) for row in EXPECTED["records"]]


@pytest.fixture
def path(tmp_path):
    """A log of format 1: five segments, compacted, repaired, with a producer and a consumer."""
    with tarfile.open(VECTORS / "log-format-1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "log"


def contents(log, **options):
    records = log.read(on_gap="skip", **options)
    return [(bytes(r.topic), bytes(r.key), r.value, r.offset, r.timestamp) for r in records]


@pytest.mark.parametrize("read_only", [True, False])
def test_a_log_of_format_1_is_read(path, either_kernel, read_only):
    """Every record, the offsets that were lost, topics, epoch and the consumer's position."""
    with virta.open(path, create=False, read_only=read_only) as log:
        assert contents(log) == RECORDS
        assert (log.next_offset, log.epoch) == (EXPECTED["next_offset"], EXPECTED["epoch"])
        assert log.verify().problems == []
        with pytest.raises(errors.LogGapError):
            list(log.read())
        for topic in {record[0] for record in RECORDS}:
            assert contents(log, topics=topic) == [r for r in RECORDS if r[0] == topic]
        topics = [[t.topic, t.records, t.first_offset, t.last_offset] for t in log.topics()]
        assert topics == [[base64.b64decode(row[0]), *row[1:]] for row in EXPECTED["topics"]]
        assert log.consumers()[0].position == EXPECTED["consumer_position"]


def test_a_log_of_format_1_is_continued(path, either_kernel):
    """Appends continue its offsets, its producer is known, and upkeep works on it."""
    with virta.open(path) as log:
        assert log.append_many(
            [("orders", "", b"again")], producer=tuple(EXPECTED["producer"])
        ).duplicate
        assert log.append("new", "k", b"value") == EXPECTED["next_offset"]
        for n in range(100):
            log.append("new", "k", b"%d" % n, durability="none")
        before = contents(log)
        log.compact()
        assert contents(log, topics=["topic-1", "late"]) != []
        log.retain(max_bytes=log.bytes // 2)
        assert contents(log) == [r for r in before if r in set(contents(log))]
        assert log.verify().problems == []
