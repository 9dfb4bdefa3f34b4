"""
The lag of a consumer: the records of its topics that it has not committed.

Counting reads the log from the lowest committed position on, at most LAG_RECORDS_MAX records or LAG_BYTES_MAX bytes of
values. Offsets after that are counted without being read, so a long lag is an upper bound (`exact` is False).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from virta.errors import LogError
from virta.log.engine import kernel
from virta.log.limits import LAG_BYTES_MAX, LAG_RECORDS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.log.log import Log
    from virta.log.record import Record


class Unread(NamedTuple):
    """What a consumer has not committed: how many records, whether all were counted, and the first per partition."""

    records: int
    exact: bool
    first: list[int]


def partition_of(record: Record, partitions: int) -> int:
    """Return the partition of a record: by key, so one key's records stay in order; without a key by offset."""
    number: int = kernel.crc32c(record.key) if record.key else record.offset
    return number % partitions


def count_unread(
    log: Log,
    positions: Sequence[int],
    topics: frozenset[bytes] | None,
    *,
    bounded: bool = True,
) -> Unread:
    """
    Count the records from `positions` (one per partition) to the end of the log.

    Without `bounded` it reads up to the first such record, however far that is, and stops counting there.
    """
    end = log.next_offset
    found: dict[int, int] = {}
    records = passed = size = 0
    at = max(min(positions), min(log.first_offset, end))
    exact = True
    # Records of other topics count toward the limit, but not toward the lag.
    wanted = None if bounded else topics
    try:
        # Read up to the committed end: counting needs no sync.
        with log.read(wanted, start=at, end=end, visibility="committed") as reader:
            for batch in reader.batches():
                passed += len(batch)
                for record in batch:
                    size += len(record.value)
                    if topics is not None and record.topic not in topics:
                        continue
                    partition = partition_of(record, len(positions))
                    if record.offset >= positions[partition]:
                        records += 1
                        found.setdefault(partition, record.offset)
                at = min(max(at, reader.position), end)
                over = passed >= LAG_RECORDS_MAX or size >= LAG_BYTES_MAX
                if over if bounded else found:
                    break
            else:
                at = end
    except LogError:
        exact = False  # damaged, or removed meanwhile: count what could not be read
    first = [max(position, found.get(p, at)) for p, position in enumerate(positions)]
    return Unread(records + end - at, exact and at == end, first)
