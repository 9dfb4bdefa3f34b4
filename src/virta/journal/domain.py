"""
A job, and the domain it waits in.

    push ──► DELAYED ──start──► READY ──NEXT──► WORKING ──done──► gone
               ▲                  ▲               │ │
               │                  └──lapse,───────┘ └─too many attempts─► DEAD
               └── push again         give back
    push while WORKING ──► HELD ──the first ends──► DELAYED or READY

Heaps are cleaned lazily: an item counts only while it still says what its job says, and a heap that
is mostly stale is rebuilt. So re-pushing one job a million times costs no memory.
"""

from __future__ import annotations

import heapq
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import Struct

from virta.journal.messages import Details, RefusedError, Value

if TYPE_CHECKING:
    from collections.abc import Callable

DELAYED, READY, HELD, WORKING, DEAD, GONE = range(6)
STATE_NAMES = ("delayed", "ready", "held", "working", "dead", "gone")
WORK_DEADLINE_US = 24 * 3600 * 1_000_000
ATTEMPTS_MAX = 65_535  # what the details of a reply can say
HOSTS_MAX = 1_024  # uris up to their path whose host is known without looking
HEAP_SLACK = 64  # stale items a heap may hold however few jobs it has

Rank = tuple[int, int, int]


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator may set per domain; kept as JSON under `virta:domain:<domain>`."""

    paused: bool = False
    deadline: float = 0.0  # seconds of work by default, 0: 24 hours
    max_attempts: int = 0  # after so many lapsed or failed attempts a job is dead, 0: never
    mode: Literal["debounce", "throttle"] = "debounce"
    retry_delay: float = 0.0  # seconds, doubled with each failed attempt

    def problem(self) -> str:
        """Why these settings cannot be, or nothing."""
        if not 0 <= self.deadline <= 3650 * 86_400:
            return f"deadline {self.deadline}: 0 to 315360000 seconds"
        if not 0 <= self.max_attempts <= ATTEMPTS_MAX:
            return f"max_attempts {self.max_attempts}: 0 to {ATTEMPTS_MAX}"
        if not 0 <= self.retry_delay <= 86_400:
            return f"retry_delay {self.retry_delay}: 0 to 86400 seconds"
        return ""


DEFAULTS = Settings()


class Job(Struct, eq=False):
    """One entry: what to do (`uri`), where it waits, and how its work goes."""

    uri: bytes
    domain: Domain
    id: int
    priority: int = 0
    start: int = 0
    timestamp: int = 0
    created: int = 0
    payload: Value | None = None
    persist: bool = False
    attempts: int = 0
    reason: str = ""  # of the last failure
    logged: bool = False  # an image of it is in the log
    state: int = GONE
    # A reserve is not logged, it is in the table of leases.
    lease: int = 0  # the id of this attempt, 0: nobody works on it
    worked_until: int = 0  # while DEAD: when it died
    slot: int = 0  # where it is in the table of leases, 0: nowhere
    # For copies on other daemons: of two states of one command the larger revision is the later one.
    revision: int = 0
    # Revisions of the commands this one took the place of.
    replaced: dict[int, int] | None = None

    def __lt__(self, other: Job) -> bool:  # equal heap items: any order
        return False

    def key(self) -> bytes:
        """The sort key: bytewise order is the order of work inside a domain."""
        return b"%s:%03d:%020d:%016x" % (
            self.domain.prefix,
            self.priority,
            self.start,
            self.lease or self.id,
        )

    def details(self) -> Details:
        worked = self.state == WORKING
        return Details(
            created=self.created,
            modified=self.timestamp,
            worked_until=self.worked_until if worked else 0,
            size=len(self.payload.data) if self.payload else 0,
            attempts=self.attempts,
            bits=self.persist | worked << 2,
        )


_KEY = re.compile(rb"[^:]*:[0-9]{3}:[0-9]{20}:([0-9a-fA-F]{16})")


def parse_key(key: bytes) -> int | None:
    """The id inside a sort key; None if the key is not one."""
    found = _KEY.fullmatch(key)
    return None if found is None else int(found[1], 16)


# After "//": user and "@" if any, then an address in brackets or a name up to the port or the path.
_HOST = re.compile(rb"//(?:[^/?#]*@)?(?:\[([^\]/?#]*)\]|([^:/?#]*))")


def host_of(uri: bytes) -> bytes:
    """The domain of a uri: its host in lower case, without user and port."""
    end = uri.find(b"/", uri.find(b"//") + 2)
    return _host(uri if end < 0 else uri[:end])


@lru_cache(maxsize=HOSTS_MAX)
def _host(uri: bytes) -> bytes:
    found = _HOST.search(uri)
    host = (found[1] or found[2]) if found else None
    if not host:
        raise RefusedError("bad-uri", "it has no host, so the domain must be given")
    return host.lower()


class Domain:
    """The jobs of one domain, ordered for work and for time."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.prefix = name.replace(b":", b"%3A")  # of sort keys
        self.settings = DEFAULTS
        self.counts = [0] * GONE
        self.watch: Callable[[Job], None] | None = None  # told of every job that moves
        self.armed: int | None = None  # the alarm that Jobs holds for this domain
        self.offered: Rank | None = None  # the head that Jobs knows of
        self._ready: list[tuple[int, int, int, Job]] = []
        self._delayed: list[tuple[int, int, Job]] = []
        self._working: list[tuple[int, int, Job]] = []

    @property
    def empty(self) -> bool:
        return not any(self.counts) and self.settings == DEFAULTS

    def move(self, job: Job, state: int) -> None:
        """Change a job's state and put it where that state is looked for."""
        counts = self.counts
        if self.watch is not None:
            self.watch(job)
        if job.state != GONE:
            counts[job.state] -= 1
        job.state = state
        if state == GONE:
            return
        counts[state] += 1
        if state == READY:
            heapq.heappush(self._ready, (job.priority, job.start, job.id, job))
            if len(self._ready) > 2 * counts[READY] + HEAP_SLACK:
                self._ready = _rebuilt(self._ready, self._is_ready)
        elif state == DELAYED:
            heapq.heappush(self._delayed, (job.start, job.id, job))
            if len(self._delayed) > 2 * self.counts[DELAYED] + HEAP_SLACK:
                self._delayed = _rebuilt(self._delayed, self._is_delayed)
        elif state == WORKING:
            heapq.heappush(self._working, (job.worked_until, job.lease, job))
            if len(self._working) > 2 * self.counts[WORKING] + HEAP_SLACK:
                self._working = _rebuilt(self._working, self._is_working)

    def restore(self, job: Job, state: int) -> None:
        """Like `move`, for a million jobs in a row: the heaps are in order only after `settle`."""
        job.state = state
        self.counts[state] += 1
        if state == READY:
            self._ready.append((job.priority, job.start, job.id, job))
        elif state == DELAYED:
            self._delayed.append((job.start, job.id, job))
        elif state == WORKING:
            self._working.append((job.worked_until, job.lease, job))

    def settle(self) -> None:
        self._ready = _rebuilt(self._ready, self._is_ready)
        self._delayed = _rebuilt(self._delayed, self._is_delayed)
        self._working = _rebuilt(self._working, self._is_working)

    def head(self) -> Job | None:
        """The job to hand out next, left where it is."""
        heap = self._ready
        while heap:
            item = heap[0]
            if self._is_ready(item):
                return item[3]
            heapq.heappop(heap)
        return None

    def rank(self) -> Rank | None:
        job = self.head()
        return None if job is None else (job.priority, job.start, job.id)

    def earliest(self) -> int | None:
        """The next time something happens here by itself: a start or the end of a work window."""
        delayed, working = self._delayed, self._working
        while delayed and not self._is_delayed(delayed[0]):
            heapq.heappop(delayed)
        while working and not self._is_working(working[0]):
            heapq.heappop(working)
        if delayed and working:
            return min(delayed[0][0], working[0][0])
        return delayed[0][0] if delayed else working[0][0] if working else None

    def due_start(self, now: int) -> Job | None:
        """A delayed job whose start has come."""
        heap = self._delayed
        while heap and heap[0][0] <= now:
            item = heapq.heappop(heap)
            if self._is_delayed(item):
                return item[2]
        return None

    def due_lapse(self, now: int) -> Job | None:
        """A job whose work window is over."""
        heap = self._working
        while heap and heap[0][0] <= now:
            item = heapq.heappop(heap)
            if self._is_working(item):
                return item[2]
        return None

    # Whether a heap item still says what its job says; the job may have moved to another domain.

    def _is_ready(self, item: tuple[int, int, int, Job]) -> bool:
        job = item[3]
        return (
            job.state == READY
            and job.id == item[2]
            and job.start == item[1]
            and job.priority == item[0]
            and job.domain is self
        )

    def _is_delayed(self, item: tuple[int, int, Job]) -> bool:
        job = item[2]
        return (
            job.state == DELAYED
            and job.domain is self
            and job.id == item[1]
            and job.start == item[0]
        )

    def _is_working(self, item: tuple[int, int, Job]) -> bool:
        job = item[2]
        return (
            job.state == WORKING
            and job.domain is self
            and job.lease == item[1]
            and job.worked_until == item[0]
        )

    def first_delayed(self) -> Job | None:
        self.earliest()
        return self._delayed[0][2] if self._delayed else None


Item = TypeVar("Item", tuple[int, int, Job], tuple[int, int, int, Job])


def _rebuilt(heap: list[Item], valid: Callable[[Item], bool]) -> list[Item]:
    kept = [item for item in heap if valid(item)]
    heapq.heapify(kept)
    return kept
