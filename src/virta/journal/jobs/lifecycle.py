"""
The jobs: a plain state machine, no I/O, time comes in as an argument.

Invariant: a command not newer than the last one of its uri, waiting, worked on or finished, changes
nothing: a spool may send it again. Where jobs are and how they are found is in `table`.
"""

from __future__ import annotations

from virta.journal.jobs.domain import (
    ATTEMPTS_MAX,
    DEAD,
    DELAYED,
    GONE,
    HELD,
    READY,
    WORK_DEADLINE_US,
    WORKING,
    Job,
    Settings,
    back_off,
    host_of,
)
from virta.journal.jobs.table import DIED, DONE, FAILED, HANDED_OUT, LAPSED, PUSHED, JobTable
from virta.journal.protocol.messages import RefusedError, Value
from virta.journal.protocol.rules import TIME_US_MAX
from virta.journal.replication.merge import bounded, covering, join, order

PRIORITY_MAX = 255
# How often a daemon that does not end attempts checks whether it has to now.
LAPSE_LOOK_US = 1_000_000


class Jobs(JobTable):
    # What producers do.

    def push(
        self,
        uri: bytes,
        domain: bytes,
        timestamp: int,
        now: int,
        *,
        priority: int = 0,
        start: int = 0,
        payload: Value | None = None,
        persist: bool = False,
        tied: bool = False,
    ) -> bool:
        """
        Ask for work; False if a command as new as this one is known already.

        Two daemons may have taken different commands of the same moment: with `tied` the larger one
        of those wins, so that both end up with it.
        """
        if priority > PRIORITY_MAX:
            raise RefusedError("bad-priority", f"{priority} is over {PRIORITY_MAX}")
        name = domain.lower() if domain else host_of(uri)
        self.finished.tick(now)
        last = self.last_command(uri)
        if last > timestamp or (last == timestamp and not tied):
            return False
        if last == timestamp and not self._wins_tie(uri, timestamp, (priority, start, payload)):
            return False
        died = self._drop_dead(uri) if self._dead else None
        job = self._waiting.get(uri)
        if job is None:
            if len(self) >= self.jobs_max:
                raise RefusedError("out-of-memory", f"the journal holds {self.jobs_max} jobs")
            job = self._new_job(uri, name, timestamp)
            if died is not None and (died.revision or died.replaced):
                self._cover(job, covering(job, died), now)
        else:
            start = self._throttled(job, start)
            if job.revision or job.replaced:
                self._cover(job, covering(job, job), now)
            job.revision = 0
            self._unschedule(job, name)
            job.timestamp = timestamp
            if not job.fenced:
                job.reason = ""
            job.attempts = 0
        job.priority = priority
        job.start = start
        job.payload = payload
        if persist or job.logged:
            self._changed(uri)
        job.persist = persist
        self._schedule(job, now)
        if not tied:
            self.totals[PUSHED] += 1
            if self.copied:
                self._tell(job)
        return True

    # What workers do.

    def take(
        self,
        domain: bytes,
        now: int,
        *,
        until: int | None = None,
        count: int = 1,
        remove: bool = False,
    ) -> list[Job]:
        """Hand out up to `count` due jobs, best first; an empty domain means all of them."""
        self.tick(now)
        taken: list[Job] = []
        while len(taken) < count:
            job = self.take_due(domain.lower(), now, until=until, remove=remove)
            if job is None:
                break
            taken.append(job)
        return taken

    def take_due(self, domain: bytes, now: int, *, until: int | None, remove: bool) -> Job | None:
        """Hand out the best job; `tick` came before, and the domain is in lower case."""
        job = self.schedule.head(domain)
        if job is None:
            return None
        self.totals[HANDED_OUT] += 1
        if remove:
            self.totals[DONE] += 1
            self._finish(job, now)
        else:
            self._reserve(job, self._deadline(job, until, now), now)
        return job

    def wake_up(self, domain: bytes, now: int) -> int | None:
        """When something will be due by itself; None if nothing is ever."""
        self.tick(now)
        return self.schedule.wake_up(domain.lower())

    def has_due(self, domain: bytes, now: int) -> bool:
        self.tick(now)
        return self.schedule.head(domain.lower()) is not None

    def done(self, job: Job, now: int) -> None:
        """The work is done, or no longer wanted."""
        self.totals[DONE] += 1
        self._finish(job, now)

    def cancel(self, uri: bytes, now: int) -> bool:
        """Whatever waits or is worked on under a uri is no longer wanted; False if nothing was."""
        job = self._waiting.get(uri) or self._working.get(uri)
        if job is not None:
            self._finish(job, now)
        return job is not None

    def mark(self, job: Job, until: int, now: int) -> None:
        """Work on it until then: longer, or from now on; a time that is over gives it back."""
        if until <= now:
            if job.state == WORKING:
                self._give_back(job, now)
        elif job.state == WORKING:
            job.worked_until = until
            job.domain.move(job, WORKING)
            self.schedule.arm(job.domain)
            if job.slot and self.leases is not None:
                self.leases.put(job)
            self._tell(job, now)
        elif job.state == HELD:
            raise RefusedError("worked-on", timestamp=job.timestamp)
        else:
            self._reserve(job, until, now, lease=job.id)

    def fail(
        self, job: Job, reason: str, now: int, *, delay: int | None = None, dead: bool = False
    ) -> None:
        """
        End an attempt that failed: again after `delay` µs (None: the domain's back-off).

        The job is dead if it was the last attempt allowed, or if the worker says so (`dead`).
        """
        if job.state != WORKING:
            raise RefusedError("does-not-exist", "nobody works on that job")
        self.totals[FAILED] += 1
        wait = delay
        if wait is None:
            settings, salt = job.domain.settings, b"%x %s" % (job.lease, job.uri)
            pause = back_off(settings.retry_delay, settings.retry_delay_max, job.attempts, salt)
            wait = int(pause * 1_000_000)
        self._attempt_over(job, reason, now, start=now + wait if wait else None, dead=dead)

    # What operators do.

    def configure(self, name: bytes, settings: Settings) -> None:
        place = self.schedule.domain(name)
        place.settings = settings
        self.schedule.offer(place)
        self.schedule.sweep(place)

    def kick(self, domain: bytes, count: int, now: int) -> int:
        """Make delayed jobs due at once, the earliest first; how many."""
        kicked = 0
        place = self.schedule.domains.get(domain.lower())
        while place is not None and kicked < count and (job := place.first_delayed()) is not None:
            self.kick_job(job, now)
            kicked += 1
        return kicked

    def kick_job(self, job: Job, now: int) -> None:
        if job.state not in (DELAYED, HELD):
            return
        self._unschedule(job, job.domain.name)
        job.start = min(job.start, now)
        self._schedule(job, now)
        self._tell(job, now)
        if job.persist:
            self._changed(job.uri)

    def bury(self, job: Job, reason: str, now: int) -> None:
        """To the dead letters: kept, not handed out, until requeued or dropped."""
        self._unlease(job)
        self._by_id.pop(job.id, None)
        self._waiting.pop(job.uri, None)
        if job.state != DEAD:
            job.domain.move(job, DEAD)
        job.reason = reason
        job.worked_until = now
        self._dead[job.uri] = job
        if job.persist or job.logged:
            self._changed(job.uri)

    def requeue(self, job: Job, now: int) -> None:
        """From the dead letters back to work, with all its attempts again."""
        del self._dead[job.uri]
        job.attempts = 0
        job.worked_until = 0
        job.start = min(job.start, now)
        self._waiting[job.uri] = job
        self._number(job)
        self._schedule(job, now)
        self._tell(job, now)
        if job.persist or job.logged:
            self._changed(job.uri)

    def drop(self, job: Job, now: int) -> None:
        """Out of the dead letters for good."""
        self._drop_dead(job.uri)
        self._over(job.uri, job.timestamp, now)
        self._tell(job)

    # What another daemon tells.

    def merge(
        self, uri: bytes, finished: int, finished_at: int, states: list[Job], now: int
    ) -> None:
        """Take in what another daemon knows of a uri; why all end up with the same is in `lattice`."""
        mine = self.entries(uri)
        before = self.finished.last(uri)
        known = join(max(before, finished), [*mine, *states])
        gone = [job for job in mine if job not in known.jobs]
        news = [job for job in known.jobs if job not in mine]
        for job in gone:
            self._take_out(job)
        for job in news:
            job.logged = any(one.logged for one in gone if one.timestamp == job.timestamp)
            self._put_in(job, now)
        if known.finished > before:
            self._over(uri, known.finished, finished_at if known.finished == finished else now)
        self._rehold(uri, now)
        covered = known.covered or None
        newest = known.jobs[-1] if known.jobs else None
        learnt = bool(newest is not None and newest.replaced != covered)
        if newest is not None:
            newest.replaced = covered
        if (
            known.finished > before
            or news
            or learnt
            or any(job.persist or job.logged for job in gone)
        ):
            self._changed(uri)
        if known.finished > max(before, finished):
            self._tell_of(uri)  # nobody else may have seen that it is over
        for state in states:
            self.schedule.sweep(state.domain)  # it may not have been needed

    def _cover(self, job: Job, covered: dict[int, int], now: int) -> None:
        """Commands this one took the place of: a mark of them that arrives late is not to come back."""
        over, covered = bounded(-1, covered)
        job.replaced = covered or None
        if over >= 0:
            self._over(job.uri, over, now)

    def _over(self, uri: bytes, timestamp: int, now: int) -> None:
        """A command is finished, and all older ones with it."""
        self.finished.remember(uri, timestamp, now)
        for job in self.entries(uri):
            if job.timestamp <= timestamp:
                self._take_out(job)
                if job.persist or job.logged:
                    self._changed(uri)

    def _rehold(self, uri: bytes, now: int) -> None:
        """What waits is held back exactly while something of its uri is worked on."""
        waiting = self._waiting.get(uri)
        if waiting is not None and (waiting.state == HELD) != (uri in self._working):
            waiting.domain.move(waiting, GONE)
            self._schedule(waiting, now)

    # Time.

    def shift(self, step: int, now: int) -> None:
        """Move times by `step` µs after the clock was set; `clocks` lists which."""
        for job in list(self._working.values()):
            job.worked_until = min(max(job.worked_until + step, 1), TIME_US_MAX)
            job.domain.move(job, WORKING)
            self.schedule.arm(job.domain, job.worked_until)
            if job.slot and self.leases is not None:
                self.leases.put(job)
            self._tell(job, now)
        if step < 0:
            for job in [job for job in self._waiting.values() if job.start > now]:
                self._unschedule(job, job.domain.name)
                job.start = max(job.start + step, 0)
                self._schedule(job, now)
                self._tell(job, now)
                if job.persist or job.logged:
                    self._changed(job.uri)
        self.finished.shift(step)

    def tick(self, now: int) -> None:
        """Starts that have come, work windows that are over, finished commands to forget."""
        for place in self.schedule.due(now):
            while self.lapsing and (job := place.due_lapse(now)) is not None:
                self.totals[LAPSED] += 1
                self._attempt_over(job, "the work deadline passed", now, when=job.worked_until)
            while (job := place.due_start(now)) is not None:
                place.move(job, READY)
            self.schedule.offer(place)
            due = place.earliest()
            if due is not None:
                self.schedule.arm(place, due if due > now else now + LAPSE_LOOK_US)
        self.finished.tick(now)

    # Inner workings.

    def _wins_tie(self, uri: bytes, timestamp: int, command: tuple[int, int, Value | None]) -> bool:
        """Only against an entry that still waits; what is worked on or done stays as it is."""
        job = self._waiting.get(uri)
        if job is None or job.timestamp != timestamp or self.finished.last(uri) == timestamp:
            return False
        return not job.revision and order(command) > order((job.priority, job.start, job.payload))

    def _throttled(self, job: Job, start: int) -> int:
        return min(job.start, start) if job.domain.settings.mode == "throttle" else start

    def _deadline(self, job: Job, until: int | None, now: int) -> int:
        if until is not None:
            return until
        seconds = job.domain.settings.deadline
        return now + (int(seconds * 1_000_000) if seconds else WORK_DEADLINE_US)

    def _attempt_over(
        self,
        job: Job,
        reason: str,
        now: int,
        *,
        start: int | None = None,
        when: int | None = None,
        dead: bool = False,
    ) -> None:
        """
        An attempt came to nothing: count it, and decide what becomes of the job.

        A lapse is dated by its deadline (`when`), so that every daemon that sees it sees the same.
        """
        if self._newer(job) is not None:
            self._finish(job, now)  # the newer command covers it
            return
        self._tell(job, now if when is None else when)
        self._start_has_come(job, now if when is None else when)
        # It keeps the id of this attempt: among equals it comes after those that were not tried since.
        job.id, job.spent = job.lease, True
        job.attempts = min(job.attempts + 1, ATTEMPTS_MAX)
        job.reason = reason
        if job.persist:
            self._changed(job.uri)
        limit = job.domain.settings.max_attempts
        if dead or (limit and job.attempts >= limit):
            self.totals[DIED] += 1
            self.bury(job, reason, now if when is None else when)
            return
        if start is not None:
            job.start = start
        self._back_to_waiting(job, now)

    def _give_back(self, job: Job, now: int) -> None:
        if self._newer(job) is not None:
            self._finish(job, now)
            return
        self._start_has_come(job, now)
        job.id, job.spent = job.lease, False
        self._back_to_waiting(job, now)
        self._tell(job, now)
        if job.logged:  # a snapshot may have said that it is worked on
            self._changed(job.uri)

    def _start_has_come(self, job: Job, now: int) -> None:
        """
        Return whether a job's start has come. A job that NEXT returned was due, even if the clock was set back since.

        A job that was marked by its key before its start (the lease is its id) waits for it again.
        """
        if job.id != job.lease:
            job.start = min(job.start, now)

    def _newer(self, job: Job) -> Job | None:
        """What came after a job that is worked on: it waits, or has died elsewhere."""
        return self._waiting.get(job.uri) or self._dead.get(job.uri)

    def _back_to_waiting(self, job: Job, now: int) -> None:
        self._unlease(job)
        job.domain.move(job, GONE)
        self._waiting[job.uri] = job
        self._number(job)
        self._schedule(job, now)

    def _finish(self, job: Job, now: int) -> None:
        self._take_out(job)
        uri = job.uri
        self.finished.remember(uri, job.timestamp, now)
        newer = self._waiting.get(uri)
        if newer is not None and newer.state == HELD:
            newer.domain.move(newer, GONE)
            self._schedule(newer, now)
        self._tell(job)
        if job.persist or job.logged:
            self._changed(uri)
        older = self._working.get(uri)
        if older is not None:
            self._finish(older, now)

    def _drop_dead(self, uri: bytes) -> Job | None:
        job = self._dead.pop(uri, None)
        if job is not None:
            job.domain.move(job, GONE)
            self.schedule.sweep(job.domain)
            if job.persist or job.logged:
                self._changed(uri)
        return job
