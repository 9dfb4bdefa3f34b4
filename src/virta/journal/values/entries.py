"""
Entries under their keys: what each key leads to, what is in memory and what on disk; no I/O of its own.

Invariants:
- `_entries` maps every key to its entry, live or tombstone; an entry lists exactly the keys that map
  to it, the value's own first; only keys of live entries are in the ordered index.
- A key linked to one that has no value is a tombstone with an `alias`, listed in `_pending`; it becomes
  a key of the value when there is one.
- `drain` names every entry and key whose stored image has become wrong since the last call.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from operator import itemgetter

from virta.journal.protocol.messages import RefusedError, Value
from virta.journal.replication.interface import Replication
from virta.journal.values.entry import Spill, ValueEntry
from virta.journal.values.sorted_keys import SortedKeys

MEMORY_BYTES_MAX = 1024 * 1024 * 1024
# What CPython spends on an entry, its keys' places in dict and index, besides the bytes themselves.
ENTRY_OVERHEAD_BYTES = 512
# Bytes kept of an expired value: another SET of the same timestamp may arrive.
OVER_BYTES_MAX = 256


class EntryTable:
    def __init__(
        self, spill: Spill | None = None, *, memory_bytes_max: int = MEMORY_BYTES_MAX
    ) -> None:
        self.memory_bytes = 0
        self.memory_bytes_max = memory_bytes_max
        self.spilled = 0
        self._spill = spill
        self._entries: dict[bytes, ValueEntry] = {}
        self.keys = SortedKeys()  # of live entries
        self.expiries: list[tuple[int, ValueEntry]] = []
        self._tombstones: deque[tuple[int, ValueEntry]] = deque()
        # Persistent entries whose data is in memory, least recently used first.
        self._resident: OrderedDict[ValueEntry, None] = OrderedDict()
        self.wants_log = False  # an acknowledgement of the last changes has to wait for the log
        self._dirty: dict[ValueEntry, None] = {}
        self._marked: dict[ValueEntry, None] = {}
        self._removed: dict[bytes, None] = {}
        self.replication = Replication()
        self._pending: dict[bytes, dict[bytes, None]] = {}  # by the key that has no value yet
        self.unannounced: list[bytes] = []  # keys expired since the last tick, for listeners

    # Reading.

    def __len__(self) -> int:
        return len(self.keys)

    def live(self, key: bytes, now: int) -> ValueEntry | None:
        """Return the live entry of a key, None if there is none or it has expired."""
        entry = self._entries.get(key)
        if entry is None or entry.tombstone:
            return None
        if entry.expires and entry.expires <= now:
            self._expire(entry, now)
            return None
        return entry

    def stored(self, key: bytes) -> ValueEntry | None:
        """Return the entry of a key, live or a tombstone, or None."""
        return self._entries.get(key)

    @property
    def by_key(self) -> dict[bytes, ValueEntry]:
        """Return all entries by key; read-only."""
        return self._entries

    def entries(self) -> list[ValueEntry]:
        """Return every entry once, including tombstones."""
        return list(dict.fromkeys(self._entries.values()))

    def value(self, entry: ValueEntry) -> Value:
        """Return type and data, read from the spill if they are not in memory."""
        data = entry.data
        if data is None:
            assert self._spill is not None
            data = self._spill.get(entry.handle)
        elif entry in self._resident:
            self._resident.move_to_end(entry)
        return Value(entry.type, data)

    def next_expiry(self) -> int | None:
        """Return the first time in the expiry heap, which may be outdated."""
        return self.expiries[0][0] if self.expiries else None

    # Log and snapshot.

    @property
    def unlogged(self) -> bool:
        """Whether `drain` has anything to do."""
        return bool(self._dirty or self._removed or self._marked) or self.wants_log

    def drain(self) -> tuple[list[bytes], list[ValueEntry], list[ValueEntry]]:
        """
        Return what to log, once: removed keys, entries to log whole, and entries of which only mark and
        expiry changed. The removed keys come first in the log.
        """
        self.wants_log = False
        if not (self._dirty or self._removed or self._marked):
            return [], [], []
        whole: list[ValueEntry] = []
        for entry in self._dirty:
            if not entry.keys:
                continue
            if entry.persist:
                entry.logged = True
                whole.append(entry)
            elif entry.logged:
                entry.logged = False
                self._removed.update(dict.fromkeys(entry.keys))
        marked = [e for e in self._marked if e.logged and e.keys and e not in self._dirty]
        removed = list(self._removed)
        self._dirty.clear()
        self._marked.clear()
        self._removed.clear()
        return removed, whole, marked

    def restore(self, entry: ValueEntry, value: Value, now: int) -> None:
        """Add an entry from the log or a snapshot, in place of what its keys led to before."""
        for key in entry.keys:
            self._detach(key)
            self._entries[key] = entry
            if entry.alias is not None:
                self._pending.setdefault(entry.alias, {})[key] = None
            self.memory_bytes += len(key)
            if not entry.tombstone:
                self.keys.add(key)
        self.memory_bytes += ENTRY_OVERHEAD_BYTES
        entry.logged = True
        entry.data = b""
        entry.size = 0
        if entry.tombstone:
            self._tombstones.append((entry.accessed or now, entry))
            self._set_data(entry, value)
        else:
            self._evict(len(value.data))
            self._set_data(entry, value)
            self._set_expiry(entry, entry.expires)

    def restore_removed(self, key: bytes) -> None:
        self._detach(key)

    def restore_mark(
        self, entry: ValueEntry, worked_until: int, marked_at: int, expires: int
    ) -> None:
        entry.worked_until = worked_until
        entry.marked_at = marked_at
        self._set_expiry(entry, expires)

    def restored(self) -> None:
        """Finish restoring: the log has everything up to here."""
        self._tombstones = deque(sorted(self._tombstones, key=itemgetter(0)))
        self._dirty.clear()
        self._marked.clear()
        self._removed.clear()
        self.wants_log = False

    # Helpers.

    def _overhead(self, key: bytes) -> int:
        return len(key) + ENTRY_OVERHEAD_BYTES

    def _mark_dirty(self, entry: ValueEntry) -> None:
        self._dirty[entry] = None
        self.wants_log |= entry.persist or entry.logged

    def _create(self, key: bytes, timestamp: int) -> ValueEntry:
        self._detach(key)
        entry = ValueEntry([key], timestamp, timestamp, timestamp)
        self._entries[key] = entry
        self.keys.add(key)
        self.memory_bytes += self._overhead(key)
        self._adopt(entry)
        return entry

    def _adopt(self, entry: ValueEntry) -> None:
        """Attach the keys that were linked to a value before it arrived."""
        for linked in self._pending.get(entry.keys[0], {}).copy():
            self._attach(entry, linked, self._entries[linked].timestamp)

    def _attach(self, entry: ValueEntry, key: bytes, linked_at: int) -> None:
        """Add a key to a live entry."""
        self._detach(key)
        entry.keys.append(key)
        entry.links = {**entry.links, key: linked_at}
        self._entries[key] = entry
        self.keys.add(key)
        self.memory_bytes += len(key)
        self._mark_dirty(entry)

    def _detach(self, key: bytes) -> None:
        """Remove a key from its entry; an entry without keys is forgotten."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.keys.remove(key)
        entry.keys.remove(key)
        if entry.links:
            entry.links = {other: at for other, at in entry.links.items() if other != key}
        if entry.alias is not None:
            waiting = self._pending.get(entry.alias, {})
            waiting.pop(key, None)
            if not waiting:
                self._pending.pop(entry.alias, None)
        self.memory_bytes -= len(key)
        if entry.logged:
            self._removed[key] = None
            self.wants_log = True
        if entry.keys:
            self._mark_dirty(entry)
            return
        self._set_data(entry, Value(0, b""))
        self._resident.pop(entry, None)
        self._dirty.pop(entry, None)
        self._marked.pop(entry, None)
        self.memory_bytes -= ENTRY_OVERHEAD_BYTES

    def _bury(
        self, key: bytes, timestamp: int, now: int, *, persist: bool, alias: bytes | None = None
    ) -> None:
        """Replace a key by a tombstone, so that an older change cannot bring it back."""
        self._detach(key)
        entry = ValueEntry([key], timestamp, timestamp, timestamp)
        if alias is not None:
            entry.alias = alias
            self._pending.setdefault(alias, {})[key] = None
        entry.tombstone = True
        entry.accessed = now  # so that restarts do not make it last longer
        entry.persist = persist
        self._entries[key] = entry
        self.memory_bytes += self._overhead(key)
        self._tombstones.append((now, entry))
        self._mark_dirty(entry)

    def _expire(self, entry: ValueEntry, now: int) -> None:
        """
        Delete with the value's own timestamp; no record is needed, as the clock decides.

        The tombstone keeps the beginning of the value, to compare another SET of the same timestamp
        with; otherwise the order of their arrival would decide.
        """
        root, value = entry.keys[0], self.value(entry)
        for key, linked_at in entry.links.items():
            self.replication.link_expired(key, max(entry.timestamp, linked_at))
        for key in list(entry.keys):
            timestamp = max(entry.timestamp, entry.timestamp_of(key))
            self._bury(key, timestamp, now, persist=entry.persist)
            self._entries[key].expires = entry.expires  # it was over, not deleted
            self.unannounced.append(key)
        tombstone = self._entries[root]
        tombstone.over = True
        tombstone.ttl = entry.ttl
        tombstone.marked_at, tombstone.worked_until = entry.marked_at, entry.worked_until
        self._set_data(tombstone, Value(value.type, value.data[:OVER_BYTES_MAX]))

    def _set_data(self, entry: ValueEntry, value: Value) -> None:
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

    def _set_expiry(self, entry: ValueEntry, expires: int) -> None:
        """Queue an expiry once: one that moves away is queued again when the old time comes."""
        entry.expires = expires
        if expires and (not entry.queued or expires < entry.queued):
            entry.queued = expires
            heapq.heappush(self.expiries, (expires, entry))

    def _reserve_memory(self, entry: ValueEntry | None, key: bytes, value: Value) -> None:
        more = len(value.data)
        if entry is None:
            more += self._overhead(key)
        elif entry.data is not None:
            more -= entry.size
        self._make_space(more)

    def _make_space(self, more: int) -> None:
        """Refuse what does not fit: values that are only in memory are never dropped."""
        if more > 0 and not self._evict(more):
            raise RefusedError("out-of-memory", f"the limit is {self.memory_bytes_max} bytes")

    def _evict(self, more: int) -> bool:
        """Spill the least recently used values until `more` bytes fit; return False if they cannot."""
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
