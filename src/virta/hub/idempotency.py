"""
Repeated events: (channel, source, id) → offset in the log.

A key is *claimed* when its event is accepted for writing and *committed* with its offset when the event is in the
log. It is removed when the write failed, when it is older than the horizon, or when there are too many keys (the
oldest first). A repeat renews nothing. `Last-Event-ID` uses the same table to find an event in the log.

The keys are in a key table: the native one (native/hub_keys.h) stores 16 bytes of digest and an offset for each, and
also accepts digests, as bytes end to end, instead of keys. `PlainKeyTable` has the same behaviour for text keys.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from virta import native

if TYPE_CHECKING:
    from collections.abc import Sequence

# Keys committed within this time expire together: a group for each would cost more than the keys.
GROUP_S = 0.01


def key_of(channel: str, source: str, id_: str) -> str:
    """Return the key of an event; NUL occurs in no channel and no CloudEvents attribute."""
    return f"{channel}\0{source}\0{id_}"


class PlainKeyTable:
    """Claimed and committed keys; the oldest are removed beyond `committed_max`."""

    def __init__(self, committed_max: int) -> None:
        self._committed_max = committed_max
        self._offsets: dict[str, int] = {}
        self._order: deque[str] = deque()
        self._claimed: set[str] = set()  # only those of running writes

    def __len__(self) -> int:
        return len(self._offsets) + len(self._claimed)

    def claim(self, key: str) -> bool:
        """Claim a key; return False if it is in the table."""
        if key in self._offsets or key in self._claimed:
            return False
        self._claimed.add(key)
        return True

    def claim_all(self, keys: Sequence[str]) -> bool:
        """Claim all keys, or return False and claim none if one is in the table or occurs twice."""
        fresh = set(keys)
        if len(keys) != len(fresh) or not self._offsets.keys().isdisjoint(keys):
            return False
        if not self._claimed.isdisjoint(fresh):
            return False
        self._claimed |= fresh
        return True

    def release(self, keys: Sequence[str]) -> None:
        """Remove claimed keys."""
        self._claimed.difference_update(keys)

    def commit_run(self, keys: Sequence[str], first: int) -> int:
        """Give keys consecutive offsets from `first` on; return how many were not committed before."""
        self._claimed.difference_update(keys)
        fresh = 0
        for offset, key in enumerate(keys, first):
            if key not in self._offsets:
                fresh += 1
                self._order.append(key)
            self._offsets[key] = offset
            if len(self._order) > self._committed_max:
                self.forget(1)
        return fresh

    def forget(self, count: int) -> None:
        """Remove the `count` keys that were committed first."""
        for _ in range(min(count, len(self._order))):
            del self._offsets[self._order.popleft()]

    def offset(self, key: str) -> int | None:
        """Return the offset of a committed key."""
        return self._offsets.get(key)


_native = native.load("virta.hub._native")
KeyTable: Final[Any] = PlainKeyTable if _native is None else _native.KeyTable


class _Group:
    """A number of keys that expire together: when the last of them does."""

    __slots__ = ("begun", "count", "last")

    def __init__(self, now: float, count: int) -> None:
        self.begun = self.last = now
        self.count = count


class Idempotency:
    """The key table with expiry; times are seconds of a monotonic clock, passed in."""

    def __init__(self, *, keys_max: int, horizon_s: float, table: Any = KeyTable) -> None:
        # Thorium keeps the last key even if it is set to keep none.
        self._keys_max = max(1, keys_max)
        self._horizon_s = horizon_s
        self._keys = table(self._keys_max)
        # Oldest first. Expiry removes groups, the limit removes single keys.
        self._groups: deque[_Group] = deque()
        self._committed = 0

    def __len__(self) -> int:
        return len(self._keys)

    def claim(self, key: str) -> bool:
        """Claim a key; return False if it is in the table."""
        return bool(self._keys.claim(key))

    def claim_all(self, keys: list[str] | bytes) -> bool:
        """Claim all keys, or return False and claim none if one is in the table or occurs twice."""
        return bool(self._keys.claim_all(keys))

    def release(self, keys: list[str] | bytes) -> None:
        """Remove claimed keys: their events are not in the log."""
        self._keys.release(keys)

    def commit(self, written: Sequence[tuple[str, int]], now: float) -> None:
        """Store the offsets of events, claimed or found in the log; `now` is when they were written."""
        self._count(sum([self._keys.commit_run([key], offset) for key, offset in written]), now)

    def commit_run(self, keys: list[str] | bytes, first: int, now: float) -> None:
        """Do the same for events at consecutive offsets."""
        self._count(self._keys.commit_run(keys, first), now)

    def _count(self, count: int, now: float) -> None:
        if not count:
            return
        groups = self._groups
        if groups and now - groups[-1].begun <= GROUP_S:
            groups[-1].last = max(groups[-1].last, now)
            groups[-1].count += count
        else:
            groups.append(_Group(now, count))
        self._committed += count
        if self._committed > self._keys_max:
            self._count_evicted(self._committed - self._keys_max)

    def expire(self, now: float) -> None:
        """Remove the keys that are older than the horizon."""
        groups = self._groups
        while groups and now - groups[0].last >= self._horizon_s:
            count = groups.popleft().count
            self._committed -= count
            self._keys.forget(count)

    def offset(self, key: str) -> int | None:
        """Return the event's offset in the log, if it is still in the table."""
        offset: int | None = self._keys.offset(key)
        return offset

    def _count_evicted(self, count: int) -> None:
        """Take keys that the table has removed by itself out of the oldest groups."""
        self._committed -= count
        groups = self._groups
        while groups[0].count <= count:
            count -= groups.popleft().count
            if not groups:
                return
        groups[0].count -= count
