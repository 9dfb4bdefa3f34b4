"""Headroom: zeros after the end make appends cheap and are invisible to readers."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest

import virta
from virta.log.format.directory import segment_bases, segment_name
from virta.log.limits import (
    BATCH_HEADER_BYTES,
    HEADROOM_BATCH_MAX,
    HEADROOM_MAX,
    HEADROOM_MIN,
    SEGMENT_HEADER_BYTES,
)
from virta.log.upkeep import retention

pytestmark = pytest.mark.usefixtures("either_kernel")


def active(log):
    """The file that is written to, what of it is data, and its size."""
    path = log.path / segment_name(segment_bases(log.path)[-1])
    return path, log.segments()[-1].bytes, path.stat().st_size


def values(path, **options):
    with virta.open(path, read_only=True, visibility="committed") as log:
        return [record.value for record in log.read(**options)]


@pytest.mark.parametrize("level", ["none", "interval", "group", "fsync"])
def test_appends_write_ahead_and_closing_cuts(tmp_path, level):
    """The file is longer than its data, in zeros; sizes, segments and verify speak of the data; close gives it back."""
    with virta.open(tmp_path / "log", durability=level) as log:
        log.append("t", "", b"one")
        file, end, size = active(log)
        assert end < size <= end + HEADROOM_MIN + 4096
        assert file.read_bytes()[end:] == bytes(size - end)
        assert log.bytes == log.verify().bytes == end
        assert log.verify().problems == []
    assert file.stat().st_size == end
    assert values(tmp_path / "log") == [b"one"]


def test_steps_grow_with_use_up_to_their_limits(tmp_path):
    """Headroom doubles as it is used up, to HEADROOM_MAX; there is none behind segment_bytes, nor for large batches."""
    with virta.open(tmp_path / "log", durability="fsync") as log:
        seen = set()
        for _ in range(40):
            log.append("t", "", bytes(HEADROOM_BATCH_MAX - 100))
            _, end, size = active(log)
            seen.add(size - end)
        assert HEADROOM_MAX - HEADROOM_BATCH_MAX < max(seen) < HEADROOM_MAX + 4096
        log.append("t", "", bytes(HEADROOM_MAX + HEADROOM_BATCH_MAX))
        _, end, size = active(log)
        assert size == end
    with virta.open(tmp_path / "small", segment_bytes=5000) as log:
        for _ in range(40):
            log.append("t", "", bytes(300))
            _, end, size = active(log)
            assert end <= size <= 5000
        assert len(log.segments()) > 2


def test_a_sealed_segment_ends_with_its_seal(tmp_path):
    """Rolling over takes the rest of the headroom away, and retention by bytes counts data only."""
    with virta.open(tmp_path / "log", segment_bytes=20_000) as log:
        for _ in range(100):
            log.append("t", "", bytes(700))
        infos = log.segments()
        assert len(infos) > 3
        for info in infos[:-1]:
            assert info.sealed
            assert os.path.getsize(info.path) == info.bytes
            with open(info.path, "rb") as file:
                assert file.read()[-21 - BATCH_HEADER_BYTES :][1:5] == b"\x36\x01\x04\x00"
        assert log.bytes == sum(info.bytes for info in infos)
        assert log.retain(max_bytes=log.bytes) == retention.RetentionReport(0, 0, 0, 0)
        assert log.verify().problems == []


def test_writers_share_it(tmp_path):
    """Handles of every durability write into the headroom that one of them made; any may close first."""
    path = tmp_path / "log"
    first, second = virta.open(path), virta.open(path, durability="none")
    first.append("t", "", b"0")
    before = active(first)[2]
    for number in range(1, 20):
        writer, level = ((first, "fsync"), (second, None), (second, "interval"))[number % 3]
        writer.append("t", "", b"%d" % number, durability=level)
        assert active(first)[2] == before
    second.close()
    assert active(first)[2] == before
    first.close()
    assert values(path) == [b"%d" % number for number in range(20)]
    with virta.open(path) as log:
        assert log.recovered == []


@pytest.mark.parametrize("control", ["kept", "lost"])
def test_a_copy_of_a_live_directory(tmp_path, control):
    """Copied under its writer, zeros and all, with or without the control page: whole, for readers and writers."""
    path, copy = tmp_path / "log", tmp_path / "copy"
    with virta.open(path) as log:
        for number in range(10):
            log.append("t", "", b"%d" % number)
        shutil.copytree(path, copy)
    if control == "lost":
        (copy / "control").unlink()
    with virta.open(copy, read_only=True) as log:
        assert log.next_offset == 10
        assert log.bytes == active(log)[1]
        assert log.verify().problems == []
        assert len(list(log.read(follow=True, timeout=0.01))) == 10
        assert active(log)[2] > log.bytes
    with virta.open(copy) as log:
        assert log.append("t", "", b"10") == 10
        assert log.recovered == []
        assert log.repair().problems == []
        assert log.append("t", "", b"11") == 11
    assert values(copy) == [b"%d" % number for number in range(12)]
    assert not (copy / "quarantine").exists()


@pytest.mark.parametrize("control", ["kept", "lost"])
@pytest.mark.parametrize("keep", [1, 30, 56, 57, 512, 3000, 5000])
def test_a_batch_torn_in_the_headroom(tmp_path, keep, control):
    """Half a batch and then zeros, its writer dead: the records before it stay, its bytes are set aside, no epoch."""
    batch = b"\0"
    for number in range(50):
        path = tmp_path / f"log{number}"
        with virta.open(path) as log:
            log.append("t", "", b"safe")
            file, end, _ = active(log)
            image = {name: (path / name).read_bytes() for name in ("control", file.name)}
            log.append("t", "", b"torn" * 1500)
            batch = file.read_bytes()[end : active(log)[1]]
        # The first byte is a CRC-8: one log in 256 has a zero there, which alone is headroom and no torn batch.
        if batch[0]:
            break
    if control == "lost":
        keep += (
            -(end + keep) % 512
        )  # only the page says where the batch ends: the disk has whole sectors
    data = bytearray(image[file.name].ljust(end + 9000, b"\0"))
    data[end : end + keep] = batch[:keep]
    file.write_bytes(data)
    page = bytearray(image["control"])
    page[116] = 1  # as its writer left it
    (path / "control").write_bytes(page)
    if control == "lost":
        (path / "control").unlink()
    assert values(path) == [b"safe"]
    with virta.open(path) as log:
        assert len(log.recovered) == 1
        assert (log.epoch, log.next_offset) == (0, 1)
        assert log.append("t", "", b"next") == 1
        assert log.verify().problems == []
    (kept,) = (path / "quarantine").glob("*.bin")
    assert kept.read_bytes().rstrip(b"\0") == batch[:keep].rstrip(b"\0")
    assert values(path) == [b"safe", b"next"]


def test_a_whole_batch_that_was_not_published_is_adopted(tmp_path):
    """Death between the write and the publication, inside the headroom: the record is there."""
    path = tmp_path / "log"
    with virta.open(path) as log:
        log.append("t", "", b"one")
        page = bytearray((path / "control").read_bytes())
        log.append("t", "", b"two")
        page[116] = 1
        (path / "control").write_bytes(page)
        assert log.append("t", "", b"three") == 2
        assert log.recovered == []
    assert values(path) == [b"one", b"two", b"three"]


def test_what_is_not_zero_there_is_reported(tmp_path):
    """A stray byte in the headroom: verify names it, readers do not see it, repair takes it away."""
    path = tmp_path / "log"
    with virta.open(path) as log:
        log.append("t", "", b"one")
        file, end, size = active(log)
        with file.open("r+b") as stream:
            stream.seek(size - 10)
            stream.write(b"!")
        (problem,) = log.verify().problems
        assert (problem.byte_from, problem.byte_to) == (end, size - 9)
        assert [record.value for record in log.read()] == [b"one"]
        log.repair()
        assert log.verify().problems == []
        assert log.append("t", "", b"two") == 1


KILLED = """
import os, signal, sys, virta
log = virta.open(sys.argv[1])
for number in range(20):
    log.append("t", "", b"%d" % number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_headroom_of_a_killed_writer_is_not_reported(tmp_path, either_kernel):
    """The next writer uses the headroom that a killed one left, and reports nothing."""
    path = tmp_path / "log"
    env = {**os.environ, "VIRTA_PLAIN": "1" if either_kernel == "plain" else ""}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    with virta.open(path) as log:
        _, end, size = active(log)
        assert size > end
        assert log.append("t", "", b"20") == 20
        assert active(log)[2] == size
        assert log.recovered == []
    assert values(path) == [b"%d" % number for number in range(21)]
    assert not (path / "quarantine").exists()


def test_a_limit_on_file_sizes_only_takes_the_headroom(tmp_path):
    """Where zeros ahead are refused (EFBIG here), appends that fit are not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with virta.open(tmp_path / "log") as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT_HEADER_BYTES + 4000, hard))
        try:
            for number in range(20):
                assert log.append("t", "", b"%d" % number) == number
            _, end, size = active(log)
            assert size == end
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.append("t", "", b"20")
        _, end, size = active(log)
        assert size > end
        assert log.recovered == []
    assert values(tmp_path / "log") == [b"%d" % number for number in range(21)]
