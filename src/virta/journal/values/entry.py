"""
An entry of the store: a value under its keys, or the tombstone of one key.
"""

from __future__ import annotations

from typing import Protocol

from virta.journal.protocol.messages import Details


class Spill(Protocol):
    """Storage for the data of values that do not fit in memory."""

    def put(self, data: bytes) -> int: ...

    def get(self, handle: int) -> bytes: ...

    def drop(self, handle: int) -> None: ...


_NO_LINKS: dict[bytes, int] = {}  # shared by all values with one key, never changed


class ValueEntry:
    """One value under one or more keys, or the tombstone of one key."""

    __slots__ = (
        "accessed",
        "alias",
        "created",
        "data",
        "expires",
        "handle",
        "keys",
        "links",
        "lock_owner",
        "lock_until",
        "logged",
        "marked_at",
        "modified",
        "over",
        "persist",
        "queued",
        "size",
        "timestamp",
        "tombstone",
        "ttl",
        "type",
        "worked_until",
    )

    def __init__(self, key: bytes, timestamp: int) -> None:
        self.keys = [key]  # the first is the value's own, the others were linked to it
        self.links: dict[bytes, int] = _NO_LINKS  # when each of the others was
        self.alias: bytes | None = None  # a tombstone until that key has a value
        self.type = 0
        self.data: bytes | None = b""  # None: spilled, `handle` says where
        self.handle = 0
        self.size = 0
        self.timestamp = timestamp
        self.created = timestamp
        self.modified = timestamp
        self.accessed = 0
        self.expires = 0
        self.ttl = 0
        self.worked_until = 0
        self.marked_at = 0  # when the mark was made
        self.persist = False
        self.tombstone = False
        self.over = False  # a tombstone with the first bytes of a value that expired
        self.logged = False  # a record of it is in the log
        self.queued = 0  # its time in the expiry heap, 0: not in it
        # In memory only: a lock never outlives its connection.
        self.lock_owner: object = None
        self.lock_until = 0

    def timestamp_of(self, key: bytes) -> int:
        """Return when a key was linked, or else the timestamp of the value or tombstone."""
        return self.links.get(key, self.timestamp)

    def __lt__(self, other: ValueEntry) -> bool:  # entries of equal expiry in the heap: any order
        return False

    def locked(self, now: int) -> bool:
        return self.lock_owner is not None and self.lock_until > now

    def details(self, now: int) -> Details:
        worked = self.worked_until > now
        return Details(
            self.expires,
            self.ttl,
            self.created,
            self.modified,
            self.accessed,
            self.worked_until if worked else 0,
            self.size,
            0,
            self.persist | self.locked(now) << 1 | worked << 2 | self.tombstone << 3,
        )
