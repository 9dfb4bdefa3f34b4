"""
Which command of a uri was finished last: a spool may send it again, and it must not run again.

Invariant: the newest finished command of a uri is known for at least FINISHED_US after it finished,
unless more than FINISHED_MAX others finished since.
"""

from __future__ import annotations

from collections import deque

# As long as a spool may be cut off from its daemon.
FINISHED_US = 7 * 24 * 3600 * 1_000_000
FINISHED_MAX = 1_000_000


class Finished:
    def __init__(self) -> None:
        self.commands: dict[bytes, int] = {}
        self._order: deque[tuple[int, bytes, int]] = deque()

    def last(self, uri: bytes) -> int:
        """The timestamp of the last finished command, -1 if none is known."""
        return self.commands.get(uri, -1)

    def remember(self, uri: bytes, timestamp: int, now: int) -> None:
        if self.commands.get(uri, -1) < timestamp:
            self.commands[uri] = timestamp
            self._order.append((now, uri, timestamp))

    def tick(self, now: int) -> None:
        order = self._order
        while order and (order[0][0] <= now - FINISHED_US or len(order) > FINISHED_MAX):
            _, uri, timestamp = order.popleft()
            if self.commands.get(uri) == timestamp:
                del self.commands[uri]

    def shift(self, step: int) -> None:
        """Move all times by `step` µs after the clock was set, so entries expire as they would have."""
        moved = [(when + step, uri, timestamp) for when, uri, timestamp in self._order]
        self._order.clear()  # keep the same object: `tables` has returned it
        self._order.extend(moved)

    def all(self) -> list[tuple[int, bytes, int]]:
        """(when, uri, timestamp), oldest first."""
        return list(self._order)
