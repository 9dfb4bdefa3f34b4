"""
Which events were already taken: (channel, source, id) → offset in the log.

A key is *claimed* when its event is accepted for writing, *settled* with its offset when the log has
it, and forgotten when the write failed, when it is older than the horizon or when there are more
keys than allowed (the oldest go first). A repeat does not renew anything. The same table answers
where in the log an event stands, which is what `Last-Event-ID` asks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Keys settled within so many seconds expire together: a group of its own for each would cost more
# than the keys.
GROUP_S = 0.01


def key_of(channel: str, source: str, id_: str) -> str:
    """Join the three; no CloudEvents attribute and no channel needs a NUL."""
    return f"{channel}\0{source}\0{id_}"


class _Group:
    """Keys that expire together, which is when the last of them does."""

    __slots__ = ("begun", "keys", "last")

    def __init__(self, now: float, keys: deque[str]) -> None:
        self.begun = self.last = now
        self.keys = keys


class Idempotency:
    """The table; times are seconds of one monotonic clock, passed in."""

    def __init__(self, *, keys_max: int, horizon_s: float) -> None:
        # Thorium remembers the last key even when told to remember none.
        self._keys_max = max(1, keys_max)
        self._horizon_s = horizon_s
        self._offsets: dict[str, int] = {}
        # Accepted, not yet in the log: few, so that looking here costs nothing beside the table.
        self._claimed: set[str] = set()
        # Keys settled at about one time, oldest group first: expiry is per group, eviction per key.
        self._groups: deque[_Group] = deque()
        self._settled = 0

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
        """Give claimed keys back: their events are not in the log."""
        self._claimed.difference_update(keys)

    def settle(self, written: Sequence[tuple[str, int]], now: float) -> None:
        """Note the offsets of claimed (or newly found) events; `now` is when they were written."""
        if written:
            self._offsets.update(written)
            self._remember([key for key, _ in written], now)

    def settle_run(self, keys: Sequence[str], first: int, now: float) -> None:
        """The same for events that stand in the log one behind the other."""
        self._offsets.update(zip(keys, range(first, first + len(keys)), strict=True))
        self._remember(keys, now)

    def _remember(self, keys: Sequence[str], now: float) -> None:
        self._claimed.difference_update(keys)
        groups = self._groups
        if groups and now - groups[-1].begun <= GROUP_S:
            groups[-1].last = max(groups[-1].last, now)
            groups[-1].keys.extend(keys)
        else:
            groups.append(_Group(now, deque(keys)))
        self._settled += len(keys)
        while self._settled > self._keys_max:
            self._drop_oldest_key()

    def expire(self, now: float) -> None:
        """Forget what is older than the horizon."""
        groups = self._groups
        while groups and now - groups[0].last >= self._horizon_s:
            keys = groups.popleft().keys
            self._settled -= len(keys)
            for key in keys:
                self._offsets.pop(key, None)

    def offset(self, key: str) -> int | None:
        """Where the event stands in the log, if that is still known."""
        return self._offsets.get(key)

    def _drop_oldest_key(self) -> None:
        keys = self._groups[0].keys
        self._offsets.pop(keys.popleft(), None)
        self._settled -= 1
        if not keys:
            self._groups.popleft()
