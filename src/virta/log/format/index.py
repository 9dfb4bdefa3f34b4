"""
The sparse index of a sealed segment (.pidx): offset and time to byte position, and each producer's last batch.

    "PUROIDX1" | u64 base | u32 salt | u32 crc32c(rest) | u64 next offset | u64 last time | u32 entries | u32 producers
    entries:   u64 offset | u64 time | u32 pos | u32 count      one per 64 KiB, in order
    producers: u64 id | u64 offset | u32 sequence | u32 0       every idempotent producer up to this segment

A hint: ignored unless salt and CRC match, rebuilt from the segment whenever it is missing or wrong.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from virta import files
from virta.errors import LogError
from virta.log.engine import kernel
from virta.log.format.codec import PRODUCER_ANONYMOUS, Status
from virta.log.format.directory import index_name, maintenance_lock, segment_bases
from virta.log.format.segment import Position, Segment, Walk
from virta.log.limits import INDEX_STEP_BYTES, PRODUCERS_MAX

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"PUROIDX1"
_HEAD: Final = struct.Struct("<8sQII")
_REST: Final = struct.Struct("<QQII")
_ENTRY: Final = struct.Struct("<QQII")
_PRODUCER: Final = struct.Struct("<QQII")

# id -> (last sequence, offset of that batch), least recently used first
Producers = dict[int, tuple[int, int]]


class IndexEntry(NamedTuple):
    offset: int
    time: int
    pos: int
    span: int


class BatchRun(NamedTuple):
    """Consecutive batches of a sealed segment: bytes `pos` to `end`, offsets `base` to `next` (not included)."""

    pos: int
    end: int
    base: int
    next: int
    time: int
    last_time: int  # no batch of it is later


class Index(NamedTuple):
    base: int
    salt: int
    next: int
    last_time: int
    entries: list[IndexEntry]
    producers: Producers

    def position(self, offset: int) -> Position | None:
        """Return where to start reading for `offset`: the last entry at or before it."""
        return self._entry(bisect_right(self.entries, offset, key=lambda entry: entry.offset))

    def position_at(self, time: int) -> Position | None:
        """Return a position at or before the first batch that is not older than `time`."""
        return self._entry(bisect_right(self.entries, time - 1, key=lambda entry: entry.time))

    def _entry(self, count: int) -> Position | None:
        """Return the position of the last of the first `count` entries."""
        if count == 0:
            return None
        entry = self.entries[count - 1]
        return Position(entry.pos, -1, entry.offset)

    def runs(self, size: int) -> list[BatchRun]:
        """
        Return all batches as runs of about INDEX_STEP_BYTES; `size` is the file's, and the last run includes the seal.

        So a planner finds batch boundaries, offsets and times without reading the segment.
        """
        bounds = [(entry.pos, entry.offset, entry.time) for entry in self.entries]
        bounds.append((size, self.next, self.last_time))
        return [
            BatchRun(pos, end, base, following, time, last_time)
            for (pos, base, time), (end, following, last_time) in pairwise(bounds)
        ]


def remember(producers: Producers, producer: int, sequence: int, offset: int) -> None:
    """Record an idempotent producer's batch; over the limit the least recently used producer is dropped."""
    producers.pop(producer, None)
    producers[producer] = (sequence, offset)
    while len(producers) > PRODUCERS_MAX:
        del producers[next(iter(producers))]


def build_index(segment: Segment, producers: Producers) -> Index | None:
    """Return the index of a segment, or None if it is not sealed or is damaged before its seal."""
    entries: list[IndexEntry] = []
    table = dict(producers)
    last_pos = -INDEX_STEP_BYTES
    last_time = segment.header.created
    walk = Walk(segment, segment.start(), segment.size)
    for batches in walk:
        for batch in batches:
            if batch.pos - last_pos >= INDEX_STEP_BYTES:
                entries.append(IndexEntry(batch.base, batch.time, batch.pos, batch.span))
                last_pos = batch.pos
            if batch.producer > PRODUCER_ANONYMOUS:
                remember(table, batch.producer, batch.sequence, batch.base)
            last_time = batch.time
    if walk.end.status != Status.SEAL:
        return None
    return Index(segment.base, segment.header.salt, walk.end.at.next, last_time, entries, table)


def index_sealed(directory: Path) -> bool:
    """Write the indexes that are missing; return False if another process has the maintenance lock."""
    try:
        with maintenance_lock(directory, wait=False) as alone:
            if alone:
                index_missing(directory)
            return alone
    except OSError:
        return False  # they are hints


def index_missing(directory: Path) -> None:
    """
    Write the indexes that are missing, under the maintenance lock; oldest first, because each continues the
    producer table of the one before. A segment that cannot be read gets none: indexes are hints.
    """
    missing: list[int] = []
    table: Producers = {}
    for base in reversed(segment_bases(directory)[:-1]):
        try:
            with Segment(directory, base) as segment:
                index = load_index(directory, base, segment.header.salt)
        except (OSError, LogError):
            index = None
        if index is not None:
            table = index.producers
            break
        missing.append(base)
    for base in reversed(missing):
        try:
            with Segment(directory, base) as segment:
                index = build_index(segment, table)
                if index is not None:
                    save_index(directory, index)
                    table = index.producers
        except (OSError, LogError):
            continue


def save_index(directory: Path, index: Index) -> None:
    rest = b"".join(
        [
            _REST.pack(index.next, index.last_time, len(index.entries), len(index.producers)),
            *(_ENTRY.pack(*entry) for entry in index.entries),
            *(_PRODUCER.pack(p, at, seq, 0) for p, (seq, at) in index.producers.items()),
        ]
    )
    head = _HEAD.pack(MAGIC, index.base, index.salt, kernel.crc32c(rest))
    files.write_whole(directory / index_name(index.base), head + rest)


def load_index(directory: Path, base: int, salt: int) -> Index | None:
    """Return the saved index, or None if there is none that fits the segment."""
    try:
        data = (directory / index_name(base)).read_bytes()
    except OSError:
        return None
    return parse_index(data, base, salt)


def parse_index(data: bytes, base: int, salt: int) -> Index | None:
    """Return the index in the content of its file, or None if it does not fit the segment."""
    if len(data) < _HEAD.size + _REST.size:
        return None
    magic, at, of_salt, crc = _HEAD.unpack_from(data)
    rest = memoryview(data)[_HEAD.size :]
    if magic != MAGIC or at != base or of_salt != salt or kernel.crc32c(rest) != crc:
        return None
    following, last_time, entry_count, producer_count = _REST.unpack_from(rest)
    split = _REST.size + entry_count * _ENTRY.size
    if len(rest) != split + producer_count * _PRODUCER.size:
        return None
    entries = [IndexEntry(*row) for row in _ENTRY.iter_unpack(rest[_REST.size : split])]
    table = {p: (seq, at) for p, at, seq, _ in _PRODUCER.iter_unpack(rest[split:])}
    return Index(base, salt, following, last_time, entries, table)


def load_producers(directory: Path, bases: list[int], producers: Producers) -> tuple[int, Position]:
    """Start from the newest index that fits; its table covers everything before it."""
    for number, base in reversed(list(enumerate(bases[:-1]))):
        with suppress(FileNotFoundError):
            with Segment(directory, base) as segment:
                index = load_index(directory, base, segment.header.salt)
            if index is not None:
                for producer, (sequence, offset) in index.producers.items():
                    if sequence >= producers.get(producer, (0, 0))[0]:
                        remember(producers, producer, sequence, offset)
                bases = bases[number + 1 :]
                break
    for base in bases[:-1]:
        with suppress(FileNotFoundError), Segment(directory, base) as segment:
            return base, segment.start()
    with Segment(directory, bases[-1]) as segment:
        return segment.base, segment.start()
