"""
The jobs: a plain state machine, no I/O, time comes in as an argument.

Invariant: a command not newer than the last one of its uri, waiting, worked on or finished, changes
nothing: a spool may send it again. Where jobs are and how they are found is in `table`.
"""

from __future__ import annotations

from virta.journal.domain import (
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
    host_of,
)
from virta.journal.messages import RefusedError, Value
from virta.journal.table import JobTable

PRIORITY_MAX = 255
REPLACED_MAX = 4  # commands a newer one remembers


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
            if died is not None:
                _covers(job, died)
        else:
            start = self._throttled(job, start)
            if job.revision and job.state != HELD:
                _covers(job, job)
            job.revision = 0
            self._unschedule(job, name)
            job.timestamp = timestamp
            job.attempts = 0
            job.reason = ""
        job.priority = priority
        job.start = start
        job.payload = payload
        if persist or job.logged:
            self._changed(uri)
        job.persist = persist
        self._schedule(job, now)
        if self.copied and not tied:
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
        if remove:
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
        self._finish(job, now)

    def cancel(self, uri: bytes, now: int) -> bool:
        """Whatever waits or is worked on under a uri is no longer wanted; False if nothing was."""
        found = [job for job in (self._waiting.get(uri), self._working.get(uri)) if job]
        for job in found:
            self._finish(job, now)
        return bool(found)

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

    def fail(self, job: Job, reason: str, now: int, *, delay: int | None = None) -> None:
        """The attempt failed: again after `delay` µs, or dead if it was the last one allowed."""
        if job.state != WORKING:
            raise RefusedError("does-not-exist", "nobody works on that job")
        pause = job.domain.settings.retry_delay * 2 ** min(job.attempts, 30)
        wait = delay if delay is not None else int(min(pause, 86_400) * 1_000_000)
        self._attempt_over(job, reason, now, start=now + wait if wait else None)

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
        self._by_id[job.id] = job
        self._schedule(job, now)
        self._tell(job, now)
        if job.persist or job.logged:
            self._changed(job.uri)

    def drop(self, job: Job, now: int) -> None:
        """Out of the dead letters for good."""
        self.finished.remember(job.uri, job.timestamp, now)
        self._drop_dead(job.uri)
        self._tell(job)

    # What another daemon tells.

    def merge(
        self, uri: bytes, finished: int, finished_at: int, states: list[Job], now: int
    ) -> None:
        """
        Take in what another daemon knows of a uri.

        Whatever order such states arrive in, and however often, all daemons end up with the same: the
        last finished command is the largest, of one command the later state wins, of two commands the
        newer one; the older stays only while it is worked on.
        """
        if finished > self.finished.last(uri):
            self.finished.remember(uri, finished, finished_at)
            self._changed(uri)
        known = self.finished.last(uri)
        for job in self.entries(uri):
            if job.timestamp <= known:
                self._merged_out(job, now)
        for state in states:
            if state.timestamp > known and self._merge(state, now):
                self._changed(uri)
            self.schedule.sweep(state.domain)  # it may not have been needed

    def _merge(self, state: Job, now: int) -> bool:
        """True if it was news."""
        others = self.entries(state.uri)
        mine = next((job for job in others if job.timestamp == state.timestamp), None)
        if mine is not None:
            if _version(state) <= _version(mine):
                return False
            state.logged = mine.logged
            state.replaced = mine.replaced
            self._take_out(mine)
            others.remove(mine)
        newer = [job for job in others if job.timestamp > state.timestamp]
        stale = any(_is_stale(job, state) for job in newer)
        contested = bool(state.lease) and not stale and any(job.lease for job in newer)
        if stale or contested or (newer and not state.lease):
            for job in newer:
                _covers(job, state)
            if contested:
                self._yield(state, now)
            self._rehold(state.uri, now)
            return mine is not None
        for job in others:
            if job not in newer and (state.lease or not job.lease):
                _covers(state, job)
                if job.lease:
                    self._yield(job, now)
                self._take_out(job)
        self._put_in(state, now)
        self._rehold(state.uri, now)
        return True

    def _yield(self, job: Job, now: int) -> None:
        """Two daemons handed out two commands of one uri: the older is over, everywhere."""
        self.finished.remember(job.uri, job.timestamp, now)
        self._changed(job.uri)
        self._tell(job)

    def _merged_out(self, job: Job, now: int) -> None:
        self._take_out(job)
        self._rehold(job.uri, now)
        if job.persist or job.logged:
            self._changed(job.uri)

    def _rehold(self, uri: bytes, now: int) -> None:
        """What waits is held back exactly while something of its uri is worked on."""
        waiting = self._waiting.get(uri)
        if waiting is not None and (waiting.state == HELD) != (uri in self._working):
            waiting.domain.move(waiting, GONE)
            self._schedule(waiting, now)

    # Time.

    def tick(self, now: int) -> None:
        """Starts that have come, work windows that are over, finished commands to forget."""
        for place in self.schedule.due(now):
            while (job := place.due_lapse(now)) is not None:
                self._attempt_over(job, "the work deadline passed", now, when=job.worked_until)
            while (job := place.due_start(now)) is not None:
                place.move(job, READY)
            self.schedule.offer(place)
            self.schedule.arm(place)
        self.finished.tick(now)

    # Inner workings.

    def _wins_tie(self, uri: bytes, timestamp: int, command: tuple[int, int, Value | None]) -> bool:
        """Only against an entry that still waits; what is worked on or done stays as it is."""
        job = self._waiting.get(uri)
        if job is None or job.timestamp != timestamp or self.finished.last(uri) == timestamp:
            return False
        return _order(command) > _order((job.priority, job.start, job.payload))

    def _throttled(self, job: Job, start: int) -> int:
        return min(job.start, start) if job.domain.settings.mode == "throttle" else start

    def _deadline(self, job: Job, until: int | None, now: int) -> int:
        if until is not None:
            return until
        seconds = job.domain.settings.deadline
        return now + (int(seconds * 1_000_000) if seconds else WORK_DEADLINE_US)

    def _attempt_over(
        self, job: Job, reason: str, now: int, *, start: int | None = None, when: int | None = None
    ) -> None:
        """
        An attempt came to nothing: count it, and decide what becomes of the job.

        A lapse is dated by its deadline (`when`), so that every daemon that sees it sees the same.
        """
        newer = self._waiting.get(job.uri)
        if newer is not None:
            self._take_out(job)
            self.finished.remember(job.uri, job.timestamp, now)  # the newer command covers it
            newer.domain.move(newer, GONE)
            self._schedule(newer, now)
            self._tell(job)
            if job.logged:
                self._changed(job.uri)
            return
        self._tell(job, now if when is None else when)
        job.attempts = min(job.attempts + 1, ATTEMPTS_MAX)
        job.reason = reason
        if job.persist:
            self._changed(job.uri)
        limit = job.domain.settings.max_attempts
        if limit and job.attempts >= limit:
            self.bury(job, reason, now if when is None else when)
            return
        if start is not None:
            job.start = start
        self._back_to_waiting(job, now)

    def _give_back(self, job: Job, now: int) -> None:
        newer = self._waiting.get(job.uri)
        if newer is not None:
            self._attempt_over(job, "", now)
        else:
            self._back_to_waiting(job, now)
            self._tell(job, now)
            if job.logged:  # a snapshot may have said that it is worked on
                self._changed(job.uri)

    def _back_to_waiting(self, job: Job, now: int) -> None:
        self._unlease(job)
        job.domain.move(job, GONE)
        self._waiting[job.uri] = job
        self._by_id[job.id] = job
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

    def _drop_dead(self, uri: bytes) -> Job | None:
        job = self._dead.pop(uri, None)
        if job is not None:
            job.domain.move(job, GONE)
            self.schedule.sweep(job.domain)
            if job.persist or job.logged:
                self._changed(uri)
        return job


def _covers(newer: Job, older: Job) -> None:
    """What a newer command took the place of: a mark of it that arrives late is not to come back."""
    known = {**(newer.replaced or {})}
    for command, revision in [*(older.replaced or {}).items(), (older.timestamp, older.revision)]:
        if revision:
            known[command] = max(known.get(command, 0), revision)
    newer.replaced = dict(sorted(known.items())[-REPLACED_MAX:]) or None


def _is_stale(newer: Job, older: Job) -> bool:
    return (newer.replaced or {}).get(older.timestamp, -1) >= older.revision


def _order(command: tuple[int, int, Value | None]) -> tuple[int, int, int, bytes]:
    priority, start, payload = command
    return (
        priority,
        start,
        -1 if payload is None else payload.type,
        payload.data if payload else b"",
    )


def _version(job: Job) -> tuple[object, ...]:
    """Orders the states of one command; anything that can differ takes part."""
    return (
        job.revision,
        bool(job.worked_until and not job.lease),
        job.attempts,
        job.lease,
        job.worked_until,
        *_order((job.priority, job.start, job.payload)),
        job.domain.name,
        job.reason,
        job.persist,
    )
