"""
Verify and repair a whole log.

Verify reads everything and checks every header, chain, payload and record checksum, that segments follow each other
without a hole, and that sealed ones are sealed. It changes nothing. Repair runs recovery over every segment: damaged
bytes go to quarantine/, the offsets they held are marked as lost, and the log is whole again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from virta.errors import LogCorruptionError
from virta.log import kernel
from virta.log.codec import REASONS, Status, crc32c_seed
from virta.log.directory import segment_bases, segment_name
from virta.log.limits import BATCH_HEADER_BYTES, READ_CHUNK_BYTES, SEGMENT_HEADER_BYTES
from virta.log.reader import FOREVER
from virta.log.recovery import Problem, find_batch, quarantine, recover
from virta.log.retention import maintaining
from virta.log.segment import FLAG_COMPACTED, NO_SEGMENT, Position, Segment, SegmentHeader, now_us

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.log.handle import Log
    from virta.log.writer import Writer

__all__ = ["Problem", "RepairReport", "VerifyReport", "repair_log", "verify_log"]


class VerifyReport(NamedTuple):
    segments: int
    batches: int
    records: int
    bytes: int
    problems: list[Problem]


class RepairReport(NamedTuple):
    problems: list[Problem]
    quarantined: list[str]
    offsets_lost: int


class _Check:
    """The state of one verification."""

    def __init__(self, log: Log, progress: Callable[[int, int], None] | None) -> None:
        self.log = log
        self.progress = progress
        self.total = 0
        self.batches = self.records = self.bytes = 0
        self.problems: list[Problem] = []
        self.link: tuple[int, int] | None = None  # (next base, header CRC) the last seal named

    def segment(self, base: int, *, last: bool) -> None:
        path = self.log.path / segment_name(base)
        try:
            segment = Segment(self.log.path, base)
        except LogCorruptionError as exc:
            self.problems.append(
                Problem(str(path), exc.byte_from, exc.byte_to, base, exc.offset_to, exc.reason)
            )
            self.bytes += path.stat().st_size
            self.link = None
            return
        with segment:
            self._follows(segment)
            limit, published = self._limit(segment)
            self._walk(segment, limit, last=last, published=published)

    def _follows(self, segment: Segment) -> None:
        if self.link is None:
            return
        following, crc = self.link
        path = str(segment.path)
        if segment.base != following:
            self.problems.append(Problem(path, 0, 0, following, segment.base, "missing"))
        elif crc >= 0 and segment.header.prev_crc != crc:
            self.problems.append(Problem(path, 44, 48, segment.base, None, "chain"))

    def _limit(self, segment: Segment) -> tuple[int, bool]:
        snapshot = self.log.source.snapshot()
        if snapshot is not None and snapshot.current and snapshot.active == segment.base:
            return snapshot.end, True
        return segment.size, False

    def _walk(self, segment: Segment, limit: int, *, last: bool, published: bool) -> None:
        at, want = segment.start(), READ_CHUNK_BYTES
        path, salt = str(segment.path), segment.header.salt
        self.link = None
        while True:
            data = os.pread(segment.fd, max(min(want, limit - at.pos), 0), at.pos)
            rows, *_ = kernel.walk(data, 0, len(data), salt, at.prev, at.next, True)
            records, pos, prev, following, code, detail = kernel.read(
                data, 0, len(data), salt, at.prev, at.next, 0, FOREVER, None, True, True, 1 << 62
            )
            status = Status(code)
            self.batches += len(rows)
            self.records += len(records)
            self.bytes += pos
            at = Position(at.pos + pos, prev, following)
            if self.progress is not None:
                self.progress(min(self.bytes, self.total), self.total)
            want = READ_CHUNK_BYTES
            if status == Status.SEAL:
                flags = segment.header.flags & FLAG_COMPACTED
                self.link = (detail, -1 if flags or at.prev < 0 else at.prev)
                if at.pos < limit:
                    self.problems.append(Problem(path, at.pos, limit, at.next, at.next, "chain"))
                return
            if status == Status.SHORT and at.pos + detail <= limit and data:
                want = max(READ_CHUNK_BYTES, detail)
            elif status in REASONS:
                found = find_batch(segment, at.pos + 1, limit, at.next)
                end, offset_to = found or (limit, None)
                self.problems.append(
                    Problem(path, at.pos, end, at.next, offset_to, REASONS[status])
                )
                if not found:
                    return
                at = Position(end, -1, found[1])
            elif at.pos >= limit or not data:
                break
        if at.pos < limit:
            self.problems.append(Problem(path, at.pos, limit, at.next, None, "short"))
        elif not last:
            self.problems.append(Problem(path, at.pos, at.pos, at.next, None, "short"))
        elif published and segment.size > limit and not self._being_written(segment):
            self.problems.append(Problem(path, limit, segment.size, at.next, None, "short"))

    def _being_written(self, segment: Segment) -> bool:
        """Bytes behind the published end: an append under way, or what a dead writer left?"""
        snapshot = self.log.source.snapshot()
        if snapshot is None or snapshot.active != segment.base:
            return True
        return bool(snapshot.holder) and os.path.exists(f"/proc/{snapshot.holder}")


def verify_log(log: Log, progress: Callable[[int, int], None] | None) -> VerifyReport:
    check = _Check(log, progress)
    bases = segment_bases(log.path)
    check.total = sum((log.path / segment_name(base)).stat().st_size for base in bases)
    for number, base in enumerate(bases):
        check.segment(base, last=number + 1 == len(bases))
    return VerifyReport(len(bases), check.batches, check.records, check.total, check.problems)


def repair_log(
    log: Log, writer: Writer, progress: Callable[[int, int], None] | None
) -> RepairReport:
    """Make every segment valid. Appends wait meanwhile."""
    problems: list[Problem] = []
    kept: list[str] = []
    lost = 0
    with maintaining(log.path), writer.locked():
        bases = segment_bases(log.path)
        for number, base in enumerate(bases):
            path = log.path / segment_name(base)
            _mend_header(log, path, problems, kept)
            following = bases[number + 1] if number + 1 < len(bases) else None
            snapshot = log.source.snapshot()
            promised = 0
            if following is None and snapshot is not None and snapshot.active == base:
                promised = snapshot.next if snapshot.current else 0
            with Segment(log.path, base) as segment:
                found = recover(
                    log.path, segment, segment.start(), promised=promised, following=following
                )
            problems += found.problems
            kept += found.quarantined
            lost += found.lost
            if progress is not None:
                progress(number + 1, len(bases))
        writer.reattach()
    return RepairReport(problems, kept, lost)


def _mend_header(log: Log, path: Path, problems: list[Problem], kept: list[str]) -> None:
    """Rebuild a segment's damaged header; everything in it is known from elsewhere but the salt."""
    base = int(path.name[:20])
    try:
        Segment(log.path, base).close()
    except LogCorruptionError as exc:
        problems.append(
            Problem(str(path), 0, SEGMENT_HEADER_BYTES, base, exc.offset_to, exc.reason)
        )
    else:
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        kept.append(_keep_header(log, path, fd))
        os.pwrite(fd, _rebuilt_header(log, base, fd).pack(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _keep_header(log: Log, path: Path, fd: int) -> str:
    raw = Segment.__new__(Segment)
    raw.path, raw.base, raw.fd = path, int(path.name[:20]), fd
    return quarantine(log.path, raw, 0, SEGMENT_HEADER_BYTES, "bad-header")


def _rebuilt_header(log: Log, base: int, fd: int) -> SegmentHeader:
    """
    The salt is what the first batch header's CRC started from, and a CRC can be run backwards.

    The chain field is the first batch's own `prev`. Flags and epoch are taken as read if they make sense.
    """
    head = os.pread(fd, BATCH_HEADER_BYTES, SEGMENT_HEADER_BYTES)
    old = os.pread(fd, SEGMENT_HEADER_BYTES, 0).ljust(SEGMENT_HEADER_BYTES, b"\0")
    bases = segment_bases(log.path)
    before = [b for b in bases if b < base]
    salt, prev_crc = int.from_bytes(old[40:44], "little"), int.from_bytes(old[44:48], "little")
    created = now_us()
    if len(head) == BATCH_HEADER_BYTES:
        salt = crc32c_seed(head[1:52], int.from_bytes(head[52:56], "little"))
        prev_crc = int.from_bytes(head[44:48], "little")
        created = int.from_bytes(head[16:24], "little")
    epoch = int.from_bytes(old[56:60], "little")
    if before:
        with Segment(log.path, before[-1]) as previous:
            epoch = max(previous.header.epoch, epoch if epoch < previous.header.epoch + 2 else 0)
    flags = int.from_bytes(old[6:8], "little") & FLAG_COMPACTED
    stream = log.stream.bytes
    previous_base = before[-1] if before else NO_SEGMENT
    return SegmentHeader(base, created, stream, salt, prev_crc, previous_base, epoch, flags)
