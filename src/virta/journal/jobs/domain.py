"""
A domain: its settings, and its jobs in the order of work and of time.

Items leave the heaps lazily: an item is valid only while it agrees with its job, and a heap that is
mostly invalid is rebuilt. So pushing one job again a million times costs no memory.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from virta.journal.jobs.job import ATTEMPTS_MAX, DEAD, DELAYED, READY, REMOVED, WORKING, Job

if TYPE_CHECKING:
    from collections.abc import Callable

# 25 attempts over about 13 hours outlast an outage of a night; Sidekiq, Faktory, River and
# graphile-worker have the same limit.
ATTEMPTS_DEFAULT = 25
BACK_OFF_S = 1.0
BACK_OFF_S_MAX = 3600.0
# The oldest ready job is searched for among so many.
OLDEST_ITEMS_MAX = 1_000
HEAP_SLACK = 64  # invalid items a heap may have however few jobs it has

Offer = tuple[int, int, int, "Domain"]  # priority, start and id of its best job


class DomainSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator may set per domain; kept as JSON under `virta:domain:<domain>`."""

    paused: bool = False
    deadline: float = 0.0  # seconds of work by default, 0: 24 hours
    # Expired or failed attempts after which a job is dead, 0: never.
    max_attempts: int = ATTEMPTS_DEFAULT
    mode: Literal["debounce", "throttle"] = "debounce"
    retry_delay: float = BACK_OFF_S  # seconds, doubled with each failed attempt, 0: at once
    retry_delay_max: float = BACK_OFF_S_MAX  # longest delay in seconds

    def problem(self) -> str:
        """Return why these settings are refused, or nothing."""
        if not 0 <= self.deadline <= 3650 * 86_400:
            return f"deadline {self.deadline}: 0 to 315360000 seconds"
        if not 0 <= self.max_attempts <= ATTEMPTS_MAX:
            return f"max_attempts {self.max_attempts}: 0 to {ATTEMPTS_MAX}"
        if not 0 <= self.retry_delay <= 86_400:
            return f"retry_delay {self.retry_delay}: 0 to 86400 seconds"
        if not 0 <= self.retry_delay_max <= 86_400:
            return f"retry_delay_max {self.retry_delay_max}: 0 to 86400 seconds"
        return ""


DEFAULTS = DomainSettings()


class Domain:
    """The jobs of one domain."""

    __slots__ = (
        "_delayed",
        "_ready",
        "_working",
        "alarm",
        "counts",
        "last_death",
        "name",
        "offer",
        "on_move",
        "prefix",
        "settings",
    )

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.prefix = name.replace(b":", b"%3A")  # of sort keys
        self.settings = DEFAULTS
        self.counts = [0] * REMOVED  # jobs by state
        self.last_death = 0  # µs: when the newest dead job died; 0 if none did
        self.on_move: Callable[[Job], None] | None = None
        self.alarm: int | None = None  # the scheduler's next alarm for this domain
        self.offer: Offer | None = None  # its item in the scheduler's choice
        self._ready: list[tuple[int, int, int, Job]] = []  # priority, start, id
        self._delayed: list[tuple[int, int, Job]] = []  # start, id
        self._working: list[tuple[int, int, Job]] = []  # deadline, lease

    def __lt__(self, other: Domain) -> bool:
        """Allow heap items that are equal up to the domain; their order does not matter."""
        return False

    @property
    def empty(self) -> bool:
        return not any(self.counts) and self.settings == DEFAULTS

    @property
    def heap_sizes(self) -> dict[int, int]:
        """Return how many items, valid or not, the heap of each state has."""
        return {
            READY: len(self._ready),
            DELAYED: len(self._delayed),
            WORKING: len(self._working),
        }

    def move(self, job: Job, state: int) -> bool:
        """Change a job's state and put it into the heap of that state; return whether it is the next to reserve."""
        if self.on_move is not None:
            self.on_move(job)
        counts, before = self.counts, job.state
        if before != REMOVED:
            counts[before] -= 1
            if before == READY and self._ready and self._ready[0][3] is job:
                heappop(
                    self._ready
                )  # usually just reserved: drop its item now, so that `head` need not
        job.state = state
        if state == REMOVED:
            return False
        counts[state] += 1
        heap: list[Any]
        if state == READY:
            heap = self._ready
            heappush(heap, (job.priority, job.start, job.id, job))
        elif state == WORKING:
            heap = self._working
            heappush(heap, (job.worked_until, job.lease, job))
        elif state == DELAYED:
            heap = self._delayed
            heappush(heap, (job.start, job.id, job))
        else:
            return False
        if len(heap) > 2 * counts[state] + HEAP_SLACK:
            self._remove_stale_items(heap, state)
        return state == READY and heap[0][-1] is job

    def load(self, job: Job, state: int) -> None:
        """Add a job while restoring: `sort` has to follow, as nothing keeps the heaps in order until then."""
        job.state = state
        self.counts[state] += 1
        if state == READY:
            self._ready.append((job.priority, job.start, job.id, job))
        elif state == WORKING:
            self._working.append((job.worked_until, job.lease, job))
        elif state == DELAYED:
            self._delayed.append((job.start, job.id, job))
        elif state == DEAD:
            self.note_death(job)

    def note_death(self, job: Job) -> None:
        """Note when a dead job died."""
        self.last_death = max(self.last_death, job.worked_until)

    def sort(self) -> None:
        """Order the heaps after loading; drop items that a replay added and removed again."""
        heaps: tuple[tuple[int, list[Any]], ...] = (
            (READY, self._ready),
            (DELAYED, self._delayed),
            (WORKING, self._working),
        )
        for state, heap in heaps:
            if len(heap) != self.counts[state]:
                self._remove_stale_items(heap, state)
            else:
                heapify(heap)

    def _remove_stale_items(self, heap: list[Any], state: int) -> None:
        """Keep one valid item per job: a job that came back to the same place has two equal ones."""
        valid: Callable[..., bool] = (
            self._is_ready
            if state == READY
            else self._is_working
            if state == WORKING
            else self._is_delayed
        )
        heap[:] = {item[-1]: item for item in heap if valid(*item)}.values()
        heapify(heap)

    def close(self) -> None:
        """Release all jobs."""
        self.alarm = self.offer = self.on_move = None
        self._ready.clear()
        self._delayed.clear()
        self._working.clear()

    def head(self) -> Job | None:
        """Return the job to reserve next, without removing it."""
        ready = self._ready
        while ready:
            item = ready[0]
            if self._is_ready(*item):
                return item[3]
            heappop(ready)
        return None

    def oldest_ready(self, now: int) -> int:
        """Return how long (µs) the oldest of the first `OLDEST_ITEMS_MAX` ready jobs has been ready, 0 without any."""
        items = islice(self._ready, OLDEST_ITEMS_MAX)
        starts = (item[1] for item in items if self._is_ready(*item))
        return max(now - min(starts, default=now), 0)

    def earliest(self) -> int | None:
        """Return the next start or work deadline."""
        delayed, working = self._delayed, self._working
        while delayed and not self._is_delayed(*delayed[0]):
            heappop(delayed)
        while working and not self._is_working(*working[0]):
            heappop(working)
        if not delayed or not working:
            return delayed[0][0] if delayed else working[0][0] if working else None
        return min(delayed[0][0], working[0][0])

    def first_delayed(self) -> Job | None:
        self.earliest()
        return self._delayed[0][2] if self._delayed else None

    def pop_started(self, now: int) -> Job | None:
        """Return a delayed job whose start has come."""
        while self._delayed and self._delayed[0][0] <= now:
            item = heappop(self._delayed)
            if self._is_delayed(*item):
                return item[2]
        return None

    def pop_expired(self, now: int) -> Job | None:
        """Return a job whose work deadline has passed."""
        while self._working and self._working[0][0] <= now:
            item = heappop(self._working)
            if self._is_working(*item):
                return item[2]
        return None

    # Whether an item still agrees with its job, which may have moved to another domain.

    def _is_ready(self, priority: int, start: int, number: int, job: Job) -> bool:
        return (
            job.state == READY
            and job.id == number
            and job.start == start
            and job.priority == priority
            and job.domain is self
        )

    def _is_delayed(self, start: int, number: int, job: Job) -> bool:
        return (
            job.state == DELAYED and job.domain is self and job.id == number and job.start == start
        )

    def _is_working(self, deadline: int, lease: int, job: Job) -> bool:
        return (
            job.state == WORKING
            and job.domain is self
            and job.lease == lease
            and job.worked_until == deadline
        )
