"""Rate limits: a token bucket for each key, such as a principal or an address."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Keys that are kept; addresses come from clients. A key that was dropped has a full bucket again.
KEYS_MAX = 100_000
# A bucket holds this many seconds of its rate, so that short bursts pass.
BURST_S = 2.0


class RateLimiter:
    """Allows `rate` requests a second for each key."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, rate * BURST_S)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # key: (requests left, when)

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, key: str, count: int = 1) -> float:
        """Count requests of a key; return 0 if they are allowed, else seconds until one is."""
        now = self._clock()
        left, since = self._buckets.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        allowed = left >= 1.0
        if allowed:
            left -= count  # several at once may borrow from the next seconds
        if len(self._buckets) >= KEYS_MAX:
            del self._buckets[next(iter(self._buckets))]  # the one that was used least recently
        self._buckets[key] = (left, now)
        return 0.0 if allowed else (1.0 - left) / self._rate
