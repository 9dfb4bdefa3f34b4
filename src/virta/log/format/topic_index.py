"""
The topic index of a sealed segment (.ptix): the batches that have records of a topic, and how many records.

    header    "VIRTATI1" | u64 base | u32 salt | u32 segment bytes | u64 next offset | u64 first time
              | u32 topics | u32 buckets | u32 repairs | u64 index bytes | u32 crc32c of the bytes before
    table     u32 position of each bucket, and the end of the last
    buckets   u32 crc32c(bucket number as u32, rows) started from the salt | rows of topics with that hash
    places    of each topic: (u32 position, u32 size, u32 offset after base) of its batches

A row is: topic length and topic; records, bytes, first offset after base, last after first, first time after the
header's, last after first, position and number of its places (all unsigned LEB128); u32 crc32c of its places started
from the salt. A topic's bucket is crc32c(topic) modulo the number of buckets, a power of two; no buckets mean that
the segment has too many topics to index.

A hint: a lookup reads three small pieces, each with its checksum. An index that does not fit its segment (salt and
size) or is damaged is not used, and the segment is read instead. Recovery and repair remove it before they change a
sealed segment.
"""

from __future__ import annotations

import os
import re
import struct
from typing import TYPE_CHECKING, Final

from virta import files
from virta.errors import LogError
from virta.log.engine import kernel
from virta.log.format.codec import Status, encode_varlong
from virta.log.format.directory import segment_bases, topic_index_name
from virta.log.format.segment import Position, Segment
from virta.log.format.topic_table import (
    INDEX_HEADER_BYTES,
    PLACE,
    REPAIRS,
    U32,
    TopicRow,
    bucket_crc,
    parse_row,
    read_bucket,
)
from virta.log.limits import READ_CHUNK_BYTES, TOPIC_INDEX_PLACES_MAX, TOPIC_INDEX_TOPICS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MAGIC: Final = b"VIRTATI1"
_HEADER: Final = struct.Struct("<8sQIIQQIIIQ")
assert _HEADER.size + U32.size == INDEX_HEADER_BYTES
# What `files.write_whole` leaves when its process is killed.
_TEMPORARY: Final = re.compile(r"\.[0-9]{20}\.(pidx|ptix)\.[0-9]+\.tmp")
# Rows in a bucket on average: a lookup reads one bucket.
_ROWS_PER_BUCKET: Final = 2


class TopicIndexError(Exception):
    """The index is damaged or does not fit its segment; read the segment instead."""


# --- writing ---------------------------------------------------------------------------------------


def build_topic_index(segment: Segment) -> bytes | None:
    """Return the topic index of a segment as bytes, or None if it is not sealed or is damaged before its seal."""
    table = kernel.TopicTable(segment.base)
    at, want = segment.start(), READ_CHUNK_BYTES
    size = segment.size
    while True:
        data = os.pread(segment.fd, min(want, size - at.pos), at.pos)
        try:
            used, prev, following, code, detail = table.add(
                data, len(data), at.pos, segment.header.salt, at.prev, at.next
            )
        except OverflowError:
            return pack_topic_index(segment, [], too_many=True)
        at = Position(at.pos + used, prev, following)
        if len(table) > TOPIC_INDEX_TOPICS_MAX or table.places > TOPIC_INDEX_PLACES_MAX:
            return pack_topic_index(segment, [], too_many=True)
        if code == Status.SEAL:
            break
        if code == Status.SHORT and len(data) < detail <= size - at.pos:
            want = max(READ_CHUNK_BYTES, detail)
        elif used == 0:
            return None
        else:
            want = READ_CHUNK_BYTES
    return pack_topic_index(segment, [TopicRow(*row) for row in table.rows()], at.next)


def pack_topic_index(
    segment: Segment, rows: list[TopicRow], following: int = 0, *, too_many: bool = False
) -> bytes:
    """Return the file of these rows; `following` is the next segment's base."""
    salt, base = segment.header.salt, segment.base
    topics = sum(row.topic != REPAIRS for row in rows)
    repairs = sum(len(row.places) // PLACE.size for row in rows if row.topic == REPAIRS)
    count = 0 if too_many else 1
    while 0 < count * _ROWS_PER_BUCKET < len(rows):
        count *= 2
    first_time = min((row.first_time for row in rows), default=0)
    buckets: list[list[TopicRow]] = [[] for _ in range(count)]
    for row in rows:
        buckets[kernel.crc32c(row.topic) & (count - 1)].append(row)
    # The places stand behind the rows, which have their positions: those count from the end of the rows.
    places: list[bytes] = []
    packed: list[bytes] = []
    place_pos = 0
    for number, bucket in enumerate(buckets):
        parts = []
        for row in bucket:
            parts.append(_pack_row(row, base, first_time, place_pos, salt))
            places.append(row.places)
            place_pos += len(row.places)
        content = b"".join(parts)
        packed.append(U32.pack(bucket_crc(number, content, salt)) + content)
    bounds, pos = [], INDEX_HEADER_BYTES + 4 * (count + 1)
    for content in packed:
        bounds.append(pos)
        pos += len(content)
    bounds.append(pos)
    header = _HEADER.pack(
        MAGIC, base, salt, segment.size, following, first_time, topics, count, repairs,
        pos + place_pos,
    )  # fmt: skip
    table = struct.pack(f"<{len(bounds)}I", *bounds)
    return b"".join([header, U32.pack(kernel.crc32c(header)), table, *packed, *places])


def _pack_row(row: TopicRow, base: int, first_time: int, place_pos: int, salt: int) -> bytes:
    return b"".join(
        [
            encode_varlong(len(row.topic)),
            row.topic,
            encode_varlong(row.records),
            encode_varlong(row.size),
            encode_varlong(row.first_offset - base),
            encode_varlong(row.last_offset - row.first_offset),
            encode_varlong(row.first_time - first_time),
            encode_varlong(row.last_time - row.first_time),
            encode_varlong(place_pos),
            encode_varlong(len(row.places) // PLACE.size),
            U32.pack(kernel.crc32c(row.places, salt)),
        ]
    )


def save_topic_index(directory: Path, base: int, data: bytes) -> None:
    files.write_whole(directory / topic_index_name(base), data)


def topics_unindexed(directory: Path) -> list[int]:
    """Return the bases of sealed segments without a topic index."""
    present = set(os.listdir(directory))
    return [base for base in segment_bases(directory)[:-1] if topic_index_name(base) not in present]


def remove_unfinished(directory: Path) -> None:
    """Remove index files that a killed process began to write; no other process writes any now."""
    for name in os.listdir(directory):
        if _TEMPORARY.fullmatch(name):
            (directory / name).unlink(missing_ok=True)


def index_topics(
    directory: Path, bytes_max: int | None = None, stopped: Callable[[], bool] = lambda: False
) -> bool:
    """
    Write the topic indexes that are missing, under the maintenance lock; return False if some are left.

    It reads at most `bytes_max` bytes, and no further segment once `stopped` returns True.
    """
    remove_unfinished(directory)
    spent = 0
    for base in reversed(topics_unindexed(directory)):  # the newest are read most
        try:
            with Segment(directory, base) as segment:
                spent += segment.size
                if stopped() or (bytes_max is not None and spent > bytes_max):
                    return False
                data = build_topic_index(segment)
            if data is not None:
                save_topic_index(directory, base, data)
        except (OSError, LogError):
            continue  # a segment that cannot be read gets none: indexes are hints
    return True


# --- reading ---------------------------------------------------------------------------------------


class TopicIndex:
    """
    The open topic index of one segment.

    Raises:
        TopicIndexError: there is none that fits the segment.
    """

    def __init__(self, directory: Path, base: int, salt: int, segment_bytes: int) -> None:
        self.base = base
        self.salt = salt
        self.segment_bytes = segment_bytes
        self._fd = -1
        self._records: int | None = None
        try:
            self._fd = os.open(directory / topic_index_name(base), os.O_RDONLY | os.O_CLOEXEC)
            head = os.pread(self._fd, INDEX_HEADER_BYTES, 0)
        except OSError as exc:
            self.close()
            raise TopicIndexError(str(exc)) from exc
        if len(head) == INDEX_HEADER_BYTES and U32.unpack_from(head, _HEADER.size)[
            0
        ] == kernel.crc32c(head[: _HEADER.size]):
            magic, at, of_salt, size, following, time, topics, buckets, repairs, end = (
                _HEADER.unpack_from(head)
            )
            if magic == MAGIC and (at, of_salt, size) == (base, salt, segment_bytes):
                self.next: int = following
                self.topics: int = topics
                self.repairs: int = repairs
                self._first_time = time
                self._buckets = buckets
                self._end = end
                return
        self.close()
        raise TopicIndexError("the index does not fit its segment")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> TopicIndex:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    @property
    def complete(self) -> bool:
        """Whether it lists topics: False if the segment has too many."""
        return bool(self._buckets)

    def find(self, topic: bytes) -> bytes:
        """Return the places of a topic, packed; empty if the segment has no record of it."""
        try:
            return kernel.find_places(self._fd, self._end, self.salt, self._buckets, topic)
        except (ValueError, OSError) as exc:
            raise TopicIndexError(str(exc)) from exc

    def records(self) -> int:
        """Return how many records the segment has."""
        if self._records is None:
            self._records = sum(row.records for row in self.counts())
        return self._records

    def records_of(self, topic: bytes) -> int:
        """Return how many records of a topic the segment has."""
        number = kernel.crc32c(topic) & (self._buckets - 1)
        return next((row.records for row in self._bucket_rows(number) if row.topic == topic), 0)

    def counts(self) -> Iterator[TopicRow]:
        """Yield every topic's row without its places."""
        for number in range(self._buckets):
            for row in self._bucket_rows(number):
                if row.topic != REPAIRS:
                    yield row

    def _bucket_rows(self, number: int) -> Iterator[TopicRow]:
        """Yield the rows of a bucket, without places."""
        try:
            rows = read_bucket(self._fd, self._end, self.salt, number)
            pos = 0
            while pos < len(rows):
                topic, numbers, _, pos = parse_row(rows, pos)
                records, total, first, more, time, duration, *_ = numbers
                first += self.base
                time += self._first_time
                yield TopicRow(
                    topic, records, total, first, first + more, time, time + duration, b""
                )
        except (ValueError, OSError) as exc:
            raise TopicIndexError(str(exc)) from exc
