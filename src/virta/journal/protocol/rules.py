"""
Which flags, fields and keys each function may carry; a bit without meaning must be 0.

Checked before anything is done, so that bits stay free for later versions and a client that uses the protocol
wrongly gets an error instead of half an effect.
"""

from __future__ import annotations

from msgspec import Struct

from virta.journal.protocol.messages import (
    DATA,
    DETAILS,
    KEY_BYTES_MAX,
    LISTEN,
    OVERWRITE,
    PERSIST,
    QUERY_KEY,
    QUERY_RANGE,
    TOUCH,
    VALUE_DATA_BYTES_MAX,
    WORKED_ON,
    Function,
    RefusedError,
    Request,
)

# Limits of a message; requests of embedded callers are not messages.
TIME_US_MAX = (1 << 64) - 1
COUNT_MAX = 65_535
# The timestamp after this one must still fit a message; timestamps of daemons are below it.
STAMP_US_MAX = 1 << 62
# One bad clock would otherwise freeze a key until that time comes.
CLOCK_SKEW_US_MAX = 300 * 1_000_000


class Rule(Struct, frozen=True):
    flags: int = 0
    queries: tuple[int, ...] = (QUERY_KEY,)
    timeout: bool = False
    ttl: bool = False
    count: bool = False
    key: bool = True  # required
    value: bool | None = None  # True: required, False: optional, None: none


GET = int(Function.GET)
_TWO_KEYS = (QUERY_RANGE,)
RULES: dict[int, Rule] = {
    Function.NOP: Rule(key=False),
    Function.QUIT: Rule(key=False),
    Function.SET: Rule(
        OVERWRITE | PERSIST | LISTEN,
        (QUERY_KEY, QUERY_RANGE),  # the second key: a mark, between daemons
        timeout=True,
        ttl=True,
        value=True,
    ),
    Function.GET: Rule(
        TOUCH | WORKED_ON | DATA | LISTEN | DETAILS,
        (0, 1, 2, 3),
        timeout=True,
        ttl=True,
        count=True,
    ),
    Function.DELETE: Rule(OVERWRITE),
    Function.ADD: Rule(value=True),
    Function.NOT: Rule(),
    Function.TRUNCATE: Rule(value=True),
    Function.LOCK: Rule(timeout=True),
    Function.UNLOCK: Rule(),
    Function.RENAME: Rule(OVERWRITE, _TWO_KEYS),
    Function.NEXT: Rule(OVERWRITE | DATA | LISTEN | DETAILS, timeout=True, count=True, key=False),
    Function.PUSH: Rule(PERSIST, _TWO_KEYS, timeout=True, count=True, value=False),
    Function.LINK: Rule(queries=_TWO_KEYS),
    Function.UNLINK: Rule(),
}


def check_limits(request: Request) -> None:
    """Refuse what does not fit a message; a request that was decoded from one does."""
    if len(request.key) > KEY_BYTES_MAX or len(request.key2) > KEY_BYTES_MAX:
        raise RefusedError("too-large", f"a key has at most {KEY_BYTES_MAX} bytes")
    if request.value is not None and len(request.value.data) > VALUE_DATA_BYTES_MAX:
        raise RefusedError("too-large", f"a value has at most {VALUE_DATA_BYTES_MAX} bytes")
    timeout, ttl, count = request.timeout, request.ttl, request.count
    if (
        (timeout is not None and not 0 <= timeout <= TIME_US_MAX)
        or (ttl is not None and not 0 <= ttl <= TIME_US_MAX)
        or not 0 <= request.timestamp <= TIME_US_MAX
    ):
        raise RefusedError("overflow", "a time before 1970 or after 2^64 microseconds")
    if count is not None and not 0 <= count <= COUNT_MAX:
        if request.function == Function.PUSH:
            raise RefusedError("bad-priority", f"{count} is not from 0 to 255")
        raise RefusedError("overflow", f"count {count} is not from 0 to {COUNT_MAX}")


def check(request: Request, latest: int) -> None:
    """Refuse what the function does not know, and timestamps after `latest`; `check_limits` is for the rest."""
    rule = RULES.get(request.function)
    if rule is None:
        raise RefusedError("unknown-function")
    if request.flags & ~rule.flags:
        raise RefusedError("bad-flags", f"0x{request.flags & ~rule.flags:04x} has no meaning here")
    query, count, value = request.query, request.count, request.value
    if query not in rule.queries:
        raise RefusedError("bad-query", f"query {query} has no meaning here")
    if (
        (request.timeout is not None and not rule.timeout)
        or (request.ttl is not None and not rule.ttl)
        or (value is not None and rule.value is None)
        or (count is not None and not rule.count and query != QUERY_RANGE)
    ):
        raise RefusedError("bad-flags", "a field that has no meaning here")
    if count and query == QUERY_RANGE and not rule.count:
        raise RefusedError("bad-query", "the count of two keys is 0")
    if rule.key and not request.key and not (request.function == GET and query == QUERY_RANGE):
        raise RefusedError("key-missing")
    if value is None and rule.value:
        raise RefusedError("value-missing")
    if request.timestamp > latest:
        ahead = (request.timestamp - latest + CLOCK_SKEW_US_MAX) // 1_000_000
        raise RefusedError("clock-skew", f"the timestamp is {ahead} s ahead of this daemon")
