"""
Sending much on a line that blocks.

Invariant: whoever sends takes what comes meanwhile. A daemon whose replies nobody reads does not read
either, and two that only write wait for each other.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def send_and_hear(
    line: socket.socket, data: bytes, timeout: float | None, hear: Callable[[], None]
) -> None:
    """All of it; `hear` is called when there is something to read. TimeoutError: nothing moved for so long."""
    rest = memoryview(data)
    ready = select.poll()
    ready.register(line, select.POLLIN | select.POLLOUT)
    while True:
        with contextlib.suppress(BlockingIOError):
            rest = rest[line.send(rest, socket.MSG_DONTWAIT) :]
        if not rest:
            return
        found = ready.poll(None if timeout is None else timeout * 1000)
        if not found:
            raise TimeoutError
        if found[0][1] & ~select.POLLOUT:
            hear()
