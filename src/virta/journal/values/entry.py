"""
An entry of the store: a value under its keys, or the tombstone of one key.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct, field

from virta.journal.protocol.messages import Details


class Spill(Protocol):
    """Storage for the data of values that do not fit in memory."""

    def put(self, data: bytes) -> int: ...

    def get(self, handle: int) -> bytes: ...

    def drop(self, handle: int) -> None: ...


_NO_LINKS: dict[bytes, int] = {}  # shared by all values with one key, never changed


class ValueEntry(Struct, eq=False):
    """One value under one or more keys, or the tombstone of one key."""

    keys: list[bytes]  # the first is the value's own, the others were linked to it
    timestamp: int
    created: int
    modified: int
    links: dict[bytes, int] = field(
        default_factory=lambda: _NO_LINKS
    )  # when each of the others was
    alias: bytes | None = None  # a tombstone until that key has a value
    type: int = 0
    data: bytes | None = b""  # None: spilled, `handle` says where
    handle: int = 0
    size: int = 0
    accessed: int = 0
    expires: int = 0
    ttl: int = 0
    worked_until: int = 0
    marked_at: int = 0  # when the mark was made
    persist: bool = False
    tombstone: bool = False
    over: bool = False  # a tombstone with the first bytes of a value that expired
    logged: bool = False  # a record of it is in the log
    queued: int = 0  # its time in the expiry heap, 0: not in it
    # In memory only: a lock never outlives its connection.
    lock_owner: object = None
    lock_until: int = 0

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
