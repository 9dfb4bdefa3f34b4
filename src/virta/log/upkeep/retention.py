"""
Retention: remove whole sealed segments, oldest first. Readers that have one open finish it undisturbed.

A pin (pins/<id>, a locked file) keeps everything from its offset on; the pin of a process that ended is ignored.
What object storage does not have yet (`shipped.json`) stays, too, if the log is shipped there.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.clock import now_us
from virta.errors import LogTypeError
from virta.log.consumers import consumer
from virta.log.disk_errors import translate_disk_errors
from virta.log.format.directory import (
    PINS,
    SHIPPED,
    index_name,
    maintenance_lock,
    remove_topic_index,
    segment_bases,
    segment_name,
)

if TYPE_CHECKING:
    from pathlib import Path

    from virta.log.log import Log
    from virta.log.seek import SegmentInfo


_pins: weakref.WeakSet[Pin] = weakref.WeakSet()


class RetentionReport(NamedTuple):
    """What was removed (or would be, on a dry run) and the first offset that is left."""

    segments: int
    bytes: int
    records: int
    first_offset: int


class Pin:
    """Keeps retention and compaction away from `offset` and above while it is open and its process runs."""

    @translate_disk_errors("pinning")
    def __init__(self, directory: Path, offset: int) -> None:
        folder = directory / PINS
        files.make_inside(folder)
        self.offset = offset
        self._path = folder / uuid.uuid4().hex
        self._fd = files.open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, json.dumps({"offset": offset}).encode())
        _pins.add(self)

    def close(self) -> None:
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            self.after_fork()

    def after_fork(self) -> None:
        """Close the file in a forked child: the pin is its parent's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def lowest_pin(directory: Path) -> int | None:
    """Return the lowest offset that a running process has pinned."""
    lowest: int | None = None
    folder = directory / PINS
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # Locked. A pin that is just being written has no offset yet: it counts as zero.
            text = os.pread(fd, 4096, 0)
            offset = _pinned_offset(text)
            lowest = offset if lowest is None else min(lowest, offset)
        else:
            if os.fstat(fd).st_size:
                path.unlink(missing_ok=True)  # its process ended
        finally:
            os.close(fd)
    return lowest


def write_shipped(directory: Path, url: str, offset: int) -> None:
    """Record that object storage at `url` has all records below `offset`: retention keeps the others."""
    files.write_whole(
        directory / SHIPPED, json.dumps({"url": url, "offset": offset}).encode() + b"\n"
    )


def shipped_offset(directory: Path) -> int | None:
    """Return the offset below which object storage has all records; None if the log is not shipped."""
    try:
        text = (directory / SHIPPED).read_bytes()
    except FileNotFoundError:
        return None
    return _pinned_offset(text)


def _pinned_offset(text: bytes) -> int:
    """Return the offset in a file; an unreadable or invalid one keeps everything."""
    try:
        offset = json.loads(text)["offset"] if text else 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return offset if type(offset) is int and offset >= 0 else 0


@translate_disk_errors("removing segments of")
def retain(
    log: Log,
    *,
    max_age: timedelta | float | None,
    max_bytes: int | None,
    consumed: bool,
    keep_unread: bool,
    unshipped: bool,
    keep_from: int | None,
    dry_run: bool,
) -> RetentionReport:
    seconds = max_age.total_seconds() if isinstance(max_age, timedelta) else max_age
    for name, value in (("max_age", seconds), ("max_bytes", max_bytes)):
        if value is not None and value < 0:
            raise LogTypeError(f"{name} must not be negative, got {value!r}")
    with maintenance_lock(log.path):
        positions: list[int] = []
        if consumed or keep_unread:
            positions = consumer.advance_consumers(log, dry_run=dry_run)
        slowest = min(positions) if positions else None
        removed = _to_remove(
            log,
            seconds,
            max_bytes,
            slowest,
            consumed=consumed,
            keep_unread=keep_unread,
            kept=(keep_from, None if unshipped else shipped_offset(log.path)),
        )
        if not dry_run:
            for info in removed:
                # The indexes first: a segment is complete without them, not the reverse.
                remove_topic_index(log.path, info.base)
                (log.path / index_name(info.base)).unlink(missing_ok=True)
                (log.path / segment_name(info.base)).unlink(missing_ok=True)
            if removed:
                files.sync_directory(log.path)
        bases = segment_bases(log.path)
        first = removed[-1].next if removed else (bases[0] if bases else 0)
    records = sum(info.next - info.base for info in removed)
    return RetentionReport(len(removed), sum(info.bytes for info in removed), records, first)


def _to_remove(
    log: Log,
    max_age: float | None,
    max_bytes: int | None,
    slowest: int | None,
    *,
    consumed: bool,
    keep_unread: bool,
    kept: tuple[int | None, ...],
) -> list[SegmentInfo]:
    """Return the segments to remove, none from `kept` on; every consumer has read the records below `slowest`."""
    segments = log.segments()
    kept_from = [offset for offset in (lowest_pin(log.path), *kept) if offset is not None]
    total = sum(info.bytes for info in segments)
    oldest = None if max_age is None else now_us() - int(max_age * 1e6)
    removed: list[SegmentInfo] = []
    for info in segments[:-1]:  # the active one always stays
        if not info.sealed or any(info.next > offset for offset in kept_from):
            break
        unread = slowest is not None and info.next > slowest
        if keep_unread and unread:
            break
        too_old = oldest is not None and info.last_time < oldest
        too_much = max_bytes is not None and total > max_bytes
        read_by_all = consumed and slowest is not None and not unread
        if not (too_old or too_much or read_by_all):
            break
        removed.append(info)
        total -= info.bytes
    return removed


def _all_after_fork() -> None:
    for pin in list(_pins):
        pin.after_fork()


os.register_at_fork(after_in_child=_all_after_fork)
