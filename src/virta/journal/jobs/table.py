"""
Every job under its uri and its id; no I/O.

Invariants:
- `_jobs` has the newest job of each uri. While an older one is worked on, the newest waits behind it
  (WAITING_BEHIND) or is DEAD, and has it as `older`; any other job has no `older`.
- `_by_id` finds exactly the jobs that are not dead: by their own id while they wait, by the id of the
  attempt while they are worked on. The key of an attempt that is over finds nothing (fencing).
- `next_id` never goes back, not even over a restart (see `storage.directory`).
- `leases` has every persistent job that is worked on.
- `finished` has the newest finished command of a uri for at least FINISHED_US, unless more than FINISHED_MAX
  others finished since: a spool may send it again, and it must not run again.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from virta.journal.jobs.job import (
    DEAD,
    DELAYED,
    READY,
    REMOVED,
    STATE_NAMES,
    WAITING_BEHIND,
    WORKING,
    Job,
    parse_key,
)
from virta.journal.jobs.scheduler import Scheduler
from virta.journal.replication.interface import Replication

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.journal.jobs.domain import Domain
    from virta.journal.storage.leases import LeaseSlot, LeaseTable

JOBS_MAX = 10_000_000
# As long as a spool may be cut off from its daemon.
FINISHED_US = 7 * 24 * 3600 * 1_000_000
FINISHED_MAX = 1_000_000
LIST_MAX = 1_000
# 2^40 ids for each of the 2^23 names a daemon may have.
ID_RANGE_SHIFT = 40
# Counters since the process started.
PUSHED, HANDED_OUT, DONE, FAILED, LAPSED, DIED = range(6)
TOTAL_NAMES = ("pushed", "handed_out", "done", "failed", "lapsed", "died")
# The oldest ready job is searched for among this many jobs, and the first jobs of this many domains.
OLDEST_JOBS_MAX = 10_000
OLDEST_DOMAINS_MAX = 1_000
# Domains whose finished jobs are counted: the first ones that had any.
DOMAINS_COUNTED_MAX = 10_000
_ID_DIGITS = 16


class FinishedCommands:
    """The last finished command of each uri, with the time when it finished."""

    def __init__(self) -> None:
        self.commands: dict[bytes, int] = {}
        self._order: deque[tuple[int, bytes, int]] = deque()

    def __len__(self) -> int:
        """Return how many are remembered, including those replaced by a newer one of the same uri."""
        return len(self._order)

    def last(self, uri: bytes) -> int:
        """Return the timestamp of the last finished command, -1 if none is known."""
        return self.commands.get(uri, -1)

    def remember(self, uri: bytes, timestamp: int, now: int) -> None:
        if self.commands.get(uri, -1) < timestamp:
            self.commands[uri] = timestamp
            self._order.append((now, uri, timestamp))
            if len(self._order) > FINISHED_MAX:
                self._forget_first()

    def tick(self, now: int) -> None:
        order = self._order
        while order and order[0][0] <= now - FINISHED_US:
            self._forget_first()

    def _forget_first(self) -> None:
        _, uri, timestamp = self._order.popleft()
        if self.commands.get(uri) == timestamp:
            del self.commands[uri]

    def shift(self, step: int) -> None:
        """Move all times by `step` µs after the clock was set, so entries expire as they would have."""
        self._order = deque((when + step, uri, timestamp) for when, uri, timestamp in self._order)

    def all(self) -> list[tuple[int, bytes, int]]:
        """Return (when, uri, timestamp), oldest first."""
        return list(self._order)


class JobTable:
    def __init__(self, *, jobs_max: int = JOBS_MAX) -> None:
        self.jobs_max = jobs_max
        self.next_id = 1
        self.scheduler = Scheduler()
        self.finished = FinishedCommands()
        self.leases: LeaseTable | None = None  # None: without a disk
        self.replication = Replication()
        # Deadlines use the clock of the daemon that assigns jobs; one whose clock is ahead must not end them.
        self.lapsing = True
        # There are changes to log, and the reply to the last one has to wait for that.
        self.wants_log = False
        self.totals = [0] * len(TOTAL_NAMES)
        self.done_in: dict[
            bytes, int
        ] = {}  # jobs done, by domain; a domain without jobs is not kept elsewhere
        self._jobs: dict[bytes, Job] = {}
        self._older = 0  # jobs that are the `older` of another
        self._by_id: dict[int, Job] = {}
        self._unlogged: dict[bytes, None] = {}  # uris with changes to log

    def __len__(self) -> int:
        return len(self._jobs) + self._older

    # Finding.

    def find(self, key: bytes) -> Job | None:
        """Return the job of a sort key, or the job of a uri that waits or is worked on."""
        if key[-_ID_DIGITS - 1 : -_ID_DIGITS] == b":":
            try:
                job = self._by_id.get(int(key[-_ID_DIGITS:], 16))
            except ValueError:
                job = None
            if job is not None and job.key() == key:
                return job
        return self.live(key)

    def live(self, uri: bytes) -> Job | None:
        """Return the job of a uri that waits, or else the one that is worked on."""
        job = self._jobs.get(uri)
        return job.older if job is not None and job.state == DEAD else job

    def find_text(self, text: str) -> Job | None:
        """Return the job of a sort key in which bytes that are not UTF-8 were replaced."""
        number = parse_key(text.encode())
        job = None if number is None else self._by_id.get(number)
        return job if job is not None and job.key().decode(errors="replace") == text else None

    def dead(self, uri: bytes) -> Job | None:
        job = self._jobs.get(uri)
        return job if job is not None and job.state == DEAD else None

    def entries(self, uri: bytes) -> list[Job]:
        """Return all jobs of a uri: the one that is worked on, then the one that waits or is dead."""
        job = self._jobs.get(uri)
        if job is None:
            return []
        return [job] if job.older is None else [job.older, job]

    def all(self) -> list[Job]:
        return list(self._all())

    def _all(self) -> Iterator[Job]:
        for job in self._jobs.values():
            if job.older is not None:
                yield job.older
            yield job

    def last_command(self, uri: bytes) -> int:
        """Return the timestamp of the newest known command of a uri, -1 if there is none."""
        last = self.finished.commands.get(uri, -1)
        if (job := self._jobs.get(uri)) is None:
            return last
        if job.older is not None:
            last = max(last, job.older.timestamp)
        return max(last, job.timestamp)

    def newest_command(self) -> int:
        """Return the largest timestamp of all commands, 0 if there is none."""
        newest = max(self.finished.commands.values(), default=0)
        return max(newest, max((job.timestamp for job in self._all()), default=0))

    def uris(self) -> list[bytes]:
        """Return every uri with a job or a finished command."""
        return list(dict.fromkeys([*self._jobs, *self.finished.commands]))

    def any_key(self, lower: bytes, upper: bytes | None) -> bool:
        """Whether a key of a job that waits or is worked on may be in a range."""
        for place in self.domains.values():
            first, beyond = place.prefix + b":", place.prefix + b";"
            if lower < beyond and (upper is None or first < upper) and any(place.counts[:DEAD]):
                return True
        return any(
            lower <= uri and (upper is None or uri < upper) and self.live(uri) is not None
            for uri in self._jobs
        )

    def next_alarm(self) -> int | None:
        """Return when `tick` may have something to do: never too late, perhaps too early."""
        alarms = self.scheduler.alarms
        return alarms[0][0] if alarms else None

    def close(self) -> None:
        """Release all jobs, which the garbage collector does not track."""
        self.scheduler.close()

    # Statistics.

    @property
    def domains(self) -> dict[bytes, Domain]:
        return self.scheduler.domains

    def counts(self) -> list[int]:
        """Return how many jobs are in each state."""
        places = self.domains.values()
        return [sum(place.counts[state] for place in places) for state in range(DEAD + 1)]

    def _count_done(self, job: Job) -> None:
        self.totals[DONE] += 1
        name, counts = job.domain.name, self.done_in
        if name in counts or len(counts) < DOMAINS_COUNTED_MAX:
            counts[name] = counts.get(name, 0) + 1

    def oldest_ready(self, now: int) -> int:
        """
        Return how long (µs) the oldest ready job has been ready, 0 if there is none.

        Bounded: with more jobs and domains than it reads, an older one may be missed. Jobs are in
        the order in which their uris arrived.
        """
        jobs = islice(self._jobs.values(), OLDEST_JOBS_MAX)
        ready = [job.start for job in jobs if job.state == READY]
        for place in islice(self.domains.values(), OLDEST_DOMAINS_MAX):
            head = place.head()
            if head is not None:
                ready.append(head.start)
        return max(now - min(ready, default=now), 0)

    def listed(
        self, *, domain: bytes = b"", state: str = "", limit: int = 100, offset: int = 0
    ) -> list[Job]:
        """Return jobs in no particular order."""
        wanted = (
            job
            for job in self._all()
            if (not domain or job.domain.name == domain.lower())
            and (not state or STATE_NAMES[job.state] == state)
        )
        return list(islice(wanted, offset, offset + min(limit, LIST_MAX)))

    # Log, snapshot and copies.

    def changes(self) -> list[tuple[bytes, int, tuple[Job, ...]]]:
        """Return per changed uri the last finished command (-1: none) and the jobs to keep."""
        jobs, finished = self._jobs.get, self.finished.commands.get
        changes: list[tuple[bytes, int, tuple[Job, ...]]] = []
        for uri in self._unlogged:
            kept: tuple[Job, ...] = ()
            if (job := jobs(uri)) is not None:
                job.logged = job.persist
                if job.persist:
                    kept = (job,)
                if (older := job.older) is not None:
                    older.logged = older.persist
                    if older.persist:
                        kept = (older, *kept)
            changes.append((uri, finished(uri, -1), kept))
        return changes

    def drained(self) -> None:
        """Forget all changes up to now: they are in records on their way to the log."""
        self.wants_log = False
        self._unlogged.clear()
        if self.leases is not None:
            self.leases.drained()

    def is_unlogged(self, uri: bytes) -> bool:
        """Whether the log has yet to get a change of a uri."""
        return uri in self._unlogged

    def use_range(self, number: int) -> None:
        """Assign ids from a range of our own, so that keys mean the same job on every daemon."""
        self.next_id = max(self.next_id, (number << ID_RANGE_SHIFT) + 1)

    def saw_id(self, number: int) -> None:
        """Never assign this id again; ids of other daemons are in other ranges."""
        if number >= self.next_id and number >> ID_RANGE_SHIFT == self.next_id >> ID_RANGE_SHIFT:
            self.next_id = number + 1

    # Restoring.

    def restore(self, job: Job, now: int, *, dead: bool = False) -> None:
        """Add a job from the log or a snapshot; `restored` has to follow."""
        job.logged = True
        if job.id >= self.next_id:
            self.saw_id(job.id)
        if self._jobs.setdefault(job.uri, job) is not job:
            for other in self.entries(job.uri):
                if (other.state == WORKING) == bool(job.lease):
                    self._remove(other)  # it was replaced while the snapshot was written
            self._insert(job)
        if dead:
            job.domain.load(job, DEAD)
        elif job.lease:
            self.saw_id(job.lease)
            self._by_id[job.lease] = job
            job.domain.load(job, WORKING)
        else:
            self._by_id[job.id] = job
            state = READY if job.start <= now else DELAYED
            job.domain.load(job, state if job.older is None else WAITING_BEHIND)

    def restore_removed(self, uri: bytes, now: int, finished: int) -> None:
        """Remove all jobs of a uri, and remember its last finished command, if any."""
        for job in self.entries(uri):
            self._remove(job)
        if finished >= 0:
            self.finished.remember(uri, finished, now)

    def restore_lease(self, slot: LeaseSlot) -> None:
        """Restore an attempt that was going on when the process ended, unless the log has its end."""
        job = self._by_id.get(slot.lease)
        if job is not None and job.lease == slot.lease and job.id == slot.job_id:
            job.worked_until = slot.worked_until
            job.domain.move(job, WORKING)
            return
        job = self._by_id.get(slot.job_id)
        if (
            job is None
            or job.state not in (READY, DELAYED)
            or job.id != slot.job_id
            or job.attempts != slot.attempts
        ):
            return
        self._remove(job)
        job.lease = slot.lease
        job.worked_until = slot.worked_until
        self.restore(job, 0)

    def restored(self) -> None:
        """Finish restoring: the log has everything up to here."""
        for place in list(self.domains.values()):
            place.sort()
            self.scheduler.sweep(place)
            self.scheduler.offer(place)
            self.scheduler.arm(place)
        if self.leases is not None:
            self.leases.begin(job for job in self._all() if job.lease and job.persist)
        self._unlogged.clear()
        self.wants_log = False

    # Adding and removing.

    def _insert(self, job: Job) -> None:
        """Add a job under its uri: before a newer one, or after one that is worked on."""
        other = self._jobs.setdefault(job.uri, job)
        if other is job:
            return
        self._older += 1
        if job.lease:
            assert other.older is None
            other.older = job
        else:
            assert other.lease
            job.older = other
            self._jobs[job.uri] = job

    def _detach(self, job: Job) -> None:
        """Remove a job from under its uri."""
        newest = self._jobs[job.uri]
        if newest is job and job.older is None:
            del self._jobs[job.uri]
            return
        self._older -= 1
        if newest is job:
            assert job.older is not None
            self._jobs[job.uri] = job.older
            job.older = None
        else:
            newest.older = None

    def _remove(self, job: Job) -> None:
        """Remove a job; its domain stays, even if it is empty now."""
        self._detach(job)
        if job.state == WORKING:
            self._end_lease(job)
        elif job.state != DEAD:
            del self._by_id[job.id]
        job.domain.move(job, REMOVED)

    def _end_lease(self, job: Job) -> None:
        """End an attempt; its key finds nothing any more."""
        self._by_id.pop(job.lease, None)
        job.lease = 0
        job.worked_until = 0
        if job.slot and self.leases is not None:
            self.leases.end(job)

    def _new_id(self) -> int:
        number = self.next_id
        self.next_id = number + 1
        return number

    def _register_id(self, job: Job) -> None:
        """
        Make a waiting job findable by its id, by a new one if another job has that.

        Ids of daemons differ, but not those from before they knew each other, nor those of commands
        that replaced others.
        """
        if self._by_id.setdefault(job.id, job) is not job:
            job.id = self._new_id()
            self._by_id[job.id] = job
            self.replication.job_changed(job, job.revision + 1)

    def _insert_copy(self, job: Job, now: int) -> None:
        """Add a state from another daemon."""
        # The job it replaces may have been the last of its domain, which is forgotten then.
        job.domain = self.scheduler.domain(job.domain.name)
        self._insert(job)
        if job.worked_until and not job.lease:
            job.domain.move(job, DEAD)
            job.domain.note_death(job)
        elif job.lease:
            other = self._by_id.get(job.lease)
            if other is not None and other.lease:
                job.lease = self._new_id()
            elif other is not None:
                self._renumber(other, now)
            self._by_id[job.lease] = job
            job.domain.move(job, WORKING)
            self.scheduler.arm(job.domain)
            if job.persist and self.leases is not None:
                self.leases.put(job)
        else:
            self._register_id(job)
            self._schedule(job, now)

    def _renumber(self, job: Job, now: int) -> None:
        """Give a waiting job another id: its own is that of an attempt, which must acknowledge."""
        self._unschedule(job, job.domain.name)
        del self._by_id[job.id]
        job.id = self._new_id()
        self._by_id[job.id] = job
        self._schedule(job, now)
        self.replication.job_changed(job, job.revision + 1)
        if job.persist:
            self._log_later(job.uri)

    def _unschedule(self, job: Job, domain: bytes) -> None:
        """Remove a waiting job from its heap before its rank or its domain changes."""
        place = job.domain
        place.move(job, REMOVED)
        if place.name != domain:
            job.domain = self.scheduler.domain(domain)
            self.scheduler.sweep(place)

    def _schedule(self, job: Job, now: int) -> None:
        """Put a waiting job into the heap it belongs to."""
        place = job.domain
        if job.older is not None:
            place.move(job, WAITING_BEHIND)
        elif job.start <= now:
            if place.move(job, READY):  # the offer is no worse than the first one
                self.scheduler.offer(place, job)
        else:
            place.move(job, DELAYED)
            self.scheduler.arm(place, job.start)

    def _log_later(self, uri: bytes) -> None:
        self._unlogged[uri] = None
        self.wants_log = True
