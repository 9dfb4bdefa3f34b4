"""
Topics of a log: how many records and bytes each has, and its first and last record.

A sealed segment's counts are in its topic index; where there is none, and in the active segment, every record is read
once. A segment changes only at its end, or with its salt (compaction), or with the log's epoch (repair): its counts are
kept with the offset they reach, and the next call continues there.

Memory is bounded: one answer has at most TOPICS_MAX topics, and a handle remembers TOPIC_COUNTS_MAX counts. A
segment that does not fit is read again by each call; the answer is the same.
"""

from __future__ import annotations

import threading
from heapq import nsmallest
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from virta.errors import LogCorruptionError, LogLimitError, LogTypeError
from virta.log.format.directory import segment_bases
from virta.log.format.segment import Segment
from virta.log.limits import TOPIC_COUNTS_MAX, TOPICS_MAX
from virta.log.record import Name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from virta.log.log import Log

# records, bytes, first offset, last offset, first time, last time
Row = list[int]
Table = dict[bytes, Row]

_DAMAGED: Final = -1  # in place of the salt of a segment whose header cannot be read


class TopicInfo(NamedTuple):
    """A topic as `log.topics()` reports it; `bytes` are those of its keys and values, times are in µs."""

    topic: Name
    records: int
    bytes: int
    first_offset: int
    last_offset: int
    first_timestamp: int
    last_timestamp: int


class _Counted(NamedTuple):
    """The counts of one segment, for records below offset `upto`."""

    salt: int
    upto: int
    table: Table


class TopicCounts:
    """The counts of one handle so far; safe to use from many threads."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._segments: dict[int, _Counted] = {}
        self._epoch = 0

    def find(self, log: Log, after: str | bytes | None, limit: int) -> list[TopicInfo]:
        """Count what is new and return up to `limit` topics whose names come after `after`."""
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= TOPICS_MAX:
            raise LogLimitError(f"limit is {limit!r}; it must be from 1 to {TOPICS_MAX}")
        if after is not None and not isinstance(after, str | bytes):
            raise LogTypeError(f"after must be a topic, str or bytes, got {type(after).__name__}")
        name = after.encode("utf-8", "surrogatepass") if isinstance(after, str) else after
        found = _Smallest(name, limit)
        with self._turn:
            self._count(log, found)
        return [TopicInfo(Name(topic), *row) for topic, row in found.rows()]

    def _count(self, log: Log, found: _Smallest) -> None:
        if self._epoch != log.epoch:  # records may have been removed
            self._epoch = log.epoch
            self._segments.clear()
        end = log.next_offset
        bases = [base for base in segment_bases(log.path) if base < end]
        for removed in self._segments.keys() - set(bases):
            del self._segments[removed]
        for base, stop in pairwise([*bases, end]):
            salt = _segment_salt(log.path, base)
            if salt is not None:
                self._count_segment(log, found, base, stop, salt)

    def _count_segment(self, log: Log, found: _Smallest, base: int, stop: int, salt: int) -> None:
        known = self._segments.pop(base, None)
        if known is None or known.salt != salt or known.upto > stop:
            rows = log.source.topic_lookup.rows(base, stop)
            indexed = {row.topic: list(row[1:-1]) for row in rows or ()}
            known = _Counted(salt, base if rows is None else stop, indexed)
        free = TOPIC_COUNTS_MAX - sum(len(one.table) for one in self._segments.values())
        table, complete = known.table, True
        if known.upto < stop:
            for part in _tables(log, table, known.upto, stop, free):
                found.add(part)
                complete = False
        found.add(table)
        if complete and len(table) <= free:
            self._segments[base] = _Counted(salt, stop, table)


def _tables(log: Log, table: Table, start: int, stop: int, topics_max: int) -> Iterator[Table]:
    """Count records into `table`; whenever it has more than `topics_max` topics, yield it and empty it."""
    reader = log.read(
        start=start, end=stop, visibility="committed", on_gap="skip", on_corruption="skip"
    )
    with reader:
        for records in reader.batches():
            for name, key, value, offset, timestamp in records:
                topic = bytes(name)  # bytes compare faster than Name
                row = table.get(topic)
                size = len(key) + len(value)
                if row is None:
                    table[topic] = [1, size, offset, offset, timestamp, timestamp]
                else:
                    row[0] += 1
                    row[1] += size
                    row[3] = offset
                    row[5] = timestamp
            if len(table) > topics_max:
                yield table
                table.clear()


def _segment_salt(directory: Path, base: int) -> int | None:
    """Return a value that identifies this generation of a segment; None if the segment was removed."""
    try:
        with Segment(directory, base) as segment:
            return segment.header.salt
    except FileNotFoundError:
        return None
    except LogCorruptionError:
        return _DAMAGED


class _Smallest:
    """Sums of the topics with the smallest names after `after`; at most twice `limit` topics in memory."""

    def __init__(self, after: bytes | None, limit: int) -> None:
        self._after = after
        self._limit = limit
        self._rows: Table = {}
        self._last: bytes | None = None  # names after it are not among the smallest

    def add(self, table: Table) -> None:
        after, rows = self._after, self._rows
        for topic, row in table.items():
            if (after is not None and topic <= after) or (
                self._last is not None and topic > self._last
            ):
                continue
            sums = rows.get(topic)
            if sums is None:
                rows[topic] = [*row]
                if len(rows) > 2 * self._limit:
                    self._prune()
            else:
                sums[0] += row[0]
                sums[1] += row[1]
                sums[3], sums[5] = row[3], row[5]  # tables come in the order of the log

    def rows(self) -> list[tuple[bytes, Row]]:
        """Return the topics in order of their names."""
        return sorted(self._rows.items())[: self._limit]

    def _prune(self) -> None:
        kept = nsmallest(self._limit, self._rows)
        self._last = kept[-1]
        for topic in self._rows.keys() - set(kept):
            del self._rows[topic]
