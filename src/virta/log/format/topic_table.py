"""
A topic table in plain Python: which batches of a segment have records of which topic.

The reference for native/log_topics.h; virta/log/engine/kernel.py chooses. A table is filled from the bytes of a
segment, in order. It is not safe to use from several threads.
"""

from __future__ import annotations

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
