"""
The touch ring: the newest changes of a row table, for consumers that resume.

A touch is (offset, row number, offset of the row before or -1, memberships before). Offsets only grow, so the touches
since a position are found by bisection. A touch takes 28 bytes: 8 + 4 + 8 in arrays, and one reference.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    Members = frozenset[int]


class Touch(NamedTuple):
    offset: int
    number: int  # of the row
    previous: int  # offset of the row before; -1 if there was none
    before: Members  # the views that had the row before


class TouchRing:
    """At most `size` touches; a new one replaces the oldest."""

    def __init__(self, size: int) -> None:
        assert size > 0
        self._size = size
        self._start = 0  # index of the oldest
        self.clear()

    def clear(self) -> None:
        self._start = 0
        self._offsets = array("q")
        self._numbers = array("I")
        self._previous = array("q")
        self._before: list[Members] = []

    def __len__(self) -> int:
        return len(self._offsets)

    def append(
        self, offset: int, number: int, previous: int, before: Members
    ) -> tuple[int, int] | None:
        """Add a touch; return (offset, number) of the one it replaces."""
        if len(self._offsets) < self._size:
            self._offsets.append(offset)
            self._numbers.append(number)
            self._previous.append(previous)
            self._before.append(before)
            return None
        at = self._start
        dropped = (self._offsets[at], self._numbers[at])
        self._offsets[at] = offset
        self._numbers[at] = number
        self._previous[at] = previous
        self._before[at] = before
        self._start = (at + 1) % self._size
        return dropped

    def since(self, position: int) -> Iterator[Touch]:
        """Yield the touches at `position` and above, in order."""
        count = len(self._offsets)
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if self._offsets[(self._start + middle) % count] < position:
                low = middle + 1
            else:
                high = middle
        for place in range(low, count):
            at = (self._start + place) % count
            yield Touch(self._offsets[at], self._numbers[at], self._previous[at], self._before[at])

    def columns(self) -> tuple[array[int], array[int], array[int]]:
        """Return offsets, numbers and previous offsets, oldest first."""
        start = self._start
        parts = (self._offsets, self._numbers, self._previous)
        if start:
            return tuple(part[start:] + part[:start] for part in parts)  # type: ignore[return-value]
        return tuple(part[:] for part in parts)  # type: ignore[return-value]

    def intern(self, known: dict[Members, Members]) -> None:
        """Add the memberships in use to a dictionary of interned sets."""
        known.update({members: members for members in self._before})
