"""
The lag of a consumer: the records of its topics that it has not committed.

Sealed segments after all positions are counted by their topic indexes. What has none (the active segment, the one with
the positions) is read, at most LAG_RECORDS_MAX records or LAG_BYTES_MAX bytes of values in all; offsets after that are
counted without being read, so such a lag is an upper bound (`exact` is False).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from virta.errors import LogError
from virta.log.engine import kernel
from virta.log.limits import LAG_BYTES_MAX, LAG_RECORDS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.log.log import Log
    from virta.log.record import Record


class Lag(NamedTuple):
    """How many records a consumer has not committed, and whether all of them were counted."""

    records: int
    exact: bool


def partition_of(record: Record, partitions: int) -> int:
    """Return the partition of a record: by key, so one key's records stay in order; without a key by offset."""
    number: int = kernel.crc32c(record.key) if record.key else record.offset
    return number % partitions


def count_lag(log: Log, positions: Sequence[int], topics: frozenset[bytes] | None) -> Lag:
    """Count the records from `positions` (one per partition) to the end of the log."""
    end = log.next_offset
    start = max(min(positions), min(log.first_offset, end))
    source = log.source
    bases = [base for base in source.bases() if base < end]
    counter = _Counter(log, positions, topics)
    records = 0
    for base, following in pairwise([*bases, end]):
        if following <= start:
            continue
        known = None
        if base >= max(positions):
            known = source.topic_lookup.count(base, following, topics, source.history)
        records += counter.count(max(base, start), following) if known is None else known
    return Lag(records, counter.exact)


class _Counter:
    """Counts by reading, up to the limits."""

    def __init__(self, log: Log, positions: Sequence[int], topics: frozenset[bytes] | None) -> None:
        self._log = log
        self._positions = positions
        self._topics = topics
        self._records_left, self._bytes_left = LAG_RECORDS_MAX, LAG_BYTES_MAX
        self.exact = True

    def count(self, at: int, stop: int) -> int:
        """Return the unread records from `at` to `stop`; offsets that are not read count as records."""
        records = 0
        try:
            # Read up to the committed end: counting needs no sync.
            with self._log.read(start=at, end=stop, visibility="committed") as reader:
                batches = reader.batches()
                while self._records_left > 0 and self._bytes_left > 0:
                    batch = next(batches, None)
                    if batch is None:
                        return records
                    records += sum(self._is_unread(record) for record in batch)
                    # Records of other topics count toward the limit, but not toward the lag.
                    self._records_left -= len(batch)
                    self._bytes_left -= sum(len(record.value) for record in batch)
                    at = min(max(at, reader.position), stop)
        except LogError:
            self.exact = False  # damaged, or removed meanwhile
        self.exact = self.exact and at == stop
        return records + stop - at

    def _is_unread(self, record: Record) -> bool:
        if self._topics is not None and record.topic not in self._topics:
            return False
        return record.offset >= self._positions[partition_of(record, len(self._positions))]


def first_unread(log: Log, positions: Sequence[int], topics: frozenset[bytes] | None) -> list[int]:
    """
    Return for each partition an offset below which it has no unread record, however far that is.

    It reads up to the first unread record of any partition, and no further than the chunk that has it.
    """
    end = log.next_offset
    at = max(min(positions), min(log.first_offset, end))
    found: dict[int, int] = {}
    try:
        with log.read(topics, start=at, end=end, visibility="committed") as reader:
            for batch in reader.batches():
                for record in batch:
                    partition = partition_of(record, len(positions))
                    if record.offset >= positions[partition]:
                        found.setdefault(partition, record.offset)
                at = min(max(at, reader.position), end)
                if found:
                    break
            else:
                at = end
    except LogError:
        pass  # damaged, or removed meanwhile: what is known so far holds
    return [max(position, found.get(p, at)) for p, position in enumerate(positions)]
