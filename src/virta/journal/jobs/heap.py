"""
Jobs or domains by (rank, time, number), the smallest first.

Invariant: `first` is never after any other item; what no longer holds is for the owner to take out.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

Item = tuple[int, int, int, Any]


class AnyHeap(Protocol):
    def push(self, rank: int, time: int, number: int, thing: object, /) -> None: ...

    def first(self) -> Item | None:
        """The first item, left where it is."""

    def time(self) -> int | None:
        """The time of the first item."""

    def pop(self) -> Item: ...

    def keep(self, valid: Callable[[Item], bool], /) -> None:
        """Only the items a function says yes to."""

    def clear(self) -> None: ...

    def __len__(self) -> int: ...


class PlainHeap:
    __slots__ = ("_items", "_tie")

    def __init__(self) -> None:
        # The fourth keeps things out of comparisons.
        self._items: list[tuple[int, int, int, int, Any]] = []
        self._tie = 0

    def push(self, rank: int, time: int, number: int, thing: object, /) -> None:
        self._tie += 1
        heapq.heappush(self._items, (rank, time, number, self._tie, thing))

    def first(self) -> Item | None:
        if not self._items:
            return None
        rank, time, number, _, thing = self._items[0]
        return rank, time, number, thing

    def time(self) -> int | None:
        return self._items[0][1] if self._items else None

    def pop(self) -> Item:
        rank, time, number, _, thing = heapq.heappop(self._items)
        return rank, time, number, thing

    def keep(self, valid: Callable[[Item], bool], /) -> None:
        self._items = [item for item in self._items if valid((*item[:3], item[4]))]
        heapq.heapify(self._items)

    def clear(self) -> None:
        self._items.clear()

    def __len__(self) -> int:
        return len(self._items)


Heap: type[AnyHeap] = PlainHeap
