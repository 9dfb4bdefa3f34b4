"""
Values of rows: a cache of what was at hand, and reads of many offsets at once from the log.

A single read costs milliseconds, since it opens a segment and seeks; so many are read together in offset order, and
one reader continues over the records between two wanted ones if there are few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from virta import native
from virta.errors import LogGapError
from virta.views.changes import event_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from virta.log import Log

_native = native.load("virta.views._native")

# Records that a reader skips rather than seek again.
SKIP_RECORDS_MAX: Final = 20_000
# What a reference and a bytes object take beside the value.
ENTRY_BYTES: Final = 48
# Rows that are tried for eviction for one new value.
SWEEP_ROWS: Final = 32


class ValueCache:
    """Values of rows by row number, at most `bytes_max` bytes; a new one evicts others in turn, round and round."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._values: list[bytes | None] = []
        self._hand = 0
        self.bytes = 0

    def __len__(self) -> int:
        return sum(value is not None for value in self._values)

    def get(self, number: int) -> bytes | None:
        """Return the value of a row; None if it is not kept."""
        return self._values[number] if number < len(self._values) else None

    def put(self, number: int, value: bytes) -> None:
        """Keep the value that a row has now."""
        self.put_all([number], [value])

    def put_all_native(self, numbers: Iterable[int], new: Iterable[bytes]) -> None:
        assert _native is not None
        _native.put_values(self, numbers, new)

    def put_all_plain(self, numbers: Iterable[int], new: Iterable[bytes]) -> None:
        """Keep the values that rows have now; of values for one row the last."""
        values, bytes_max = self._values, self._bytes_max
        for number, value in zip(numbers, new, strict=True):
            if len(value) + ENTRY_BYTES > bytes_max:  # no other has to be dropped for it
                self.drop(number)
                continue
            if number >= len(values):
                values.extend([None] * (number + 1 - len(values)))
            old = values[number]
            values[number] = value
            self.bytes += len(value) + ENTRY_BYTES if old is None else len(value) - len(old)
            if self.bytes > bytes_max:
                self._sweep(number)

    put_all = put_all_plain if _native is None else put_all_native

    def _sweep(self, new: int) -> None:
        """Evict other values for a new one, after the one evicted last; drop the new one if that was not enough."""
        for _ in range(SWEEP_ROWS):
            self._hand = self._hand + 1 if self._hand + 1 < len(self._values) else 0
            self.drop(self._hand)
            if self.bytes <= self._bytes_max:
                return
        self.drop(new)

    def offer_all(self, numbers: Sequence[int], new: Sequence[bytes]) -> None:
        """Keep values as far as there is room for them; evict none."""
        room, fitting = self._bytes_max - self.bytes, 0
        for value in new:
            room -= len(value) + ENTRY_BYTES
            if room < 0:
                break
            fitting += 1
        self.put_all(numbers[:fitting], new[:fitting])

    def drop(self, number: int) -> None:
        if number < len(self._values):
            value = self._values[number]
            if value is not None:
                self._values[number] = None
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
                        found[record.offset] = event_value(record)
    except LogGapError:
        return
