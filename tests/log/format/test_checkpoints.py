"""Starting near the end of the active segment does not read the whole segment each time."""

from __future__ import annotations

from pathlib import Path

import pytest

import virta
from virta.log.format.checkpoints import Checkpoints
from virta.log.format.segment import Position, SegmentHeader
from virta.log.limits import INDEX_STEP_BYTES

RECORDS, VALUE = 4_000, b"v" * 4_000  # 16 MB in one active segment
READ_BYTES_MAX = 4 * 1024 * 1024


def bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log") as log:
        for _ in range(0, RECORDS, 100):
            log.append_many([("t", "k", VALUE)] * 100, durability="none")
        yield log


def test_a_second_read_near_the_end_reads_little(log):
    """The first reader remembers positions that later ones start from."""
    assert sum(1 for _ in log.read()) == RECORDS
    before = bytes_read()

    found = [record.offset for record in log.read(start=RECORDS - 1)]

    assert found == [RECORDS - 1]
    assert bytes_read() - before < READ_BYTES_MAX


def test_segments_of_an_active_log_are_described_without_reading_them(log):
    before = bytes_read()

    (info,) = log.segments()

    assert (info.base, info.next, info.sealed) == (0, RECORDS, False)
    assert info.bytes > RECORDS * len(VALUE)
    assert bytes_read() - before < READ_BYTES_MAX


def test_every_start_gives_the_same_records_with_and_without_checkpoints(log):
    """A start between two positions begins at the one before it."""
    with virta.open(log.path) as other:
        list(log.read())
        for start in (0, 1, 99, 100, 101, 1234, RECORDS - 1, RECORDS):
            known = [r.offset for r in log.read(start=start, end=start + 3)]
            unknown = [r.offset for r in other.read(start=start, end=start + 3)]
            assert known == unknown == list(range(start, min(start + 3, RECORDS)))


def header(base=0, epoch=0, salt=7):
    return SegmentHeader(base, 1, b"s" * 16, salt, 0, 0, epoch, 0)


def test_positions_belong_to_one_segment_and_epoch():
    """Recovery that drops published offsets makes earlier positions unusable."""
    checkpoints = Checkpoints()
    checkpoints.add(header(), Position(INDEX_STEP_BYTES, 1, 10))

    assert checkpoints.find(header(), 10) == Position(INDEX_STEP_BYTES, 1, 10)
    assert checkpoints.find(header(), 9) is None
    assert checkpoints.find(header(epoch=1), 10) is None
    assert checkpoints.find(header(salt=8), 10) is None


def test_positions_are_sparse_and_newest_segment_first():
    checkpoints = Checkpoints()
    checkpoints.add(header(base=5), Position(INDEX_STEP_BYTES, 1, 10))
    checkpoints.add(header(base=5), Position(INDEX_STEP_BYTES + 1, 1, 11))
    checkpoints.add(header(base=0), Position(9 * INDEX_STEP_BYTES, 1, 4))

    assert checkpoints.find(header(base=5), 100) == Position(INDEX_STEP_BYTES, 1, 10)
    assert checkpoints.find(header(base=0), 4) is None
