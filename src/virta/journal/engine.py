"""
What each command means: requests in, replies out, no I/O; the clock is given.

Invariants:
- A request is carried out whole or not at all, in the order `handle` is called.
- `wants_log` after a change says that its acknowledgement has to wait until `drain`ed images are on
  disk; a reserve (NEXT) never asks for that.
- What other daemons have to hear is in `outgoing`, with final timestamps, and nothing of it came
  from a daemon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.clock import now_us
from virta.journal import clock_steps as clocks
from virta.journal.admin import Admin
from virta.journal.jobs.commands import JobCommands
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.jobs.watch import JobWatch
from virta.journal.protocol import rules
from virta.journal.protocol.messages import (
    DATA,
    DELETED,
    LISTEN,
    LOCKED,
    OVERWRITE,
    PERSIST,
    TOUCH,
    Function,
    Pair,
    RefusedError,
    Reply,
    Request,
    Value,
)
from virta.journal.replication.messages import JOB_KEY, Copies
from virta.journal.sessions import Listeners, Session
from virta.journal.values import numbers
from virta.journal.values.reading import Reading
from virta.journal.values.store import LOCK_DEFAULT_US, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.values.entry import Entry

# What is only to be forgotten after days may stay a second longer.
TIDY_US = 1_000_000
PEER_PREFIX = b"peer:"
PULL_PREFIX = b"pull:"
# Commands that change nothing if the stored value is newer; others get a newer timestamp when executed.
_LATEST_WINS = frozenset({Function.SET, Function.DELETE, Function.RENAME, Function.PUSH})


class Engine:
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
            steady = clocks.steady_clock
        # Without a steady clock to compare with, the clock is trusted.
        self._steps = None if steady is None else clocks.StepWatch(clock, steady)
        # Not `or`: an empty one is false, and its limits and its disk would be lost.
        self.store = Store() if store is None else store
        self.jobs = Jobs() if jobs is None else jobs
        self.listeners = Listeners()
        self.watch = JobWatch(self.jobs, self.listeners)
        self.copies = Copies(self)
        self.admin = Admin(self)
        self.disk_bytes: Callable[[], int] = lambda: 0  # for figures; set by whoever has a disk
        self.pull: Callable[[str], None] = lambda _: (
            None
        )  # ask a peer for everything; set by `peers`
        self.primary = True  # only the primary hands out jobs
        self.replicate = False
        self.outgoing: list[Request] = []
        self.handled = 0
        self._reading = Reading(self)
        self._job_commands = JobCommands(self)
        self._expiries = self.store.expiries
        self._last_stamp = 0
        self._tidy_at = 0
        self._functions: dict[int, Callable[[Request, Session, int], Reply]] = {
            Function.NOP: self._nop,
            Function.QUIT: self._quit,
            Function.SET: self._set,
            Function.GET: self._reading.get,
            Function.DELETE: self._delete,
            Function.ADD: self._add,
            Function.NOT: self._not,
            Function.TRUNCATE: self._truncate,
            Function.LOCK: self._lock,
            Function.UNLOCK: self._unlock,
            Function.RENAME: self._rename,
            Function.NEXT: self._job_commands.next,
            Function.PUSH: self._job_commands.push,
            Function.LINK: self._link,
            Function.UNLINK: self._unlink,
        }

    def handle(self, request: Request, session: Session) -> Reply:
        """Carry out one request; the reply, which has to wait for the disk if `wants_log`."""
        self.handled += 1
        now = self.clock()
        if self._steps is not None and (step := self._steps.step()):
            now = self.clock()
            clocks.shift(self, step, now)
        try:
            # Another daemon's clock was checked where the command came in.
            rules.check_numbers(request)
            rules.check(request, now if session.peer is None else rules.STAMP_US_MAX)
            if request.timestamp == 0:
                request.timestamp = self._stamp_for(request, now)
            reply = self._functions[request.function](request, session, now)
        except RefusedError as refused:
            reply = Reply(
                request.identifier,
                LOCKED if refused.code == "locked" else 0,
                now if refused.timestamp is None else refused.timestamp,
                refused.timeout,
                error=refused.message,
            )
        if self.watch.moved:
            self.watch.tell(session, now)
        return reply

    @property
    def wants_log(self) -> bool:
        return self.store.wants_log or self.jobs.wants_log

    def stamp(self, now: int) -> int:
        """
        Return a timestamp of this daemon, later than every one before.

        Except when those are from a clock that was far ahead: then new ones would be too, and win over commands
        of clients with a correct clock. `_stamp_for` keeps the order where it matters.
        """
        if self._last_stamp > now + rules.CLOCK_SKEW_US_MAX:
            self._last_stamp = 0
        self._last_stamp = max(now, self._last_stamp + 1)
        return self._last_stamp

    def _stamp_for(self, request: Request, now: int) -> int:
        """Return a timestamp later than all stored ones of the request's keys, so that it has an effect."""
        stamp = self.stamp(now)
        if request.function not in _LATEST_WINS:
            return stamp
        keys = [request.key] if request.function != Function.RENAME else [request.key, request.key2]
        for key in keys:
            entry = self.store.stored(key)
            if entry is not None:
                stamp = max(stamp, entry.timestamp + 1, *(at + 1 for at in entry.links.values()))
            stamp = max(stamp, self.jobs.last_command(key) + 1)
        return stamp

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

    def tick(self, now: int | None = None) -> int | None:
        """
        Let time pass: expiries, starts, lapses, recurring jobs, and who waits for them.

        The `next_event` is returned.
        """
        if now is None:
            now = self.clock()
        if self._steps is not None and (step := self._steps.step()):
            now = self.clock()
            clocks.shift(self, step, now)
            self._tidy_at = 0
        event = self.next_event()
        due = event is not None and event <= now
        set_back = now < self._tidy_at - TIDY_US
        if due or set_back or now >= self._tidy_at or self.store.unannounced:
            if self._tidy_at and self.jobs.leases is not None:
                self.jobs.leases.note_clock(
                    now
                )  # only after what a clock step changed is being written to disk
            self._tidy_at = now + TIDY_US
            gone = self.store.tick(now)
            if gone:
                self.listeners.changed(gone, None, now, None)
            self.jobs.lapsing = self.primary
            self.jobs.tick(now)
            self.admin.tick(now)
            event = self.next_event()
        if self.watch.moved:
            self.watch.tell(None, now)
        if self.listeners.awaited:
            self.listeners.work_due(self.jobs, now)
        return event

    def next_event(self) -> int | None:
        """When `tick` may have something to do; too early is possible, too late is not."""
        first, alarm = self.admin.next_event(), self.jobs.next_alarm()
        if alarm is not None and (first is None or alarm < first):
            first = alarm
        if self._expiries and (first is None or self._expiries[0][0] < first):
            first = self._expiries[0][0]
        return first

    def close(self, session: Session) -> None:
        """The connection is gone: its locks and registrations with it."""
        self.store.release_locks(session, session.locked)
        self.watch.forget(session)

    # Connection.

    def _nop(self, request: Request, session: Session, now: int) -> Reply:
        if request.key.startswith(PEER_PREFIX):
            session.peer = request.key[len(PEER_PREFIX) :].decode(errors="replace")
        elif request.key.startswith(PULL_PREFIX) and session.peer is not None:
            self.pull(request.key[len(PULL_PREFIX) :].decode(errors="replace"))
        return Reply(request.identifier, 0, now)

    def _quit(self, request: Request, session: Session, now: int) -> Reply:  # noqa: ARG002
        return Reply(request.identifier, 0, now)

    # Values.

    def _set(self, request: Request, session: Session, now: int) -> Reply:
        key, value = request.key, request.value
        assert value is not None
        flags = request.flags
        told = session.peer is not None
        if request.query and not told:
            raise RefusedError("bad-query", f"query {request.query} has no meaning here")
        if flags & LISTEN:
            self.listeners.check(session, [key])
        if key.startswith(b"virta:"):
            if told and key == JOB_KEY:
                self.copies.merge_job(value, now)
                return Reply(request.identifier, 0, request.timestamp)
            if self.admin.is_command(key):
                return self.admin.run(request, session, now)
            self.admin.check(request, told=told)
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
            told=told,
        )
        if request.key2:
            self.copies.merge_mark(request)
        entry = self.store.stored(key)
        assert entry is not None
        if applied:
            self._publish(entry, session)
            if key.startswith(b"virta:"):
                self.admin.applied(key, value, now)
            if self.replicate and not told:
                self.tell_value(entry)
        if flags & LISTEN:
            self.watch.listen(session, [key])
        return self._about(request, entry, now)

    def _delete(self, request: Request, session: Session, now: int) -> Reply:
        key = request.key
        if session.peer is not None:
            return self._bury(request, session, now)
        # With copies a tombstone is always needed: an older SET may be on its way from elsewhere.
        complete = bool(request.flags & OVERWRITE) and not self.replicate
        entry = self.store.live(key, now)
        if entry is None:
            reply = self._job_commands.end(request, now)
            if reply is not None:
                return reply
        keys = [] if entry is None else list(entry.keys)
        removed = self.store.delete(key, request.timestamp, now, owner=session, complete=complete)
        if removed:
            self.listeners.changed(keys, session, request.timestamp, None)
            self.admin.removed(keys)
        stored = self.store.stored(key)
        timestamp = request.timestamp if stored is None else stored.timestamp
        if self.replicate and (removed or (entry is None and timestamp <= request.timestamp)):
            for each in keys or [key]:
                self.tell_gone(each)
        return Reply(request.identifier, DELETED if removed else 0, timestamp)

    def _bury(self, request: Request, session: Session, now: int) -> Reply:
        """Another daemon deleted one key; it says of each by itself."""
        key = request.key
        removed = self.store.bury(key, request.timestamp, now, owner=session)
        if removed:
            self.listeners.changed([key], session, request.timestamp, None)
            self.admin.removed([key])
        return Reply(request.identifier, DELETED if removed else 0, request.timestamp)

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

    def _result(self, request: Request, entry: Entry, session: Session, now: int) -> Reply:
        self._publish(entry, session)
        value = self.store.value(entry)
        if self.replicate:
            self.tell_value(entry)
        reply = self._about(request, entry, now)
        reply.flags |= DATA
        reply.pair = Pair(b"", value)
        return reply

    def _lock(self, request: Request, session: Session, now: int) -> Reply:
        until = now + LOCK_DEFAULT_US if request.timeout is None else request.timeout
        entry = self.store.lock(request.key, session, until, now)
        session.locked.update(entry.keys)
        return self._about(request, entry, now)

    def _unlock(self, request: Request, session: Session, now: int) -> Reply:
        entry = self.store.unlock(request.key, session, now)
        session.locked.difference_update(entry.keys)
        return self._about(request, entry, now)

    def _rename(self, request: Request, session: Session, now: int) -> Reply:
        key, target = request.key, request.key2
        if not target:
            raise RefusedError("key-missing", "the new key")
        self.admin.refuse_reserved(key)
        self.admin.refuse_reserved(target)
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
        self._publish(entry, session)
        if self.replicate:
            self.tell_value(entry)
            if key != target:
                self.tell_gone(key)
        return self._about(request, entry, now)

    def _link(self, request: Request, session: Session, now: int) -> Reply:
        if not request.key2:
            raise RefusedError("key-missing", "the additional key")
        self.admin.refuse_reserved(request.key)
        self.admin.refuse_reserved(request.key2)
        if session.peer is not None:
            return self._link_told(request, session, now)
        entry = self.store.link(request.key, request.key2, request.timestamp, now, owner=session)
        self.listeners.changed([request.key2], session, entry.timestamp, entry.type)
        if self.replicate:
            self.tell_value(entry)
        return self._about(request, entry, now)

    def _link_told(self, request: Request, session: Session, now: int) -> Reply:
        """Another daemon's LINK, perhaps before the value it is about."""
        key = request.key2
        if self.store.link_told(request.key, key, request.timestamp, now):
            entry = self.store.live(key, now)
            kind = None if entry is None else entry.type
            self.listeners.changed([key], session, request.timestamp, kind)
        return Reply(request.identifier, 0, request.timestamp)

    def _unlink(self, request: Request, session: Session, now: int) -> Reply:
        self.admin.refuse_reserved(request.key)
        entry = self.store.live(request.key, now)
        if entry is not None:
            moment = max(entry.timestamp, entry.moment(request.key)) + 1
            request.timestamp = max(request.timestamp, moment)
        removed = self.store.unlink(request.key, request.timestamp, now, owner=session)
        if entry is not None:
            self.listeners.changed([request.key], session, request.timestamp, None)
            if self.replicate and session.peer is None:
                self.tell_gone(request.key)
        return Reply(request.identifier, DELETED if removed else 0, request.timestamp)

    # Replies, listeners and peers.

    def _about(self, request: Request, entry: Entry, now: int) -> Reply:
        """A reply about one stored version."""
        flags = PERSIST if entry.persist and not entry.tombstone else 0
        if entry.locked(now):
            flags |= LOCKED
        return Reply(request.identifier, flags, entry.timestamp)

    def _publish(self, entry: Entry, session: Session) -> None:
        self.listeners.changed(entry.keys, session, entry.timestamp, entry.type)

    def tell_value(self, entry: Entry) -> None:
        """Other daemons have to hear of a value as it is now."""
        self.outgoing += self.copies.of_value(entry)
        self._tell_moved()

    def tell_gone(self, key: bytes) -> None:
        """Other daemons have to hear that a key leads nowhere."""
        stored = self.store.stored(key)
        if stored is not None:
            self.outgoing.append(Request(Function.DELETE, 0, 0, stored.moment(key), key=key))
        self._tell_moved()

    def _tell_moved(self) -> None:
        """Values that go on under another key, because theirs was taken away."""
        moved, self.store.moved = self.store.moved, []
        for entry in moved:
            if entry.keys:
                self.outgoing += self.copies.of_value(entry)

    def tell_read(self, entry: Entry, request: Request) -> None:
        """A mark or a longer life, together with the value, as that may be still on its way."""
        if self.replicate and (request.timeout is not None or request.flags & TOUCH):
            self.tell_value(entry)

    def gather(self) -> list[Request]:
        """Everything other daemons have to hear of and have not been told; taken once."""
        self.outgoing += self.copies.of_jobs(self.clock())
        gone, self.store.expired_links = self.store.expired_links, []
        self.outgoing += [Request(Function.DELETE, 0, 0, at, key=key) for key, at in gone]
        outgoing, self.outgoing = self.outgoing, []
        return outgoing

    def start_copying(self) -> None:
        """From now on every change is to be told to other daemons."""
        self.replicate = self.jobs.copied = self.store.copied = True
