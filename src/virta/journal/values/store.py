"""
The values: a plain state machine, no I/O, time comes in as an argument.

Invariant: a change applies only if it is newer than what is stored (the largest timestamp wins; at equal
timestamps SET beats DELETE, DELETE beats LINK, and the larger (type, data) wins), so any order and any
repetition of the same changes ends in the same state. Where values are is in `entries`.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from virta.journal.protocol.messages import RefusedError, Value
from virta.journal.protocol.rules import TIME_US_MAX
from virta.journal.values import numbers
from virta.journal.values.entries import OVER_BYTES_MAX, EntryTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.journal.values.entry import ValueEntry

LOCK_DEFAULT_US = 30 * 1_000_000
# Longer than a spool may be cut off from its daemon.
TOMBSTONE_US = 7 * 24 * 3600 * 1_000_000
TOMBSTONES_MAX = 1_000_000
KEYS_PER_VALUE_MAX = 64


class Store(EntryTable):
    # Changes. `owner` is the connection that asks, for locks.

    def set(
        self,
        key: bytes,
        value: Value,
        timestamp: int,
        now: int,
        *,
        owner: object = None,
        overwrite: bool = True,
        persist: bool = False,
        expires: int = 0,
        ttl: int = 0,
        copied: bool = False,
    ) -> bool:
        """
        Store a value; return False if what is there is newer or the same.

        With `copied`, from another daemon, it concerns this very key, even if that is linked here.
        """
        entry = self._unlocked(key, now, owner)
        if copied and entry is not None and key in entry.links:
            if entry.links[key] > timestamp:
                return False
            self._detach(key)
            entry = None
        if entry is not None and not overwrite:
            if timestamp == entry.timestamp and value == self.value(entry):
                return False
            raise RefusedError("already-exists", timestamp=entry.timestamp)
        before = self._entries.get(key)
        rest = (persist, expires, ttl)
        if before is not None and not self._newer(before, timestamp, value, rest):
            return False
        self._reserve_memory(entry, key, value)
        if entry is None:
            entry = self._create(key, timestamp)
            if before is not None and before.over and before.timestamp == timestamp:
                entry.marked_at, entry.worked_until = before.marked_at, before.worked_until
        if entry.timestamp != timestamp or not copied:
            # A mark belongs to a version; other daemons may know of one for this very version.
            again = entry.marked_at and entry.timestamp == timestamp
            entry.marked_at = entry.marked_at + 1 if again else 0
            entry.worked_until = 0
        entry.timestamp = entry.modified = timestamp
        entry.persist = persist
        entry.ttl = ttl
        self._set_data(entry, value)
        self._set_expiry(entry, expires)
        self._mark_dirty(entry)
        return True

    def delete(
        self, key: bytes, timestamp: int, now: int, *, owner: object = None, complete: bool = False
    ) -> bool:
        """Remove a value under all its keys; return True if a live one was removed."""
        entry = self._unlocked(key, now, owner)
        before = self._entries.get(key)
        if before is not None and (
            timestamp < before.timestamp
            or (timestamp == before.timestamp and (entry is not None or before.over))
        ):
            return False
        if entry is None:
            if complete:
                self._detach(key)
            else:
                self._bury(key, timestamp, now, persist=True)
            return False
        times = {each: max(timestamp, entry.links.get(each, 0)) for each in entry.keys}
        for each, deleted_at in times.items():
            if complete:
                self._detach(each)
            else:
                self._bury(each, deleted_at, now, persist=entry.persist)
        return True

    def delete_copy(self, key: bytes, timestamp: int, now: int, *, owner: object = None) -> bool:
        """Delete this very key for another daemon; return True if it led to a value."""
        entry = self._unlocked(key, now, owner)
        before = self._entries.get(key)
        if before is None or entry is None:
            if before is None or (timestamp, 0) >= (before.timestamp, before.over):
                self._bury(key, timestamp, now, persist=True)
            return False
        if key in entry.links:
            if timestamp >= entry.links[key]:
                self._bury(key, timestamp, now, persist=entry.persist)
                return True
            return False
        if timestamp <= entry.timestamp:
            return False
        self._detach_links(entry, now)
        self._bury(key, timestamp, now, persist=entry.persist)
        return True

    def change(
        self, key: bytes, timestamp: int, now: int, value: Value, *, owner: object = None
    ) -> ValueEntry:
        """Replace the data of a value in place (ADD, NOT, TRUNCATE); a missing one is created."""
        entry = self._unlocked(key, now, owner)
        before = self._entries.get(key)
        final = timestamp if before is None else max(timestamp, before.timestamp + 1)
        self._reserve_memory(entry, key, value)
        if entry is None:
            entry = self._create(key, final)
        self._renew(entry, final)
        self._set_data(entry, value)
        self._mark_dirty(entry)
        return entry

    def add(
        self, key: bytes, amount: Value, timestamp: int, now: int, *, owner: object = None
    ) -> ValueEntry:
        entry = self.live(key, now)
        stored = None if entry is None else self.value(entry)
        return self.change(key, timestamp, now, numbers.added(stored, amount), owner=owner)

    def lock(self, key: bytes, owner: object, until: int, now: int) -> ValueEntry:
        entry = self._required(key, now, owner)
        entry.lock_owner = owner
        entry.lock_until = until
        return entry

    def unlock(self, key: bytes, owner: object, now: int) -> ValueEntry:
        entry = self.live(key, now)
        if entry is None or not entry.locked(now) or entry.lock_owner is not owner:
            raise RefusedError("not-owner", timestamp=entry.timestamp if entry else None)
        entry.lock_owner = None
        return entry

    def rename(
        self,
        key: bytes,
        target: bytes,
        timestamp: int,
        now: int,
        *,
        owner: object = None,
        overwrite: bool = False,
    ) -> bool:
        """Move a value to another key; return False if either key has a newer change."""
        entry = self._required(key, now, owner)
        occupant = self._unlocked(target, now, owner)
        if occupant is not None and not overwrite:
            raise RefusedError("already-exists", timestamp=occupant.timestamp)
        before = self._entries.get(target)
        if timestamp < entry.timestamp or (before is not None and timestamp < before.timestamp):
            return False
        # Later than what either key had, or one timestamp would have two values.
        final = max(timestamp, entry.timestamp + 1, *(at + 1 for at in entry.links.values()))
        if before is not None:
            final = max(final, before.timestamp + 1, before.timestamp_of(target) + 1)
        if key != target:
            self._drop_key(target, final)
            first = entry.keys[0] == key
            self._attach(entry, target, final)
            if first:
                entry.keys.remove(target)
                entry.keys.insert(0, target)
                entry.links = dict.fromkeys(entry.keys[1:], final)
                self._adopt(entry)
            self._bury(key, final, now, persist=entry.persist)
        self._renew(entry, final)
        self._mark_dirty(entry)
        return True

    def link(
        self, key: bytes, additional: bytes, timestamp: int, now: int, *, owner: object = None
    ) -> ValueEntry:
        """Add a key to a value; adding it again is no error."""
        entry = self._required(key, now, owner)
        other = self.live(additional, now)
        if other is entry:
            return entry
        if other is not None:
            raise RefusedError("already-exists", timestamp=other.timestamp)
        if len(entry.keys) == KEYS_PER_VALUE_MAX:
            raise RefusedError("too-large", f"a value has at most {KEYS_PER_VALUE_MAX} keys")
        self._make_space(len(additional))
        before = self._entries.get(additional)
        linked_at = timestamp if before is None else max(timestamp, before.timestamp + 1)
        self._attach(entry, additional, linked_at)
        return entry

    def link_copy(self, key: bytes, additional: bytes, timestamp: int, now: int) -> bool:
        """Link a key for another daemon to a value, which may not have arrived; return True if applied."""
        before = self._entries.get(additional)
        if key == additional or (
            before is not None and self._link_rank(before, additional) >= (timestamp, 0, key)
        ):
            return False
        if before is not None and not before.tombstone and additional not in before.links:
            self._detach_links(before, now)
        entry = self.live(key, now)
        if entry is not None and key == entry.keys[0]:
            self._attach(entry, additional, timestamp)
        else:
            self._bury(additional, timestamp, now, persist=True, alias=key)
        return True

    def _link_rank(self, entry: ValueEntry, key: bytes) -> tuple[int, int, bytes]:
        """Return the rank of what a key is now; a link with a larger one replaces it."""
        if key in entry.links:
            return entry.links[key], 0, entry.keys[0]
        if entry.alias is not None:
            return entry.timestamp, 0, entry.alias
        return entry.timestamp, 1, b""

    def unlink(self, key: bytes, timestamp: int, now: int, *, owner: object = None) -> bool:
        """Remove one key; return True if it was the last, so that the value is removed."""
        entry = self._unlocked(key, now, owner)
        if entry is None:
            return False
        if len(entry.keys) == 1:
            return self.delete(key, max(timestamp, entry.timestamp + 1), now, owner=owner)
        self._drop_key(key, timestamp)
        self._bury(key, timestamp, now, persist=entry.persist)
        return False

    def _drop_key(self, key: bytes, timestamp: int) -> None:
        """Remove a key from its value, which continues under the next one if it was its own."""
        entry = self._entries.get(key)
        first = entry is not None and entry.keys[0] == key and len(entry.keys) > 1
        self._detach(key)
        if entry is not None and first:
            # Later than when they were linked, by whatever clock.
            if self.replication.older_may_arrive:
                timestamp = max(timestamp, *(at + 1 for at in entry.links.values()))
            self._renew(entry, timestamp)
            entry.links = dict.fromkeys(entry.keys[1:], timestamp)
            self._adopt(entry)
            self._mark_dirty(entry)
            self.replication.value_moved(entry)

    def _renew(self, entry: ValueEntry, timestamp: int) -> None:
        """Start a new version that keeps its mark."""
        entry.timestamp = entry.modified = timestamp
        if entry.worked_until:
            entry.marked_at = max(entry.marked_at, timestamp + 1)

    def _detach_links(self, entry: ValueEntry, now: int) -> None:
        """Detach the linked keys of a value that loses its own; they wait until that has a value again."""
        root = entry.keys[0]
        for key, linked_at in list(entry.links.items()):
            self._bury(key, linked_at, now, persist=entry.persist, alias=root)
            self.unannounced.append(key)

    # Attributes that change without a new version.

    def mark(self, entry: ValueEntry, until: int, now: int) -> None:
        """Mark a value as worked on until then; a time that has passed clears the mark."""
        entry.worked_until = until if until > now else 0
        entry.marked_at = max(now, entry.marked_at + 1, entry.timestamp + 1)
        self._marked[entry] = None

    def mark_copy(self, entry: ValueEntry, until: int, timestamp: int) -> None:
        """Mark this version for another daemon; of two marks the later one wins."""
        if (timestamp, until) > (entry.marked_at, entry.worked_until):
            entry.marked_at = timestamp
            entry.worked_until = until
            if entry.tombstone:
                self._mark_dirty(entry)  # it expired; a later expiry may be on its way
            else:
                self._marked[entry] = None

    def touch(self, entry: ValueEntry, ttl: int, now: int) -> None:
        """Extend the expiry to at least `ttl` from now; a value without expiry stays without."""
        later = min(now + ttl, TIME_US_MAX)
        if entry.expires and later > entry.expires:
            self._set_expiry(entry, later)
            self._marked[entry] = None

    def release_locks(self, owner: object, keys: Iterable[bytes]) -> None:
        """Release the locks of a connection that was closed."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.lock_owner is owner:
                entry.lock_owner = None

    # Time.

    def tick(self, now: int) -> list[bytes]:
        """Expire values and forget old tombstones; return the keys that expired."""
        while self.expiries and self.expiries[0][0] <= now:
            due, entry = heapq.heappop(self.expiries)
            if entry.queued != due or not entry.keys:
                continue
            entry.queued = 0
            if entry.expires and entry.expires <= now:
                self._expire(entry, now)
            else:
                self._set_expiry(entry, entry.expires)
        while self._tombstones and (
            self._tombstones[0][0] <= now - TOMBSTONE_US or len(self._tombstones) > TOMBSTONES_MAX
        ):
            _, entry = self._tombstones.popleft()
            if entry.keys and self._entries.get(entry.keys[0]) is entry and entry.tombstone:
                self._detach(entry.keys[0])
        expired, self.unannounced = self.unannounced, []
        return expired

    def shift(self, step: int) -> None:
        """Move times by `step` µs after the clock was set; `clock_steps` lists which."""
        for entry in dict.fromkeys(self._entries.values()):
            if entry.lock_owner is not None:
                entry.lock_until += step
            if entry.tombstone:
                entry.accessed = max(entry.accessed + step, 1)
                continue
            if entry.worked_until:
                entry.worked_until = min(max(entry.worked_until + step, 1), TIME_US_MAX)
                self._marked[entry] = None
            if entry.ttl and entry.expires:
                self._set_expiry(entry, min(max(entry.expires + step, 1), TIME_US_MAX))
                self._marked[entry] = None
        self._tombstones = deque((when + step, entry) for when, entry in self._tombstones)

    # Helpers.

    def _required(self, key: bytes, now: int, owner: object) -> ValueEntry:
        entry = self._unlocked(key, now, owner)
        if entry is None:
            raise RefusedError("does-not-exist")
        return entry

    def _unlocked(self, key: bytes, now: int, owner: object) -> ValueEntry | None:
        entry = self.live(key, now)
        if entry is not None and entry.locked(now) and entry.lock_owner is not owner:
            raise RefusedError("locked", timestamp=entry.timestamp, timeout=entry.lock_until)
        return entry

    def _newer(
        self, before: ValueEntry, timestamp: int, value: Value, rest: tuple[bool, int, int]
    ) -> bool:
        """Whether a SET wins; at equal timestamps the content decides, so that all copies agree."""
        if timestamp != before.timestamp:
            return timestamp > before.timestamp
        if before.tombstone and not before.over:
            return True
        stored = self.value(before)
        data = value.data[:OVER_BYTES_MAX] if before.over else value.data
        return (value.type, data, *rest) > (
            stored.type,
            stored.data,
            before.persist,
            before.expires,
            before.ttl,
        )
