"""
The life of a job: a plain state machine, no I/O, time comes in as an argument.

Invariant: a command not newer than the last one of its uri, waiting, worked on or finished, changes
nothing: a spool may send it again. Where jobs are and how they are found is in `table`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.jobs.failures import add_failure
from virta.journal.jobs.job import (
    ATTEMPTS_MAX,
    DEAD,
    DELAYED,
    READY,
    REMOVED,
    WAITING_BEHIND,
    WORKING,
    Job,
    host_of,
    retry_delay_s,
)
from virta.journal.jobs.table import DIED, FAILED, HANDED_OUT, LAPSED, PUSHED, JobTable
from virta.journal.protocol.messages import RefusedError, Value
from virta.journal.protocol.rules import TIME_US_MAX
from virta.journal.replication.merge import bounded, covering, join, order

if TYPE_CHECKING:
    from virta.journal.jobs.domain import DomainSettings

PRIORITY_MAX = 255
WORK_DEADLINE_US = 24 * 3600 * 1_000_000
# How often a daemon that does not end attempts checks whether it has to now.
EXPIRY_CHECK_US = 1_000_000


class Jobs(JobTable):
    # For producers.

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
        Ask for work; return False if a command as new as this one is known already.

        Two daemons may have accepted different commands of the same time: with `tied` the larger
        one wins, so that both end up with it.
        """
        if priority > PRIORITY_MAX:
            raise RefusedError("bad-priority", f"{priority} is over {PRIORITY_MAX}")
        name = domain.lower() if domain else host_of(uri)
        job = self._jobs.get(uri)
        last = self.finished.commands.get(uri, -1) if job is None else self.last_command(uri)
        if last >= timestamp:
            self.finished.tick(now)  # it may be time to forget that one
            last = self.last_command(uri)
        if last >= timestamp and (
            last > timestamp
            or not tied
            or not self._wins_tie(job, timestamp, (priority, start, payload))
        ):
            return False
        died = None
        if job is not None and job.state == DEAD:
            died = job
            self._drop_dead(died)
            job = self._jobs.get(uri)
        if job is None or job.state == WORKING:
            if len(self._jobs) + self._older >= self.jobs_max:
                raise RefusedError("out-of-memory", f"the limit is {self.jobs_max} jobs")
            place = self.scheduler.domain(name)
            number = self._new_id()
            job = Job(uri, place, number, priority, start, timestamp, timestamp, payload, persist)
            self._insert(job)
            self._by_id[number] = job
            if died is not None and (died.revision or died.replaced):
                self._cover(job, covering(job, died), now)
        else:
            if job.domain.settings.mode == "throttle":
                start = min(job.start, start)
            self._renew(job, name, timestamp, now)
            job.priority, job.start, job.payload = priority, start, payload
            job.persist = persist
        if persist or job.logged:
            self._log_later(uri)
        self._schedule(job, now)
        if not tied:
            self.totals[PUSHED] += 1
            self.replication.job_changed(job)
        return True

    # For workers.

    def reserve(
        self,
        domain: bytes,
        now: int,
        *,
        until: int | None = None,
        count: int = 1,
        remove: bool = False,
        payload_bytes: int | None = None,
    ) -> list[Job]:
        """
        Reserve up to `count` due jobs, best first; an empty domain means all of them.

        With `remove` they are done at once. The job whose payload exceeds `payload_bytes` in total is the last.
        """
        self.tick(now)
        domain = domain.lower()
        reserved: list[Job] = []
        while len(reserved) < count and (job := self.scheduler.head(domain)) is not None:
            reserved.append(job)
            if remove:
                self._count_done(job)
                self._finish(job, now)
            else:
                seconds = job.domain.settings.deadline
                default = int(seconds * 1_000_000) if seconds else WORK_DEADLINE_US
                self._reserve(job, now + default if until is None else until, now, self._new_id())
            if payload_bytes is not None and job.payload is not None:
                payload_bytes -= len(job.payload.data)
                if payload_bytes < 0:
                    break
        self.totals[HANDED_OUT] += len(reserved)
        return reserved

    def wake_up(self, domain: bytes, now: int) -> int | None:
        """Return when the next job starts or expires, None if none does."""
        self.tick(now)
        return self.scheduler.wake_up(domain.lower())

    def has_due(self, domain: bytes, now: int) -> bool:
        self.tick(now)
        return self.scheduler.head(domain.lower()) is not None

    def done(self, job: Job, now: int) -> None:
        """Finish a job whose work is done or no longer wanted."""
        self._count_done(job)
        self._finish(job, now)

    def cancel(self, uri: bytes, now: int) -> bool:
        """Finish what waits or is worked on under a uri; return False if there was nothing."""
        job = self.live(uri)
        if job is not None:
            self._finish(job, now)
        return job is not None

    def mark(self, job: Job, until: int, now: int) -> None:
        """Reserve or extend a job until that time; a time that has passed returns it to the queue."""
        if until <= now:
            if job.state == WORKING:
                self._give_back(job, now)
        elif job.state == WORKING:
            self._set_deadline(job, until, now)
            self.scheduler.arm(job.domain)
        elif job.state == WAITING_BEHIND:
            raise RefusedError("worked-on", timestamp=job.timestamp)
        else:
            self._reserve(job, until, now, job.id)

    def fail(
        self, job: Job, reason: str, now: int, *, delay: int | None = None, dead: bool = False
    ) -> None:
        """
        End an attempt that failed: retry after `delay` µs (None: the domain's back-off).

        The job is dead if it was the last attempt allowed, or if the worker says so (`dead`).
        """
        if job.state != WORKING:
            raise RefusedError("does-not-exist", "that job is not worked on")
        self.totals[FAILED] += 1
        wait = delay
        if wait is None:
            settings, salt = job.domain.settings, b"%x %s" % (job.lease, job.uri)
            pause = retry_delay_s(
                settings.retry_delay, settings.retry_delay_max, job.attempts, salt
            )
            wait = int(pause * 1_000_000)
        self._end_attempt(job, reason, now, start=now + wait if wait else None, dead=dead)

    # For operators.

    def configure(self, name: bytes, settings: DomainSettings) -> None:
        place = self.scheduler.domain(name)
        place.settings = settings
        self.scheduler.offer(place)
        self.scheduler.sweep(place)

    def kick(self, domain: bytes, count: int, now: int) -> int:
        """Make up to `count` delayed jobs due, the earliest first; return how many."""
        kicked = 0
        place = self.domains.get(domain.lower())
        while place is not None and kicked < count and (job := place.first_delayed()) is not None:
            self.kick_job(job, now)
            kicked += 1
        return kicked

    def kick_job(self, job: Job, now: int) -> None:
        if job.state not in (DELAYED, WAITING_BEHIND):
            return
        self._unschedule(job, job.domain.name)
        job.start = min(job.start, now)
        self._schedule(job, now)
        self.replication.job_changed(job, now)
        if job.persist:
            self._log_later(job.uri)

    def bury(self, job: Job, reason: str, now: int) -> None:
        """Move a job to the dead letters, where it stays until requeued or dropped."""
        if job.lease:
            self._end_lease(job)
        self._by_id.pop(job.id, None)
        if job.state != DEAD:
            job.domain.move(job, DEAD)
        job.reason = reason
        job.worked_until = now
        job.domain.note_death(job)
        if job.persist or job.logged:
            self._log_later(job.uri)

    def requeue(self, job: Job, now: int) -> None:
        """Move a dead job back to work, with all its attempts again."""
        job.attempts = 0
        job.worked_until = 0
        job.start = min(job.start, now)
        self._register_id(job)
        self._schedule(job, now)
        self.replication.job_changed(job, now)
        if job.persist or job.logged:
            self._log_later(job.uri)

    def drop(self, job: Job, now: int) -> None:
        """Remove a job from the dead letters for good."""
        self._drop_dead(job)
        self._finish_up_to(job.uri, job.timestamp, now)
        self.replication.job_changed(job)

    # Copies.

    def merge(
        self, uri: bytes, finished: int, finished_at: int, states: list[Job], now: int
    ) -> None:
        """Join another daemon's state of a uri; `replication.merge` says why all daemons agree."""
        mine = self.entries(uri)
        before = self.finished.last(uri)
        known = join(max(before, finished), [*mine, *states])
        lost = [job for job in mine if job not in known.jobs]
        news = [job for job in known.jobs if job not in mine]
        for job in lost:
            self._discard(job)
        for job in news:
            job.logged = any(one.logged for one in lost if one.timestamp == job.timestamp)
            self._insert_copy(job, now)
        if known.finished > before:
            self._finish_up_to(
                uri, known.finished, finished_at if known.finished == finished else now
            )
        self._reschedule(uri, now)
        newest = self._jobs.get(uri)
        covered = known.covered or None
        learnt = newest is not None and newest.replaced != covered
        if newest is not None:
            newest.replaced = covered
        if known.finished > before or news or learnt or any(j.persist or j.logged for j in lost):
            self._log_later(uri)
        if known.finished > max(before, finished):
            self.replication.uri_changed(uri)  # no other daemon may have concluded that it is over
        for state in states:
            self.scheduler.sweep(state.domain)  # it may not have been needed

    def _cover(self, job: Job, covered: dict[int, int], now: int) -> None:
        """Remember the commands a job replaced: a late mark of them must not bring them back."""
        over, covered = bounded(-1, covered)
        job.replaced = covered or None
        if over >= 0:
            self._finish_up_to(job.uri, over, now)

    def _finish_up_to(self, uri: bytes, timestamp: int, now: int) -> None:
        """Finish a command and all older ones."""
        self.finished.remember(uri, timestamp, now)
        for job in self.entries(uri):
            if job.timestamp <= timestamp:
                self._discard(job)
                if job.persist or job.logged:
                    self._log_later(uri)

    def _reschedule(self, uri: bytes, now: int) -> None:
        """Make a job wait behind an older one exactly while that is worked on."""
        job = self._jobs.get(uri)
        if job is None or job.state not in (DELAYED, READY, WAITING_BEHIND):
            return
        if (job.state == WAITING_BEHIND) != (job.older is not None):
            job.domain.move(job, REMOVED)
            self._schedule(job, now)

    # Time.

    def shift(self, step: int, now: int) -> None:
        """Move times by `step` µs after the clock was set; `clock_steps` lists which."""
        for job in self.all():
            if job.state == WORKING:
                until = min(max(job.worked_until + step, 1), TIME_US_MAX)
                self._set_deadline(job, until, now)
                self.scheduler.arm(job.domain, until)
            elif step < 0 and job.state != DEAD and job.start > now:
                self._unschedule(job, job.domain.name)
                job.start = max(job.start + step, 0)
                self._schedule(job, now)
                self.replication.job_changed(job, now)
                if job.persist or job.logged:
                    self._log_later(job.uri)
        self.finished.shift(step)

    def tick(self, now: int) -> None:
        """Process starts, expired attempts, and finished commands to forget."""
        alarms = self.scheduler.alarms
        if alarms and alarms[0][0] <= now:
            self._process_due(now)
        self.finished.tick(now)

    def _process_due(self, now: int) -> None:
        for place in self.scheduler.pop_due(now):
            while self.lapsing and (job := place.pop_expired(now)) is not None:
                self.totals[LAPSED] += 1
                self._end_attempt(job, "the work deadline passed", now, when=job.worked_until)
            while (job := place.pop_started(now)) is not None:
                place.move(job, READY)
            self.scheduler.offer(place)
            due = place.earliest()
            if due is not None:
                self.scheduler.arm(place, due if due > now else now + EXPIRY_CHECK_US)

    # Transitions.

    def _wins_tie(
        self, job: Job | None, timestamp: int, command: tuple[int, int, Value | None]
    ) -> bool:
        """Whether a command of the same time replaces one that still waits."""
        if (
            job is None
            or job.state not in (DELAYED, READY, WAITING_BEHIND)
            or job.timestamp != timestamp
        ):
            return False
        if self.finished.last(job.uri) == timestamp or job.revision:
            return False
        return order(command) > order((job.priority, job.start, job.payload))

    def _renew(self, job: Job, domain: bytes, timestamp: int, now: int) -> None:
        """Prepare a waiting job for the newer command that replaces it."""
        if job.revision or job.replaced:
            self._cover(job, covering(job, job), now)
        job.revision = 0
        self._unschedule(job, domain)
        job.timestamp = timestamp
        if not job.fenced:
            job.reason = ""
        job.attempts = 0

    def _reserve(self, job: Job, until: int, now: int, lease: int) -> None:
        del self._by_id[job.id]
        self._by_id[lease] = job
        job.lease = lease
        job.worked_until = until
        place = job.domain
        place.move(job, WORKING)
        if place.alarm is None or until < place.alarm:
            self.scheduler.arm(place, until)
        if job.persist and self.leases is not None:
            self.leases.put(job)
        if job.replaced:  # commands older than one that is worked on are over
            self.finished.remember(job.uri, max(job.replaced), now)
            job.replaced = None
            self._log_later(job.uri)
        self.replication.job_changed(job, now)

    def _set_deadline(self, job: Job, until: int, now: int) -> None:
        job.worked_until = until
        job.domain.move(job, WORKING)
        if job.slot and self.leases is not None:
            self.leases.put(job)
        self.replication.job_changed(job, now)

    def _end_attempt(
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
        Count a failed or expired attempt, then retry the job or move it to the dead letters.

        An expiry is dated by its deadline (`when`), so that every daemon that sees it sees the same.
        """
        if self._jobs[job.uri] is not job:
            self._finish(job, now)  # the newer command covers it
            return
        ended = now if when is None else when
        self.replication.job_changed(job, ended)
        self._reset_start(job, ended)
        # It keeps the id of this attempt: among equals it comes after those that were not tried since.
        job.id, job.spent = job.lease, True
        job.attempts = min(job.attempts + 1, ATTEMPTS_MAX)
        job.reason = add_failure(job.reason, reason, job.attempts, ended)
        if job.persist:
            self._log_later(job.uri)
        limit = job.domain.settings.max_attempts
        if dead or (limit and job.attempts >= limit):
            self.totals[DIED] += 1
            self.bury(job, job.reason, ended)
            return
        if start is not None:
            job.start = start
        self._wait_again(job, now)

    def _give_back(self, job: Job, now: int) -> None:
        if self._jobs[job.uri] is not job:
            self._finish(job, now)  # the newer command covers it
            return
        self._reset_start(job, now)
        job.id, job.spent = job.lease, False
        self._wait_again(job, now)
        self.replication.job_changed(job, now)
        if job.logged:  # a snapshot may have it as worked on
            self._log_later(job.uri)

    def _reset_start(self, job: Job, now: int) -> None:
        """
        Make a job due that NEXT returned: its start had come, even if the clock was set back since.

        A job that was reserved by its key before its start (the lease is its id) waits for it again.
        """
        if job.id != job.lease:
            job.start = min(job.start, now)

    def _wait_again(self, job: Job, now: int) -> None:
        self._end_lease(job)
        job.domain.move(job, REMOVED)
        self._register_id(job)
        self._schedule(job, now)

    def _finish(self, job: Job, now: int) -> None:
        """Remove a job, and with it an older one of its uri; a newer one starts to wait."""
        uri, older = job.uri, job.older
        self._discard(job)
        self.finished.remember(uri, job.timestamp, now)
        newest = self._jobs.get(uri)
        if newest is not None and newest.state == WAITING_BEHIND:
            newest.domain.move(newest, REMOVED)
            self._schedule(newest, now)
        self.replication.job_changed(job)
        if job.persist or job.logged:
            self._log_later(uri)
        if older is not None:
            self._finish(older, now)

    def _discard(self, job: Job) -> None:
        """Remove a job, and its domain if that is no longer needed."""
        self._remove(job)
        if not any(job.domain.counts):
            self.scheduler.sweep(job.domain)

    def _drop_dead(self, job: Job) -> None:
        self._discard(job)
        if job.persist or job.logged:
            self._log_later(job.uri)
