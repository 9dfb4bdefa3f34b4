"""
The values: a plain state machine, no I/O, time comes in as an argument.

Invariants:
- `_entries` maps every key to its entry, live or tombstone; an entry lists exactly the keys that map
  to it; only keys of live entries are in the ordered index.
- A change applies only if it is newer than what is stored (the largest timestamp wins; at equal
  timestamps SET beats DELETE and the larger (type, data) wins), so any order and any repetition of
  the same changes ends in the same state.
- `drain` names every entry and key whose stored image has become wrong since the last call.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from virta.journal import numbers
from virta.journal.entry import Entry, Spill
from virta.journal.keys import SortedKeys
from virta.journal.messages import RefusedError, Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOCK_DEFAULT_US = 30 * 1_000_000
# Longer than a spool may be cut off from its daemon.
TOMBSTONE_US = 7 * 24 * 3600 * 1_000_000
TOMBSTONES_MAX = 1_000_000
KEYS_PER_VALUE_MAX = 64
TIME_US_MAX = (1 << 64) - 1  # what a reply can say
MEMORY_BYTES_MAX = 1024 * 1024 * 1024
# What CPython spends on an entry, its keys' places in dict and index, besides the bytes themselves.
ENTRY_OVERHEAD_BYTES = 512


class Store:
    def __init__(
        self, spill: Spill | None = None, *, memory_bytes_max: int = MEMORY_BYTES_MAX
    ) -> None:
        self.memory_bytes = 0
        self.memory_bytes_max = memory_bytes_max
        self.spilled = 0
        self._spill = spill
        self._entries: dict[bytes, Entry] = {}
        self._keys = SortedKeys()
        self._expiries: list[tuple[int, Entry]] = []
        self._tombstones: deque[tuple[int, Entry]] = deque()
        # Persistent entries whose data is in memory, least recently used first.
        self._resident: OrderedDict[Entry, None] = OrderedDict()
        self.wants_log = False  # an acknowledgement of the last changes has to wait for the log
        self._dirty: dict[Entry, None] = {}
        self._marked: dict[Entry, None] = {}
        self._gone: dict[bytes, None] = {}
        self.unannounced: list[bytes] = []  # keys expired since the last tick, for listeners

    # Reading.

    def __len__(self) -> int:
        return len(self._keys)

    def live(self, key: bytes, now: int) -> Entry | None:
        """The entry a key leads to, unless it is gone or its time is over."""
        entry = self._entries.get(key)
        if entry is None or entry.tombstone:
            return None
        if entry.expires and entry.expires <= now:
            self._expire(entry, now)
            return None
        return entry

    def stored(self, key: bytes) -> Entry | None:
        """Whatever is known of a key: a live entry, a tombstone, or nothing."""
        return self._entries.get(key)

    def scan(self, lower: bytes, upper: bytes | None, *, after: bool = False) -> Iterator[bytes]:
        return self._keys.scan(lower, upper, after=after)

    def entries(self) -> list[Entry]:
        """Every entry once, tombstones too."""
        return list(dict.fromkeys(self._entries.values()))

    def value(self, entry: Entry) -> Value:
        """Type and data, fetched from the spill when memory had no room."""
        data = entry.data
        if data is None:
            assert self._spill is not None
            data = self._spill.get(entry.handle)
        elif entry in self._resident:
            self._resident.move_to_end(entry)
        return Value(entry.type, data)

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
    ) -> bool:
        """Store a value; False if what is there is newer or the same."""
        entry = self._unlocked(key, now, owner)
        if entry is not None and not overwrite:
            if timestamp == entry.timestamp and value == self.value(entry):
                return False
            raise RefusedError("already-exists", timestamp=entry.timestamp)
        before = self._entries.get(key)
        rest = (persist, expires, ttl)
        if before is not None and not self._newer(before, timestamp, value, rest):
            return False
        self._room_for(entry, key, value)
        if entry is None:
            entry = self._create(key, timestamp)
        entry.timestamp = entry.modified = timestamp
        entry.persist = persist
        entry.ttl = ttl
        entry.worked_until = 0
        self._set_data(entry, value)
        self._set_expiry(entry, expires)
        self._changed(entry)
        return True

    def delete(
        self, key: bytes, timestamp: int, now: int, *, owner: object = None, complete: bool = False
    ) -> bool:
        """Remove a value under all its keys; True if a live one was removed."""
        entry = self._unlocked(key, now, owner)
        before = self._entries.get(key)
        if before is not None and (
            timestamp < before.timestamp or (entry is not None and timestamp == before.timestamp)
        ):
            return False
        if entry is None:
            if complete:
                self._detach(key)
            else:
                self._bury(key, timestamp, now, persist=True)
            return False
        keys = list(entry.keys)
        for each in keys:
            if complete:
                self._detach(each)
            else:
                self._bury(each, timestamp, now, persist=entry.persist)
        return True

    def change(
        self, key: bytes, timestamp: int, now: int, value: Value, *, owner: object = None
    ) -> Entry:
        """Replace the data of a value in place (ADD, NOT, TRUNCATE); a missing one is created."""
        entry = self._unlocked(key, now, owner)
        before = self._entries.get(key)
        final = timestamp if before is None else max(timestamp, before.timestamp + 1)
        self._room_for(entry, key, value)
        if entry is None:
            entry = self._create(key, final)
        entry.timestamp = entry.modified = final
        self._set_data(entry, value)
        self._changed(entry)
        return entry

    def add(
        self, key: bytes, amount: Value, timestamp: int, now: int, *, owner: object = None
    ) -> Entry:
        entry = self.live(key, now)
        stored = None if entry is None else self.value(entry)
        return self.change(key, timestamp, now, numbers.added(stored, amount), owner=owner)

    def lock(self, key: bytes, owner: object, until: int, now: int) -> Entry:
        entry = self._required(key, now, owner)
        entry.lock_owner = owner
        entry.lock_until = until
        return entry

    def unlock(self, key: bytes, owner: object, now: int) -> Entry:
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
        """Move a value to another key; False if either key has seen a newer change."""
        entry = self._required(key, now, owner)
        occupant = self._unlocked(target, now, owner)
        if occupant is not None and not overwrite:
            raise RefusedError("already-exists", timestamp=occupant.timestamp)
        before = self._entries.get(target)
        if timestamp < entry.timestamp or (before is not None and timestamp < before.timestamp):
            return False
        # Later than what either key had, or the same moment would have two values.
        final = max(timestamp, entry.timestamp + 1, 0 if before is None else before.timestamp + 1)
        if key != target:
            self._detach(target)
            entry.keys[entry.keys.index(key)] = target
            self._entries[target] = entry
            self._keys.add(target)
            del self._entries[key]
            self._keys.remove(key)
            self.memory_bytes += len(target) - len(key)
            if entry.logged:
                self._gone[key] = None
            self._bury(key, final, now, persist=entry.persist)
        entry.timestamp = entry.modified = final
        self._changed(entry)
        return True

    def link(self, key: bytes, additional: bytes, now: int, *, owner: object = None) -> Entry:
        """Let a second key lead to a value; doing it again is no error."""
        entry = self._required(key, now, owner)
        other = self.live(additional, now)
        if other is entry:
            return entry
        if other is not None:
            raise RefusedError("already-exists", timestamp=other.timestamp)
        if len(entry.keys) == KEYS_PER_VALUE_MAX:
            raise RefusedError("too-large", f"a value has at most {KEYS_PER_VALUE_MAX} keys")
        self._make_room(len(additional))
        self._detach(additional)
        entry.keys.append(additional)
        self._entries[additional] = entry
        self._keys.add(additional)
        self.memory_bytes += len(additional)
        self._changed(entry)
        return entry

    def unlink(self, key: bytes, timestamp: int, now: int, *, owner: object = None) -> bool:
        """Drop one key; the last one takes the value with it (True)."""
        entry = self._unlocked(key, now, owner)
        if entry is None:
            return False
        if len(entry.keys) == 1:
            return self.delete(key, max(timestamp, entry.timestamp + 1), now, owner=owner)
        self._bury(key, timestamp, now, persist=entry.persist)
        return False

    # Attributes that change without a new version.

    def mark(self, entry: Entry, until: int, now: int) -> None:
        """Worked on until then; a time that is over clears the mark."""
        entry.worked_until = until if until > now else 0
        self._marked[entry] = None

    def touch(self, entry: Entry, ttl: int, now: int) -> None:
        """Live at least `ttl` from now; a value without expiry stays without."""
        later = min(now + ttl, TIME_US_MAX)
        if entry.expires and later > entry.expires:
            self._set_expiry(entry, later)
            self._marked[entry] = None

    def release_locks(self, owner: object, keys: Iterable[bytes]) -> None:
        """The connection is gone, and its locks with it."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.lock_owner is owner:
                entry.lock_owner = None

    # Time.

    def tick(self, now: int) -> list[bytes]:
        """Let expire what is over and forget old tombstones; the keys that are newly gone."""
        while self._expiries and self._expiries[0][0] <= now:
            due, entry = heapq.heappop(self._expiries)
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
        gone, self.unannounced = self.unannounced, []
        return gone

    def next_expiry(self) -> int | None:
        return self._expiries[0][0] if self._expiries else None

    # Persistence.

    def drain(self) -> tuple[list[bytes], list[Entry], list[Entry]]:
        """
        What the log must learn, once: keys to forget, entries to keep whole, entries of which only
        mark and expiry changed. The keys to forget come first in the log.
        """
        self.wants_log = False
        if not (self._dirty or self._gone or self._marked):
            return [], [], []
        whole: list[Entry] = []
        for entry in self._dirty:
            if not entry.keys:
                continue
            if entry.persist:
                entry.logged = True
                whole.append(entry)
            elif entry.logged:
                entry.logged = False
                self._gone.update(dict.fromkeys(entry.keys))
        marked = [e for e in self._marked if e.logged and e.keys and e not in self._dirty]
        gone = list(self._gone)
        self._dirty.clear()
        self._marked.clear()
        self._gone.clear()
        return gone, whole, marked

    def restore(self, entry: Entry, value: Value, now: int) -> None:
        """Take an entry from the log or a snapshot, whatever its keys led to before."""
        for key in entry.keys:
            self._detach(key)
            self._entries[key] = entry
            self.memory_bytes += len(key)
            if not entry.tombstone:
                self._keys.add(key)
        self.memory_bytes += ENTRY_OVERHEAD_BYTES
        entry.logged = True
        entry.data = b""
        entry.size = 0
        if entry.tombstone:
            self._tombstones.append((now, entry))
        else:
            self._evict(len(value.data))
            self._set_data(entry, value)
            self._set_expiry(entry, entry.expires)

    def restore_gone(self, key: bytes) -> None:
        self._detach(key)

    def restore_mark(self, entry: Entry, worked_until: int, expires: int) -> None:
        entry.worked_until = worked_until
        self._set_expiry(entry, expires)

    def restored(self) -> None:
        """The log knows everything up to here."""
        self._dirty.clear()
        self._marked.clear()
        self._gone.clear()
        self.wants_log = False

    # Inner workings.

    def _overhead(self, key: bytes) -> int:
        return len(key) + ENTRY_OVERHEAD_BYTES

    def _required(self, key: bytes, now: int, owner: object) -> Entry:
        entry = self._unlocked(key, now, owner)
        if entry is None:
            raise RefusedError("does-not-exist")
        return entry

    def _unlocked(self, key: bytes, now: int, owner: object) -> Entry | None:
        entry = self.live(key, now)
        if entry is not None and entry.locked(now) and entry.lock_owner is not owner:
            raise RefusedError("locked", timestamp=entry.timestamp, timeout=entry.lock_until)
        return entry

    def _newer(
        self, before: Entry, timestamp: int, value: Value, rest: tuple[bool, int, int]
    ) -> bool:
        """Whether a SET wins; at one moment the content decides, so that all copies agree."""
        if timestamp != before.timestamp:
            return timestamp > before.timestamp
        if before.tombstone:
            return True
        stored = self.value(before)
        return (value.type, value.data, *rest) > (
            stored.type,
            stored.data,
            before.persist,
            before.expires,
            before.ttl,
        )

    def _changed(self, entry: Entry) -> None:
        self._dirty[entry] = None
        self.wants_log |= entry.persist or entry.logged

    def _create(self, key: bytes, timestamp: int) -> Entry:
        self._detach(key)
        entry = Entry(key, timestamp)
        self._entries[key] = entry
        self._keys.add(key)
        self.memory_bytes += self._overhead(key)
        return entry

    def _detach(self, key: bytes) -> None:
        """Take a key off whatever it leads to; an entry without keys is forgotten."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._keys.remove(key)
        entry.keys.remove(key)
        self.memory_bytes -= len(key)
        if entry.logged:
            self._gone[key] = None
            self.wants_log = True
        if entry.keys:
            self._changed(entry)
            return
        self._set_data(entry, Value(0, b""))
        self._resident.pop(entry, None)
        self._dirty.pop(entry, None)
        self._marked.pop(entry, None)
        self.memory_bytes -= ENTRY_OVERHEAD_BYTES

    def _bury(self, key: bytes, timestamp: int, now: int, *, persist: bool) -> None:
        """Leave a tombstone, so that an older change cannot bring the key back."""
        self._detach(key)
        entry = Entry(key, timestamp)
        entry.tombstone = True
        entry.persist = persist
        self._entries[key] = entry
        self.memory_bytes += self._overhead(key)
        self._tombstones.append((now, entry))
        self._changed(entry)

    def _expire(self, entry: Entry, now: int) -> None:
        """A DELETE with the value's own timestamp; the log need not hear of it, the clock tells."""
        for key in list(entry.keys):
            self._bury(key, entry.timestamp, now, persist=entry.persist)
            self.unannounced.append(key)

    def _set_data(self, entry: Entry, value: Value) -> None:
        if entry.data is None:
            assert self._spill is not None
            self._spill.drop(entry.handle)
            self.spilled -= 1
        else:
            self.memory_bytes -= entry.size
        entry.type = value.type
        entry.data = value.data
        entry.size = len(value.data)
        self.memory_bytes += entry.size
        if entry.persist and self._spill is not None:
            self._resident[entry] = None
            self._resident.move_to_end(entry)
        else:
            self._resident.pop(entry, None)

    def _set_expiry(self, entry: Entry, expires: int) -> None:
        """Queue it once: an expiry that moves away is looked at again when the old one comes."""
        entry.expires = expires
        if expires and (not entry.queued or expires < entry.queued):
            entry.queued = expires
            heapq.heappush(self._expiries, (expires, entry))

    def _room_for(self, entry: Entry | None, key: bytes, value: Value) -> None:
        more = len(value.data)
        if entry is None:
            more += self._overhead(key)
        elif entry.data is not None:
            more -= entry.size
        self._make_room(more)

    def _make_room(self, more: int) -> None:
        """Values in memory only are never dropped, so there may be no room to make."""
        if more > 0 and not self._evict(more):
            raise RefusedError("out-of-memory", f"the limit is {self.memory_bytes_max} bytes")

    def _evict(self, more: int) -> bool:
        """Spill what was not used for longest until `more` bytes fit; False if they cannot."""
        while self.memory_bytes + more > self.memory_bytes_max:
            if self._spill is None or not self._resident:
                return False
            entry, _ = self._resident.popitem(last=False)
            if entry.data is None or not entry.keys:
                continue
            entry.handle = self._spill.put(entry.data)
            entry.data = None
            self.spilled += 1
            self.memory_bytes -= entry.size
        return True
