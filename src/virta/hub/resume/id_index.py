"""
Offsets of events in the log, by channel, source and id.

`Last-Event-ID` may name an event that was published long ago, or more than once. The index answers
with the oldest offset. It is filled from the log on demand, newest records first, and has 8 bytes per record on disk
(`virta.hub.resume.id_blocks`), so each part of the log is read at most once:

    blocks, by offset:   [first … next) ─► sorted array of  hash of (channel, source, id) | offset - first
                          44 bits of a keyed hash ─────────┘                     20 bits ─┘

One search reads at most `SEARCH_BYTES_MAX` and `SEARCH_RECORDS_MAX` of the log, and the whole index has at most
`INDEX_RECORDS_MAX` records. Parts that were not searched are reported, never ignored
(`IdSearchResult.searched_from`); a later search continues where the limit stopped an earlier one.
"""

from __future__ import annotations

import logging
import os
from array import array
from typing import TYPE_CHECKING, NamedTuple

from virta.errors import LogError
from virta.hub.delivery import from_record, identity, is_bookkeeping
from virta.hub.idempotency import key_of
from virta.hub.resume.id_blocks import HASH_MASK, SPAN_MAX, Block, BlockFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.log import Log
    from virta.log.seek import SegmentInfo

logger = logging.getLogger("virta.hub")

# Limits of what one search may read of the log for the first time: one or two seconds of one core.
SEARCH_BYTES_MAX = 1024 * 1024 * 1024
SEARCH_RECORDS_MAX = 1024 * 1024
# Records in the index, 8 bytes each: 128 MiB of disk. Beyond that the oldest are left out.
INDEX_RECORDS_MAX = 16 * 1024 * 1024
# The log is read in parts of about this size, so that a search stops close to its limit.
PART_BYTES = 4 * 1024 * 1024
# Small blocks are joined up to this many records, since a search reads every block.
BLOCK_RECORDS_MIN = 16 * 1024


class IdSearchResult(NamedTuple):
    """The oldest offset (None: not found) and the offset from which the log was searched."""

    offset: int | None
    searched_from: int


class IdIndex:
    """The index over one log; its methods block, and one thread at a time may call them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._blocks: list[Block] = []  # by offset; they do not overlap
        self._file = BlockFile(log.path)
        self._records = 0
        # Without a secret, publishers could choose ids that collide.
        self._secret = os.urandom(16).hex()
        self.bytes_read = 0  # of records

    def find(self, channel: str, pairs: Iterable[tuple[str, str]], end: int) -> IdSearchResult:
        """
        Find the oldest event below `end` with one of these sources and ids.

        Raises:
            LogError: the log cannot be read.
        """
        searched_from = self._cover(end)
        wanted = set(pairs)
        hashes = [self._hash(channel, source, id_) for source, id_ in wanted]
        for block in self._blocks:
            candidates = self._candidates(block, hashes)
            for offset in sorted(candidates):
                if offset < end and self._is(offset, wanted):
                    return IdSearchResult(offset, searched_from)
        return IdSearchResult(None, searched_from)

    def _candidates(self, block: Block, hashes: list[int]) -> list[int]:
        try:
            return [offset for hashed in hashes for offset in block.offsets(hashed)]
        except OSError as error:
            raise LogError(
                f"the index of event ids cannot be read: {error}", code="id_index_unreadable"
            ) from error

    def _is(self, offset: int, wanted: set[tuple[str, str]]) -> bool:
        """Return whether the record at an offset is wanted; one that was removed counts as a match."""
        with self._log.read(
            start=offset, end=offset + 1, on_gap="skip", on_corruption="skip"
        ) as reader:
            for record in reader:
                delivery = from_record(record)
                return (delivery.source, delivery.id) in wanted
        return True

    def _cover(self, end: int) -> int:
        """
        Read what is missing below `end`, newest first; return the offset from which on the index is complete.

        If anything is missing, it reads up to the end of the log: searches that wait need not read again.
        """
        first = self._log.first_offset
        self._drop_below(first)
        if not self._blocks or self._blocks[-1].next < end:
            # Opening a reader costs more than reading a few records more.
            end = max(end, self._log.next_offset)
        segments: list[SegmentInfo] | None = None
        bytes_max = self.bytes_read + SEARCH_BYTES_MAX
        left = SEARCH_RECORDS_MAX
        at, cursor = len(self._blocks), end
        while cursor > first:
            if at and self._blocks[at - 1].next >= cursor:
                at -= 1
                cursor = self._blocks[at].first
                continue
            if left <= 0 or self.bytes_read >= bytes_max:
                break
            if self._records >= INDEX_RECORDS_MAX:
                if not at:
                    break
                self._drop_oldest()  # newer records are more useful
                at -= 1
                continue
            floor = max(first, self._blocks[at - 1].next if at else 0)
            if segments is None:
                segments = self._log.segments()
            start = max(floor, _part_start(segments, cursor))
            at = self._insert(at, self._read(start, cursor))
            left -= cursor - start
            cursor = start
        return cursor

    def _insert(self, at: int, block: Block) -> int:
        """Insert a block at an index, or join it with the one before; return the index for older blocks."""
        self._records += block.records
        if at:
            before = self._blocks[at - 1]
            small = not before.stored and before.records + block.records <= BLOCK_RECORDS_MIN
            if before.next == block.first and small and block.next - before.first <= SPAN_MAX:
                shift = block.first - before.first
                entries = [*before.entries, *[entry + shift for entry in block.entries]]
                before.entries = array("Q", sorted(entries))
                before.records = len(before.entries)
                before.next = block.next
                return at
        self._blocks.insert(at, block)
        for grown in self._blocks[max(0, at - 1) : at + 1]:
            # The newest block still grows.
            if grown is not self._blocks[-1] and not grown.stored:
                self._store(grown)
        return at

    def _store(self, block: Block) -> None:
        try:
            block.store(self._file)
        except OSError as error:
            logger.warning("id_index_in_memory: %s", error)

    def _drop_oldest(self) -> None:
        block = self._blocks.pop(0)
        self._records -= block.records
        self._file.drop(block, self._blocks)

    def _read(self, start: int, stop: int) -> Block:
        entries: list[int] = []
        with self._log.read(start=start, end=stop, on_gap="skip", on_corruption="skip") as reader:
            for records in reader.batches():
                self.bytes_read += sum([len(record.value) for record in records])
                for record in records:
                    if is_bookkeeping(bytes(record.topic)):
                        continue
                    channel, source, id_ = identity(record)
                    entries.append(self._hash(channel, source, id_) | record.offset - start)
            # Records that are not visible yet are left to a later search.
            next_ = max(start, min(stop, reader.position))
        entries.sort()
        return Block(start, next_, array("Q", entries))

    def _hash(self, channel: str, source: str, id_: str) -> int:
        return hash(self._secret + key_of(channel, source, id_)) & HASH_MASK

    def _drop_below(self, first: int) -> None:
        """Drop blocks that the log no longer has."""
        while self._blocks and self._blocks[0].next <= first:
            self._drop_oldest()


def _part_start(segments: list[SegmentInfo], stop: int) -> int:
    """Return where to start reading up to `stop`: about `PART_BYTES` before it, in the same segment."""
    for info in reversed(segments):
        if info.base < stop:
            record_bytes = info.bytes / max(1, info.next - info.base)
            number = min(SPAN_MAX, max(1, int(PART_BYTES / max(1.0, record_bytes))))
            return max(info.base, stop - number)
    raise LogError(f"no segment holds offset {stop - 1}", code="log_segment_missing")
