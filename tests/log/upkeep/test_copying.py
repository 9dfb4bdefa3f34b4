"""Copies of a log that others write to: whole, private, and never of less than was durable."""

from __future__ import annotations

import shutil
import threading

import pytest

import virta
from virta.errors import LogError, LogWriteError
from virta.log.format.directory import segment_bases, segment_name
from virta.log.upkeep import copying
from virta.log.upkeep.copying import copy_file, copy_log, copy_tree, is_log

SEGMENT_BYTES = 64 * 1024


def filled(path, count):
    log = virta.open(path, segment_bytes=SEGMENT_BYTES)
    for first in range(0, count, 50):
        log.append_many([("t", "", b"%06d" % n + b"x" * 200) for n in range(first, first + 50)])
    return log


def values(path):
    with virta.open(path, read_only=True) as log:
        return [bytes(record.value[:6]) for record in log.read()]


def test_a_copy_has_everything(tmp_path):
    """Records, the log's id, and the positions of consumers."""
    with filled(tmp_path / "log", 1000) as log:
        with log.consumer("c") as consumer:
            for record in consumer.read():
                if record.offset == 499:
                    break
            consumer.commit()
        following = copy_log(log.path, tmp_path / "copy")
        infos = log.consumers()

        assert following == log.next_offset == 1000
        assert values(tmp_path / "copy") == values(log.path)
        with virta.open(tmp_path / "copy") as copy:
            assert copy.id == log.id
            assert [(one.name, one.lag) for one in copy.consumers()] == [
                (one.name, one.lag) for one in infos
            ]
            assert copy.append("t", "", b"more").offset == 1000
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "copy").iterdir())


def test_a_copy_under_a_writer_is_a_prefix(tmp_path):
    """With all that was there when it began, though segments roll over meanwhile."""
    stop, written = threading.Event(), threading.Event()
    with filled(tmp_path / "log", 500) as log:

        def write():
            number = 500
            while not stop.is_set():
                batch = [("t", "", b"%06d" % n + b"x" * 500) for n in range(number, number + 20)]
                log.append_many(batch)
                number += 20
                written.set()

        thread = threading.Thread(target=write)
        thread.start()
        assert written.wait(60)
        try:
            began = log.next_offset
            copied = [copy_log(log.path, tmp_path / f"copy{n}") for n in range(3)]
        finally:
            stop.set()
            thread.join(60)
        everything = values(log.path)

    assert copied == sorted(copied)
    assert copied[0] >= began
    for number, following in enumerate(copied):
        assert values(tmp_path / f"copy{number}") == everything[:following]


def test_a_segment_that_disappears_is_tried_again(tmp_path, monkeypatch):
    """A second attempt starts from nothing; one that always fails is an error."""
    failures = []

    def vanishing(source, target, copy=copy_file):
        if source.name == segment_name(0) and len(failures) < limit:
            failures.append(target)
            raise FileNotFoundError(2, "gone", str(source))
        copy(source, target)

    monkeypatch.setattr(copying, "copy_file", vanishing)
    with filled(tmp_path / "log", 100) as log:
        limit = 1
        assert copy_log(log.path, tmp_path / "copy") == 100
        limit = 1 + copying.TRIES_MAX
        with pytest.raises(LogWriteError, match="copying"):
            copy_log(log.path, tmp_path / "other")
    assert len(failures) == 1 + copying.TRIES_MAX
    assert values(tmp_path / "copy") == [b"%06d" % n for n in range(100)]


def test_damage_is_not_copied_silently(tmp_path):
    """A copy whose checksums do not fit is refused."""
    with filled(tmp_path / "log", 1000) as log:
        damaged = log.path / segment_name(segment_bases(log.path)[0])
        data = bytearray(damaged.read_bytes())
        data[SEGMENT_BYTES // 2] ^= 0xFF
        damaged.write_bytes(data)
        with pytest.raises(LogError, match="damage"):
            copy_log(log.path, tmp_path / "copy")


def test_what_is_a_log(tmp_path):
    with filled(tmp_path / "log", 50):
        pass
    (tmp_path / "other").mkdir()

    assert is_log(tmp_path / "log")
    assert not is_log(tmp_path / "other")
    assert not is_log(tmp_path / "none")
    with pytest.raises(LogError):
        copy_log(tmp_path / "other", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)


def test_a_tree_with_files_that_come_and_go(tmp_path, monkeypatch):
    """A file that disappears while the tree is copied is left out."""
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    for name in ("a", "b", "inner/c"):
        (source / name).write_text(name)

    def vanishing(path, target, copy=copy_file):
        if path.name == "b":
            path.unlink()
        copy(path, target)

    monkeypatch.setattr(copying, "copy_file", vanishing)
    copy_tree(source, tmp_path / "target")

    found = sorted(
        str(p.relative_to(tmp_path / "target")) for p in (tmp_path / "target").rglob("*")
    )
    assert found == ["a", "inner", "inner/c"]
    assert (tmp_path / "target/inner/c").read_text() == "inner/c"
