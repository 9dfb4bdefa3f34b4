"""
A topic table in plain Python: which batches of a segment have records of which topic.

The reference for native/log_topics.h; virta/log/engine/kernel.py chooses. A table is filled from the bytes of a
segment, in order. It is not safe to use from several threads.
"""

from __future__ import annotations

import os
import struct
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from virta.log.format import codec
from virta.log.format.checksums import crc32c
from virta.log.format.codec import FLAG_REPAIR, FLAG_SEAL, Status
from virta.log.limits import BATCH_HEADER_BYTES

if TYPE_CHECKING:
    from virta.log.format.checksums import Buffer
    from virta.log.format.codec import BatchHeader

# Repair batches are listed under this name, which no user can write to: every reader must visit them.
REPAIRS: Final = b"\x02"
# Byte position and size of a batch, and its base offset after that of the segment.
PLACE: Final = struct.Struct("<III")
PLACE_MAX: Final = (1 << 32) - 1
INDEX_HEADER_BYTES: Final = 64
U32: Final = struct.Struct("<I")


class TopicRow(NamedTuple):
    """The records of one topic in a segment; `places` are packed with PLACE, in order."""

    topic: bytes
    records: int
    size: int  # bytes of its keys and values
    first_offset: int
    last_offset: int
    first_time: int
    last_time: int
    places: bytes


class _Entry:
    __slots__ = ("counts", "last_pos", "places")

    def __init__(self) -> None:
        # As in TopicRow, from `records` to `last_time`.
        self.counts = [0, 0, 0, 0, 0, 0]
        self.last_pos = -1
        self.places = array("I")


class TopicTable:
    """The topics of the batches added so far."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._entries: dict[bytes, _Entry] = {}
        self.places = 0  # of all topics

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, buf: Buffer, end: int, file_pos: int, salt: int, prev: int, next_offset: int
    ) -> tuple[int, int, int, int, int]:
        """
        Add the whole, valid batches in buf[:end], which begins at byte `file_pos` of the segment.

        Returns (pos, prev, next, status, detail) like `walk`; nothing of an invalid batch is added.
        """
        pos = 0
        while pos < end:
            status, batch, payload_crc = codec.parse_header(buf, pos, end, salt, prev, next_offset)
            if batch is None:
                return pos, prev, next_offset, status, BATCH_HEADER_BYTES * (status == 1)
            if batch.end > end:
                return pos, prev, next_offset, Status.SHORT, batch.end - pos
            if crc32c(buf[batch.payload_pos : batch.end]) != payload_crc:
                return pos, prev, next_offset, Status.BAD_PAYLOAD, 0
            following = None
            if batch.flags & FLAG_SEAL:
                following = codec.seal_next(buf, batch)
                if following is None:
                    return pos, prev, next_offset, Status.BAD_RECORD, 0
            elif not self._add_batch(buf, batch, file_pos):
                return pos, prev, next_offset, Status.BAD_RECORD, 0
            pos, prev, next_offset = batch.end, batch.chain, next_offset + batch.span
            if following is not None:
                return pos, prev, next_offset, Status.SEAL, following
        return pos, prev, next_offset, Status.END, 0

    def _add_batch(self, buf: Buffer, batch: BatchHeader, file_pos: int) -> bool:
        if batch.flags & FLAG_REPAIR:
            if batch.span:
                self._note(REPAIRS, batch, file_pos, batch.base, 0)
            return True
        try:
            records = codec.decode_batch(buf, batch, 0, 1 << 64, None, False)
        except codec.BadRecordError:
            return False
        for topic, key, value, offset, _ in records:
            self._note(bytes(topic), batch, file_pos, offset, len(key) + len(value))
        return True

    def _note(
        self, topic: bytes, batch: BatchHeader, file_pos: int, offset: int, size: int
    ) -> None:
        entry = self._entries.get(topic)
        if entry is None:
            entry = self._entries[topic] = _Entry()
            entry.counts[2] = offset
            entry.counts[4] = batch.time
        counts = entry.counts
        counts[0] += 1
        counts[1] += size
        counts[3], counts[5] = offset, batch.time
        pos = file_pos + batch.pos
        if pos != entry.last_pos:
            if pos > PLACE_MAX or batch.base - self._base > PLACE_MAX:
                raise OverflowError("the segment is too large for a topic table")
            entry.last_pos = pos
            entry.places.extend((pos, batch.end - batch.pos, batch.base - self._base))
            self.places += 1

    def rows(self) -> list[TopicRow]:
        """Return all topics, in the order of their first record."""
        return [
            TopicRow(topic, *entry.counts, places=entry.places.tobytes())  # type: ignore[arg-type, misc]
            for topic, entry in self._entries.items()
        ]

    def find(self, topic: bytes) -> bytes:
        """Return the places of a topic, packed; empty if it has none."""
        entry = self._entries.get(topic)
        return b"" if entry is None else entry.places.tobytes()


# --- a lookup in a topic index file (virta/log/format/topic_index.py); native/log_topic_index.h is the same in C ---


def find_places(fd: int, end: int, salt: int, buckets: int, topic: bytes) -> bytes:
    """
    Return the places of a topic, packed; empty if the index does not list it. The file has `end` bytes.

    Raises:
        ValueError: the index is damaged.
    """
    rows = read_bucket(fd, end, salt, crc32c(topic) & (buckets - 1))
    pos = 0
    while pos < len(rows):
        name, numbers, crc, pos = parse_row(rows, pos)
        if name == topic:
            (start,) = U32.unpack(
                _read_exactly(fd, end, INDEX_HEADER_BYTES + 4 * buckets, U32.size)
            )
            places = _read_exactly(fd, end, start + numbers[6], numbers[7] * PLACE.size)
            if crc32c(places, salt) != crc:
                raise ValueError("the places of a topic are damaged")
            return places
    return b""


def read_bucket(fd: int, end: int, salt: int, number: int) -> bytes:
    """Return the rows of a bucket."""
    start, stop = struct.unpack("<II", _read_exactly(fd, end, INDEX_HEADER_BYTES + 4 * number, 8))
    content = _read_exactly(fd, end, start, stop - start)
    rows = content[U32.size :]
    if content[: U32.size] != U32.pack(bucket_crc(number, rows, salt)):
        raise ValueError("a bucket of topics is damaged")
    return rows


def bucket_crc(number: int, rows: bytes, salt: int) -> int:
    return crc32c(U32.pack(number) + rows, salt)


def parse_row(rows: bytes, pos: int) -> tuple[bytes, list[int], int, int]:
    """Return the topic at a position, its eight numbers, the checksum of its places, and the position after it."""
    numbers = []
    try:
        size, pos = _parse_number(rows, pos)
        topic = rows[pos : pos + size]
        pos += size
        for _ in range(8):
            number, pos = _parse_number(rows, pos)
            numbers.append(number)
        (crc,) = U32.unpack_from(rows, pos)
    except (IndexError, struct.error):
        raise ValueError("a row of a topic is damaged") from None
    return topic, numbers, crc, pos + U32.size


def _parse_number(data: bytes, pos: int) -> tuple[int, int]:
    n = shift = 0
    while True:
        byte = data[pos]
        pos += 1
        n |= (byte & 0x7F) << shift
        if byte < 0x80:
            return n, pos
        shift += 7


def _read_exactly(fd: int, end: int, pos: int, size: int) -> bytes:
    if not 0 <= size <= end - pos:
        raise ValueError("a position is outside the index")
    data = os.pread(fd, size, pos)
    if len(data) < size:
        raise ValueError("the index is cut off")
    return data
