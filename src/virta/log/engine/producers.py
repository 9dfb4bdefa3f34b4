"""
The last batch of each idempotent producer, in any process.

Indexes of sealed segments contain it; the rest is read from the batches appended since.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from virta.log.format.codec import PRODUCER_ANONYMOUS
from virta.log.format.directory import segment_bases
from virta.log.format.index import Producers, load_producers, remember
from virta.log.format.segment import Position, Segment, Walk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.log.engine.kernel import Snapshot


class ProducerTable:
    """The last sequence number and offset of each producer. Used under the write lock only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._producers: Producers = {}
        self._read_to: tuple[int, Position] | None = None  # base of a segment, position in it

    def last(self, producer: int, snapshot: Callable[[], Snapshot]) -> tuple[int, int] | None:
        """Return the sequence number and offset of a producer's last batch, None when it has none."""
        self._catch_up(snapshot)
        return self._producers.get(producer)

    def _catch_up(self, snapshot: Callable[[], Snapshot]) -> None:
        """Read the batches appended since the last call: by others, or before the log was opened."""
        bases = segment_bases(self._directory)
        if self._read_to is None or self._read_to[0] != bases[-1]:
            # Sealed since, perhaps even compacted: only the index still lists batches that were removed.
            self._read_to = load_producers(self._directory, bases, self._producers)
        base, at = self._read_to
        for number in [b for b in bases if b >= base]:
            # Retention may have removed it since.
            with suppress(FileNotFoundError), Segment(self._directory, number) as segment:
                start = at if number == base else segment.start()
                now = snapshot()
                limit = now.end if now.active == number else segment.size
                walk = Walk(segment, start, limit)
                for batches in walk:
                    for batch in batches:
                        if batch.producer > PRODUCER_ANONYMOUS:
                            remember(self._producers, batch.producer, batch.sequence, batch.base)
                self._read_to = (number, walk.end.at)
