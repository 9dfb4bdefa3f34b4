"""
Recovery: what a writer with the lock does when the control page and the files disagree.

Walk from the last trusted batch. Complete, valid batches are adopted: their writer died before publishing them.
What follows is copied to quarantine/ and
  * cut off, when no valid batch comes after it (a torn tail);
  * overwritten by a repair batch, when one does (a hole). A valid later batch is never truncated.
Zeros are headroom (docs/format.md §5.5): cut off, and not reported.
Published offsets that are lost are never used again: a repair batch spans them, readers get an explicit gap, and
the next segment has a higher epoch.

Readers never repair; `repair` runs the same code over all segments.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.clock import now_us
from virta.errors import LogSyncError
from virta.log.engine import kernel
from virta.log.format.codec import (
    FLAG_REPAIR,
    FLAG_SEAL,
    Status,
    fill_header,
    gap_record,
    seal_record,
)
from virta.log.format.damage import Problem, find_batch
from virta.log.format.directory import QUARANTINE, remove_topic_index
from virta.log.format.segment import FLAG_RESEALED, Position, Segment, Walk, WalkEnd, unwritten
from virta.log.limits import BATCH_HEADER_BYTES, READ_CHUNK_BYTES, SEGMENT_HEADER_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from virta.log.engine.kernel import Snapshot

logger = logging.getLogger("virta.log")


class Recovered(NamedTuple):
    """What recovery found: the end of the valid part, and what was repaired."""

    at: Position
    last_pos: int  # of the last batch, 0: none
    last_time: int
    sealed_next: int | None  # the segment is sealed, the next one starts there
    problems: list[Problem]
    quarantined: list[str]
    lost: int  # published offsets whose records are lost


def quarantine(directory: Path, segment: Segment, start: int, end: int, reason: str) -> str:
    """Copy bytes that will be removed, with a note of where they were; return the copy's path."""
    folder = directory / QUARANTINE
    files.make_inside(folder)
    stem = f"{segment.path.stem}-{start}-{end}-{now_us()}"
    target = folder / f"{stem}.bin"
    with open(target, "xb", opener=files.open_file) as file:
        pos = start
        while pos < end:
            data = os.pread(segment.fd, min(READ_CHUNK_BYTES, end - pos), pos)
            if not data:
                break
            file.write(data)
            pos += len(data)
        file.flush()
        os.fsync(file.fileno())
    note = {"segment": segment.path.name, "byte_from": start, "byte_to": end, "reason": reason}
    files.write_text(folder / f"{stem}.json", json.dumps(note) + "\n")
    files.sync_directory(folder)
    return str(target)


def repair_batch(segment: Segment, at: Position, time: int, lost: int, size: int | None) -> bytes:
    """Return a batch that spans `lost` offsets, `size` bytes long if it must fill a hole."""
    payload = gap_record(lost) if lost else b""
    if size is not None:
        length = size - BATCH_HEADER_BYTES
        payload = payload.ljust(length, b"\0") if len(payload) <= length else bytes(length)
    return _control_batch(segment.header.salt, at, time, lost, FLAG_REPAIR, payload)


def seal_batch(salt: int, at: Position, time: int, following: int) -> bytes:
    """Return the batch that ends a segment and names the next."""
    return _control_batch(salt, at, time, 0, FLAG_SEAL, seal_record(following, at.pos))


def _control_batch(
    salt: int, at: Position, time: int, count: int, flags: int, payload: bytes
) -> bytes:
    buf = bytearray(BATCH_HEADER_BYTES) + payload
    fill_header(
        buf,
        salt=salt,
        base=at.next,
        time=time,
        count=count,
        prev=max(at.prev, 0),
        flags=flags,
        crc=kernel.crc32c,
    )
    return bytes(buf)


def scan_segment(segment: Segment, start: Position, size: int) -> tuple[WalkEnd, int, int]:
    """Walk with payload checks; return the end, and the last batch's position (0: none) and time."""
    walk = Walk(segment, start, size, check_payload=True)
    last_pos, last_time = 0, segment.header.created
    for batches in walk:
        last_pos, last_time = batches[-1].pos, batches[-1].time
    return walk.end, last_pos, last_time


def trusted_end(segment: Segment, snapshot: Snapshot) -> Position | None:
    """Return the end that the control page names, if the batch it names as last is there."""
    if not snapshot.current or snapshot.active != segment.base or snapshot.end > segment.size:
        return None
    if snapshot.last_pos == 0:
        return segment.start() if snapshot.end == SEGMENT_HEADER_BYTES else None
    head = os.pread(segment.fd, BATCH_HEADER_BYTES, snapshot.last_pos)
    base = int.from_bytes(head[8:16], "little")
    # With its payload: a copy of a live directory may have the header and zeros for the rest.
    start = Position(snapshot.last_pos, -1, base)
    last = Walk(segment, start, snapshot.end, check_payload=True).run()
    named = Position(snapshot.end, last.at.prev, snapshot.next)
    return named if last.status == Status.END and last.at == named else None


def recover(
    directory: Path,
    segment: Segment,
    start: Position,
    *,
    promised: int = 0,
    exact: bool = False,
    following: int | None = None,
) -> Recovered:
    """
    Make a segment valid up to its end. The caller has the write lock or the maintenance lock.

    Args:
        start: a position up to which the segment is valid.
        promised: the next offset as published; missing offsets below it are lost.
        exact: nothing after `start` was ever published.
        following: the next segment's base: this one must be sealed and reach it.
    """
    remove_topic_index(directory, segment.base)  # it may change now
    problems: list[Problem] = []
    kept: list[str] = []
    lost = 0
    at, last_pos, last_time = start, 0, segment.header.created
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            size = segment.size
            end, pos, time = scan_segment(segment, at, size)
            at = end.at
            if pos:
                last_pos, last_time = pos, time
            if at.pos == size or _headroom_cut(segment, fd, end, following):
                break
            problem, hole = _damage_at_end(segment, end, size)
            problems.append(problem)
            kept.append(quarantine(directory, segment, at.pos, problem.byte_to, problem.reason))
            logger.warning("log_repaired %s", problem)
            if hole is None:
                os.ftruncate(fd, at.pos)
                if not exact:
                    promised = max(promised, problem.offset_to or 0)
                break
            count = hole[1] - at.next
            batch = repair_batch(segment, at, last_time, count, hole[0] - at.pos)
            files.write_all(fd, batch, at.pos)
            lost += count
        sealed_next = end.detail if end.status == Status.SEAL else following
        reach = promised if following is None else following
        sealed = end.status == Status.SEAL
        if sealed and following is not None and following != end.detail:
            problem, at = _unseal(segment, fd, at, last_pos, following)
            problems.append(problem)
            sealed = False
        if not sealed and not problems and (reach > at.next or following is not None):
            # Published offsets or the seal are missing without a damaged byte: the file was cut.
            problems.append(Problem(str(segment.path), at.pos, at.pos, at.next, reach, "short"))
        if not sealed and reach > at.next:
            batch = repair_batch(segment, at, last_time, reach - at.next, None)
            files.write_all(fd, batch, at.pos)
            lost += reach - at.next
            last_pos, at = at.pos, Position(at.pos + len(batch), -1, reach)
        if not sealed and following is not None:
            _reseal(segment, fd, at, last_time, following)
        _sync(fd, segment)
    finally:
        os.close(fd)
    return Recovered(at, last_pos, last_time, sealed_next, problems, kept, lost)


def _sync(fd: int, segment: Segment) -> None:
    try:
        os.fdatasync(fd)
    except OSError as exc:
        raise LogSyncError(
            f"fsync of {segment.path} failed ({exc.strerror}): what was recovered is not safe; "
            "check the disk, then open the log again"
        ) from exc


def _headroom_cut(segment: Segment, fd: int, end: WalkEnd, following: int | None) -> bool:
    """Cut off headroom after a seal, or at the end of a segment that needs no seal yet."""
    at = end.at.pos
    if (following is not None and end.status != Status.SEAL) or segment.data_end(at) > at:
        return False
    os.ftruncate(fd, at)
    return True


def _reseal(segment: Segment, fd: int, at: Position, last_time: int, following: int) -> None:
    # The flag first: set without need, it only skips one check.
    segment.header = segment.header._replace(flags=segment.header.flags | FLAG_RESEALED)
    files.write_all(fd, segment.header.pack(), 0)
    files.write_all(fd, seal_batch(segment.header.salt, at, last_time, following), at.pos)


def _unseal(
    segment: Segment, fd: int, at: Position, seal: int, following: int
) -> tuple[Problem, Position]:
    """Remove a seal that names a segment that no longer exists; its offsets are lost."""
    problem = Problem(str(segment.path), seal, at.pos, at.next, following, "missing")
    prev = int.from_bytes(os.pread(fd, 4, seal + 44), "little")
    os.ftruncate(fd, seal)
    return problem, Position(seal, prev, at.next)


def _damage_at_end(
    segment: Segment, end: WalkEnd, size: int
) -> tuple[Problem, tuple[int, int] | None]:
    """Return the damage at the end of a walk, and (position, base) of the next valid batch, if any."""
    at = end.at
    path = str(segment.path)
    used = segment.sectors_end(at.pos)
    if end.status == Status.SEAL:
        return Problem(path, at.pos, used, at.next, at.next, "chain"), None
    hole = None
    search = at.pos + 1
    while (hole := find_batch(segment, search, size, at.next)) is not None:
        if hole[0] - at.pos >= BATCH_HEADER_BYTES:
            break
        search = hole[0] + 1  # too close for a repair batch before it: skip that one as well
    if hole is not None:
        return Problem(path, at.pos, hole[0], at.next, hole[1], end.reason), hole
    offset_to = None
    if end.status == Status.BAD_PAYLOAD and not unwritten(segment, at):
        # The header is valid: it has the number of offsets of the lost payload.
        count = struct.unpack("<I", os.pread(segment.fd, 4, at.pos + 24))[0]
        offset_to = at.next + count
    return Problem(
        path, at.pos, used if used > at.pos else size, at.next, offset_to, end.reason
    ), None
