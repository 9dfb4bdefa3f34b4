"""
Named consumers: a durable position, and members that share the work.

Records are spread over partitions by key (records without a key, by offset), so one key's records stay in order.
Each partition has one owner at a time. An owner that dies gives up its locks to the kernel and its partitions go to
the others at once. One that runs but reads no record and commits nothing for longer than its lease (stopped, or
in a handler that does not return) is hung: it no longer counts when partitions are divided, and loses those it has.
Either way the next owner starts at the committed position: what was not committed is delivered again, nothing is
skipped. A member that continues later is fenced by the generation of each partition and joins again.

The committed position also moves over records that are not for this consumer (other topics) or not for this member
(other partitions), as it reads past them, while nothing that was delivered is uncommitted.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from virta.clock import now_us
from virta.errors import ConsumerError, LogClosedError, LogError, LogTypeError
from virta.log.consumers.lag import count_lag, first_unread, partition_of
from virta.log.consumers.members import Heartbeats, load_topics, save_topics
from virta.log.consumers.positions import (
    NO_OWNER,
    LockFile,
    Positions,
    Slot,
    check_name,
    create_positions,
    list_names,
    position_of,
)
from virta.log.disk_errors import translate_disk_errors
from virta.log.limits import LEASE_S_MAX, PARTITIONS_DEFAULT, POLL_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from virta.log.log import Log
    from virta.log.record import Record

# How often a member checks whether partitions should change owner, and moves past records of other members.
_BALANCE_S: Final = 0.2

__all__ = ["Consumer", "ConsumerInfo", "advance_consumers", "list_consumers", "position_of"]


class ConsumerInfo(NamedTuple):
    """
    A consumer as `log.consumers()` reports it; `updated` is µs since the epoch.

    `members` are active, `hung` members exist but their lease has expired. `lag` counts the records of the
    consumer's topics that it has not committed; it is an upper bound when `lag_exact` is False.
    """

    name: str
    position: int
    lag: int
    members: int
    partitions: int
    updated: int
    lag_exact: bool = True
    hung: int = 0


@translate_disk_errors("reading the consumers of")
def list_consumers(log: Log) -> list[ConsumerInfo]:
    infos = []
    for name in list_names(log.path):
        slots = _slots_of(log, name)
        members: set[int] = set()
        # Without a lock file no member ever joined.
        with suppress(FileNotFoundError), LockFile(log.path, name, read_only=True) as locks:
            members = locks.others()
        beats = Heartbeats(log.path, name, read_only=True)
        try:
            hung, _ = beats.expired(members)
        finally:
            beats.close()
        lag = count_lag(log, [slot.next for slot in slots], load_topics(log.path, name))
        infos.append(
            ConsumerInfo(
                name,
                position=min(slot.next for slot in slots),
                lag=lag.records,
                members=len(members) - len(hung),
                partitions=len(slots),
                updated=max(slot.time for slot in slots),
                lag_exact=lag.exact,
                hung=len(hung),
            )
        )
    return infos


def _slots_of(log: Log, name: str) -> list[Slot]:
    positions = Positions(log.path, name, read_only=True)
    try:
        return positions.read()
    finally:
        positions.close()


@translate_disk_errors("moving the consumers of")
def advance_consumers(log: Log, *, dry_run: bool) -> list[int]:
    """
    Move every consumer's positions past records of other topics; return the lowest position of each.

    Retention needs this: it can then remove those records without leaving a gap before the consumer's position.
    """
    lowest = []
    for name in list_names(log.path):
        start = [slot.next for slot in _slots_of(log, name)]
        # Records at this position were removed, perhaps unread: the consumer itself must report that gap.
        if min(start) < log.first_offset:
            lowest.append(min(start))
            continue
        # Not past what a power failure may remove: those offsets could be used again, for this consumer.
        durable = log.durable_offset
        unread = first_unread(log, start, load_topics(log.path, name))
        first = [max(min(f, durable), s) for f, s in zip(unread, start, strict=True)]
        lowest.append(min(first))
        if dry_run or first == start:
            continue

        def forward(slots: list[Slot], start: list[int] = start, first: list[int] = first) -> dict[int, Slot]:  # fmt: skip
            return {
                p: Slot(slot.sequence + 1, first[p], slot.time, slot.generation)
                for p, slot in enumerate(slots)
                if start[p] <= slot.next < first[p]
            }

        positions = Positions(log.path, name)
        try:
            with LockFile(log.path, name) as locks:
                positions.change(locks, forward)
            positions.sync()
        finally:
            positions.close()
    return lowest


class Consumer:
    """One member of a named consumer. Not for several threads at once: give each its own."""

    @translate_disk_errors("joining a consumer")
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
        self._lease = _check_lease(lease)
        create_positions(log.path, name, partitions, start)
        self._positions = Positions(log.path, name)
        stored = self._positions.partitions
        if partitions not in {stored, PARTITIONS_DEFAULT}:
            self._positions.close()
            raise ConsumerError(
                f"consumer {name!r} has {stored} partitions, fixed when it was made; asked for {partitions}",
                code="consumer_partitions",
            )
        save_topics(log.path, name, topics)
        self._locks = LockFile(log.path, name)
        self._member = self._locks.join()
        self._beats = Heartbeats(log.path, name)
        self._owned: dict[int, int] = {}  # partition -> generation
        self._next: dict[int, int] = {}  # partition -> offset up to which it was delivered
        self._committed: dict[int, int] = {}  # partition -> offset in its slot
        self._fenced: set[int] = set()  # lost with something delivered and not committed
        self._scanned = 0  # the present scan has delivered all owned partitions up to here
        self._delivered = 0
        self._dirty = False
        self._changed = True
        self._closed = False
        self._balanced = self._renewed = self._advanced = 0.0
        self._renew_lease()
        self._balance()

    # --- for the user ---

    def __iter__(self) -> Iterator[Record]:
        return self.read()

    def read(self, *, follow: bool = False, timeout: float | None = None) -> Iterator[Record]:
        """Records of this member's partitions from the committed position on; see `Log.read`."""
        return chain.from_iterable(self._deliver(follow, timeout))

    def commit(self) -> None:
        """
        Commit everything delivered so far: it is never delivered again.

        Raises:
            ConsumerError: other members own some partitions now (code consumer_lost); their records since the
                last commit are delivered again, to the new owners. The rest is committed.
        """
        self._open_or_raise()
        if time.monotonic() - self._renewed > self._lease / 3:
            self._renew_lease()
        self._record_progress()
        lost = self._write(dict(self._next))
        self._dirty = False
        fenced, self._fenced = sorted(self._fenced.union(lost)), set()
        self._balance()
        if fenced:
            raise ConsumerError(
                f"consumer {self.name!r}: partitions {fenced} went to another member because this one read "
                f"no record and committed nothing for longer than its lease of {self._lease:g} s; their records "
                "since the last commit will be delivered again",
                code="consumer_lost",
            )

    def put_back(self, record: Record) -> None:
        """Deliver the last record again, because its reader was cancelled. Running iterations end."""
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
        """Return how many records of its topics no member has committed; an upper bound if there are very many."""
        self._open_or_raise()
        positions = [slot.next for slot in self._positions.read()]
        return count_lag(self._log, positions, self._topics).records

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions this member owns now."""
        return tuple(sorted(self._owned))

    def close(self) -> None:
        """Leave: partitions go to the others, uncommitted records are delivered again."""
        if not self._closed:
            if self._locks.fd >= 0:  # not in a forked child: the lock is the parent's
                with suppress(LogError, OSError):
                    self._advance()
                with suppress(OSError):
                    self._beats.clear(self._member)
            self._closed = True
            self._positions.close()
            self._beats.close()
            self._locks.close()  # releases the member's byte: other members notice at once

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
            self._keep_membership()
            if self._owned:
                self._changed = False
                self._record_progress()
                self._scanned = min(self._next.values())
                before = self._delivered
                yield from self._scan()
                if self._delivered != before or self._changed:
                    idle_since = time.monotonic()
                    continue
            now = time.monotonic()
            if not follow or (timeout is not None and now - idle_since >= timeout):
                self._advance()
                return
            if now - self._advanced > _BALANCE_S:
                self._advance()
            left = POLL_S if timeout is None else min(POLL_S, idle_since + timeout - now)
            self._log.source.wait(seen, left)

    def _scan(self) -> Iterator[Iterable[Record]]:
        """Deliver from the lowest owned position to the present end, or until ownership changes."""
        end = max(self._log.next_offset, self._scanned)
        with self._log.read(start=self._scanned, end=end, on_gap=self._on_gap) as reader:
            reader.select(self._topics)
            for batch in reader.batches():
                mine = batch if self._owns_all() else [r for r in batch if self._is_for_us(r)]
                if mine:
                    yield self._deliver_each(mine)
                self._keep_membership()
                if self._changed or self._closed:
                    return
                self._scanned = max(self._scanned, reader.position)
            self._scanned = max(self._scanned, min(reader.position, end))

    def _owns_all(self) -> bool:
        """Return whether this member owns all partitions and has delivered nothing after the scan's position."""
        return (
            len(self._owned) == self._positions.partitions
            and max(self._next.values()) <= self._scanned
        )

    def _is_for_us(self, record: Record) -> bool:
        partition = partition_of(record, self._positions.partitions)
        return partition in self._owned and record.offset >= self._next[partition]

    def _deliver_each(self, records: list[Record]) -> Iterator[Record]:
        """Yield one by one, so that a commit in between includes exactly what was delivered."""
        third = self._lease / 3
        for record in records:
            # A slow handler may have lost its partitions since the last record.
            if time.monotonic() - self._renewed > third:
                self._keep_membership()
                if self._changed:
                    return
            self._dirty = True
            self._delivered += 1
            self._scanned = record.offset + 1
            yield record
            if self._changed:
                return

    def _advance(self) -> None:
        """Commit scanned records that are not for this member, if nothing delivered is uncommitted."""
        self._advanced = time.monotonic()
        if self._dirty:
            return
        self._record_progress()
        if any(self._next[p] > self._committed[p] for p in self._owned):
            self._write(dict(self._next), durable=False)

    # --- ownership ---

    def _keep_membership(self) -> None:
        self._open_or_raise()
        now = time.monotonic()
        if now - self._renewed > self._lease / 3:
            self._renew_lease()
            self._write()
        if now - self._balanced > _BALANCE_S:
            self._balance()

    @translate_disk_errors("renewing the lease of a consumer")
    def _renew_lease(self) -> None:
        # A third more than the lease, because it is renewed only after a third of it has passed.
        self._beats.beat(self._member, self._lease * 4 / 3)
        self._renewed = time.monotonic()

    @translate_disk_errors("sharing a consumer's work")
    def _balance(self) -> None:
        """Acquire free or abandoned partitions up to a fair share; release those over it once all is committed."""
        self._balanced = time.monotonic()
        self._record_progress()
        if self._positions.chained:
            self._positions.collapse(self._locks)
        lost: list[int] = []

        def divide(slots: list[Slot]) -> dict[int, Slot]:
            # Inside the change: a member that joined later would be taken for dead and lose its new partitions.
            lost[:] = [p for p, g in self._owned.items() if slots[p].generation != g]
            return self._division(slots, set(self._owned).difference(lost))

        changes = self._positions.change(self._locks, divide)
        self._lose(lost)
        for partition, slot in changes.items():
            if slot.owner == self._member:
                self._owned[partition] = slot.generation
                self._next[partition] = self._committed[partition] = slot.next
                # The current scan has delivered nothing of this partition.
                self._scanned = min(self._scanned, slot.next)
                self._changed = True
            elif partition in self._owned:
                self._forget(partition)

    def _division(self, slots: list[Slot], mine: set[int]) -> dict[int, Slot]:
        """Return the slots to change so that this member has its share."""
        now = now_us()
        live = self._live(slots, now)
        fair = -(-len(slots) // (len(live) + 1))
        over = () if self._dirty else sorted(mine)[fair:]
        changes = {partition: slots[partition].owned_by(NO_OWNER, now) for partition in over}
        wanted = fair - len(mine)
        for partition, slot in enumerate(slots):
            if partition in mine:
                continue
            # Our number on a partition we do not own is from an earlier member with this number.
            if slot.owner not in live and wanted > 0:
                changes[partition] = slot.owned_by(self._member, now)
                wanted -= 1
            elif slot.owner == self._member:
                changes[partition] = slot.owned_by(NO_OWNER, now)
        return changes

    def _live(self, slots: list[Slot], now: int) -> set[int]:
        """Return the other active members."""
        members = self._locks.others()
        hung, silent = self._beats.expired(members)
        if silent:
            # Members of older versions record it in their slots, by wall-clock time.
            expired = now - int(self._lease * 1e6)
            at_work = {slot.owner for slot in slots if slot.time >= expired}
            late = {slot.owner for slot in slots} - at_work
            hung |= silent & late
        return members - hung

    def _record_progress(self) -> None:
        """Record in every owned partition how far the scan is, before the set of partitions changes."""
        for partition in self._owned:
            self._next[partition] = max(self._next[partition], self._scanned)

    def _forget(self, partition: int) -> None:
        del self._owned[partition], self._next[partition], self._committed[partition]
        self._changed = True

    def _lose(self, partitions: Iterable[int]) -> None:
        """Drop partitions that other members own now; the next commit fails if delivered records are uncommitted."""
        for partition in partitions:
            self._forget(partition)
            if self._dirty:
                self._fenced.add(partition)

    @translate_disk_errors("committing a consumer's position")
    def _write(
        self, done: dict[int, int] | None = None, *, back: bool = False, durable: bool = True
    ) -> list[int]:
        """Move positions, or only update the slots' times; return the partitions that are no longer ours."""
        lost: list[int] = []

        def move(slots: list[Slot]) -> dict[int, Slot]:
            lost[:] = [p for p, g in self._owned.items() if slots[p].generation != g]
            changes: dict[int, Slot] = {}
            for partition in set(self._owned).difference(lost):
                slot = slots[partition]
                following = slot.next if done is None else done[partition]
                if not back:
                    following = max(following, slot.next)
                changes[partition] = Slot(slot.sequence + 1, following, now_us(), slot.generation)
            return changes

        changes = self._positions.change(self._locks, move)
        moved = any(self._committed[p] != slot.next for p, slot in changes.items())
        self._committed.update({p: slot.next for p, slot in changes.items()})
        if durable and moved and self._log.durability in {"group", "fsync"}:
            self._positions.sync()  # without the lock: other members must not wait for the disk
        self._lose(lost)
        return lost

    def _open_or_raise(self) -> None:
        if self._closed:
            raise LogClosedError(f"consumer {self.name!r} is closed")
        if self._locks.fd < 0:
            raise LogClosedError(
                f"consumer {self.name!r} belongs to the process that made it; after a fork make another one"
            )


def _check_lease(lease: object) -> float:
    number = isinstance(lease, int | float) and not isinstance(lease, bool)
    if not number or not math.isfinite(lease) or not 0 < lease <= LEASE_S_MAX:  # type: ignore[arg-type,operator]
        raise LogTypeError(
            f"lease must be a number of seconds over 0 and up to {LEASE_S_MAX:g}, got {lease!r}"
        )
    return float(lease)  # type: ignore[arg-type]
