"""Plan splits: headroom, retention and damage while planning, sealed segments by their index."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace

import pytest

import virta
from virta.errors import LogCorruptionError, LogGapError
from virta.log.format.index import index_sealed
from virta.log.format.segment import Segment

splits = pytest.importorskip("virta.spark.source.splits")


@pytest.mark.parametrize("page", ["live", "copied", "lost"])
def test_headroom_is_in_no_split(tmp_path, page):
    """With an open writer, in a copy, and without a control page: every record once, and no zeros after them."""
    root = tmp_path / "log"
    with virta.open(root, segment_bytes=4096) as log:
        for number in range(60):
            log.append("t", "", b"%d" % number * 30)
        end = log.segments()[-1].bytes
        if page != "live":
            shutil.copytree(root, tmp_path / "copy")
            root = tmp_path / "copy"
        if page == "lost":
            (root / "control").unlink()
        plan = splits.Plan(str(root))
        try:
            ends = plan.ends()
            assert (ends.first, ends.end) == (0, 60)
            found = plan.splits(0, ends.end)
            assert [split.start for split in found] == [0, *(split.stop for split in found[:-1])]
            assert found[-1].stop == 60
            assert found[-1].end == end
        finally:
            plan.close()


def many_segments(tmp_path):
    root = tmp_path / "log"
    with virta.open(root, segment_bytes=4096) as log:
        for number in range(120):
            log.append("t", "", b"%d" % number * 30)
    return root


@pytest.mark.parametrize("listed", [False, True], ids=["before", "after"])
def test_retention_during_planning_is_a_gap(tmp_path, monkeypatch, listed):
    """Segments removed before or after they are listed are a gap that is raised, or skipped."""
    root = many_segments(tmp_path)
    segments = splits.Plan.segments

    def late(plan, start, stop):
        found = segments(plan, start, stop)
        with virta.open(root) as log:
            log.retain(max_bytes=1)
        return found if listed else segments(plan, start, stop)

    monkeypatch.setattr(splits.Plan, "segments", late)
    plan = splits.Plan(str(root))
    try:
        assert plan.ends().first == 0
        with pytest.raises(LogGapError, match=r"offsets 0 to 19 of .* are not there any more"):
            plan.splits(0, 20)
        plan.skip_gaps = True
        assert plan.splits(0, 20) == []
    finally:
        plan.close()


def test_retention_during_a_limit_by_bytes(tmp_path, monkeypatch):
    """A segment removed after it was listed does not end the query: planning the range raises the gap."""
    root = many_segments(tmp_path)
    segments = splits.Plan.segments

    def late(plan, start, stop):
        found = segments(plan, start, stop)
        with virta.open(root) as log:
            log.retain(max_bytes=1)
        return found

    monkeypatch.setattr(splits.Plan, "segments", late)
    plan = splits.Plan(str(root))
    try:
        assert plan.bytes_end(0, 120, 1) > 20
    finally:
        plan.close()


def damaged(root):
    """Make a log whose second segment has a batch with a broken header, and whose third has no header."""
    with virta.open(root, segment_bytes=4096) as log:
        for number in range(120):
            log.append("t", "", b"%d" % number * 30)
        segments = log.segments()
    second, third = (sorted(root.glob("*.puro"))[n] for n in (1, 2))
    raw = bytearray(second.read_bytes())
    raw[64 + 20] ^= 0xFF  # in the header of its first batch
    second.write_bytes(raw)
    third.write_bytes(b"\0" * third.stat().st_size)
    assert len(segments) > 3
    return segments


def offsets_of(reader):
    return [
        o
        for part in reader.partitions()
        for b in reader.read(part)
        for o in b["offset"].to_pylist()
    ]


def test_damage_found_while_planning_is_reported_too(tmp_path):
    """Batches and whole segments without a header are skipped by option, each with a report of its offsets."""
    source = pytest.importorskip("virta.spark.source.source")
    segments = damaged(tmp_path / "log")
    given = {
        "path": str(tmp_path / "log"),
        "onCorruption": "skip",
        "problems": str(tmp_path / "problems"),
    }
    schema = source.StructType([source.RECORD["offset"]])

    found = offsets_of(source.LogReader(source.read_options(given), schema))

    reports = [json.loads(file.read_text()) for file in sorted((tmp_path / "problems").iterdir())]
    lost = [o for report in reports for o in range(report["offset_from"], report["offset_to"])]
    assert sorted([*found, *lost]) == list(range(120))
    assert [report["reason"] for report in reports] == ["bad-header", "bad-header"]
    assert (reports[0]["offset_from"], reports[1]["offset_from"]) == (
        segments[1].base,
        segments[2].base,
    )
    assert reports[1]["offset_to"] == segments[3].base


def test_a_segment_without_a_header_is_named_with_its_offset(tmp_path):
    """Without the option the first damage is an error with file and range."""
    source = pytest.importorskip("virta.spark.source.source")
    segments = damaged(tmp_path / "log")
    given = {"path": str(tmp_path / "log"), "start": str(segments[2].base)}

    with pytest.raises(
        LogCorruptionError,
        match=rf"\.puro: bytes 0 to 64 are damaged .*offsets {segments[2].base} on",
    ):
        source.LogReader(source.read_options(given), source.RECORD).partitions()


@pytest.mark.parametrize("at", [8, 41, 45, 57])
def test_every_byte_of_a_segments_header_is_verified(tmp_path, at):
    """A wrong base, salt, link or epoch is damage that is named; it does not make the segment look empty."""
    source = pytest.importorskip("virta.spark.source.source")
    with virta.open(tmp_path / "log", segment_bytes=4096) as log:
        for number in range(120):
            log.append("t", "", b"%d" % number * 30)
    segment = sorted((tmp_path / "log").glob("*.puro"))[1]
    raw = bytearray(segment.read_bytes())
    raw[at] ^= 0x10
    segment.write_bytes(raw)

    reader = source.LogReader(source.read_options({"path": str(tmp_path / "log")}), source.RECORD)
    with pytest.raises(LogCorruptionError, match=f"{segment.name}: bytes 0 to 64 are damaged"):
        reader.partitions()


def test_sealed_segments_are_planned_by_their_index(tmp_path, monkeypatch):
    """Only the active segment is walked; the splits equal those of a walk over all segments."""
    root = tmp_path / "log"
    with virta.open(root, segment_bytes=256 * 1024) as log:
        for number in range(300):
            log.append_many([("t", "", bytes(200))] * (number % 40 + 1))
        end = log.next_offset
        index_sealed(root)
    walked = []
    index = splits.kernel.index

    def counted(fd, *arguments):
        walked.append(arguments[0])
        return index(fd, *arguments)

    monkeypatch.setattr(splits, "kernel", SimpleNamespace(index=counted))
    plans = []
    for _ in range(2):
        plan = splits.Plan(str(root))
        plans.append(plan.splits(5, end, split_bytes=100_000))
        plan.close()
        for file in root.glob("*.pidx"):
            file.unlink()

    assert len(walked) == 1 + len(list(root.glob("*.puro")))
    bounds = [[(s.path, s.pos, s.end, s.start, s.stop) for s in plan] for plan in plans]
    assert bounds[0] == bounds[1]


def test_an_index_older_than_its_segment_is_not_used(tmp_path):
    """A repair may move batches: then the segment is walked."""
    root = tmp_path / "log"
    with virta.open(root, segment_bytes=256 * 1024) as log:
        for _ in range(100):
            log.append_many([("t", "", bytes(200))] * 40)
        index_sealed(root)
    first = min(root.glob("*.puro"))
    with Segment(root, 0) as segment:
        assert splits.SegmentRuns.of(segment).sealed
        os.utime(first)
        assert not splits.SegmentRuns.of(segment).sealed


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("1960-01-01", 0),
        ("0001-01-01T00:00:00+14:00", 0),
        ("2026-01-01T00:00:00.000001Z", 1767225600000001),
        ("9999-12-31T23:59:59.999999-14:00", 253402300799999999),
        ("77", 77),
    ],
)
def test_times_are_exact(text, micros):
    """Bounds on time are microseconds, and before 1970 is before everything."""
    options = pytest.importorskip("virta.spark.source.options")

    assert options.read_options({"path": "x", "startTime": text}).time_from == micros
