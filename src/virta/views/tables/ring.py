"""
The touch ring: the newest changes of a row table, for consumers that resume.

A touch is (offset, row number, offset of the row before or -1, memberships before). Offsets only grow, so the touches
since a position are found by bisection. A touch takes 28 bytes: 8 + 4 + 8 in arrays, and one reference.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Members = frozenset[int]


class Touch(NamedTuple):
    offset: int
    number: int  # of the row
    previous: int  # offset of the row before; -1 if there was none
    before: Members  # the views that had the row before


class TouchCopy:
    """Touches that no longer change, oldest first."""

    __slots__ = ("_before", "numbers", "offsets", "previous")

    def __init__(
        self,
        offsets: array[int],
        numbers: array[int],
        previous: array[int],
        before: list[Members],
    ) -> None:
        self.offsets = offsets
        self.numbers = numbers
        self.previous = previous
        self._before = before

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Touch]:
        columns = (self.offsets, self.numbers, self.previous, self._before)
        return map(Touch, *columns)


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
        offsets, numbers = self.extend([offset], [number], [previous], [before])
        return (offsets[0], numbers[0]) if offsets else None

    def extend(
        self,
        offsets: Sequence[int],
        numbers: Sequence[int],
        previous: Sequence[int],
        before: list[Members],
    ) -> tuple[array[int], array[int]]:
        """Add touches, in order; return the offsets and numbers of those they replace, oldest first."""
        room = self._size - len(self._before)
        self._offsets.extend(offsets[:room])
        self._numbers.extend(numbers[:room])
        self._previous.extend(previous[:room])
        self._before.extend(before[:room])
        lost = array("q"), array("I")
        low, count = room, len(offsets)
        while low < count:
            start = self._start
            high = min(count, low + self._size - start)
            end = start + high - low
            lost[0].extend(self._offsets[start:end])
            lost[1].extend(self._numbers[start:end])
            self._offsets[start:end] = array("q", offsets[low:high])
            self._numbers[start:end] = array("I", numbers[low:high])
            self._previous[start:end] = array("q", previous[low:high])
            self._before[start:end] = before[low:high]
            self._start = end if end < self._size else 0
            low = high
        return lost

    def since(self, position: int) -> Iterator[Touch]:
        """Yield the touches at `position` and above, in order."""
        count = len(self._offsets)
        for place in range(self._find(position), count):
            at = (self._start + place) % count
            yield Touch(self._offsets[at], self._numbers[at], self._previous[at], self._before[at])

    def copy(self, position: int) -> TouchCopy:
        """Return a copy of the touches at `position` and above, which another thread may read."""
        low, start = self._find(position), self._start
        count = len(self._offsets)
        first, second = slice(start + low, count), slice(max(0, start + low - count), start)
        return TouchCopy(
            self._offsets[first] + self._offsets[second],
            self._numbers[first] + self._numbers[second],
            self._previous[first] + self._previous[second],
            self._before[first] + self._before[second],
        )

    def _find(self, position: int) -> int:
        """Return how many touches are below a position."""
        count = len(self._offsets)
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if self._offsets[(self._start + middle) % count] < position:
                low = middle + 1
            else:
                high = middle
        return low

    def intern(self, known: dict[Members, Members]) -> None:
        """Add the memberships in use to a dictionary of interned sets."""
        known.update({members: members for members in self._before})
