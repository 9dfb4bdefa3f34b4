"""Wait for a condition with a deadline: the only place where tests of servers and clients poll."""

from __future__ import annotations

import asyncio
import time

DEADLINE_S = 20.0
PAUSE_S = 0.01


def wait_until(condition, what="the condition", *, seconds=DEADLINE_S, pause=PAUSE_S):
    """Return the first true result of `condition`; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(pause)
    return found


async def until(condition, what="the condition", *, seconds=DEADLINE_S, pause=0.001):
    """Return the first true result of `condition` while the loop runs; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        await asyncio.sleep(pause)
    return found


async def turns(count=1):
    """Let every task that is ready run, `count` times: for tests about the order of turns."""
    for _ in range(count):
        await asyncio.sleep(0)
