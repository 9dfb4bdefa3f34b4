"""
Reading: from a start offset over all segments, to the present end, or following the log as it grows.

A reader takes no lock. It reads up to the end that the control page publishes (committed, or durable), checks every
header, the chain of headers and every payload, and returns whole batches only. Without a current control page it
reads what is valid. It never repairs: damage and gaps are raised, or skipped on request.
"""

from __future__ import annotations

import logging
import os
import time
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from virta.errors import LogClosedError, LogCorruptionError, LogError
from virta.log.engine import kernel
from virta.log.format.codec import REASONS, Status
from virta.log.format.damage import Problem, describe_damage, gap_error, problem_of
from virta.log.format.directory import segment_bases, segment_name
from virta.log.format.index import load_index
from virta.log.format.segment import FLAGS_UNLINKED, Position, Segment, unwritten
from virta.log.limits import (
    POLL_S,
    READ_CHUNK_BYTES,
    READ_RECORDS_MAX,
    SEGMENT_HEADER_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from virta.log.engine.kernel import Snapshot
    from virta.log.format.checkpoints import Checkpoints
    from virta.log.record import Record

FOREVER: Final = (1 << 63) - 1

logger = logging.getLogger("virta.log")


class History(Protocol):
    """Older segments of a log that are kept elsewhere, and fetched when a reader needs them."""

    @property
    def next(self) -> int:
        """The offset after the last record that is kept there."""

    def bases(self) -> list[int]:
        """Return the first offsets of its segments, in order."""

    def fetch(self, base: int) -> Path:
        """Return the directory that has the segment's file now; raise FileNotFoundError if there is none."""


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
        self.history = history

    def bases(self) -> list[int]:
        """Return the first offsets of all segments, in order; those of the history come first."""
        return all_bases(self.directory, self.history)

    def segment(self, base: int) -> Segment:
        """Open a segment here or in the history."""
        return open_segment(self.directory, base, self.history)

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


def open_segment(directory: Path, base: int, history: History | None) -> Segment:
    """Open a segment of a log's directory, or of its history."""
    try:
        return Segment(directory, base)
    except FileNotFoundError:
        if history is None:
            raise
    return Segment(history.fetch(base), base)


class Reader:
    """An iterator of records; `position` is the offset of the next record it will decode."""

    def __init__(
        self,
        source: LogSource,
        *,
        start: int,
        stop: int = FOREVER,
        topics: frozenset[bytes] | None = None,
        follow: bool = False,
        timeout: float | None = None,
        durable: bool = True,
        skip_gaps: bool = False,
        skip_damage: bool = False,
        verify: bool = False,
    ) -> None:
        self._source = source
        self._start = start
        self._stop = stop
        self._topics = topics
        self._follow = follow
        self._timeout = timeout
        self._durable = durable
        self._skip_gaps = skip_gaps
        self._skip_damage = skip_damage
        self._verify = verify
        self._segment: Segment | None = None
        self._at = Position(0, -1, start)
        self._buffer = bytearray(READ_CHUNK_BYTES)
        self._want = READ_CHUNK_BYTES
        self._sealed_next: int | None = None
        self._closed = False
        self.problems: list[Problem] = []
        self._batches = self._run()
        self._records: Iterator[Record] = chain.from_iterable(self._batches)

    # --- for the user ---

    @property
    def position(self) -> int:
        return max(self._at.next, self._start)

    def __iter__(self) -> Iterator[Record]:
        return self._records

    def __next__(self) -> Record:
        return next(self._records)

    def select(self, topics: frozenset[bytes] | None) -> None:
        """Deliver these topics only, from the next chunk on."""
        self._topics = topics

    def batches(self) -> Iterator[list[Record]]:
        """Return the records in lists, as they were decoded: faster than one by one."""
        return self._batches

    def close(self) -> None:
        """Close the file; iteration ends. A follower that waits in another thread ends soon."""
        self._closed = True
        if not self._batches.gi_running:  # type: ignore[attr-defined]
            self._batches.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the loop ---

    def _run(self) -> Iterator[list[Record]]:
        idle_since: float | None = None
        try:
            while not self._closed and self._at.next < self._stop:
                if self._source.closed():
                    raise LogClosedError(
                        f"the log at {self._source.directory} was closed while reading"
                    )
                seen = self._source.notified() if self._follow else 0
                before = self._at
                records, more = self._step()
                if records:
                    idle_since = None
                    yield records
                if more or self._at != before:
                    continue
                if not self._follow:
                    return
                now = time.monotonic()
                idle_since = now if idle_since is None else idle_since
                left = POLL_S
                if self._timeout is not None:
                    left = idle_since + self._timeout - now
                    if left <= 0:
                        return
                self._source.wait(seen, min(left, POLL_S))
        except OSError as exc:
            raise LogError(
                f"reading {self._source.directory} failed: {exc.strerror}; check the disk",
                code="log_read_failed",
            ) from exc
        finally:
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    def _step(self) -> tuple[list[Record], bool]:
        """Return the records of the next chunk, and whether to continue at once."""
        if self._sealed_next is not None:
            return [], self._next_segment(self._sealed_next)
        again = self._segment is None and self._open()
        segment = self._segment
        if segment is None:
            return [], again
        limit, published = self._limit(segment)
        size = min(self._want, limit - self._at.pos)
        if size <= 0:
            return [], self._at_end(segment, limit)
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        got = os.preadv(segment.fd, [memoryview(self._buffer)[:size]], self._at.pos)
        at = self._at
        records, pos, prev, following, code, detail = kernel.read(
            self._buffer,
            0,
            got,
            segment.header.salt,
            at.prev,
            at.next,
            self._start,
            self._stop,
            self._topics,
            self._verify,
            self._skip_gaps,
            READ_RECORDS_MAX,
        )
        self._at = Position(at.pos + pos, prev, following)
        self._source.checkpoints.add(segment.header, self._at)
        self._want = READ_CHUNK_BYTES
        status = Status(code)
        if status == Status.SEAL:
            self._sealed_next = detail
            return records, True
        if got < size and status == Status.END:
            status = Status.SHORT  # the file ends before its published end
        if status == Status.SHORT and got == size and self._at.pos + detail <= limit:
            self._want = max(READ_CHUNK_BYTES, detail)
            return records, True
        if status in REASONS:
            if records:
                return records, True  # return these first; the next step finds the damage again
            if not published and (status == Status.SHORT or unwritten(segment, self._at)):
                # Headroom, a batch that is being written, or a torn one: damage only in a sealed segment.
                return [], self._at_end(segment, limit, status)
            return [], self._damage(segment, status, limit)
        if status == Status.REPAIR:
            if records:
                return records, True
            self._raise_gap(following, following + detail)
        return records, status in {Status.FULL, Status.STOP}

    # --- where it may read ---

    def _limit(self, segment: Segment) -> tuple[int, bool]:
        """Return the byte up to which this segment may be read now, and whether that is a published end."""
        snapshot = self._source.snapshot()
        if snapshot is None or not snapshot.current:
            return segment.size, False
        if snapshot.active > segment.base:
            return segment.size, True
        if snapshot.active < segment.base:
            return SEGMENT_HEADER_BYTES, True  # created, but not yet published
        durable = (snapshot.durable_base, snapshot.durable_pos) >= (snapshot.active, snapshot.end)
        if self._durable and not durable and self._at.pos < snapshot.end:
            # Never return what a power failure could still remove.
            self._source.sync(segment.fd, snapshot.active, snapshot.end)
        return snapshot.end, True

    def _at_end(self, segment: Segment, limit: int, status: Status = Status.SHORT) -> bool:
        """Return whether to continue after the end of a segment without a seal, which is valid in the last one only."""
        if self._source.extend(segment):
            if segment.replaced:  # compacted: read on by offset in the new file
                segment.close()
                self._segment, self._at = None, Position(0, -1, self._at.next)
            return True
        snapshot = self._source.snapshot()
        if snapshot is not None and snapshot.current:
            sealed = snapshot.active > segment.base
        else:
            sealed = self._source.bases()[-1:] > [segment.base]
        if not sealed:
            return False
        return segment.size > limit or self._damage(segment, status, limit)

    def _is_missing(self, first: int) -> bool:
        """Return whether to retry when no segment from `first` on exists; raise if it was published and removed."""
        snapshot = self._source.snapshot()
        if snapshot is None or not snapshot.current or snapshot.next <= first:
            return False
        if snapshot.active in self._source.bases():
            return True  # it was created just now
        if not self._skip_gaps:
            self._raise_gap(first, snapshot.next)
        return False  # the next writer will continue after the gap

    def _segment_at(self, base: int) -> Segment | None:
        """Open a segment; return None after skipping one with a damaged header, if that is allowed."""
        try:
            return self._source.segment(base)
        except LogCorruptionError as exc:
            if not self._skip_damage:
                raise
            later = [b for b in self._source.bases() if b > base]
            following = later[0] if later else None
            problem = problem_of(exc, following)
            if problem not in self.problems:
                self.problems.append(problem)
                logger.warning("log_damage_skipped %s", problem)
            if self._segment is not None:
                self._segment.close()
            self._segment = self._sealed_next = None
            self._at = Position(0, -1, self._at.next if following is None else following)
            return None

    def _open(self) -> bool:
        """Open the segment of the position; return False while there is none."""
        bases = self._source.bases()
        wanted = self._at.next
        at_or_before = [base for base in bases if base <= wanted]
        if not at_or_before:
            if not bases:
                return self._is_missing(wanted)
            self._gap(wanted, bases[0])
            at_or_before = bases[:1]
        try:
            segment = self._segment_at(at_or_before[-1])
        except FileNotFoundError:
            return True  # removed by retention: try again
        if segment is None:
            return False
        self._segment = segment
        checkpoints = self._source.checkpoints
        index = load_index(segment.path.parent, segment.base, segment.header.salt)
        known = index.position(wanted) if index else checkpoints.find(segment.header, wanted)
        self._at = known or segment.start()
        return True

    def _next_segment(self, base: int) -> bool:
        """Open the segment after a seal; return False while it does not exist. A removed one is a gap."""
        sealed = self._segment
        assert sealed is not None
        prev = self._at.prev
        try:
            segment = self._segment_at(base)
        except FileNotFoundError:
            later = [b for b in self._source.bases() if b >= base]
            if not later:
                return self._is_missing(base)  # or the rollover is not finished
            if later[0] == base:
                return True  # it was created just now
            self._gap(base, later[0])
            try:
                segment = self._segment_at(later[0])
            except FileNotFoundError:
                return True  # retention removed it, too: try again
        if segment is None:
            return True
        unlinked = sealed.header.flags & FLAGS_UNLINKED or prev < 0 or segment.base != base
        if not unlinked and segment.header.prev_crc != prev:
            segment.close()
            name = str(self._source.directory / segment_name(base))
            raise Problem(name, 0, SEGMENT_HEADER_BYTES, base, None, "chain").error()
        sealed.close()
        self._segment = segment
        self._sealed_next = None
        self._at = segment.start()
        return True

    # --- gaps and damage ---

    def _gap(self, first: int, following: int) -> None:
        if self._skip_gaps:
            logger.warning("log_gap_skipped from=%d to=%d", first, following)
            self._at = Position(0, -1, following)
            return
        self._raise_gap(first, following)

    def _raise_gap(self, first: int, following: int) -> None:
        raise gap_error(self._source.directory, first, following)

    def _damage(self, segment: Segment, status: Status, limit: int) -> bool:
        """Raise for damage, or skip to the next valid batch and report it."""
        problem, after = describe_damage(segment, self._at, limit, REASONS[status])
        if not self._skip_damage:
            raise problem.error()
        self.problems.append(problem)
        logger.warning("log_damage_skipped %s", problem)
        if after is not None:
            self._at = after
            return True
        later = [b for b in self._source.bases() if b > segment.base]
        if later:
            segment.close()
            self._segment = None
            self._at = Position(0, -1, later[0])
            return True
        self._at = Position(limit, -1, self._at.next)
        return False
