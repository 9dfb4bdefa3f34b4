"""
Which events were already taken: (channel, source, id) → offset in the log.

A key is *claimed* when its event is accepted for writing, *settled* with its offset when the log has
it, and forgotten when the write failed, when it is older than the horizon or when there are more
keys than allowed (the oldest go first). A repeat does not renew anything. The same table answers
where in the log an event stands, which is what `Last-Event-ID` asks.

The keys themselves are in `virta.hub.kernel`'s `Keys`; of each it keeps 16 bytes and the offset, if it
is the native one. Keys that come as bytes are what that one makes of keys: digests, end to end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from virta.hub.kernel import Keys

if TYPE_CHECKING:
    from collections.abc import Sequence

# Keys settled within so many seconds expire together: a group of its own for each would cost more
# than the keys.
GROUP_S = 0.01


def key_of(channel: str, source: str, id_: str) -> str:
    """Join the three; no CloudEvents attribute and no channel needs a NUL."""
    return f"{channel}\0{source}\0{id_}"


class _Group:
    """So many keys that expire together, which is when the last of them does."""

    __slots__ = ("begun", "count", "last")

    def __init__(self, now: float, count: int) -> None:
        self.begun = self.last = now
        self.count = count


class Idempotency:
    """The table; times are seconds of one monotonic clock, passed in."""

    def __init__(self, *, keys_max: int, horizon_s: float) -> None:
        # Thorium remembers the last key even when told to remember none.
        self._keys_max = max(1, keys_max)
        self._horizon_s = horizon_s
        self._keys = Keys(self._keys_max)
        # Keys settled at about one time, oldest group first: expiry is per group, eviction per key.
        self._groups: deque[_Group] = deque()
        self._settled = 0

    def __len__(self) -> int:
        return len(self._keys)

    def claim(self, key: str) -> bool:
        """Take a key; False when it is held already."""
        return bool(self._keys.claim(key))

    def claim_all(self, keys: list[str] | bytes) -> bool:
        """Take all these keys at once if none is held and none stands twice; else take none."""
        return bool(self._keys.claim_all(keys))

    def release(self, keys: list[str] | bytes) -> None:
        """Give claimed keys back: their events are not in the log."""
        self._keys.release(keys)

    def settle(self, written: Sequence[tuple[str, int]], now: float) -> None:
        """Note the offsets of claimed (or newly found) events; `now` is when they were written."""
        self._remember(sum([self._keys.settle_run([key], offset) for key, offset in written]), now)

    def settle_run(self, keys: list[str] | bytes, first: int, now: float) -> None:
        """The same for events that stand in the log one behind the other."""
        self._remember(self._keys.settle_run(keys, first), now)

    def _remember(self, count: int, now: float) -> None:
        if not count:
            return
        groups = self._groups
        if groups and now - groups[-1].begun <= GROUP_S:
            groups[-1].last = max(groups[-1].last, now)
            groups[-1].count += count
        else:
            groups.append(_Group(now, count))
        self._settled += count
        if self._settled > self._keys_max:
            self._drop_oldest(self._settled - self._keys_max)

    def expire(self, now: float) -> None:
        """Forget what is older than the horizon."""
        groups = self._groups
        while groups and now - groups[0].last >= self._horizon_s:
            count = groups.popleft().count
            self._settled -= count
            self._keys.forget(count)

    def offset(self, key: str) -> int | None:
        """Where the event stands in the log, if that is still known."""
        offset: int | None = self._keys.offset(key)
        return offset

    def _drop_oldest(self, count: int) -> None:
        """The table has let so many go to make room."""
        self._settled -= count
        groups = self._groups
        while groups[0].count <= count:
            count -= groups.popleft().count
            if not groups:
                return
        groups[0].count -= count
