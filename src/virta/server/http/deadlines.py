"""
One timer for all deadlines: a wheel of slots instead of a timer per connection.

Whoever is on the wheel has a `deadline` (seconds of the loop's clock) and is called with `expired`
once that has passed, at most one slot late. Moving a deadline later costs one assignment: the wheel
looks at it when the old slot comes round.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("virta.server")

SLOT_S = 0.05
NEVER = float("inf")
# Values of `Timed.slot` besides slot numbers.
OFF_WHEEL = -1
REMOVED = -2


class Timed(Protocol):
    """Something with a deadline."""

    deadline: float
    slot: int  # its slot on the wheel, OFF_WHEEL or REMOVED

    def expired(self, now: float) -> None:
        """The deadline has passed; set a new one and come back on the wheel if there is one."""


class Wheel:
    """Deadlines of everything that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Each object is in at most one slot, the one it names: sets make removal cheap.
        self._slots: dict[int, set[Timed]] = {}
        self.now = loop.time()  # as of the last turn: good enough for whoever counts in slots
        self._done = int(self.now / SLOT_S)
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._handle = self._loop.call_later(SLOT_S, self._turn)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._slots.clear()

    def set(self, timed: Timed, deadline: float) -> None:
        """Give something a deadline, earlier or later than the one it has."""
        timed.deadline = deadline
        if deadline == NEVER or timed.slot == REMOVED:
            return
        slot = max(int(deadline / SLOT_S) + 1, self._done + 1)
        if timed.slot == OFF_WHEEL or slot < timed.slot:
            self._take_out(timed)
            timed.slot = slot
            self._slots.setdefault(slot, set()).add(timed)

    def remove(self, timed: Timed) -> None:
        """Remove a closed object permanently: a deadline set later does not add it again."""
        timed.deadline = NEVER
        self._take_out(timed)
        timed.slot = REMOVED

    def _take_out(self, timed: Timed) -> None:
        slot = self._slots.get(timed.slot)
        if slot is not None:
            slot.discard(timed)
            if not slot:
                del self._slots[timed.slot]

    def _turn(self) -> None:
        self._handle = self._loop.call_later(SLOT_S, self._turn)
        now = self.now = self._loop.time()
        while self._done < int(now / SLOT_S):
            self._done += 1
            for timed in self._slots.pop(self._done, ()):
                if timed.slot == REMOVED:
                    continue  # removed by another object that expired in this slot
                timed.slot = OFF_WHEEL
                if timed.deadline <= now:
                    self._expire(timed, now)
                else:
                    self.set(timed, timed.deadline)

    def _expire(self, timed: Timed, now: float) -> None:
        try:
            timed.expired(now)
        except Exception:
            # Nobody foresaw this one; the others of its slot would never be looked at again.
            logger.exception("deadline_failed")
