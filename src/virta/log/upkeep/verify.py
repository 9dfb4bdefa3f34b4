"""
Verify and repair a whole log.

Verify reads everything and checks every header, chain, payload and record checksum, that segments follow each other
without a hole, and that sealed ones are sealed. It changes nothing. Repair runs recovery over every segment: damaged
bytes go to quarantine/, and their offsets are marked as lost.
"""

from __future__ import annotations

import os
import struct
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.errors import LogCorruptionError
from virta.log.disk_errors import translate_disk_errors
from virta.log.engine import kernel
from virta.log.format.checksums import crc32c_seed
from virta.log.format.codec import REASONS, Status
from virta.log.format.damage import Problem, describe_damage, find_batch, problem_of
from virta.log.format.directory import maintenance_lock, segment_bases, segment_name
from virta.log.format.segment import (
    FLAG_COMPACTED,
    FLAG_RESEALED,
    FLAG_ZSTD,
    FLAGS_UNLINKED,
    NO_SEGMENT,
    Position,
    Segment,
    SegmentHeader,
    Walk,
)
from virta.log.format.topic_index import index_topics
from virta.log.limits import BATCH_HEADER_BYTES, READ_CHUNK_BYTES, SEGMENT_HEADER_BYTES
from virta.log.reader import FOREVER
from virta.log.seek import total_bytes
from virta.log.upkeep.recovery import quarantine, recover

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.log.engine.writer import Writer
    from virta.log.log import Log


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
        except FileNotFoundError:  # removed by retention
            self.link = None
            return
        except LogCorruptionError as exc:
            self.problems.append(problem_of(exc))
            self.bytes += path.stat().st_size
            self.link = None
            return
        with segment:
            self._follows(segment)
            limit, published = self._limit(segment) if last else (segment.size, False)
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
            size = max(min(want, limit - at.pos), 0)
            data = os.pread(segment.fd, size, at.pos)
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
                flags = segment.header.flags & FLAGS_UNLINKED
                self.link = (detail, -1 if flags or at.prev < 0 else at.prev)
                if segment.data_end(at.pos) > at.pos:
                    self.problems.append(Problem(path, at.pos, limit, at.next, at.next, "chain"))
                return
            if status == Status.SHORT and at.pos + detail <= limit and len(data) == size:
                want = max(READ_CHUNK_BYTES, detail)
            elif status in REASONS:
                if last and not published and segment.data_end(at.pos) == at.pos:
                    return  # headroom
                after = self._damage(segment, at, limit, status)
                if after is None:
                    return
                at = after
            elif at.pos >= limit or not data:
                break
        if at.pos < limit:
            self.problems.append(Problem(path, at.pos, limit, at.next, None, "short"))
        elif not last:
            self.problems.append(Problem(path, at.pos, at.pos, at.next, None, "short"))
        elif published and (left := self._unpublished_bytes(segment)) is not None:
            self.problems.append(Problem(path, *left, None, "short"))

    def _damage(
        self, segment: Segment, at: Position, limit: int, status: Status
    ) -> Position | None:
        """Record the damage at `at`; return where the next valid batch starts, if there is one."""
        problem, after = describe_damage(segment, at, limit, REASONS[status])
        self.problems.append(problem)
        return after

    def _unpublished_bytes(self, segment: Segment) -> tuple[int, int, int] | None:
        """Return (from, to, next offset) of bytes after the published end that a dead writer left, or None."""
        seen: set[tuple[int, int, int]] = set()
        for _ in range(2):
            before = self.log.source.snapshot()
            if before is None or before.active != segment.base:
                return None
            used = segment.data_end(before.end)
            after = self.log.source.snapshot()
            # A running append has moved the end by now, or its process still has the lock.
            if after is None or (after.active, after.end) != (before.active, before.end):
                return None
            if used == before.end or (after.holder and os.path.exists(f"/proc/{after.holder}")):
                return None
            seen.add((before.end, used, before.next))
        return seen.pop() if len(seen) == 1 else None  # else a failed append removed them


@translate_disk_errors("verifying")
def verify_log(log: Log, progress: Callable[[int, int], None] | None) -> VerifyReport:
    check = _Check(log, progress)
    bases = segment_bases(log.path)
    check.total = total_bytes(log)
    for number, base in enumerate(bases):
        check.segment(base, last=number + 1 == len(bases))
    snapshot = log.source.snapshot()
    if snapshot is not None and snapshot.current and not bases[-1:] >= [snapshot.active]:
        # The active segment was removed, unless it was created during this check.
        path = log.path / segment_name(snapshot.active)
        if not path.exists():
            lost = Problem(str(path), 0, 0, snapshot.active, snapshot.next, "missing")
            check.problems.append(lost)
    return VerifyReport(len(bases), check.batches, check.records, check.total, check.problems)


@translate_disk_errors("repairing")
def repair_log(
    log: Log, writer: Writer, progress: Callable[[int, int], None] | None
) -> RepairReport:
    """Make every segment valid; appends wait until it is done."""
    problems: list[Problem] = []
    kept: list[str] = []
    lost = 0
    with maintenance_lock(log.path), writer.locked():
        bases = segment_bases(log.path)
        for number, base in enumerate(bases):
            path = log.path / segment_name(base)
            _repair_header(log, path, problems, kept)
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
        writer.reattach(lost=lost > 0)
        index_topics(log.path)  # recovery has removed all of them
    return RepairReport(problems, kept, lost)


def _repair_header(log: Log, path: Path, problems: list[Problem], kept: list[str]) -> None:
    """Rebuild a segment's damaged header; everything but the salt is known from elsewhere."""
    base = int(path.name[:20])
    try:
        Segment(log.path, base).close()
    except LogCorruptionError as exc:
        problems.append(problem_of(exc))
    else:
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        kept.append(_quarantine_header(log, path, fd))
        files.write_all(fd, _rebuilt_header(log, base, fd).pack(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _quarantine_header(log: Log, path: Path, fd: int) -> str:
    raw = Segment.__new__(Segment)
    raw.path, raw.base, raw.fd = path, int(path.name[:20]), os.dup(fd)
    with raw:
        return quarantine(log.path, raw, 0, SEGMENT_HEADER_BYTES, "bad-header")


def _rebuilt_header(log: Log, base: int, fd: int) -> SegmentHeader:
    """
    Try the possible values of the fields, as read or as other segments imply; the header's CRC confirms them.

    The salt is what the first batch header's CRC started from, and a CRC can be run backwards; the chain field is
    the first batch's own `prev`, or what the segment before ends with.
    """
    old = os.pread(fd, SEGMENT_HEADER_BYTES, 0).ljust(SEGMENT_HEADER_BYTES, b"\0")
    head = os.pread(fd, BATCH_HEADER_BYTES, SEGMENT_HEADER_BYTES)
    flags, _, created, _, salt, prev_crc, _, epoch = struct.unpack_from("<HQQ16sIIQI", old, 6)
    salts, prevs, times, epochs = [salt], [prev_crc], [created], [epoch]
    before = [b for b in segment_bases(log.path) if b < base]
    if before:
        with Segment(log.path, before[-1]) as previous:
            epochs.append(previous.header.epoch)
            if not previous.header.flags & FLAGS_UNLINKED:
                seal = Walk(previous, previous.start(), previous.size).run().at.prev
                prevs.insert(0, max(seal, 0))
    if len(head) == BATCH_HEADER_BYTES:
        salts.append(crc32c_seed(head[1:52], int.from_bytes(head[52:56], "little")))
        prevs.insert(len(prevs) - 1, int.from_bytes(head[44:48], "little"))
        times.append(int.from_bytes(head[16:24], "little"))
    kinds = [
        kind | zstd
        for zstd in dict.fromkeys((flags & FLAG_ZSTD, 0, FLAG_ZSTD))
        for kind in (flags & FLAGS_UNLINKED, 0, FLAG_COMPACTED, FLAG_RESEALED, FLAGS_UNLINKED)
    ]
    stream, previous_base = log.stream.bytes, before[-1] if before else NO_SEGMENT
    guesses = [
        SegmentHeader(base, *fields[:1], stream, *fields[1:3], previous_base, *fields[3:])
        for fields in product(times, salts, prevs, epochs, kinds)
    ]
    for guess in guesses:
        if guess.pack()[60:] == old[60:]:
            return guess
    for guess in guesses:
        # The CRC itself is damaged. CRC-8 alone proves little, so the link must fit too.
        if guess.pack()[:60] == old[:60] and guess.prev_crc == prevs[0]:
            return guess
    # Nothing fits: use what makes batches readable, and do not check the link to the next segment.
    fallback = guesses[0]._replace(
        epoch=min(epoch, epochs[-1] + 1), flags=flags & (FLAGS_UNLINKED | FLAG_ZSTD) | FLAG_RESEALED
    )
    choices = [fallback._replace(salt=s) for s in salts]
    return next((header for header in choices if _readable(log, header, fd)), fallback)


def _readable(log: Log, header: SegmentHeader, fd: int) -> bool:
    raw = Segment.__new__(Segment)
    raw.path, raw.base, raw.fd = log.path / segment_name(header.base), header.base, os.dup(fd)
    raw.header = header
    with raw:
        return find_batch(raw, SEGMENT_HEADER_BYTES, raw.size, header.base) is not None
