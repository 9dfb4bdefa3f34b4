"""
What happens when the system's clock is set, while the journal runs or between two runs.

Times on the wire and on disk are Unix times. Some of them were counted from the clock ("60 s from now"), and
those keep what was left of them when the clock is set by `step` µs:

    deadlines of work, marks, locks        move by `step`: none lapses early, none lasts for days
    values with a ttl                      move by `step`, as a touch counts from the clock as well
    starts of jobs that wait               move back with the clock, never forward: a start is a time that the
                                           producer gave or a delay, which are stored alike, and no job may wait
                                           longer because a clock was corrected
    how long finished commands and
    tombstones are remembered              move by `step`

A value without a ttl expires at its Unix time. Between two runs only a clock that went back is noticed: a
forward step is the same as a long pause.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from virta.journal.protocol.rules import CLOCK_SKEW_US_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.engine import JournalEngine

log = logging.getLogger("virta.journal")

# A smaller difference is a slewed clock, or a process that was not scheduled.
CLOCK_STEP_US_MIN = 1_000_000
# Both clocks must be read within this time; else the process was stopped in between, and the result is ignored.
SAMPLE_US_MAX = 100_000
# Suspended time counts for leases too, where the system measures it.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady_clock() -> int:
    """Return a time in µs that setting the clock does not change."""
    return time.clock_gettime_ns(_STEADY) // 1000


class StepWatch:
    """Compare the clock with one that cannot be set."""

    def __init__(self, clock: Callable[[], int], steady: Callable[[], int]) -> None:
        self._clock = clock
        self._steady = steady
        self._ahead = clock() - steady()

    def step(self, now: int) -> int:
        """Return by how much (µs) the clock, which says `now`, was set since the last call, or 0."""
        ahead = now - self._steady()
        if abs(ahead - self._ahead) < CLOCK_STEP_US_MIN:
            self._ahead = ahead
            return 0
        before = self._steady()
        now = self._clock()
        after = self._steady()
        if after - before > SAMPLE_US_MAX:
            return 0
        ahead = now - after
        step, self._ahead = ahead - self._ahead, ahead
        return step if abs(step) >= CLOCK_STEP_US_MIN else 0


def shift(engine: JournalEngine, step: int, now: int) -> None:
    """Move everything that was counted from the clock, which was set by `step` µs and says `now`."""
    log.warning("journal_clock_set seconds=%.3f", step / 1e6)
    engine.jobs.shift(step, now)
    engine.store.shift(step)
    engine.admin.expect_all(now)
    engine.listeners.forget_announcements()


def went_back(engine: JournalEngine, last: int, now: int) -> int:
    """
    Return by how much the clock went back since the last run (µs, not above 0).

    `last` is the clock's last known time, 0 if that is lost: then the largest timestamp is used instead, if
    that is further ahead than a correct clock allows.
    """
    newest = engine.newest_stamp()
    if newest > now + CLOCK_SKEW_US_MAX:
        log.warning(
            "journal_clock_behind seconds=%.0f: the newest change is from a clock ahead of this one",
            (newest - now) / 1e6,
        )
        last = last or newest
    return now - last if last - now >= CLOCK_STEP_US_MIN else 0
