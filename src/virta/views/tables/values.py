"""
Values of rows: a cache of what was at hand, and reads of many offsets at once from the log.

A single read costs milliseconds, since it opens a segment and seeks; so many are read together in offset order, and
one reader continues over the records between two wanted ones if there are few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from virta.errors import LogGapError
from virta.views.tables.changes import event_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.log import Log

# Records that a reader skips rather than seek again.
SKIP_RECORDS_MAX: Final = 20_000
# What a dictionary entry, an int and a bytes object take beside the value.
ENTRY_BYTES: Final = 140


class ValueCache:
    """Values by offset, at most `bytes_max` of them; the oldest are dropped first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._values: dict[int, bytes] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, offset: int) -> bytes | None:
        return self._values.get(offset)

    def put(self, offset: int, value: bytes) -> None:
        if self._bytes_max <= 0:
            return
        assert offset not in self._values, "every record has its own offset"
        self._values[offset] = value
        self.bytes += len(value) + ENTRY_BYTES
        while self.bytes > self._bytes_max:
            self.drop(next(iter(self._values)))

    def drop(self, offset: int) -> None:
        value = self._values.pop(offset, None)
        if value is not None:
            self.bytes -= len(value) + ENTRY_BYTES

    def clear(self) -> None:
        self._values.clear()
        self.bytes = 0


def read_values(log: Log, topic: str, offsets: Iterable[int]) -> dict[int, bytes]:
    """Return the events at these offsets of a topic; those that are no longer in the log are left out. Blocks."""
    wanted = sorted(set(offsets))
    found: dict[int, bytes] = {}
    start = 0
    while start < len(wanted):
        end = start + 1
        while end < len(wanted) and wanted[end] - wanted[end - 1] <= SKIP_RECORDS_MAX:
            end += 1
        run = set(wanted[start:end])
        _read_run(log, topic, wanted[start], wanted[end - 1] + 1, run, found)
        start = end
    return found


def _read_run(
    log: Log, topic: str, first: int, end: int, run: set[int], found: dict[int, bytes]
) -> None:
    try:
        with log.read(
            topics=[topic], start=first, end=end, on_gap="skip", on_corruption="skip"
        ) as reader:
            for records in reader.batches():
                for record in records:
                    if record.offset in run:
                        found[record.offset] = event_of(record).value
    except LogGapError:
        return
