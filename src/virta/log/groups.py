"""
Named consumers: a durable position, and members that share the work.

Records are spread over partitions by key (records without a key, by offset), so one key's records stay in order.
Each partition has one owner at a time. An owner that dies gives up its locks to the kernel and its partitions go to
the others at once; one that lives but neither reads nor commits for longer than its lease loses them as well. Either
way the next owner starts at the committed position: what was not committed is delivered again, nothing is skipped.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from virta.errors import ConsumerError, LogClosedError
from virta.log import kernel
from virta.log.disk import in_words
from virta.log.limits import PARTITIONS_DEFAULT, POLL_S
from virta.log.positions import (
    NOBODY,
    LockFile,
    Positions,
    Slot,
    check_name,
    create_positions,
    list_names,
    position_of,
)
from virta.log.segment import now_us

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from virta.log.handle import Log
    from virta.log.record import Record

# How often a member looks whether partitions should change hands.
_BALANCE_S: Final = 0.2

__all__ = ["Consumer", "ConsumerInfo", "list_consumers", "position_of"]


class ConsumerInfo(NamedTuple):
    """A consumer as `log.consumers()` reports it; `updated` is µs since the epoch."""

    name: str
    position: int
    lag: int
    members: int
    partitions: int
    updated: int


@in_words("looking at the consumers of")
def list_consumers(directory: Path, end: int) -> list[ConsumerInfo]:
    infos = []
    for name in list_names(directory):
        positions = Positions(directory, name)
        try:
            slots = positions.read()
        finally:
            positions.close()
        with LockFile(directory, name) as locks:
            members = len(locks.others())
        position = min(slot.next for slot in slots)
        updated = max(slot.time for slot in slots)
        lag = max(end - position, 0)
        infos.append(ConsumerInfo(name, position, lag, members, len(slots), updated))
    return infos


class Consumer:
    """One member of a named consumer. Not for several threads at once: give each its own."""

    @in_words("joining a consumer")
    def __init__(
        self,
        log: Log,
        name: str,
        *,
        topics: frozenset[bytes] | None,
        start: int,
        partitions: int,
        lease: float,
        on_gap: Literal["raise", "skip"],
    ) -> None:
        self.name = check_name(name)
        self._log = log
        self._on_gap = on_gap
        self._topics = topics
        self._lease = lease
        create_positions(log.path, name, partitions, start)
        self._positions = Positions(log.path, name)
        stored = self._positions.partitions
        if partitions not in {stored, PARTITIONS_DEFAULT}:
            self._positions.close()
            raise ConsumerError(
                f"consumer {name!r} has {stored} partitions, fixed when it was made; asked for {partitions}",
                code="consumer_partitions",
            )
        self._locks = LockFile(log.path, name)
        self._member = self._locks.join()
        self._owned: dict[int, int] = {}  # partition -> generation
        self._next: dict[int, int] = {}  # partition -> offset up to which it was delivered
        self._scanned = 0  # the present scan has delivered all owned partitions up to here
        self._delivered = 0
        self._dirty = False
        self._changed = True
        self._balanced = self._renewed = 0.0
        self._closed = False
        self._balance()

    # --- for the user ---

    def __iter__(self) -> Iterator[Record]:
        return self.read()

    def read(self, *, follow: bool = False, timeout: float | None = None) -> Iterator[Record]:
        """Records of this member's partitions from the committed position on; see `Log.read`."""
        return chain.from_iterable(self._deliver(follow, timeout))

    def commit(self) -> None:
        """
        Everything delivered so far is done: never deliver it again.

        Raises:
            ConsumerError: partitions were taken over by others meanwhile (code consumer_lost); their records
                since the last commit are delivered again, to the new owners. The rest is committed.
        """
        self._open_or_raise()
        self._settle()
        lost = self._write(dict(self._next))
        self._dirty = False
        self._balance()
        if lost:
            raise ConsumerError(
                f"consumer {self.name!r}: partitions {lost} went to another member because this one was "
                f"silent for longer than its lease of {self._lease:g} s; their records since the last "
                "commit will be delivered again",
                code="consumer_lost",
            )

    def put_back(self, record: Record) -> None:
        """The record that was handed out last was not taken: hand it out again. Iterations under way end."""
        self._scanned = min(self._scanned, record.offset)
        self._changed = True

    def seek(self, offset: int) -> None:
        """Commit `offset` as the position of the partitions this member owns, back or forth."""
        self._open_or_raise()
        self._write(dict.fromkeys(self._owned, offset), back=True)
        self._next = dict.fromkeys(self._owned, offset)
        self._scanned = min(self._scanned, offset)
        self._dirty, self._changed = False, True

    @property
    def position(self) -> int:
        """Below it everything is committed, by all members."""
        self._open_or_raise()
        return min(slot.next for slot in self._positions.read())

    @property
    def lag(self) -> int:
        """Offsets between the committed position and the end of the log."""
        return max(self._log.next_offset - self.position, 0)

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions this member owns now."""
        return tuple(sorted(self._owned))

    def close(self) -> None:
        """Leave: partitions go to the others, uncommitted records are delivered again."""
        if not self._closed:
            self._closed = True
            self._positions.close()
            self._locks.close()  # and with it our member's byte: the others see it at once

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # --- delivery ---

    def _deliver(self, follow: bool, timeout: float | None) -> Iterator[Iterable[Record]]:  # noqa: FBT001
        idle_since = time.monotonic()
        while not self._closed:
            seen = self._log.source.notified()
            self._tend()
            if self._owned:
                self._changed = False
                self._settle()
                self._scanned = min(self._next.values())
                before = self._delivered
                yield from self._scan()
                if self._delivered != before or self._changed:
                    idle_since = time.monotonic()
                    continue
            if not follow:
                return
            now = time.monotonic()
            if timeout is not None and now - idle_since >= timeout:
                return
            left = POLL_S if timeout is None else min(POLL_S, idle_since + timeout - now)
            self._log.source.wait(seen, left)

    def _scan(self) -> Iterator[Iterable[Record]]:
        """Deliver from the lowest owned position to the present end, or until ownership changes."""
        end = max(self._log.next_offset, self._scanned)
        with self._log.read(start=self._scanned, end=end, on_gap=self._on_gap) as reader:
            reader.select(self._topics)
            for batch in reader.batches():
                mine = batch if self._sole() else [r for r in batch if self._takes(r)]
                if mine:
                    yield self._hand_out(mine)
                self._tend()
                if self._changed or self._closed:
                    return
                self._scanned = max(self._scanned, reader.position)
            self._scanned = max(self._scanned, min(reader.position, end))

    def _sole(self) -> bool:
        """This member owns everything and nothing in front of it was delivered before."""
        return (
            len(self._owned) == self._positions.partitions
            and max(self._next.values()) <= self._scanned
        )

    def _takes(self, record: Record) -> bool:
        partition = self._partition(record)
        return partition in self._owned and record.offset >= self._next[partition]

    def _partition(self, record: Record) -> int:
        number: int = kernel.crc32c(record.key) if record.key else record.offset
        return number % self._positions.partitions

    def _hand_out(self, records: list[Record]) -> Iterator[Record]:
        """One by one, so that a commit in between covers exactly what was handed out."""
        for record in records:
            self._dirty = True
            self._delivered += 1
            self._scanned = record.offset + 1
            yield record
            if self._changed:
                return

    # --- ownership ---

    def _tend(self) -> None:
        self._open_or_raise()
        now = time.monotonic()
        if now - self._renewed > self._lease / 3:
            self._write()
        if now - self._balanced > _BALANCE_S and not self._dirty:
            self._balance()

    @in_words("sharing a consumer's work")
    def _balance(self) -> None:
        """Take what is free or abandoned up to a fair share; give back what is over it."""
        self._balanced = time.monotonic()
        self._settle()
        with self._locks.changing():
            # Only here: one who joined since would seem dead, and lose what it has just taken.
            alive = self._locks.others()
            fair = -(-self._positions.partitions // (len(alive) + 1))
            now = now_us()
            expired = now - int(self._lease * 1e6)
            changes: dict[int, Slot] = {}
            slots = self._positions.read()
            for partition in sorted(self._owned)[fair:] if not self._dirty else ():
                changes[partition] = slots[partition].owned_by(NOBODY, now)
                self._forget(partition)
            for partition, slot in enumerate(slots):
                if partition in self._owned or partition in changes:
                    continue
                # Our number on a partition we do not know: a dead member's, whose number we got.
                free = slot.owner not in alive or slot.time < expired
                if free and len(self._owned) < fair:
                    changes[partition] = slot.owned_by(self._member, now)
                    self._owned[partition] = changes[partition].generation
                    self._next[partition] = slot.next
                    # Of this one the present scan has delivered nothing.
                    self._scanned = min(self._scanned, slot.next)
                    self._changed = True
                elif slot.owner == self._member:
                    changes[partition] = slot.owned_by(NOBODY, now)
            if changes:
                self._positions.write(changes)

    def _settle(self) -> None:
        """Note in every owned partition how far the scan has come, before the set of them changes."""
        for partition in self._owned:
            self._next[partition] = max(self._next[partition], self._scanned)

    def _forget(self, partition: int) -> None:
        del self._owned[partition], self._next[partition]
        self._changed = True

    @in_words("committing a consumer's position")
    def _write(self, done: dict[int, int] | None = None, *, back: bool = False) -> list[int]:
        """Renew the lease and move positions; returns the partitions that are not ours any more."""
        durable = self._log.durability in {"group", "fsync"}
        lost = []
        with self._locks.changing():
            slots = self._positions.read()
            changes: dict[int, Slot] = {}
            moved = False
            for partition, generation in list(self._owned.items()):
                slot = slots[partition]
                if slot.generation != generation:
                    lost.append(partition)
                    continue
                following = slot.next if done is None else done[partition]
                if not back:
                    following = max(following, slot.next)
                moved |= following != slot.next
                changes[partition] = Slot(slot.sequence + 1, following, now_us(), generation)
            self._positions.write(changes)
        if durable and moved:
            self._positions.sync()  # not under the lock: nobody else is to wait for our disk
        self._renewed = time.monotonic()
        for partition in lost:
            self._forget(partition)
        return lost

    def _open_or_raise(self) -> None:
        if self._closed:
            raise LogClosedError(f"consumer {self.name!r} is closed")
        if self._locks.fd < 0:
            raise LogClosedError(
                f"consumer {self.name!r} belongs to the process that made it; after a fork make another one"
            )
