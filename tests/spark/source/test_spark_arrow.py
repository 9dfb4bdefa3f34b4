"""Decode splits: both engines against the log's own reader, and against each other on damaged bytes."""

from __future__ import annotations

import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import virta
from virta.errors import LogCorruptionError, LogGapError
from virta.log.format.damage import Problem
from virta.log.format.segment import Segment
from virta.spark.source import arrow, arrow_plain, decode, splits
from virta.spark.source.arrow import RECORD_COLUMNS, make_array
from virta.spark.source.decode import ScanSpec, read_rows, report
from virta.spark.source.splits import Plan

import pyarrow as pa  # isort: skip

SEGMENT_BYTES = 64 * 1024
KERNELS = [arrow_plain] + ([arrow.native] if arrow.native else [])


@pytest.fixture(params=KERNELS, ids=lambda k: k.__name__.rpartition(".")[2])
def kernel(request, monkeypatch):
    for module in (arrow, decode, splits):
        monkeypatch.setattr(module, "kernel", request.param)
    return request.param


@pytest.fixture(scope="module", params=["none", "zstd"])
def filled(request, tmp_path_factory):
    """A log of several segments with batches of all sizes, plain or compressed, and its records."""
    path = tmp_path_factory.mktemp("arrow") / "log"
    rng = random.Random(5)
    compression = request.param
    with virta.open(
        path, segment_bytes=SEGMENT_BYTES, durability="none", compression=compression
    ) as log:
        for _ in range(120):
            log.append_many(
                [
                    (
                        rng.choice(["a", "b", "näme", b"\xff\xfe"]),
                        rng.randbytes(rng.randrange(6)),
                        rng.choice((rng.randbytes, bytes))(rng.randrange(300)),
                    )
                    for _ in range(rng.choice([1, 1, 2, 7, 40]))
                ]
            )
        records = list(log.read(visibility="committed"))
    return str(path), records


def rows_of(path, *, start=0, stop=None, split_bytes=splits.SPLIT_BYTES, **scan):
    """(topic, offset, timestamp, key, value) of a range, through plan and decoder."""
    plan = Plan(
        path,
        skip_corruption=scan.get("skip_corruption", False),
        skip_gaps=scan.get("skip_gaps", False),
    )
    try:
        splits = plan.splits(
            start, plan.ends().end if stop is None else stop, split_bytes=split_bytes
        )
    finally:
        plan.close()
    found = []
    for split in splits:
        for rows in read_rows(ScanSpec(path, **scan), split, RECORD_COLUMNS, []):
            columns = [
                make_array(name, pa.binary(), rows.size, rows.columns[i], is_text=False)
                for i, name in enumerate(RECORD_COLUMNS)
            ]
            columns[2] = columns[2].cast(pa.int64())
            found += list(zip(*(column.to_pylist() for column in columns), strict=True))
    return found


def plain(records):
    return [(bytes(r.topic), r.offset, r.timestamp, bytes(r.key), r.value) for r in records]


def test_decoder_equals_the_reader(filled, kernel):
    """Every record of a log of many segments, in order, byte for byte."""
    path, records = filled

    assert len(list(Path(path).glob("*.puro"))) >= 3
    assert rows_of(path) == plain(records)


@pytest.mark.parametrize("split_bytes", [1, 10_000, 1 << 30])
def test_splits_cover_a_range_once(filled, kernel, split_bytes):
    """Whatever the size of splits and the bounds, each offset comes once."""
    path, records = filled
    rng = random.Random(split_bytes)
    for _ in range(5):
        start, stop = sorted(rng.randrange(len(records) + 1) for _ in range(2))

        assert rows_of(path, start=start, stop=stop, split_bytes=split_bytes) == plain(
            records[start:stop]
        )


def test_selection_by_topic_and_time(filled, kernel):
    """Topics and times select exactly the records that have them."""
    path, records = filled
    times = sorted({r.timestamp for r in records})
    low, high = times[len(times) // 4], times[len(times) // 2]

    found = rows_of(path, topics=(b"a", b"\xff\xfe"), time_from=low, time_to=high)

    assert found == plain(
        r for r in records if bytes(r.topic) in {b"a", b"\xff\xfe"} and low <= r.timestamp < high
    )


def test_small_chunks_change_nothing(filled, kernel, monkeypatch):
    """Batches that do not fit in a read are read again, whole."""
    path, records = filled
    monkeypatch.setattr(decode, "CHUNK_BYTES", 100)

    assert rows_of(path, rows_max=3) == plain(records)


def test_compaction_between_plan_and_read(tmp_path, kernel):
    """A split planned before a compaction yields the records that the log has after it."""
    path = str(tmp_path / "log")
    with virta.open(path, segment_bytes=SEGMENT_BYTES) as log:
        for i in range(60):
            log.append_many([("t", f"k{j % 10}", bytes(200)) for j in range(i, i + 20)])
        plan = Plan(path)
        splits = plan.splits(0, log.next_offset, split_bytes=1)
        plan.close()
        log.compact()
        expected = [r.offset for r in log.read()]

    offsets = []
    for split in splits:
        for rows in read_rows(ScanSpec(path), split, ["offset"], []):
            offsets += memoryview(rows.columns[1]).cast("q").tolist()

    assert offsets == expected
    assert len(expected) < 1200


def test_retention_after_planning_is_a_gap(tmp_path, kernel):
    """Offsets that retention removed raise an error that names them, or are skipped when asked to."""
    path = str(tmp_path / "log")
    with virta.open(path, segment_bytes=SEGMENT_BYTES) as log:
        for _ in range(60):
            log.append_many([("t", "", bytes(300)) for _ in range(10)])
        plan = Plan(path)
        splits = plan.splits(0, log.next_offset, split_bytes=1)
        plan.close()
        log.retain(max_bytes=SEGMENT_BYTES)
        first, end = log.first_offset, log.next_offset
    assert first > 0

    with pytest.raises(LogGapError) as caught:
        list(read_rows(ScanSpec(path), splits[0], ["offset"], []))
    skipped = []
    for split in splits:
        for rows in read_rows(ScanSpec(path, skip_gaps=True), split, ["offset"], []):
            skipped += memoryview(rows.columns[1]).cast("q").tolist()

    assert caught.value.first == 0
    assert skipped == list(range(first, end))


def test_a_repaired_gap_below_the_start(tmp_path, kernel):
    """A read from the end of a gap does not report it, though the segment is read from its beginning."""
    path = str(tmp_path / "log")
    with virta.open(path, durability="none") as log:
        ends = []
        for number in range(30):
            log.append("t", "", b"%d" % number)
            ends.append(log.bytes)
        segment = log.segments()[0].path
    damage(segment, ends[9] + 30, b"broken")
    (tmp_path / "log" / "control").unlink()
    with virta.open(path) as log:
        log.repair()

    assert [row[1] for row in rows_of(path, start=11)] == list(range(11, 30))
    with pytest.raises(LogGapError):
        rows_of(path, start=10)


def test_a_repaired_gap_is_skipped_on_request(tmp_path, kernel):
    """With onGap=skip a read continues after offsets that a repair gave up; their padding is no damage."""
    path = str(tmp_path / "log")
    with virta.open(path, durability="none") as log:
        for number in range(30):
            log.append("t", "", b"%d" % number * 40)
            if number == 9:
                broken = log.bytes + 30
        segment = log.segments()[0].path
    damage(segment, broken, b"broken")
    (tmp_path / "log" / "control").unlink()
    with virta.open(path) as log:
        log.repair()

    assert [row[1] for row in rows_of(path, skip_gaps=True)] == [*range(10), *range(11, 30)]


def damage(path, pos, data):
    with Path(path).open("r+b") as file:
        file.seek(pos)
        file.write(data)


@pytest.mark.parametrize("where", ["header", "payload"])
def test_damage_names_file_and_range_or_is_skipped(tmp_path, kernel, where):
    """A flipped byte is an error with file, bytes and offsets; skipping loses that batch and no other."""
    path = str(tmp_path / "log")
    with virta.open(path, segment_bytes=1 << 20) as log:
        for i in range(30):
            log.append_many([("t", "", f"{i}-{j}".encode()) for j in range(10)])
        segment = log.segments()[0].path
    plan = Plan(path)
    plan.splits(0, 300, split_bytes=1)
    with Segment(Path(path), 0) as file:
        header = file.header
        found = kernel.index(file.fd, 64, file.size, header.salt, header.prev_crc, 0, 300, 1)[0]
    plan.close()
    pos = found[12][0]
    damage(segment, pos + (20 if where == "header" else 60), b"\xaa")

    with pytest.raises(LogCorruptionError) as caught:
        rows_of(path, stop=300)
    problems = tmp_path / "problems"
    kept = rows_of(path, stop=300, skip_corruption=True, problems=str(problems))

    assert caught.value.segment == segment
    assert caught.value.byte_from == pos
    assert (caught.value.offset_from, caught.value.offset_to) == (120, 130)
    assert [row[1] for row in kept] == [*range(120), *range(130, 300)]
    if where == "payload":
        assert len(list(problems.iterdir())) == 1


def test_damage_that_several_report_at_once(tmp_path, monkeypatch):
    """Executors with equal process ids, as in containers, do not remove each other's report."""
    problem = Problem("1.puro", 64, 128, 0, 10, "bad-payload")
    scan = ScanSpec(root=str(tmp_path), problems=str(tmp_path / "problems"))
    replace, both = Path.replace, threading.Barrier(2)

    def together(draft, target):
        both.wait(60)
        replace(draft, target)

    monkeypatch.setattr(Path, "replace", together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: report(scan, problem), range(2)))

    (kept,) = (tmp_path / "problems").iterdir()
    assert json.loads(kept.read_text())["reason"] == "bad-payload"


def test_engines_agree_on_damaged_bytes(filled):
    """On randomly damaged segments both kernels give the same rows, positions and statuses."""
    if arrow.native is None:
        pytest.skip("the native decoder is not built")
    path, _ = filled
    segment = min(Path(path).glob("*.puro"))
    raw = segment.read_bytes()
    salt = int.from_bytes(raw[40:44], "little")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(40):
        damaged = bytearray(raw[: rng.randrange(100, 20_000)])
        for _ in range(rng.choice([0, 1, 2])):
            damaged[rng.randrange(64, len(damaged))] = rng.randrange(256)
        arguments = (
            bytes(damaged),
            64,
            len(damaged),
            salt,
            -1,
            0,
            rng.randrange(50),
            10_000,
            0,
            1 << 62,
        )
        arguments += (None, rng.randrange(32), 25, False, rng.choice([5, 1000]), 1 << 20)

        assert arrow.native.decode(*arguments) == arrow_plain.decode(*arguments)


def test_a_file_cut_short_is_damage(tmp_path, kernel):
    """Published offsets that are no longer in the last file are an error, not a shorter answer."""
    path = str(tmp_path / "log")
    with virta.open(path) as log:
        for i in range(10):
            log.append_many([("t", "", f"{i}-{j}".encode()) for j in range(10)])
        segment = log.segments()[0].path
        plan = Plan(path)
        whole = plan.splits(0, 100)
        os.truncate(segment, log.segments()[0].bytes - 100)

        with pytest.raises(LogCorruptionError, match="short"):
            Plan(path).splits(0, 100)
        with pytest.raises(LogCorruptionError, match="short"):
            [list(read_rows(ScanSpec(path), split, ["offset"], [])) for split in whole]
        plan.close()
