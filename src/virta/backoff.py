"""
Waits between attempts: each is twice the one before, up to a maximum, and shortened at random.

Jitter only shortens, so the maximum holds. It spreads the attempts of many clients that failed together.
"""

from __future__ import annotations

import random
from typing import Final

# Doubled this often, any first wait is over any maximum; it also keeps the power within a float.
_DOUBLINGS_MAX: Final = 62


def backoff(
    attempt: int,
    first: float,
    longest: float,
    *,
    jitter: float = 0.0,
    fraction: float | None = None,
) -> float:
    """
    Return the wait before attempt number `attempt` (the first one after a failure is 0).

    Args:
        attempt: how many waits came before this one.
        first: the wait at attempt 0.
        longest: the longest wait; a longer `first` counts instead.
        jitter: the largest part of the wait that is cut off, 0 to 1.
        fraction: which part of `jitter` is cut off, 0 to 1; random unless given.
    """
    wait = min(first * 2.0 ** min(attempt, _DOUBLINGS_MAX), max(longest, first))
    if jitter:
        wait *= 1 - jitter * (random.random() if fraction is None else fraction)  # noqa: S311
    return wait


class Backoff:
    """The waits of one thing that is tried again and again; `reset` after a success."""

    def __init__(self, first: float, longest: float, *, jitter: float = 0.0) -> None:
        self._first, self._longest, self._jitter = first, longest, jitter
        self.attempt = 0

    def next(self) -> float:
        """Return the wait before the next attempt and count it."""
        wait = backoff(self.attempt, self._first, self._longest, jitter=self._jitter)
        self.attempt += 1
        return wait

    def reset(self) -> None:
        """Start again with the first wait."""
        self.attempt = 0
