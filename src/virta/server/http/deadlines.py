"""
A timer wheel: one timer for the deadlines of all connections.

An object on the wheel has a `deadline` (seconds of the loop's clock); its `expired` is called after that,
at most one slot late. Moving a deadline later costs one assignment: the wheel checks it when the old slot
is due.
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
UNSET = -1
REMOVED = -2


class Timed(Protocol):
    """Something with a deadline."""

    deadline: float
    slot: int  # its slot on the wheel, UNSET or REMOVED

    def expired(self, now: float) -> None:
        """React to the deadline; set a new one if there is one."""


class TimerWheel:
    """Deadlines, in slots of equal length."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Each object is in at most one slot, the one it names: sets make removal cheap.
        self._slots: dict[int, set[Timed]] = {}
        self.now = loop.time()  # at the last slot: precise enough for deadlines
        self._done = int(self.now / SLOT_S)
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._handle = self._loop.call_later(SLOT_S, self._turn)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._slots.clear()

    def set(self, timed: Timed, deadline: float) -> None:
        """Give an object a deadline, earlier or later than the one it has."""
        timed.deadline = deadline
        if deadline == NEVER or timed.slot == REMOVED:
            return
        slot = max(int(deadline / SLOT_S) + 1, self._done + 1)
        if timed.slot == UNSET or slot < timed.slot:
            self._discard(timed)
            timed.slot = slot
            self._slots.setdefault(slot, set()).add(timed)

    def remove(self, timed: Timed) -> None:
        """Remove a closed object permanently: a deadline set later does not add it again."""
        timed.deadline = NEVER
        self._discard(timed)
        timed.slot = REMOVED

    def _discard(self, timed: Timed) -> None:
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
                timed.slot = UNSET
                if timed.deadline <= now:
                    self._expire(timed, now)
                else:
                    self.set(timed, timed.deadline)

    def _expire(self, timed: Timed, now: float) -> None:
        try:
            timed.expired(now)
        except Exception:
            # Unexpected; the other objects of the slot still have to expire.
            logger.exception("deadline_failed")
