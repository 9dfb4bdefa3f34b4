"""
Compaction by key: in sealed segments only the newest record of each (topic, key) stays.

Offsets never change: a GAP record replaces what is removed. Records without a key always stay. An empty value
deletes its key; that record is kept for TOMBSTONE_AGE_S. A compacted segment is written next to the old one with a
new salt and renamed over it, so readers of the old file finish it undisturbed.

Records of sealed segments supersede others, those of the active one do not: what replaces a removed record is on
disk. The last segment that superseded something is marked as compacted even if it loses nothing itself, before the
others are rewritten. So a reader from the end of the last marked segment on finds, for every key, the record that was
the newest there; a live view that is rebuilt relies on it.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.clock import now_us
from virta.log.disk_errors import translate_disk_errors
from virta.log.engine import kernel
from virta.log.format.codec import (
    FLAG_COMPRESSED,
    FLAG_REPAIR,
    FLAG_SEAL,
    REASONS,
    BatchHeader,
    Status,
    compress_batch,
    encode_record,
    fill_header,
    gap_record,
)
from virta.log.format.damage import Problem
from virta.log.format.directory import maintenance_lock, remove_topic_index
from virta.log.format.index import Producers, build_index, index_missing, load_index, save_index
from virta.log.format.segment import (
    FLAG_COMPACTED,
    FLAG_ZSTD,
    Position,
    Segment,
    SegmentHeader,
    Walk,
    new_salt,
    rewrite_header,
)
from virta.log.format.topic_index import index_topics
from virta.log.limits import (
    BATCH_HEADER_BYTES,
    GAP_MAX,
    SEGMENT_HEADER_BYTES,
    TOMBSTONE_AGE_S,
)
from virta.log.reader import FOREVER
from virta.log.upkeep.recovery import seal_batch
from virta.log.upkeep.retention import lowest_pin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedWriter
    from pathlib import Path

    from virta.log.log import Log
    from virta.log.record import Record
    from virta.log.seek import SegmentInfo

    Stays = Callable[[Record], bool]


class CompactionReport(NamedTuple):
    segments: int
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int


def _key_digest(record: Record) -> bytes:
    """Return a 16-byte digest of (topic, key): a map of a million keys takes about a hundred megabytes."""
    topic = record.topic
    return blake2b(len(topic).to_bytes(2, "little") + topic + record.key, digest_size=16).digest()


@translate_disk_errors("compacting")
def compact(
    log: Log, topics: frozenset[bytes] | None, progress: Callable[[int, int], None] | None
) -> CompactionReport:
    """Rewrite every sealed segment that has records to remove."""
    with maintenance_lock(log.path):
        # The last batch of a producer may be removed; then only the indexes list it.
        index_missing(log.path)
        total = log.bytes
        pinned = lowest_pin(log.path)
        sealed: list[SegmentInfo] = []
        for info in log.segments()[:-1]:
            if not info.sealed or (pinned is not None and info.next > pinned):
                break
            sealed.append(info)
        counts = [0, 0, 0, 0, 0]
        for info, stays, kept in _plan(log, sealed, topics, progress):
            for i, n in enumerate(_compact_segment(log, info, stays, kept)):
                counts[i] += n
            if progress is not None:
                progress(total + min(counts[1], total), 2 * total)
        index_topics(log.path)
        files.sync_directory(log.path)
        if progress is not None:
            progress(2 * total, 2 * total)
    return CompactionReport(*counts)


def _plan(
    log: Log,
    segments: list[SegmentInfo],
    topics: frozenset[bytes] | None,
    progress: Callable[[int, int], None] | None,
) -> list[tuple[SegmentInfo, Stays, tuple[int, int]]]:
    """Return what stays in each segment, and its records before and after; mark the last one if any changes."""
    if not segments:
        return []
    stays = _stays(_newest(log, segments, topics, progress), topics)
    counts = [_count_kept(log, info, stays) for info in segments]
    changed = [before != after for before, after in counts]
    if any(changed) and not changed[-1]:
        _mark(log, segments[-1])
    return [(info, stays, kept) for info, kept in zip(segments, counts, strict=True)]


def _mark(log: Log, info: SegmentInfo) -> None:
    """Mark a segment as compacted that has nothing to remove: its records supersede earlier ones."""
    with Segment(log.path, info.base) as segment:
        header = segment.header
        if not header.flags & FLAG_COMPACTED:
            rewrite_header(segment, header._replace(flags=header.flags | FLAG_COMPACTED))


def _newest(
    log: Log,
    segments: list[SegmentInfo],
    topics: frozenset[bytes] | None,
    progress: Callable[[int, int], None] | None,
) -> dict[bytes, int]:
    """Return the offset of the newest record of each key in these segments."""
    newest: dict[bytes, int] = {}
    total, done = log.bytes, 0
    first, end = segments[0].base, segments[-1].next
    for batch in log.read(start=first, end=end, on_gap="skip", visibility="durable").batches():
        for record in batch:
            if record.key and (topics is None or bytes(record.topic) in topics):
                newest[_key_digest(record)] = record.offset
            done += len(record.value) + len(record.topic) + len(record.key)
        if progress is not None:
            progress(min(done, total), 2 * total)
    return newest


def _stays(newest: dict[bytes, int], topics: frozenset[bytes] | None) -> Stays:
    horizon = now_us() - int(TOMBSTONE_AGE_S * 1e6)

    def stays(record: Record) -> bool:
        if not record.key or (topics is not None and bytes(record.topic) not in topics):
            return True
        if newest.get(_key_digest(record), -1) > record.offset:
            return False
        return bool(record.value) or record.timestamp >= horizon

    return stays


def _count_kept(log: Log, info: SegmentInfo, stays: Stays) -> tuple[int, int]:
    """Return the records of a segment before and after compaction."""
    before = after = 0
    with Segment(log.path, info.base) as segment:
        for batch in _batches(segment):
            records = _batch_records(segment, batch)
            before += len(records)
            after += sum(map(stays, records))
    return before, after


def _compact_segment(
    log: Log, info: SegmentInfo, stays: Stays, kept: tuple[int, int]
) -> tuple[int, int, int, int, int]:
    """Compact one segment: (rewritten, bytes before, after, records before, after)."""
    before, after = kept
    if before == after:
        return 0, info.bytes, info.bytes, before, after
    with Segment(log.path, info.base) as segment:
        old = load_index(log.path, info.base, segment.header.salt)
        size = _rewrite(segment, stays, info.next, old.producers if old else {})
    return 1, info.bytes, size, before, after


class ExpiryReport(NamedTuple):
    """One segment after `expire`: what was removed, and when more of it expires (µs; None: never)."""

    base: int
    records: int
    bytes: int
    next_due: int | None


@translate_disk_errors("removing expired records of")
def expire(
    log: Log,
    max_age_us: Callable[[bytes], int | None],
    *,
    before: int,
    skip: Callable[[int], bool],
) -> list[ExpiryReport]:
    """
    Remove records that are older than their topic may be; offsets do not change.

    Only whole sealed segments below offset `before` are rewritten, and none that is pinned.

    Args:
        max_age_us: the age that a topic's records may reach; None keeps them.
        skip: called with the base of a segment, to leave it alone.
    """
    reports = []
    with maintenance_lock(log.path):
        index_missing(log.path)
        pinned = lowest_pin(log.path)
        for info in log.segments()[:-1]:
            if not info.sealed or info.next > before or (pinned is not None and info.next > pinned):
                break
            if not skip(info.base):
                reports.append(_expire_segment(log, info, max_age_us))
        index_topics(log.path)
        files.sync_directory(log.path)
    return reports


def _expire_segment(
    log: Log, info: SegmentInfo, max_age_us: Callable[[bytes], int | None]
) -> ExpiryReport:
    now = now_us()
    due: list[int] = []

    def stays(record: Record) -> bool:
        age = max_age_us(bytes(record.topic))
        if age is None:
            return True
        if record.timestamp + age < now:
            return False
        due.append(record.timestamp + age)
        return True

    with Segment(log.path, info.base) as segment:
        removed = 0
        for batch in _batches(segment):
            records = _batch_records(segment, batch)
            removed += len(records) - sum(map(stays, records))
            due[:] = [min(due)] if due else []
        if not removed:
            return ExpiryReport(info.base, 0, 0, due[0] if due else None)
        old = load_index(log.path, info.base, segment.header.salt)
        size = _rewrite(segment, stays, info.next, old.producers if old else {})
    return ExpiryReport(info.base, removed, info.bytes - size, min(due, default=None))


def _batches(segment: Segment) -> Iterator[BatchHeader]:
    walk = Walk(segment, segment.start(), segment.size)
    for batches in walk:
        for batch in batches:
            if not batch.flags & FLAG_SEAL:
                yield batch
    if walk.end.status != Status.SEAL:
        raise Problem(
            str(segment.path),
            walk.end.at.pos,
            segment.size,
            walk.end.at.next,
            None,
            walk.end.reason,
        ).error()


def _batch_records(segment: Segment, batch: BatchHeader) -> list[Record]:
    """Return the records of one batch; only one batch is in memory at a time."""
    data = os.pread(segment.fd, BATCH_HEADER_BYTES + batch.payload_len, batch.pos)
    salt, size = segment.header.salt, len(data)
    records, _, _, _, status, _ = kernel.read(
        data, 0, size, salt, -1, batch.base, 0, FOREVER, None, False, True, FOREVER
    )
    if status != Status.END:
        end = batch.pos + len(data)
        reason = REASONS.get(Status(status), "bad-record")
        raise Problem(
            str(segment.path), batch.pos, end, batch.base, batch.base + batch.span, reason
        ).error()
    return records


class _Rewriter:
    """Writes batches of a compacted segment, merging the gaps between them."""

    def __init__(self, file: BufferedWriter, header: SegmentHeader) -> None:
        self._file = file
        self._salt = header.salt
        self._compressing = bool(header.flags & FLAG_ZSTD)
        self.at = Position(SEGMENT_HEADER_BYTES, header.prev_crc, header.base)
        self._gap = 0
        self._time = 0

    def batch(self, batch: BatchHeader, kept: list[Record]) -> None:
        self._time = batch.time
        if batch.flags & FLAG_REPAIR:
            self.flush()  # lost offsets stay marked as lost
            self._write_batch(bytearray(), batch.span, 0, 0, flags=FLAG_REPAIR)
            return
        if not kept:
            self._gap += batch.span
            return
        self.flush()
        payload = bytearray()
        offset = batch.base
        for record in kept:
            if record.offset > offset:
                payload += gap_record(record.offset - offset)
            payload += encode_record(bytes(record.topic), bytes(record.key), record.value)
            offset = record.offset + 1
        if offset < batch.base + batch.span:
            payload += gap_record(batch.base + batch.span - offset)
        self._write_batch(payload, batch.span, batch.producer, batch.sequence)

    def flush(self) -> None:
        """Write the gap before the next batch, if any."""
        while self._gap:
            count = min(self._gap, GAP_MAX)
            self._write_batch(bytearray(gap_record(count)), count, 0, 0)
            self._gap -= count

    def seal(self, following: int) -> None:
        self.flush()
        self._file.write(seal_batch(self._salt, self.at, self._time, following))

    def _write_batch(
        self, payload: bytearray, count: int, producer: int, sequence: int, flags: int = 0
    ) -> None:
        buf = bytearray(BATCH_HEADER_BYTES) + payload
        packed = compress_batch(buf, kernel.crc8) if self._compressing and not flags else None
        if packed is not None:
            buf, flags = packed, FLAG_COMPRESSED
        crc = fill_header(
            buf,
            salt=self._salt,
            base=self.at.next,
            time=self._time,
            count=count,
            prev=self.at.prev,
            producer=producer,
            sequence=sequence,
            flags=flags,
            crc=kernel.crc32c,
        )
        self._file.write(buf)
        self.at = Position(self.at.pos + len(buf), crc, self.at.next + count)


def _rewrite(segment: Segment, stays: Stays, following: int, producers: Producers) -> int:
    """Write the compacted file next to the segment and rename it over it; return its size."""
    header = segment.header._replace(salt=new_salt(), flags=segment.header.flags | FLAG_COMPACTED)
    temporary = segment.path.with_suffix(".compact")
    try:
        with open(temporary, "wb", opener=files.open_file) as file:
            file.write(header.pack())
            writer = _Rewriter(file, header)
            for batch in _batches(segment):
                writer.batch(batch, list(filter(stays, _batch_records(segment, batch))))
            writer.seal(following)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        _index_first(segment.path.parent, temporary, header, producers)
        remove_topic_index(segment.path.parent, segment.base)
        os.rename(temporary, segment.path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk needs the space
        raise
    return size


def _index_first(
    directory: Path, temporary: Path, header: SegmentHeader, producers: Producers
) -> None:
    """
    Write the compacted segment's index before the segment is replaced.

    Until then the new index does not fit the old segment and is ignored; the old segment still has all batches.
    """
    fresh = Segment.__new__(Segment)
    fresh.path, fresh.base, fresh.header = temporary, header.base, header
    fresh.fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    with fresh:
        index = build_index(fresh, producers)
    if index is not None:
        save_index(directory, index)
