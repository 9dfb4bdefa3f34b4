"""
Reading many keys: bounds, regular expressions, and cursors that carry everything they need.

A cursor is `c1:` and a MessagePack array (query, bound or pattern, last key, count, flags). The daemon
keeps no state for it: it is valid on any connection and after a restart, and continues strictly
after the last key returned. There is no snapshot.
"""

from __future__ import annotations

import heapq
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import msgspec

from virta.journal.messages import KEY_BYTES_MAX, QUERY_RANGE, QUERY_REGEX, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

PATTERN_BYTES_MAX = 1024
# RE2's automata for one pattern; more is refused rather than built.
REGEX_MEMORY_BYTES_MAX = 1024 * 1024
# Keys looked at in vain for one reply: some 10 ms of regular expressions.
SCAN_KEYS_MAX = 20_000
_CURSOR_PREFIX = b"c1:"


class Pattern(Protocol):
    def search(self, text: bytes) -> object | None: ...


class Scanned(Protocol):
    def scan(self, lower: bytes, upper: bytes | None, *, after: bool) -> Iterator[bytes]: ...


class Query(msgspec.Struct, array_like=True):
    """What is asked for, and where the next reply continues."""

    kind: int
    bound: bytes  # the upper end of a range (empty: none), or the pattern
    last: bytes  # the last key of the reply before; or the lower end
    count: int
    flags: int
    after: bool = True

    def cursor(self, last: bytes) -> bytes:
        encoded = _CURSOR_PREFIX + msgspec.msgpack.encode(
            Query(self.kind, self.bound, last, self.count, self.flags)
        )
        if len(encoded) > KEY_BYTES_MAX:
            raise RefusedError("too-large", "these keys are too long for a cursor; ask for fewer")
        return encoded

    def keys(self, *scanned: Scanned) -> Iterator[tuple[bytes, bool]]:
        """Keys in order, and whether each is asked for."""
        upper = self.bound or None if self.kind == QUERY_RANGE else None
        scans = [source.scan(self.last, upper, after=self.after) for source in scanned]
        keys = heapq.merge(*scans) if len(scans) > 1 else scans[0]
        if self.kind == QUERY_RANGE:
            for key in keys:
                yield key, True
            return
        pattern = compiled(self.bound)
        for key in keys:
            yield key, pattern.search(key) is not None


def parse_cursor(cursor: bytes) -> Query:
    if not cursor.startswith(_CURSOR_PREFIX):
        raise RefusedError("bad-cursor", "it was not given by this journal")
    try:
        query = msgspec.msgpack.decode(cursor[len(_CURSOR_PREFIX) :], type=Query)
    except msgspec.DecodeError as error:
        raise RefusedError("bad-cursor", "it was not given by this journal") from error
    if query.kind not in (QUERY_RANGE, QUERY_REGEX):
        raise RefusedError("bad-cursor", f"it holds query {query.kind}")
    return query


_cache: dict[bytes, Pattern] = {}
_CACHE_PATTERNS_MAX = 64


def compiled(pattern: bytes) -> Pattern:
    """RE2 only: its time is linear in the key, whatever the pattern."""
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
        result: Pattern = re2.compile(pattern, options)
    except re2.error as error:
        text = error.args[0] if error.args else b""
        detail = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        raise RefusedError("bad-regex", detail[:200]) from error
    if len(_cache) >= _CACHE_PATTERNS_MAX:
        _cache.clear()
    _cache[pattern] = result
    return result
