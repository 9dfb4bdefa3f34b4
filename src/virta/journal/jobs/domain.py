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

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from virta.backoff import backoff
from virta.journal.jobs.heap import AnyHeap, Heap, Item
from virta.journal.protocol.messages import Details, RefusedError, Value

if TYPE_CHECKING:
    from collections.abc import Callable

DELAYED, READY, HELD, WORKING, DEAD, GONE = range(6)
STATE_NAMES = ("delayed", "ready", "held", "working", "dead", "gone")
WORK_DEADLINE_US = 24 * 3600 * 1_000_000
ATTEMPTS_MAX = 65_535  # what the details of a reply can say
# Tried 25 times over about 13 hours, a job survives an outage of a night; Sidekiq, Faktory, River and
# graphile-worker have the same limit.
ATTEMPTS_DEFAULT = 25
BACK_OFF_S = 1.0
BACK_OFF_S_MAX = 3600.0
# A pause is shortened by up to this part, so that jobs that failed together are not tried together.
RETRY_JITTER = 0.25
# Between the reason and the traceback of a failure, which are kept as one text.
TRACEBACK_MARK = "\x1e"
REASON_CHARS_MAX = 1_000
TRACEBACK_CHARS_MAX = 4_000  # the end of it, which shows where the error was raised
HOSTS_MAX = 1_024  # uris up to their path whose host is known without looking
HEAP_SLACK = 64  # stale items a heap may hold however few jobs it has

Rank = tuple[int, int, int]


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator may set per domain; kept as JSON under `virta:domain:<domain>`."""

    paused: bool = False
    deadline: float = 0.0  # seconds of work by default, 0: 24 hours
    # Expired or failed attempts after which a job is dead, 0: never.
    max_attempts: int = ATTEMPTS_DEFAULT
    mode: Literal["debounce", "throttle"] = "debounce"
    retry_delay: float = BACK_OFF_S  # seconds, doubled with each failed attempt, 0: at once
    retry_delay_max: float = BACK_OFF_S_MAX  # longest delay in seconds

    def problem(self) -> str:
        """Why these settings cannot be, or nothing."""
        if not 0 <= self.deadline <= 3650 * 86_400:
            return f"deadline {self.deadline}: 0 to 315360000 seconds"
        if not 0 <= self.max_attempts <= ATTEMPTS_MAX:
            return f"max_attempts {self.max_attempts}: 0 to {ATTEMPTS_MAX}"
        if not 0 <= self.retry_delay <= 86_400:
            return f"retry_delay {self.retry_delay}: 0 to 86400 seconds"
        if not 0 <= self.retry_delay_max <= 86_400:
            return f"retry_delay_max {self.retry_delay_max}: 0 to 86400 seconds"
        return ""


DEFAULTS = Settings()


def back_off(delay: float, longest: float, attempts: int, salt: bytes) -> float:
    """
    Return the seconds until the next attempt of a job that failed after `attempts` others.

    `delay` is doubled with each of them up to `longest`; `salt` decides by how much, up to a quarter, it is shortened.
    """
    fraction = zlib.crc32(salt) / (1 << 32)
    return backoff(attempts, delay, longest, jitter=RETRY_JITTER, fraction=fraction)


def reason_text(reason: str, traceback: str) -> str:
    """Return reason and traceback as the one text that is stored, each within its limit."""
    text = reason.replace(TRACEBACK_MARK, " ")[:REASON_CHARS_MAX]
    return f"{text}{TRACEBACK_MARK}{traceback[-TRACEBACK_CHARS_MAX:]}" if traceback else text


class Job(Struct, eq=False, gc=False):
    """
    One entry: what to do (`uri`), where it waits, and how its work goes.

    Collections of garbage do not look at jobs, of which there may be millions. The only cycle they can be
    in is that with their domain, and `Schedule.let_go` ends that.
    """

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
    # The id is that of an attempt that came to nothing; None: not since the process started.
    spent: bool | None = None

    def key(self) -> bytes:
        """The sort key: bytewise order is the order of work inside a domain."""
        return b"%s:%03d:%020d:%016x" % (
            self.domain.prefix,
            self.priority,
            self.start,
            self.lease or self.id,
        )

    @property
    def fenced(self) -> bool:
        """Whether its key is that of an attempt that is over, and acknowledges nothing."""
        if self.spent is None:  # these outlive a restart
            return not self.lease and (self.attempts > 0 or self.reason != "")
        return self.spent and not self.lease

    def details(self, data: bytes) -> Details:
        """Of one pair of a reply: its data is the uri or the payload, all else is the same."""
        worked = self.state == WORKING
        return Details(
            created=self.created,
            modified=self.timestamp,
            worked_until=self.worked_until if worked else 0,
            size=len(data),
            attempts=self.attempts,
            bits=self.persist | worked << 2,
        )


_KEY = re.compile(rb"[^:]*:[0-9]{3}:[0-9]{20}:([0-9a-fA-F]{16})")


def parse_key(key: bytes) -> int | None:
    """The id inside a sort key; None if the key is not one."""
    found = _KEY.fullmatch(key)
    return None if found is None else int(found[1], 16)


def domain_of(key: bytes) -> bytes:
    """The domain inside a sort key."""
    return key.partition(b":")[0].replace(b"%3A", b":")


# A scheme, if any, and "//": user and "@" if any, then an address in brackets or a name up to the port or the path.
_HOST = re.compile(rb"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//(?:[^/?#]*@)?(?:\[([^\]/?#]*)\]|([^:/?#]*))")


def host_of(uri: bytes) -> bytes:
    """The domain of a uri: its host in lower case, without user and port."""
    end = uri.find(b"/", uri.find(b"//") + 2)
    return _host(uri if end < 0 else uri[:end])


@lru_cache(maxsize=HOSTS_MAX)
def _host(uri: bytes) -> bytes:
    found = _HOST.match(uri)
    host = (found[1] or found[2]) if found else None
    if not host:
        shown = uri[:60].decode(errors="replace")
        raise RefusedError("bad-uri", f"{shown!r} has no host, so the domain must be given")
    return host.lower()


class Domain:
    """The jobs of one domain, ordered for work and for time."""

    __slots__ = (
        "_delayed",
        "_ready",
        "_working",
        "armed",
        "counts",
        "name",
        "offered",
        "prefix",
        "settings",
        "watch",
    )

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.prefix = name.replace(b":", b"%3A")  # of sort keys
        self.settings = DEFAULTS
        self.counts = [0] * GONE
        self.watch: Callable[[Job], None] | None = None  # told of every job that moves
        self.armed: int | None = None  # the alarm that Jobs holds for this domain
        self.offered: Rank | None = None  # the head that Jobs knows of
        self._ready = Heap()  # by priority, start and id
        self._delayed = Heap()  # by start and id
        self._working = Heap()  # by deadline and lease

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
            self._ready.push(job.priority, job.start, job.id, job)
            if len(self._ready) > 2 * counts[READY] + HEAP_SLACK:
                self._ready.keep(self._is_ready)
        elif state == DELAYED:
            self._delayed.push(0, job.start, job.id, job)
            if len(self._delayed) > 2 * counts[DELAYED] + HEAP_SLACK:
                self._delayed.keep(self._is_delayed)
        elif state == WORKING:
            self._working.push(0, job.worked_until, job.lease, job)
            if len(self._working) > 2 * counts[WORKING] + HEAP_SLACK:
                self._working.keep(self._is_working)

    def restore(self, job: Job, state: int) -> None:
        """Like `move`, for a million jobs in a row: nobody watches, and `settle` follows."""
        job.state = state
        self.counts[state] += 1
        if state == READY:
            self._ready.push(job.priority, job.start, job.id, job)
        elif state == DELAYED:
            self._delayed.push(0, job.start, job.id, job)
        elif state == WORKING:
            self._working.push(0, job.worked_until, job.lease, job)

    def settle(self) -> None:
        """Out with what a replay put in and took out again."""
        for heap, state, valid in (
            (self._ready, READY, self._is_ready),
            (self._delayed, DELAYED, self._is_delayed),
            (self._working, WORKING, self._is_working),
        ):
            if len(heap) != self.counts[state]:
                heap.keep(valid)

    def let_go(self) -> None:
        """Hold no jobs any more, not even what no longer holds: it is forgotten, or all of them are."""
        self.armed = self.offered = None
        self._ready.clear()
        self._delayed.clear()
        self._working.clear()

    def head(self) -> Job | None:
        """The job to hand out next, left where it is."""
        while (item := self._ready.first()) is not None:
            if self._is_ready(item):
                job: Job = item[3]
                return job
            self._ready.pop()
        return None

    def rank(self) -> Rank | None:
        job = self.head()
        return None if job is None else (job.priority, job.start, job.id)

    def earliest(self) -> int | None:
        """The next time something happens here by itself: a start or the end of a work window."""
        delayed, working = self._delayed, self._working
        while (item := delayed.first()) is not None and not self._is_delayed(item):
            delayed.pop()
        while (item := working.first()) is not None and not self._is_working(item):
            working.pop()
        start, end = delayed.time(), working.time()
        if start is None or end is None:
            return end if start is None else start
        return min(start, end)

    def due_start(self, now: int) -> Job | None:
        """A delayed job whose start has come."""
        return _due(self._delayed, self._is_delayed, now)

    def due_lapse(self, now: int) -> Job | None:
        """A job whose work window is over."""
        return _due(self._working, self._is_working, now)

    # Whether a heap item still says what its job says; the job may have moved to another domain.

    def _is_ready(self, item: Item) -> bool:
        job = item[3]
        return (
            job.state == READY
            and job.id == item[2]
            and job.start == item[1]
            and job.priority == item[0]
            and job.domain is self
        )

    def _is_delayed(self, item: Item) -> bool:
        job = item[3]
        return (
            job.state == DELAYED
            and job.domain is self
            and job.id == item[2]
            and job.start == item[1]
        )

    def _is_working(self, item: Item) -> bool:
        job = item[3]
        return (
            job.state == WORKING
            and job.domain is self
            and job.lease == item[2]
            and job.worked_until == item[1]
        )

    def first_delayed(self) -> Job | None:
        self.earliest()
        item = self._delayed.first()
        return None if item is None else item[3]


def _due(heap: AnyHeap, valid: Callable[[Item], bool], now: int) -> Job | None:
    while (time := heap.time()) is not None and time <= now:
        item = heap.pop()
        if valid(item):
            job: Job = item[3]
            return job
    return None
