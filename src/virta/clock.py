"""
Wall-clock time as Virta stores it: integer microseconds since 1970, UTC.

A class that reads the time has a `Clock` as an argument, so tests can set it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, TypeAlias

Clock: TypeAlias = Callable[[], int]
"""Returns the present time in microseconds since 1970."""

# Neighbouring records often share the second of their time.
_SECONDS_CACHE_MAX: Final = 64


def now_us() -> int:
    """Return microseconds since 1970."""
    return time.time_ns() // 1000


def now_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def time_text(microseconds: int) -> str:
    """Return a time as RFC 3339 in UTC with six fraction digits; outside the years 1 to 9999, as a number."""
    seconds, fraction = divmod(microseconds, 1_000_000)
    try:
        return f"{_second_text(seconds)}.{fraction:06d}Z"
    except (ValueError, OverflowError, OSError):
        return f"{microseconds} µs after 1970"


@lru_cache(_SECONDS_CACHE_MAX)
def _second_text(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
