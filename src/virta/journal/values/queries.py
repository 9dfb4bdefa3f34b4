"""
Reading many keys: bounds, regular expressions, and cursors that carry everything they need.

A cursor is `c1:` and a MessagePack array (query, bound or pattern, last key, count, flags). The daemon
keeps no state for it: it is valid on any connection and after a restart, and continues strictly
after the last key returned. There is no snapshot. In a cursor that would be longer than CURSOR_BYTES, long
keys are cut where they differ from their neighbours.
"""

from __future__ import annotations

import heapq
import re
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from virta.journal.protocol.messages import (
    KEY_BYTES_MAX,
    PAIRS_MAX,
    QUERY_RANGE,
    QUERY_REGEX,
    RefusedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.journal.values.sorted_keys import SortedKeys

PATTERN_BYTES_MAX = 1024
# RE2's automata for one pattern; more is refused rather than built.
REGEX_MEMORY_BYTES_MAX = 1024 * 1024
# Keys that may be skipped for one reply: some 10 ms of regular expressions.
SCAN_KEYS_MAX = 20_000
CURSOR_BYTES = 255  # what any client can send back; more only where keys differ that late, or patterns are long
_CURSOR_PREFIX = b"c1:"
# A pattern that is anchored begins with this much of plain text, unless what follows makes the last optional.
_ANCHORED = re.compile(rb"\^([A-Za-z0-9_:/%@#&=,;~ -]*)(.?)", re.DOTALL)


class KeyPattern(Protocol):
    def search(self, text: bytes) -> object | None: ...


class Query(msgspec.Struct, array_like=True):
    """What is asked for, and where the next reply continues."""

    kind: int
    bound: bytes  # the upper end of a range (empty: none), or the pattern
    last: bytes  # the last key of the reply before; or the lower end
    # A cursor comes from outside: check it.
    count: Annotated[int, msgspec.Meta(ge=0, le=PAIRS_MAX)]
    flags: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    after: bool = True

    def cursor(self, last: bytes, following: bytes, *scanned: SortedKeys) -> bytes:
        """Return the cursor of a reply that begins after `last`, which `following` comes after."""
        exact = self._encoded(self.bound, last, after=True)
        if len(exact) <= CURSOR_BYTES or following <= last:
            return _check_cursor(exact)
        bound = self.bound
        if self.kind == QUERY_RANGE and bound:
            bound = separator(max(source.before(bound) for source in scanned), bound)
        short = self._encoded(bound, separator(last, following), after=False)
        return short if len(short) <= CURSOR_BYTES or len(exact) > KEY_BYTES_MAX else exact

    def _encoded(self, bound: bytes, last: bytes, *, after: bool) -> bytes:
        following = Query(self.kind, bound, last, self.count, self.flags, after)
        return _CURSOR_PREFIX + msgspec.msgpack.encode(following)

    def span(self) -> tuple[bytes, bytes | None]:
        """Return the bounds of the keys to read; None: to the end."""
        if self.kind == QUERY_RANGE:
            return self.last, self.bound or None
        prefix = literal_prefix(self.bound)
        return max(self.last, prefix), _after_all(prefix)

    def keys(self, *scanned: SortedKeys) -> Iterator[tuple[bytes, bool]]:
        """Yield keys in order, and whether each is part of the result."""
        lower, upper = self.span()
        after = self.after and lower == self.last
        scans = [source.scan(lower, upper, after=after) for source in scanned]
        keys = heapq.merge(*scans) if len(scans) > 1 else scans[0]
        if self.kind == QUERY_RANGE:
            for key in keys:
                yield key, True
            return
        pattern = compiled(self.bound)
        for key in keys:
            yield key, pattern.search(key) is not None


def separator(low: bytes, high: bytes) -> bytes:
    """Return the shortest prefix of `high` that is larger than `low`, which is smaller than `high`."""
    size = next(
        (at for at, (one, two) in enumerate(zip(low, high, strict=False)) if one != two), None
    )
    return high[: (len(low) if size is None else size) + 1]


def literal_prefix(pattern: bytes) -> bytes:
    """Return the prefix of every key that an anchored pattern finds."""
    found = _ANCHORED.match(pattern)
    if found is None or b"|" in pattern:
        return b""
    return found[1][:-1] if found[2] in (b"*", b"?", b"{") else found[1]


def _after_all(prefix: bytes) -> bytes | None:
    """Return the first key after all with this prefix of plain characters."""
    return prefix[:-1] + bytes((prefix[-1] + 1,)) if prefix else None


def _check_cursor(cursor: bytes) -> bytes:
    if len(cursor) > KEY_BYTES_MAX:
        raise RefusedError("too-large", "these keys are too long for a cursor; ask for fewer")
    return cursor


def parse_cursor(cursor: bytes) -> Query:
    if not cursor.startswith(_CURSOR_PREFIX):
        raise RefusedError("bad-cursor", "it was not given by this journal")
    try:
        query = msgspec.msgpack.decode(cursor[len(_CURSOR_PREFIX) :], type=Query)
    except msgspec.DecodeError as error:
        raise RefusedError("bad-cursor", "it was not given by this journal") from error
    if query.kind not in (QUERY_RANGE, QUERY_REGEX):
        raise RefusedError("bad-cursor", f"its query is {query.kind}")
    return query


_cache: dict[bytes, KeyPattern] = {}
_CACHE_PATTERNS_MAX = 64


def compiled(pattern: bytes) -> KeyPattern:
    """
    Compile a pattern with RE2, whose time is linear in the key.

    What Python's `re` reads otherwise, or not at all, is refused, so that a pattern has one meaning.
    """
    found = _cache.get(pattern)
    if found is not None:
        return found
    if len(pattern) > PATTERN_BYTES_MAX:
        raise RefusedError("bad-regex", f"{len(pattern)} bytes, at most {PATTERN_BYTES_MAX}")
    try:
        re2 = import_module("re2")  # an extra; only this query needs it
    except ImportError as error:
        raise RefusedError("bad-regex", "needs google-re2: pip install virta[match]") from error
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # keys are bytes, not text
    options.max_mem = REGEX_MEMORY_BYTES_MAX
    options.log_errors = False
    try:
        result: KeyPattern = re2.compile(pattern, options)
    except re2.error as error:
        text = error.args[0] if error.args else b""
        detail = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        raise RefusedError("bad-regex", detail[:200]) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for classes in brackets that Python reads otherwise
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise RefusedError("bad-regex", f"not in Python's re: {error}"[:200]) from error
    if len(_cache) >= _CACHE_PATTERNS_MAX:
        _cache.clear()
    _cache[pattern] = result
    return result
