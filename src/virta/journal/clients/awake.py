"""
Waiting awake: where the next bytes usually come within microseconds, sleeping costs more than they take.

A core that went to sleep needs about 40 µs to run again on a virtual machine, twice in a round trip, which
itself may take 50. So both ends may look again and again for a moment before they sleep: if they are asked
to, as this takes the core from others while it lasts. This is the plain half; the native one in
`native/look.h` notices when it has to share its core, and so needs not be asked.

Invariant: nobody waits awake for longer than AWAKE_S_MAX at a time, and only while waits were usually
shorter than that. A process with one core never does.
"""

from __future__ import annotations

import os
from socket import MSG_DONTWAIT
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from socket import socket

AWAKE_S_MAX = 0.000_5
# A client's, without being asked to: time for a sync of a quick disk.
REPLY_LOOK_S_MAX = 0.000_4
RECEIVE_BYTES = 65_536
_LEARNING = 0.2


def possible() -> bool:
    """Whether somebody else can run while this process waits."""
    return len(os.sched_getaffinity(0)) > 1


class Awake:
    """One end of a connection: whether to wait awake there, learned from how long waits were."""

    __slots__ = ("_socket", "_usual")

    def __init__(self, socket: socket) -> None:
        self._socket = socket
        self._usual = 2 * AWAKE_S_MAX

    def worthwhile(self) -> bool:
        return self._usual < AWAKE_S_MAX

    def learn(self, waited: float) -> None:
        self._usual += _LEARNING * (min(waited, 4 * AWAKE_S_MAX) - self._usual)

    def receive(self) -> bytes | None:
        """What comes soon, None if nothing does; nothing but what the socket would say anyway."""
        end = perf_counter() + AWAKE_S_MAX
        receive = self._socket.recv
        while True:
            try:
                return receive(RECEIVE_BYTES, MSG_DONTWAIT)
            except BlockingIOError:
                if perf_counter() > end:
                    return None
