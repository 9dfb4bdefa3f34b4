"""
What a reader needs of its log: its segments, here or in a history elsewhere, what is published, and how to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from virta.log.format.directory import segment_bases
from virta.log.format.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.log.engine.kernel import Snapshot
    from virta.log.format.checkpoints import Checkpoints
    from virta.log.format.topic_lookup import TopicLookup, TopicPlaces


class IndexedSegment(NamedTuple):
    """A segment of the history whose topic index is in `directory`: its salt and size."""

    directory: Path
    salt: int
    bytes: int


class History(Protocol):
    """Older segments of a log that are kept elsewhere, and fetched when a reader needs them."""

    @property
    def next(self) -> int:
        """The offset after the last record that is kept there."""

    def bases(self) -> list[int]:
        """Return the first offsets of its segments, in order."""

    def fetch(self, base: int) -> Path:
        """Return the directory that has the segment's file now; raise FileNotFoundError if there is none."""

    def topic_index(self, base: int) -> IndexedSegment | None:
        """Fetch the topic index of a sealed segment without the segment; None if there is none."""

    def fetch_ranges(self, base: int, ranges: list[tuple[int, int]]) -> Segment | None:
        """Open a segment of which only these bytes are needed; None if fetching it whole is better."""


class LogSource:
    """What a reader needs of its log: where it is, what is published, and how to wait."""

    def __init__(
        self,
        directory: Path,
        *,
        snapshot: Callable[[], Snapshot | None],
        sync: Callable[[int, int, int], None],
        notified: Callable[[], int],
        wait: Callable[[int, float], None],
        wake: Callable[[], None],
        closed: Callable[[], bool],
        checkpoints: Checkpoints,
        topic_lookup: TopicLookup,
        history: History | None = None,
    ) -> None:
        self.directory = directory
        self.snapshot = snapshot  # the control page, None where there is none
        self.sync = sync  # (segment fd, base, end): make durable what a reader is about to return
        self.notified = notified
        self.wait = wait
        self.wake = wake  # end every wait of this handle
        self.closed = closed
        self.checkpoints = checkpoints
        self.topic_lookup = topic_lookup
        self.history = history

    def bases(self) -> list[int]:
        """Return the first offsets of all segments, in order; those of the history come first."""
        return all_bases(self.directory, self.history)

    def open_segment(self, base: int, found: TopicPlaces | None = None) -> Segment:
        """Open a segment here or in the history: there, `found` may be all that is fetched of it."""
        try:
            return Segment(self.directory, base)
        except FileNotFoundError:
            if self.history is None:
                raise
        partial = None
        if found is not None and found.path is None:
            ranges = [(run.pos, run.end) for run in found.runs()]
            partial = self.history.fetch_ranges(base, ranges)
        return Segment(self.history.fetch(base), base) if partial is None else partial

    def find_topics(self, base: int, topics: frozenset[bytes], start: int) -> TopicPlaces | None:
        """Return which batches of a sealed segment have records of the topics from `start` on, if that is known."""
        return self.topic_lookup.find(base, topics, start, self.history)

    def extend(self, segment: Segment) -> bool:
        """Fetch what the history has more of an open segment by now; return whether its file has changed."""
        if self.history is None or segment.path.parent == self.directory:
            return False
        before = segment.size
        self.history.fetch(segment.base)
        return segment.size > before or segment.replaced


def all_bases(directory: Path, history: History | None) -> list[int]:
    """Return the first offsets of a log's segments, in order: those of the history, then those of its directory."""
    bases = segment_bases(directory)
    if history is None:
        return bases
    return [base for base in history.bases() if not bases or base < bases[0]] + bases
