"""
A timer wheel: one timer for the deadlines of all connections.

An object on the wheel has a `deadline` (seconds of the loop's clock); its `expired` is called after that,
at most one slot late. Moving a deadline later costs one assignment: the wheel checks it when the old slot
is due. The timer is set for the next slot that has an object: without deadlines the wheel sleeps.
"""

from __future__ import annotations

import logging
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("virta.server")

SLOT_S = 0.05
# Loops count in milliseconds and may call this much too early.
EARLY_S = 0.001
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
        self._order: list[
            int
        ] = []  # a heap with the numbers of all slots, and of some that are empty now
        self._ordered: set[int] = set()  # its members
        self._due = NEVER  # the slot that the timer waits for
        self._handle: asyncio.TimerHandle | None = None
        self._running = False

    @property
    def now(self) -> float:
        """Seconds of the loop's clock."""
        return self._loop.time()

    def start(self) -> None:
        self._running = True
        self._schedule()

    def stop(self) -> None:
        self._running = False
        if self._handle is not None:
            self._handle.cancel()
        self._slots.clear()

    def set(self, timed: Timed, deadline: float) -> None:
        """Give an object a deadline, earlier or later than the one it has."""
        timed.deadline = deadline
        if deadline == NEVER or timed.slot == REMOVED:
            return
        slot = int(deadline / SLOT_S) + 1
        if timed.slot == UNSET or slot < timed.slot:
            self._discard(timed)
            timed.slot = slot
            self._slots.setdefault(slot, set()).add(timed)
            if slot not in self._ordered:
                self._ordered.add(slot)
                heappush(self._order, slot)
                if slot < self._due:
                    self._schedule()

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

    def _schedule(self) -> None:
        """Set the timer for the next slot that is not empty."""
        while self._order and self._order[0] not in self._slots:
            self._ordered.discard(heappop(self._order))
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._due = self._order[0] if self._order else NEVER
        if self._order and self._running:
            self._handle = self._loop.call_at(self._due * SLOT_S + EARLY_S, self._turn)

    def _turn(self) -> None:
        self._due = -1  # objects that expire set deadlines: one schedule after all of them
        now = self._loop.time()
        while self._order and self._order[0] * SLOT_S <= now:
            slot = heappop(self._order)
            self._ordered.discard(slot)
            for timed in self._slots.pop(slot, ()):
                if timed.slot == REMOVED:
                    continue  # removed by another object that expired in this slot
                timed.slot = UNSET
                if timed.deadline <= now:
                    self._expire(timed, now)
                else:
                    self.set(timed, timed.deadline)
        self._schedule()

    def _expire(self, timed: Timed, now: float) -> None:
        try:
            timed.expired(now)
        except Exception:
            # Unexpected; the other objects of the slot still have to expire.
            logger.exception("deadline_failed")
