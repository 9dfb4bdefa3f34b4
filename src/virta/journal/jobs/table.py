"""
Every job in its place: found by uri, by id, and in the order of work; no I/O.

Invariants:
- One waiting entry per uri; while a uri is worked on, a newer one waits behind it (HELD).
- `_by_id` finds exactly the live entries: by their own id while they wait, by the id of the attempt
  while they are worked on. A key of an attempt that is over finds nothing (fencing).
- `next_id` never goes back, also not over a restart (see `persistence`).
- `leases` knows every entry that must survive and is worked on.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from virta.journal.jobs.domain import (
    DEAD,
    DELAYED,
    GONE,
    HELD,
    READY,
    STATE_NAMES,
    WORKING,
    Job,
    parse_key,
)
from virta.journal.jobs.finished import Finished
from virta.journal.jobs.scheduler import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.journal.storage.leases import Lease, Leases

JOBS_MAX = 10_000_000
LIST_MAX = 1_000
# 2^40 ids for each of the 2^23 names a daemon may have.
ID_RANGE_SHIFT = 40
# Counters since the process started; the native module updates the first three as well.
PUSHED, HANDED_OUT, DONE, FAILED, LAPSED, DIED = range(6)
TOTAL_NAMES = ("pushed", "handed_out", "done", "failed", "lapsed", "died")
# The oldest ready job is searched for among this many waiting jobs, and the first jobs of this many domains.
OLDEST_JOBS_MAX = 10_000
OLDEST_DOMAINS_MAX = 1_000


class JobTable:
    def __init__(self, *, jobs_max: int = JOBS_MAX) -> None:
        self.jobs_max = jobs_max
        self.next_id = 1
        self.schedule = Schedule()
        self.finished = Finished()
        self.leases: Leases | None = None  # set by whoever has a disk
        self.copied = False  # other daemons have to hear of what happens here
        # Deadlines use the clock of the daemon that assigns jobs; one whose clock is ahead must not end them.
        self.lapsing = True
        # The log has to learn something, and the acknowledgement of the last changes to wait for that.
        self.wants_log = False
        self.totals_buffer = bytearray(8 * len(TOTAL_NAMES))
        self.totals = memoryview(self.totals_buffer).cast("Q")
        self._waiting: dict[bytes, Job] = {}
        self._working: dict[bytes, Job] = {}
        self._dead: dict[bytes, Job] = {}
        self._by_id: dict[int, Job] = {}
        # Of those nothing is left of, with the last finished command: a hint for the native half.
        self._dirty: dict[bytes, int | None] = {}
        self._untold: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._working) + len(self._dead)

    # Looking.

    def find(self, key: bytes) -> Job | None:
        """The job of a sort key, else the waiting or else the worked-on job of a uri."""
        job_id = parse_key(key)
        if job_id is not None:
            job = self._by_id.get(job_id)
            if job is not None and job.key() == key:
                return job
        return self._waiting.get(key) or self._working.get(key)

    def find_text(self, text: str) -> Job | None:
        """The job of a sort key that came as text: bytes of the domain that are none are replaced in it."""
        key = text.encode()
        job_id = parse_key(key)
        job = None if job_id is None else self._by_id.get(job_id)
        return job if job is not None and job.key().decode(errors="replace") == text else None

    def last_command(self, uri: bytes) -> int:
        """The newest command known of a uri, however it went; -1 if none is."""
        last = self.finished.commands.get(uri, -1)
        for table in (self._waiting, self._working, self._dead):
            if uri in table and table[uri].timestamp > last:
                last = table[uri].timestamp
        return last

    def counts(self) -> list[int]:
        """Return how many jobs are in each state."""
        return [
            sum(place.counts[state] for place in self.schedule.domains.values())
            for state in range(DEAD + 1)
        ]

    def oldest_ready(self, now: int) -> int:
        """
        Return how long (µs) the oldest ready job has been ready, 0 if there is none.

        Bounded: with more jobs and domains than it reads, an older one may be missed. Waiting jobs
        are in the order in which they arrived.
        """
        ready = [
            job.start
            for job in islice(self._waiting.values(), OLDEST_JOBS_MAX)
            if job.state == READY
        ]
        for place in islice(self.schedule.domains.values(), OLDEST_DOMAINS_MAX):
            head = place.head()
            if head is not None:
                ready.append(head.start)
        return max(now - min(ready, default=now), 0)

    def newest_command(self) -> int:
        """Return the largest timestamp of all commands, 0 if there is none."""
        newest = max(self.finished.commands.values(), default=0)
        for table in (self._waiting, self._working, self._dead):
            newest = max(newest, max((job.timestamp for job in table.values()), default=0))
        return newest

    def any_key(self, lower: bytes, upper: bytes | None) -> bool:
        """Whether a key of a job that waits or is worked on may be in a range; quick to say yes."""
        for place in self.schedule.domains.values():
            first, beyond = place.prefix + b":", place.prefix + b";"
            if lower < beyond and (upper is None or first < upper) and any(place.counts[:DEAD]):
                return True
        return any(
            lower <= uri and (upper is None or uri < upper)
            for uri in chain(self._waiting, self._working)
        )

    def uris(self) -> list[bytes]:
        """Every uri something is known of."""
        return list(
            dict.fromkeys(chain(self._working, self._waiting, self._dead, self.finished.commands))
        )

    def dead(self, uri: bytes) -> Job | None:
        return self._dead.get(uri)

    def entries(self, uri: bytes) -> list[Job]:
        """All there is of a uri: what waits or is dead, and before it what is worked on."""
        tables = (self._working, self._waiting, self._dead)
        return [job for table in tables if (job := table.get(uri)) is not None]

    def listed(
        self, *, domain: bytes = b"", state: str = "", limit: int = 100, offset: int = 0
    ) -> list[Job]:
        """Jobs in no particular order, for people to look at."""
        everything: Iterable[Job] = chain(
            self._working.values(), self._waiting.values(), self._dead.values()
        )
        wanted = (
            job
            for job in everything
            if (not domain or job.domain.name == domain.lower())
            and (not state or STATE_NAMES[job.state] == state)
        )
        return list(islice(wanted, offset, offset + min(limit, LIST_MAX)))

    # Copies.

    def use_range(self, number: int) -> None:
        """Take ids from a range of our own, so that keys mean the same job on every daemon."""
        self.next_id = max(self.next_id, (number << ID_RANGE_SHIFT) + 1)

    def saw_id(self, job_id: int) -> None:
        """An id that was handed out; those of other daemons are in other ranges."""
        if job_id >= self.next_id and job_id >> ID_RANGE_SHIFT == self.next_id >> ID_RANGE_SHIFT:
            self.next_id = job_id + 1

    def untold(self) -> list[tuple[bytes, bool]]:
        """Uris other daemons have to hear of, once, and whether the log waits for them, too."""
        uris = [(uri, uri in self._dirty) for uri in self._untold]
        self._untold.clear()
        return uris

    # Persistence.

    def changes(self) -> list[tuple[bytes, int, list[Job]]]:
        """Per uri that changed: the last finished command (-1: none known) and the entries to keep."""
        changes: list[tuple[bytes, int, list[Job]]] = []
        finished = self.finished.commands
        tables = [table for table in (self._working, self._waiting, self._dead) if table]
        for uri in self._dirty:
            kept: list[Job] = []
            for table in tables:
                if uri in table:
                    job = table[uri]
                    job.logged = job.persist
                    if job.persist:
                        kept.append(job)
            changes.append((uri, finished.get(uri, -1), kept))
        return changes

    def drained(self) -> None:
        """What changed up to now is in images that go to the log."""
        self.wants_log = False
        self._dirty.clear()
        if self.leases is not None:
            self.leases.drained()

    def all(self) -> list[Job]:
        return [*self._working.values(), *self._waiting.values(), *self._dead.values()]

    def restore(self, job: Job, now: int, *, dead: bool = False) -> None:
        """Take an entry from the log or a snapshot; `restored` has to follow."""
        job.logged = True
        if dead:
            self._dead[job.uri] = job
            job.domain.restore(job, DEAD)
        elif job.lease:
            self._working[job.uri] = job
            self._by_id[job.lease] = job
            job.domain.restore(job, WORKING)
            self.saw_id(job.lease)
        else:
            self._waiting[job.uri] = job
            self._by_id[job.id] = job
            held = job.uri in self._working
            job.domain.restore(job, HELD if held else READY if job.start <= now else DELAYED)
        self.saw_id(job.id)

    def restore_gone(self, uri: bytes, now: int, finished: int) -> None:
        """Nothing is left of a uri but perhaps the memory of its last finished command."""
        for table in (self._waiting, self._working, self._dead):
            job = table.pop(uri, None)
            if job is not None:
                self._by_id.pop(job.lease or job.id, None)
                job.domain.move(job, GONE)
        if finished >= 0:
            self.finished.remember(uri, finished, now)

    def restore_lease(self, lease: Lease) -> None:
        """Somebody worked on a job when the process ended, unless the log knows better."""
        job = self._by_id.get(lease.lease)
        if job is not None and job.lease == lease.lease and job.id == lease.job_id:
            job.worked_until = lease.worked_until
            job.domain.move(job, WORKING)
            return
        job = self._by_id.get(lease.job_id)
        if (
            job is None
            or job.state not in (READY, DELAYED)
            or job.id != lease.job_id
            or job.attempts != lease.attempts
        ):
            return
        job.domain.move(job, GONE)
        del self._waiting[job.uri]
        del self._by_id[job.id]
        job.lease = lease.lease
        job.worked_until = lease.worked_until
        self.restore(job, 0)

    def _take_out(self, job: Job) -> None:
        """Out of every table, as if it had never been here."""
        if job.state == WORKING:
            self._unlease(job)
        elif job.state == DEAD:
            del self._dead[job.uri]
        else:
            del self._waiting[job.uri]
            del self._by_id[job.id]
        place = job.domain
        place.move(job, GONE)
        self.schedule.sweep(place)

    def _put_in(self, job: Job, now: int) -> None:
        """A state from another daemon into the tables."""
        uri = job.uri
        # What it takes the place of may have been the last of its domain, which is forgotten then.
        job.domain = self.schedule.domain(job.domain.name)
        if job.worked_until and not job.lease:
            self._dead[uri] = job
            job.domain.move(job, DEAD)
        elif job.lease:
            other = self._by_id.get(job.lease)
            if other is not None and other.lease:
                job.lease = self._new_id()
            elif other is not None:
                self._renumber(other, now)
            self._working[uri] = self._by_id[job.lease] = job
            job.domain.move(job, WORKING)
            self.schedule.arm(job.domain)
            if job.persist and self.leases is not None:
                self.leases.put(job)
        else:
            self._waiting[uri] = job
            self._number(job)
            self._schedule(job, now)

    def _number(self, job: Job) -> None:
        """
        Let an entry be found by its id; by a new one if that means another entry.

        Ids of daemons differ, but not those from before they knew each other, nor those of commands
        that took the place of others.
        """
        if self._by_id.setdefault(job.id, job) is not job:
            job.id = self._new_id()
            self._by_id[job.id] = job
            self._tell(job, job.revision + 1)

    def _renumber(self, job: Job, now: int) -> None:
        """Its id is that of an attempt somebody works in, who must be able to acknowledge it."""
        self._unschedule(job, job.domain.name)
        del self._by_id[job.id]
        job.id = self._new_id()
        self._by_id[job.id] = job
        self._schedule(job, now)
        self._tell(job, job.revision + 1)
        if job.persist:
            self._changed(job.uri)

    def _new_id(self) -> int:
        number = self.next_id
        self.next_id = number + 1
        return number

    def restored(self) -> None:
        """All is taken in, and the log knows everything up to here."""
        for place in list(self.schedule.domains.values()):
            place.settle()
            self.schedule.sweep(place)
            self.schedule.offer(place)
            self.schedule.arm(place)
        if self.leases is not None:
            self.leases.begin(job for job in self._working.values() if job.persist)
        self._dirty.clear()
        self.wants_log = False

    # Inner workings.

    def _changed(self, uri: bytes) -> None:
        self._dirty[uri] = None
        self.wants_log = True

    def _tell(self, job: Job, when: int | None = None) -> None:
        """Other daemons have to hear of it: of a state later than the one before, if `when` is given."""
        if self.copied:
            if when is not None:
                job.revision = max(job.revision + 1, when)
            self._untold[job.uri] = None

    def _tell_of(self, uri: bytes) -> None:
        if self.copied:
            self._untold[uri] = None

    def _new_job(self, uri: bytes, domain: bytes, timestamp: int) -> Job:
        number = self.next_id
        self.next_id = number + 1
        job = Job(uri, self.schedule.domain(domain), number, 0, 0, timestamp, timestamp)
        self._waiting[uri] = job
        self._by_id[number] = job
        return job

    def _unschedule(self, job: Job, domain: bytes) -> None:
        """Out of its place, before what orders it changes; perhaps into another domain."""
        place = job.domain
        place.move(job, GONE)
        if place.name != domain:
            job.domain = self.schedule.domain(domain)
            self.schedule.sweep(place)

    def _schedule(self, job: Job, now: int) -> None:
        place = job.domain
        if job.uri in self._working:
            place.move(job, HELD)
        elif job.start <= now:
            place.move(job, READY)
            self.schedule.offer(place, job)
        else:
            place.move(job, DELAYED)
            self.schedule.arm(place, job.start)

    def _reserve(self, job: Job, until: int, now: int, *, lease: int = 0) -> None:
        if not lease:
            lease = self.next_id
            self.next_id += 1
        del self._waiting[job.uri]
        del self._by_id[job.id]
        self._working[job.uri] = job
        self._by_id[lease] = job
        job.lease = lease
        job.worked_until = until
        job.domain.move(job, WORKING)
        self.schedule.arm(job.domain, until)
        if job.persist and self.leases is not None:
            self.leases.put(job)
        if job.replaced:  # commands older than one that is worked on are over
            self.finished.remember(job.uri, max(job.replaced), now)
            job.replaced = None
            self._changed(job.uri)
        self._tell(job, now)

    def _unlease(self, job: Job) -> None:
        """The attempt is over; its key finds nothing any more."""
        if job.lease:
            self._by_id.pop(job.lease, None)
            del self._working[job.uri]
            job.lease = 0
            job.worked_until = 0
            if job.slot and self.leases is not None:
                self.leases.drop(job)
