"""
A job, its states and its sort key.

    push ──► DELAYED ──start──► READY ──NEXT──► WORKING ──done──► REMOVED
               ▲                  ▲               │ │
               │                  └─expired,──────┘ └─too many attempts─► DEAD
               └── push again       given back
    push while WORKING ──► WAITING_BEHIND ──the older attempt ends──► DELAYED or READY

The names in STATE_NAMES are part of the administration's replies.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct

from virta.backoff import backoff
from virta.journal.protocol.messages import Details, RefusedError, Value

if TYPE_CHECKING:
    from virta.journal.jobs.domain import Domain

DELAYED, READY, WAITING_BEHIND, WORKING, DEAD, REMOVED = range(6)
STATE_NAMES = ("delayed", "ready", "held", "working", "dead", "gone")
ATTEMPTS_MAX = 65_535  # the largest number the details of a reply can carry
# A retry delay is shortened by up to this part, so that jobs that failed together are not retried together.
RETRY_JITTER = 0.25
_WORKED_ON_BIT = 4  # in the details of a reply
HOSTS_MAX = 1_024  # size of the cache of hosts by the part of a uri before its path


class Job(Struct, eq=False, gc=False):
    """
    One command on a uri: where it waits, and how its work goes.

    Jobs are not tracked by the garbage collector, as there may be millions. The only reference cycle is
    the one with their domain, which `Scheduler.close` breaks.
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
    reason: str = (
        ""  # of the last failure, and the attempts before it (`virta.journal.jobs.failures`)
    )
    # In memory from here on, except lease, worked_until, revision and replaced.
    logged: bool = False  # a record of it is in the log
    state: int = REMOVED
    lease: int = 0  # the id of this attempt, 0: not worked on; kept in the table of leases
    worked_until: int = 0  # while DEAD: when it died
    slot: int = 0  # index in the table of leases, 0: none
    # For copies on other daemons: of two states of one command the larger revision is the later one.
    revision: int = 0
    replaced: dict[int, int] | None = None  # timestamps of replaced commands, with their revisions
    # Whether the id belongs to a failed attempt; None: unknown since a restart.
    spent: bool | None = None
    older: Job | None = None  # the job of the same uri that is worked on; this one waits or is dead

    def __lt__(self, other: Job) -> bool:
        """Allow heap items that are equal up to the job; their order does not matter."""
        return False

    def key(self) -> bytes:
        """Return the sort key: bytewise order is the order of work inside a domain."""
        return b"%s:%03d:%020d:%016x" % (
            self.domain.prefix,
            self.priority,
            self.start,
            self.lease or self.id,
        )

    @property
    def fenced(self) -> bool:
        """Whether its key belongs to an attempt that is over and acknowledges nothing."""
        if self.spent is None:  # attempts and reason survive a restart
            return not self.lease and (self.attempts > 0 or self.reason != "")
        return self.spent and not self.lease

    def details(self, data: bytes) -> Details:
        """Return the details of one pair of a reply, whose data is the uri or the payload."""
        # By position, as names take twice the time.
        if self.state != WORKING:
            return Details(
                0, 0, self.created, self.timestamp, 0, 0, len(data), self.attempts, self.persist
            )
        return Details(
            0,
            0,
            self.created,
            self.timestamp,
            0,
            self.worked_until,
            len(data),
            self.attempts,
            self.persist | _WORKED_ON_BIT,
        )


_KEY = re.compile(rb"[^:]*:[0-9]{3}:[0-9]{20}:([0-9a-fA-F]{16})")


def parse_key(key: bytes) -> int | None:
    """Return the id in a sort key, None if the key is not one."""
    found = _KEY.fullmatch(key)
    return None if found is None else int(found[1], 16)


def domain_of(key: bytes) -> bytes:
    """Return the domain in a sort key."""
    return key.partition(b":")[0].replace(b"%3A", b":")


# An optional scheme, "//", an optional user and "@", then an address in brackets or a name up to port or path.
_HOST = re.compile(rb"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//(?:[^/?#]*@)?(?:\[([^\]/?#]*)\]|([^:/?#]*))")


def host_of(uri: bytes) -> bytes:
    """Return the default domain of a uri: its host in lower case, without user and port."""
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


def retry_delay_s(delay: float, longest: float, attempts: int, salt: bytes) -> float:
    """
    Return the seconds until the next attempt of a job that failed after `attempts` others.

    `delay` doubles with each of them up to `longest`, and is shortened by up to a quarter, chosen by `salt`.
    """
    fraction = zlib.crc32(salt) / (1 << 32)
    return backoff(attempts, delay, longest, jitter=RETRY_JITTER, fraction=fraction)
