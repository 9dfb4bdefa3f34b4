"""
Keys that are held: the plain twin of `native/hub_keys.h`, with the same answers.

A key is claimed (its event is on its way into the log) or settled (the event stands there, at an
offset). Settled keys are forgotten in the order in which they were settled, and never more than
`settled_max` are kept.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Keys:
    """The keys of a table, claimed and settled."""

    def __init__(self, settled_max: int) -> None:
        self._settled_max = settled_max
        self._offsets: dict[str, int] = {}
        self._order: deque[str] = deque()
        # Few, so that looking here costs nothing beside the settled ones.
        self._claimed: set[str] = set()

    def __len__(self) -> int:
        return len(self._offsets) + len(self._claimed)

    def claim(self, key: str) -> bool:
        """Take a key; False when it is held already."""
        if key in self._offsets or key in self._claimed:
            return False
        self._claimed.add(key)
        return True

    def claim_all(self, keys: Sequence[str]) -> bool:
        """Take all these keys at once if none is held and none stands twice; else take none."""
        fresh = set(keys)
        if len(keys) != len(fresh) or not self._offsets.keys().isdisjoint(keys):
            return False
        if not self._claimed.isdisjoint(fresh):
            return False
        self._claimed |= fresh
        return True

    def release(self, keys: Sequence[str]) -> None:
        """Give claimed keys back."""
        self._claimed.difference_update(keys)

    def settle_run(self, keys: Sequence[str], first: int) -> int:
        """Give keys their offsets, one behind the other; returns how many were not settled before."""
        self._claimed.difference_update(keys)
        fresh = 0
        for offset, key in enumerate(keys, first):
            if key not in self._offsets:
                fresh += 1
                self._order.append(key)
            self._offsets[key] = offset
            if len(self._order) > self._settled_max:
                self.forget(1)
        return fresh

    def forget(self, count: int) -> None:
        """Let so many go that were settled first."""
        for _ in range(min(count, len(self._order))):
            del self._offsets[self._order.popleft()]

    def offset(self, key: str) -> int | None:
        """Where the event of a settled key stands."""
        return self._offsets.get(key)
