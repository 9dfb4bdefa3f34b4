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


def records_of(expected):
    return [
        (*(base64.b64decode(text) for text in row[:3]), *row[3:]) for row in expected["records"]
    ]


RECORDS = records_of(EXPECTED)


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


# --- with topic indexes and zstd, and shipped to a store ---

ZSTD = json.loads((VECTORS / "log-format-1-zstd.json").read_text())


@pytest.fixture
def compressed(tmp_path):
    """A log with plain and compressed segments, topic indexes and a compacted topic; and the store it was shipped to."""
    with tarfile.open(VECTORS / "log-format-1-zstd.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def check_compressed(log):
    records = records_of(ZSTD)
    assert contents(log) == records
    for topic in {record[0] for record in records}:
        assert contents(log, topics=topic) == [r for r in records if r[0] == topic]
        assert contents(log, topics=topic, start=100) == [
            r for r in records if r[0] == topic and r[3] >= 100
        ]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_compressed_log_is_read_and_continued(compressed, either_kernel, indexed):
    """With its topic indexes, and without them, as versions before them leave a log."""
    path = compressed / "log"
    assert len(list(path.glob("*.ptix"))) > 2
    if not indexed:
        for file in path.glob("*.ptix"):
            file.unlink()
    with virta.open(path, create=False, read_only=True) as log:
        check_compressed(log)
        topics = [[t.topic, t.records, t.first_offset, t.last_offset] for t in log.topics()]
        assert topics == [[base64.b64decode(row[0]), *row[1:]] for row in ZSTD["topics"]]
        assert log.consumers()[0].position == ZSTD["consumer_position"]
        assert log.verify().problems == []
    with virta.open(path) as log:
        again = log.append_many([("orders", "", b"p")], producer=tuple(ZSTD["producer"]))
        assert again.duplicate
        assert log.compression == "zstd"
        assert log.append("new", "k", b"v" * 500) == ZSTD["next_offset"]
        assert log.verify().problems == []


def test_a_shipped_log_is_read_verified_and_restored(compressed):
    """The store's manifest, segments, indexes and chunks are read by this version."""
    pytest.importorskip("obstore", reason="object storage needs obstore")
    from virta.tier import restore_log, verify_store

    url = f"file://{compressed}/store"
    with virta.open(url) as shipped:
        check_compressed(shipped)
    assert verify_store(url).problems == []
    restore_log(url, compressed / "restored")
    with virta.open(compressed / "restored") as restored:
        check_compressed(restored)
        assert restored.append("new", "k", b"v") == ZSTD["next_offset"]
