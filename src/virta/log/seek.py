"""Resolve start points and times to offsets, and describe the segments of a log."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from virta.clock import now_us
from virta.errors import ConsumerError, LogCorruptionError, LogTypeError
from virta.log.consumers.positions import position_of
from virta.log.disk_errors import translate_disk_errors
from virta.log.format.codec import Status
from virta.log.format.directory import segment_bases, segment_name
from virta.log.format.index import load_index
from virta.log.format.segment import FLAG_COMPACTED, Segment, Walk
from virta.log.record import timestamp_of

if TYPE_CHECKING:
    from pathlib import Path

    from virta.log.log import Log


class SegmentInfo(NamedTuple):
    """One segment as `log.segments()` reports it; `next` is the offset after its last."""

    path: str
    base: int
    next: int
    bytes: int
    created: int
    last_time: int
    sealed: bool
    compacted: bool


def resolve(log: Log, start: object) -> int:
    """Return the offset that a start (or end) point means now."""
    if isinstance(start, bool):
        raise _bad_start(start)
    if isinstance(start, int):
        if start < 0:
            raise _bad_start(start)
        return int(start)
    if isinstance(start, datetime):
        return offset_at(log, timestamp_of(start))
    if start == "earliest":
        return log.first_offset
    if start == "latest":
        return log.next_offset
    if isinstance(start, str):
        name = start.removeprefix("consumer:")
        position = position_of(log.path, name)
        if position is None:
            raise ConsumerError(
                f"no consumer named {name!r} in {log.path}; a start is 'earliest', 'latest', an offset, "
                "a datetime or a consumer's name",
                code="consumer_unknown",
            )
        return position
    raise _bad_start(start)


def _bad_start(start: object) -> LogTypeError:
    return LogTypeError(
        "a start must be 'earliest', 'latest', an offset from 0 up, a datetime or a consumer's name, "
        f"got {start!r}"
    )


def offset_at(log: Log, time: int) -> int:
    """Return the first offset appended at or after `time` (µs); the end if all records are older."""
    end = log.next_offset  # read first, so that records appended during the search are not skipped
    for base in log.source.bases():
        # Retention may have removed it.
        with suppress(FileNotFoundError), log.source.open_segment(base) as segment:
            index = load_index(segment.path.parent, base, segment.header.salt)
            if index is not None and index.last_time < time:
                continue
            start = segment.start() if index is None else index.position_at(time) or segment.start()
            for batches in Walk(segment, start, segment.size):
                for batch in batches:
                    if batch.time >= time and batch.span:
                        return min(batch.base, end)
    return end


@translate_disk_errors("finding the end of")
def valid_end(directory: Path) -> int:
    """Return the next offset by the files alone: the end of the valid part of the last segment."""
    segment = last_segment(directory)
    if segment is None:
        return 0
    with segment:
        return Walk(segment, segment.start(), segment.size, check_payload=True).run().at.next


def epoch(directory: Path) -> int:
    """Return the epoch of the last segment, 0 if there is none."""
    segment = last_segment(directory)
    if segment is None:
        return 0
    with segment:
        return segment.header.epoch


def last_segment(directory: Path) -> Segment | None:
    """Open the segment with the highest base; None if there is none."""
    bases = segment_bases(directory)
    while bases:
        try:
            return Segment(directory, bases[-1])
        except FileNotFoundError:  # another process rolled over and removed it
            known, bases = bases, segment_bases(directory)
            if bases[-1:] == known[-1:]:
                raise
    return None


def clock_ahead(log: Log) -> float:
    """Return the seconds by which the newest record is ahead of this machine's clock, 0.0 when that is not known."""
    snapshot = log.source.snapshot()
    if snapshot is not None and snapshot.current:
        last_time = snapshot.last_time
    else:
        try:
            rows = describe(log)
        except LogCorruptionError:
            return 0.0  # reading and verifying report the damage
        last_time = rows[-1].last_time if rows else 0
    return max(last_time - now_us(), 0) / 1e6


def total_bytes(log: Log) -> int:
    """Return the size of all segments, without the active one's headroom."""
    bases = segment_bases(log.path)
    total = 0
    for base in bases[:-1]:
        with suppress(FileNotFoundError):  # removed by retention
            total += (log.path / segment_name(base)).stat().st_size
    snapshot = log.source.snapshot()
    if bases and snapshot is not None and snapshot.current and snapshot.active == bases[-1]:
        return total + snapshot.end
    for base in bases[-1:]:
        try:
            with Segment(log.path, base) as segment:
                walked = Walk(segment, segment.start(), segment.size).run().at.pos
                total += segment.data_end(walked)
        except LogCorruptionError:
            total += (log.path / segment_name(base)).stat().st_size
    return total


@translate_disk_errors("reading the segments of")
def describe(log: Log) -> list[SegmentInfo]:
    """Return the details of every segment."""
    rows: list[SegmentInfo] = []
    bases = segment_bases(log.path)
    published = log.source.snapshot()
    for number, base in enumerate(bases):
        try:
            segment = Segment(log.path, base)
        except FileNotFoundError:
            rows.clear()  # retention removed it, and with it the older ones
            continue
        with segment:
            header, size = segment.header, segment.size
            index = load_index(log.path, base, header.salt)
            if index is not None:
                following, last_time, sealed = index.next, index.last_time, True
            elif published is not None and published.current and published.active == base:
                following, last_time, sealed = published.next, published.last_time, False
                size = published.end
            else:
                walk = Walk(segment, segment.start(), size)
                last_time = header.created
                for batches in walk:
                    last_time = batches[-1].time
                following, sealed = walk.end.at.next, walk.end.status == Status.SEAL
                size = segment.data_end(walk.end.at.pos)
                if number + 1 == len(bases):
                    following = min(following, max(log.next_offset, base))
            compacted = bool(header.flags & FLAG_COMPACTED)
            path = str(segment.path)
        rows.append(
            SegmentInfo(path, base, following, size, header.created, last_time, sealed, compacted)
        )
    return rows
