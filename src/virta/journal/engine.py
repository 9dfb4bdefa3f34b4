"""
The meaning of each command: requests in, replies out, no I/O; the clock is an argument.

Invariants:
- A request is carried out completely or not at all, in the order `handle` is called.
- `wants_log` after a change says that its reply has to wait until the records of `storage.records.drain`
  are on disk; a reserve (NEXT) never needs that.
- `replication` gets every change that a client made, with its final timestamp; requests of other daemons
  are `replication.apply`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.clock import now_us
from virta.journal import clock_steps
from virta.journal.admin import RESERVED, Admin
from virta.journal.jobs.commands import JobCommands
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.jobs.watch import JobWatch
from virta.journal.protocol import rules
from virta.journal.protocol.messages import (
    COMMAND_KEY,
    DATA,
    DELETED,
    LISTEN,
    LOCKED,
    OVERWRITE,
    PERSIST,
    Function,
    Pair,
    RefusedError,
    Reply,
    Request,
    Value,
)
from virta.journal.replication.apply import PeerRequests
from virta.journal.replication.copies import Copies
from virta.journal.replication.interface import Replication
from virta.journal.replication.messages import Export
from virta.journal.sessions import CLIENT, Listeners, Session
from virta.journal.values import numbers
from virta.journal.values.reader import ValueReader
from virta.journal.values.store import LOCK_DEFAULT_US, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.values.entry import ValueEntry

# What is only to be forgotten after days may stay a second longer.
TIDY_US = 1_000_000
# Commands that change nothing if the stored value is newer; others get a newer timestamp when executed.
_RENAME = int(Function.RENAME)
_LATEST_WINS = frozenset({int(Function.SET), int(Function.DELETE), _RENAME, int(Function.PUSH)})


class JournalEngine:
    def __init__(
        self,
        clock: Callable[[], int],
        store: Store | None = None,
        jobs: Jobs | None = None,
        *,
        steady: Callable[[], int] | None = None,
    ) -> None:
        self.clock = clock
        if steady is None and clock is now_us:
            steady = clock_steps.steady_clock
        # Without a steady clock to compare with, the clock is trusted.
        self._steps = None if steady is None else clock_steps.StepWatch(clock, steady)
        # Not `or`: an empty one is false, and its limits and its disk would be lost.
        self.store = Store() if store is None else store
        self.jobs = Jobs() if jobs is None else jobs
        self.listeners = Listeners()
        self.watch = JobWatch(self.jobs, self.listeners)
        self.admin = Admin(self)
        self.disk_bytes: Callable[[], int] = lambda: 0  # for statistics; set with the directory
        self.primary = True  # only the primary hands out jobs
        self.replication = Replication()
        self.export = Export(self)
        self.handled = 0
        self.reader = ValueReader(self)
        self.job_commands = JobCommands(self)
        self._last_stamp = 0
        self._tidy_at = 0
        self.functions: dict[int, Callable[[Request, Session, int], Reply]] = {
            Function.QUIT: self._quit,
            Function.SET: self._set,
            Function.GET: self.reader.get,
            Function.DELETE: self._delete,
            Function.ADD: self._add,
            Function.NOT: self._not,
            Function.TRUNCATE: self._truncate,
            Function.LOCK: self._lock,
            Function.UNLOCK: self._unlock,
            Function.RENAME: self._rename,
            Function.NEXT: self.job_commands.next,
            Function.PUSH: self.job_commands.push,
            Function.LINK: self._link,
            Function.UNLINK: self._unlink,
        }
        self.roles = {CLIENT: self.functions}
        self.peer_requests = PeerRequests(self)

    def now(self) -> int:
        """Return the time by the clock; if that was set, first move what was counted from it."""
        now = self.clock()
        if self._steps is not None and (step := self._steps.step(now)):
            now = self.clock()
            clock_steps.shift(self, step, now)
            self._tidy_at = 0
        return now

    def handle(self, request: Request, session: Session, now: int | None = None) -> Reply:
        """
        Carry out one request, decoded or not; the reply has to wait for the disk if `wants_log`.

        Requests that arrive together may share one reading of `now()`.
        """
        if now is None:
            now = self.now()
        try:
            rules.check_limits(request)
        except RefusedError as refused:
            self.handled += 1
            return _refusal(request, refused, now)
        return self.carry_out(request, session, now)

    def carry_out(self, request: Request, session: Session, now: int) -> Reply:
        """Carry out one request that fits a message, as one that was decoded does."""
        self.handled += 1
        try:
            rules.check(request, now + session.skew_us_max)
            if request.timestamp == 0:
                request.timestamp = self._stamp_for(request, now)
            reply = self.roles[session.role][request.function](request, session, now)
        except RefusedError as refused:
            reply = _refusal(request, refused, now)
        if self.watch.moved:
            self.watch.notify(session, now)
        return reply

    @property
    def wants_log(self) -> bool:
        return self.store.wants_log or self.jobs.wants_log

    def stamp(self, now: int) -> int:
        """
        Return a timestamp of this daemon, later than every one before.

        Except when those are from a clock that was far ahead: then new ones would be too, and win over
        commands of clients with a correct clock. `_stamp_for` keeps the order where it matters.
        """
        last = self._last_stamp
        if now > last or last > now + rules.CLOCK_SKEW_US_MAX:
            self._last_stamp = now
        else:
            self._last_stamp = last + 1
        return self._last_stamp

    def _stamp_for(self, request: Request, now: int) -> int:
        """Return a timestamp later than all stored ones of the request's keys, so that it has an effect."""
        stamp, function = self.stamp(now), request.function
        if function in _LATEST_WINS:
            stamp = self._later_than(request.key, stamp)
            if function == _RENAME:
                stamp = self._later_than(request.key2, stamp)
        return stamp

    def _later_than(self, key: bytes, stamp: int) -> int:
        """Return `stamp`, or one later than all stored ones of a key."""
        entry = self.store.stored(key)
        if entry is not None:
            stamp = max(stamp, entry.timestamp + 1, *(at + 1 for at in entry.links.values()))
        last = self.jobs.last_command(key)
        return last + 1 if last >= stamp else stamp

    def newest_stamp(self) -> int:
        """Return the largest timestamp of anything stored, 0 if there is nothing."""
        values = (
            max(entry.timestamp, *entry.links.values()) if entry.links else entry.timestamp
            for entry in self.store.by_key.values()
        )
        return max(max(values, default=0), self.jobs.newest_command())

    def restored(self) -> None:
        """Continue above the timestamps that came back from disk."""
        self._last_stamp = max(self._last_stamp, self.newest_stamp())

    def start_copying(self) -> None:
        """Collect every change from now on for other daemons."""
        self.replication = self.store.replication = self.jobs.replication = Copies(self)

    # Time.

    def tick(self, now: int | None = None) -> int | None:
        """Process what is due by time alone, notify those who wait for it, and return `next_event`."""
        if now is None:
            now = self.now()
        event = self.next_event()
        due = event is not None and event <= now
        set_back = now < self._tidy_at - TIDY_US
        if due or set_back or now >= self._tidy_at or self.store.unannounced:
            if self.jobs.leases is not None:
                self.jobs.leases.clock_read = now
            self._tidy_at = now + TIDY_US
            expired = self.store.tick(now)
            if expired:
                self.listeners.changed(expired, None, now, None)
            self.jobs.lapsing = self.primary
            self.jobs.tick(now)
            self.admin.tick(now)
            event = self.next_event()
        if self.watch.moved:
            self.watch.notify(None, now)
        if self.listeners.awaited:
            self.listeners.work_due(self.jobs, now)
        return event

    def next_event(self) -> int | None:
        """Return when `tick` may have something to do: never too late, perhaps too early."""
        first = self.admin.next_event()
        for time in (self.jobs.next_alarm(), self.store.next_expiry()):
            if time is not None and (first is None or time < first):
                first = time
        return first

    def close(self, session: Session) -> None:
        """Release the locks and registrations of a connection that was closed."""
        self.store.release_locks(session, session.locked)
        self.watch.forget(session)

    # Connection.

    def _quit(self, request: Request, session: Session, now: int) -> Reply:  # noqa: ARG002
        return Reply(request.identifier, 0, now)

    # Values.

    def _set(self, request: Request, session: Session, now: int) -> Reply:
        if request.query:
            raise RefusedError("bad-query", f"query {request.query} has no meaning here")
        if request.key == COMMAND_KEY:
            if request.flags & LISTEN:
                self.listeners.check(session, [request.key])
            return self.admin.run(request, session, now)
        entry, applied = self.store_value(request, session, now)
        if applied:
            self.replication.value_changed(entry)
        return self.reply_about(request, entry, now)

    def store_value(
        self, request: Request, session: Session, now: int, *, copied: bool = False
    ) -> tuple[ValueEntry, bool]:
        """Carry out a SET; return the stored entry, and whether it was changed."""
        key, value, flags = request.key, request.value, request.flags
        assert value is not None
        if flags & LISTEN:
            self.listeners.check(session, [key])
        reserved = key.startswith(RESERVED)
        if reserved:
            self.admin.check(request, copied=copied)
            flags |= PERSIST | OVERWRITE
        applied = self.store.set(
            key,
            value,
            request.timestamp,
            now,
            owner=session,
            overwrite=bool(flags & OVERWRITE),
            persist=bool(flags & PERSIST),
            expires=request.timeout or 0,
            ttl=request.ttl or 0,
            copied=copied,
        )
        entry = self.store.stored(key)
        assert entry is not None
        if applied:
            self._notify(entry, session)
            if reserved:
                self.admin.applied(key, value, now)
        if flags & LISTEN:
            self.watch.listen(session, [key])
        return entry, applied

    def _delete(self, request: Request, session: Session, now: int) -> Reply:
        key = request.key
        entry = self.store.live(key, now)
        if entry is None:
            reply = self.job_commands.end(request, now)
            if reply is not None:
                return reply
        # With copies a tombstone is always needed: an older SET may be on its way from elsewhere.
        complete = bool(request.flags & OVERWRITE) and not self.replication.older_may_arrive
        keys = [] if entry is None else list(entry.keys)
        removed = self.store.delete(key, request.timestamp, now, owner=session, complete=complete)
        if removed:
            self.listeners.changed(keys, session, request.timestamp, None)
            self.admin.removed(keys)
        stored = self.store.stored(key)
        timestamp = request.timestamp if stored is None else stored.timestamp
        if removed or (entry is None and timestamp <= request.timestamp):
            for each in keys or [key]:
                self.replication.key_removed(each)
        return Reply(request.identifier, DELETED if removed else 0, timestamp)

    def _add(self, request: Request, session: Session, now: int) -> Reply:
        assert request.value is not None
        self.admin.refuse_reserved(request.key)
        entry = self.store.add(request.key, request.value, request.timestamp, now, owner=session)
        return self._result(request, entry, session, now)

    def _not(self, request: Request, session: Session, now: int) -> Reply:
        return self._changed_in_place(request, session, now, numbers.inverted)

    def _truncate(self, request: Request, session: Session, now: int) -> Reply:
        assert request.value is not None
        size = numbers.integer_of(request.value)
        reply = self._changed_in_place(
            request, session, now, lambda stored: numbers.truncated(stored, size)
        )
        reply.pair = None
        reply.flags &= ~DATA
        return reply

    def _changed_in_place(
        self, request: Request, session: Session, now: int, change: Callable[[Value], Value]
    ) -> Reply:
        self.admin.refuse_reserved(request.key)
        entry = self.store.live(request.key, now)
        if entry is None:
            raise RefusedError("does-not-exist")
        value = change(self.store.value(entry))
        entry = self.store.change(request.key, request.timestamp, now, value, owner=session)
        return self._result(request, entry, session, now)

    def _result(self, request: Request, entry: ValueEntry, session: Session, now: int) -> Reply:
        self._notify(entry, session)
        self.replication.value_changed(entry)
        reply = self.reply_about(request, entry, now)
        reply.flags |= DATA
        reply.pair = Pair(b"", self.store.value(entry))
        return reply

    def _lock(self, request: Request, session: Session, now: int) -> Reply:
        until = now + LOCK_DEFAULT_US if request.timeout is None else request.timeout
        entry = self.store.lock(request.key, session, until, now)
        session.locked.update(entry.keys)
        return self.reply_about(request, entry, now)

    def _unlock(self, request: Request, session: Session, now: int) -> Reply:
        entry = self.store.unlock(request.key, session, now)
        session.locked.difference_update(entry.keys)
        return self.reply_about(request, entry, now)

    def check_two_keys(self, request: Request, second: str) -> None:
        """Refuse a request without a second key or with a reserved one."""
        if not request.key2:
            raise RefusedError("key-missing", second)
        self.admin.refuse_reserved(request.key)
        self.admin.refuse_reserved(request.key2)

    def _rename(self, request: Request, session: Session, now: int) -> Reply:
        self.check_two_keys(request, "the new key")
        key, target = request.key, request.key2
        overwrite = bool(request.flags & OVERWRITE)
        moved = self.store.rename(
            key, target, request.timestamp, now, owner=session, overwrite=overwrite
        )
        if not moved:
            kept = self.store.stored(key)
            return Reply(request.identifier, 0, now if kept is None else kept.timestamp)
        entry = self.store.stored(target)
        assert entry is not None
        if key != target:
            self.listeners.changed([key], session, entry.timestamp, None)
        self._notify(entry, session)
        self.replication.value_changed(entry)
        if key != target:
            self.replication.key_removed(key)
        return self.reply_about(request, entry, now)

    def _link(self, request: Request, session: Session, now: int) -> Reply:
        self.check_two_keys(request, "the additional key")
        entry = self.store.link(request.key, request.key2, request.timestamp, now, owner=session)
        self.listeners.changed([request.key2], session, entry.timestamp, entry.type)
        self.replication.value_changed(entry)
        return self.reply_about(request, entry, now)

    def _unlink(self, request: Request, session: Session, now: int) -> Reply:
        self.admin.refuse_reserved(request.key)
        entry = self.store.live(request.key, now)
        if entry is not None:
            known = max(entry.timestamp, entry.timestamp_of(request.key)) + 1
            request.timestamp = max(request.timestamp, known)
        removed = self.store.unlink(request.key, request.timestamp, now, owner=session)
        if entry is not None:
            self.listeners.changed([request.key], session, request.timestamp, None)
            self.replication.key_removed(request.key)
        return Reply(request.identifier, DELETED if removed else 0, request.timestamp)

    def reply_about(self, request: Request, entry: ValueEntry, now: int) -> Reply:
        """Return a reply about one stored version."""
        flags = PERSIST if entry.persist and not entry.tombstone else 0
        if entry.locked(now):
            flags |= LOCKED
        return Reply(request.identifier, flags, entry.timestamp)

    def _notify(self, entry: ValueEntry, session: Session) -> None:
        self.listeners.changed(entry.keys, session, entry.timestamp, entry.type)


def _refusal(request: Request, refused: RefusedError, now: int) -> Reply:
    return Reply(
        request.identifier,
        LOCKED if refused.code == "locked" else 0,
        now if refused.timestamp is None else refused.timestamp,
        refused.timeout,
        error=refused.message,
    )
