"""
Places in the active segment that readers of this process have passed.

A sealed segment has an index; the active one has none yet, so a reader that starts near its end would check
every batch before it. `Checkpoints` remembers one position per `INDEX_STEP_BYTES` at most, and only for one segment.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING

from virta.log.limits import INDEX_STEP_BYTES

if TYPE_CHECKING:
    from virta.log.format.segment import Position, SegmentHeader

_offset = attrgetter("next")


class Checkpoints:
    """Positions in one segment, in order; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Recovery that drops published offsets changes the epoch: positions of another epoch do not count.
        self._segment: tuple[int, int, int] | None = None
        self._positions: list[Position] = []

    def add(self, header: SegmentHeader, position: Position) -> None:
        """Remember a position that a reader reached, if it is far enough behind the last one."""
        segment = header.generation
        with self._lock:
            if segment != self._segment:
                if self._segment is not None and segment < self._segment:
                    return  # the reader is in an older segment
                self._segment, self._positions = segment, []
            last = self._positions[-1].pos if self._positions else 0
            if position.pos - last >= INDEX_STEP_BYTES and position.prev >= 0:
                self._positions.append(position)

    def find(self, header: SegmentHeader, offset: int) -> Position | None:
        """Return the last position at or before an offset, None when none is known."""
        with self._lock:
            if header.generation != self._segment:
                return None
            at = bisect_right(self._positions, offset, key=_offset) - 1
            return self._positions[at] if at >= 0 else None
