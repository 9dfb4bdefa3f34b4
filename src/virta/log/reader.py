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
from bisect import bisect_right
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final

from virta.errors import LogClosedError, LogCorruptionError, LogError
from virta.log.engine import kernel
from virta.log.format.codec import REASONS, Status
from virta.log.format.damage import Problem, describe_damage, gap_error, problem_of
from virta.log.format.directory import segment_name
from virta.log.format.index import load_index
from virta.log.format.segment import FLAGS_UNLINKED, Position, Segment, unwritten
from virta.log.limits import (
    POLL_S,
    READ_CHUNK_BYTES,
    READ_RECORDS_MAX,
    SEGMENT_HEADER_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.log.engine.source import LogSource
    from virta.log.format.codec import Read
    from virta.log.format.topic_lookup import TopicPlaces, TopicRun
    from virta.log.record import Record

FOREVER: Final = (1 << 63) - 1
_READ_ONLY: Final = os.O_RDONLY | os.O_CLOEXEC

logger = logging.getLogger("virta.log")


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
        self._buffer = bytearray()
        self._want = READ_CHUNK_BYTES
        self._sealed_next: int | None = None
        # With topics: the batches of this segment still to read, the end of the current ones, and what follows them.
        self._runs: deque[TopicRun] | None = None
        self._run_end = 0
        self._run_from = self._after_runs = self._at
        self._in_order = (
            -1
        )  # this segment is read in order: its topic index or its batches are damaged
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
        self._runs = None

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
            return self._next_segment(self._sealed_next)
        segment = self._segment
        if segment is None:
            records, again = self._open()
            segment = self._segment
            if segment is None or records:
                return records, again
        limit, published = self._limit(segment)
        bound = limit
        if self._runs is not None:
            if self._at.pos >= self._run_end and not self._next_run():
                return [], True
            bound = min(self._run_end, limit)
        size = min(self._want, bound - self._at.pos)
        if size <= 0:
            return [], self._leave_runs() or self._at_end(segment, limit)
        records, status, detail, got = self._read_chunk(segment, size)
        if status == Status.SEAL:
            self._sealed_next = detail
            return records, True
        if got < size and status == Status.END:
            status = Status.SHORT  # the file ends before its published end
        if status == Status.SHORT and got == size and self._at.pos + detail <= bound:
            self._want = max(READ_CHUNK_BYTES, detail)
            return records, True
        if status in REASONS or status == Status.REPAIR:
            # Return the records before it first; the next step finds it again.
            return records, bool(records) or self._obstacle(
                segment, status, detail, limit, published=published
            )
        return records, status in {Status.FULL, Status.STOP}

    def _read_chunk(self, segment: Segment, size: int) -> tuple[list[Record], Status, int, int]:
        """Decode the next `size` bytes: the records, why that ended, its detail, and the bytes there were."""
        at = self._at
        (records, pos, prev, following, code, detail), got = self._decode(
            segment.fd, segment.header.salt, *at, size
        )
        self._at = Position(at.pos + pos, prev, following)
        if pos:
            self._run_from = self._at
        self._source.checkpoints.add(segment.header, self._at)
        self._want = READ_CHUNK_BYTES
        return records, Status(code), detail, got

    def _decode(
        self, fd: int, salt: int, pos: int, prev: int, following: int, size: int
    ) -> tuple[Read, int]:
        """Read and decode `size` bytes at a position: what `kernel.read` returns, and the bytes there were."""
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        got = os.preadv(fd, [memoryview(self._buffer)[:size]], pos)
        return kernel.read(
            self._buffer, 0, got, salt, prev, following, self._start, self._stop,
            self._topics, self._verify, self._skip_gaps, READ_RECORDS_MAX,
        ), got  # fmt: skip

    def _obstacle(
        self, segment: Segment, status: Status, detail: int, limit: int, *, published: bool
    ) -> bool:
        """Handle what is no valid batch at the position; return whether to continue at once."""
        if status == Status.REPAIR:
            self._raise_gap(self._at.next, self._at.next + detail)
        if self._leave_runs():
            return True
        if not published and (status == Status.SHORT or unwritten(segment, self._at)):
            # Headroom, a batch that is being written, or a torn one: damage only in a sealed segment.
            return self._at_end(segment, limit, status)
        return self._damage(segment, status, limit)

    # --- topics ---

    def _next_run(self) -> bool:
        """Move to the next batches of the topics; return False after the last ones of the segment."""
        assert self._runs is not None
        if self._runs:
            run = self._runs.popleft()
            self._at, self._run_end = Position(run.pos, -1, run.base), run.end
            return True
        self._runs = None
        if self._after_runs.pos < 0:
            self._sealed_next = self._after_runs.next
            self._at = self._at._replace(prev=-1, next=self._after_runs.next)
        elif self._after_runs.pos > self._at.pos:
            self._at = self._after_runs
        return False

    def _leave_runs(self) -> bool:
        """If only runs are read, go back to the last good one and read in order: index or segment are damaged."""
        if self._runs is None:
            return False
        self._runs, self._at = None, self._run_from
        segment = self._segment
        if segment is not None and segment.partial:  # the rest of it has to be fetched
            self._in_order = segment.base
            self._forget_segment()
        return True

    def _enter(self, segment: Segment, found: TopicPlaces | None) -> list[Record] | None:
        """Begin with a segment: with its batches of the topics if they are known, else return None."""
        self._segment, self._sealed_next, self._runs = segment, None, None
        if found is None:
            found = self._find_active_topics(segment)
        if found is None or found.salt != segment.header.salt:
            return None
        if found.after.pos >= 0 and found.end <= self._limit(segment)[0]:
            records = self._read_places(segment.fd, found)
            if records is not None:
                self._at = found.after
                return records
        self._at = self._run_from = segment.start()
        self._runs, self._run_end, self._after_runs = deque(found.runs()), 0, found.after
        return []

    def _find_topics(self, base: int) -> TopicPlaces | None:
        """Return the batches of the topics in a sealed segment from the position on, if they are known."""
        if self._topics is None or self._verify or base == self._in_order:
            return None
        return self._source.find_topics(base, self._topics, self._at.next)

    def _pass_segment(self, found: TopicPlaces | None) -> list[Record] | None:
        """Read what the topics have in a sealed segment, and go on after it; None: open it, and read with care."""
        if found is None or (found.places and found.path is None):
            return None
        records: list[Record] | None = []
        if found.places:
            try:
                fd = os.open(found.path or "", _READ_ONLY)
            except FileNotFoundError:
                return None
            try:
                records = self._read_places(fd, found)
            finally:
                os.close(fd)
        if records is not None:
            self._sealed_next = found.after.next
            self._at = Position(0, -1, found.after.next)
        return records

    def _read_places(self, fd: int, found: TopicPlaces) -> list[Record] | None:
        """Return the records of a few batches; None if they are many, damaged, or mark a gap."""
        records: list[Record] = []
        left = READ_CHUNK_BYTES
        for pos, size, offset in found.places:
            left -= size
            if left < 0:
                return None
            read, _ = self._decode(fd, found.salt, pos, -1, found.base + offset, size)
            if read[1] < size:
                return None
            records += read[0]
        return records

    def _find_active_topics(self, segment: Segment) -> TopicPlaces | None:
        """Return those of the active segment up to its published end, if they are known."""
        snapshot = self._source.snapshot()
        if self._topics is None or self._verify or snapshot is None or not snapshot.current:
            return None
        if snapshot.active != segment.base:
            return None
        return self._source.topic_lookup.find_active(
            segment, self._topics, self._at.next, snapshot.end
        )

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
                self._forget_segment()
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

    def _segment_at(self, base: int, found: TopicPlaces | None) -> Segment | None:
        """Open a segment; return None after skipping one with a damaged header, if that is allowed."""
        try:
            return self._source.open_segment(base, found)
        except LogCorruptionError as exc:
            if not self._skip_damage:
                raise
            later = [b for b in self._source.bases() if b > base]
            following = later[0] if later else None
            problem = problem_of(exc, following)
            if problem not in self.problems:
                self.problems.append(problem)
                logger.warning("log_damage_skipped %s", problem)
            self._forget_segment(following)
            self._sealed_next = None
            return None

    def _forget_segment(self, following: int | None = None) -> None:
        """Open another segment in the next step: that of the position, or of the offset `following`."""
        if self._segment is not None:
            self._segment.close()
        self._segment = None
        self._at = Position(0, -1, self._at.next if following is None else following)

    def _open(self) -> tuple[list[Record], bool]:
        """Open or pass the segment of the position: its records so far, and whether to continue at once."""
        bases = self._source.bases()
        wanted = self._at.next
        at_or_before = bisect_right(bases, wanted)
        if not at_or_before:
            if not bases:
                return [], self._is_missing(wanted)
            self._gap(wanted, bases[0])
            at_or_before = 1
        base = bases[at_or_before - 1]
        found = self._find_topics(base)
        records = self._pass_segment(found)
        if records is not None:
            return records, True
        try:
            segment = self._segment_at(base, found)
        except FileNotFoundError:
            return [], True  # removed by retention: try again
        if segment is None:
            return [], False
        records = self._enter(segment, found)
        if records is None:
            self._at = self._position_in(segment, wanted)
        return records or [], True

    def _position_in(self, segment: Segment, offset: int) -> Position:
        """Return the last known position at or before an offset."""
        index = load_index(segment.path.parent, segment.base, segment.header.salt)
        if index is not None:
            return index.position(offset) or segment.start()
        return self._source.checkpoints.find(segment.header, offset) or segment.start()

    def _next_segment(self, base: int) -> tuple[list[Record], bool]:
        """Open or pass the segment after a seal; False while it does not exist. A removed one is a gap."""
        sealed, prev = self._segment, self._at.prev
        found = self._find_topics(base)
        records = self._pass_segment(found)
        if records is not None:
            return records, True
        try:
            segment = self._segment_at(base, found)
        except FileNotFoundError:
            later = [b for b in self._source.bases() if b >= base]
            if not later:
                return [], self._is_missing(base)  # or the rollover is not finished
            if later[0] == base:
                return [], True  # it was created just now
            self._gap(base, later[0])
            try:
                segment = self._segment_at(later[0], None)
            except FileNotFoundError:
                return [], True  # retention removed it, too: try again
        if segment is None:
            return [], True
        linked = sealed is not None and not sealed.header.flags & FLAGS_UNLINKED
        if linked and prev >= 0 and segment.base == base and segment.header.prev_crc != prev:
            segment.close()
            name = str(self._source.directory / segment_name(base))
            raise Problem(name, 0, SEGMENT_HEADER_BYTES, base, None, "chain").error()
        if sealed is not None:
            sealed.close()
        records = self._enter(segment, found)
        if records is None:
            self._at = segment.start()
        return records or [], True

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
            self._forget_segment(later[0])
            return True
        self._at = Position(limit, -1, self._at.next)
        return False
