"""
Where the records of an offset range lie: segments, their sparse indexes, and splits.

A log is a directory, object storage, or both; a segment that is only in object storage is planned by the manifest and
the shipped index, and executors read the bytes of their splits from there.

    log directory ── segments ── batches ── splits (file, salt, byte range, offset range)

Invariants: a split starts and ends on batch boundaries; the splits of a range cover each of its offsets once.
Offsets are authoritative and bytes a hint: the salt in a split identifies the generation of the file, and a reader
that finds another one (compaction) plans again by offset.

A sealed segment is planned by the log's own index. Others are walked by their batch headers; a `Plan` keeps what it
has walked, so that a stream that plans many times a second reads only new headers.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import virta
from virta.errors import LogCorruptionError, LogFormatError, TierError
from virta.log.format.codec import REASONS, Status
from virta.log.format.damage import Problem, describe_damage, gap_error, problem_of
from virta.log.format.directory import index_name, segment_bases, segment_name
from virta.log.format.index import BatchRun, Index, load_index
from virta.log.format.segment import Position, Segment, SegmentHeader, parse_header
from virta.log.limits import INDEX_STEP_BYTES
from virta.log.reader import FOREVER
from virta.spark.source.arrow import kernel
from virta.tier.history import TierHistory

if TYPE_CHECKING:
    from virta.log.engine.source import LogSource
    from virta.tier.remote import RemoteSegment

SPLIT_BYTES = 32 * 1024 * 1024  # a task of a fifth of a second; small enough to balance two cores
ENDS_COST_RATIO = 10  # asking for the end takes at most a tenth of a stream's idle time
SPLITS_MAX = 100_000  # a larger plan should be several reads
SKIP_DAMAGE = "Run `virta log repair`, or read with onCorruption=skip"
SKIP_GAPS = "onGap=skip"


@dataclass(frozen=True)
class Split:
    """The input of a task: batches of one file generation and the offsets requested of them."""

    path: str
    salt: int
    pos: int
    end: int
    base: int
    start: int
    stop: int
    remote: RemoteSegment | None = None  # in object storage, else a file

    def open(self) -> Segment:
        """
        Open the segment file, or the split's bytes of a segment in object storage.

        Raises:
            FileNotFoundError: it was removed or replaced.
            LogCorruptionError: its header is damaged.
        """
        if self.remote is not None:
            try:
                return self.remote.open(self.pos, self.end)
            except TierError as exc:
                if exc.code == "tier_object_missing":
                    raise FileNotFoundError(exc.message) from exc
                raise
        return open_segment(Path(self.path).parent, int(Path(self.path).stem))


def open_segment(place: Path | LogSource, base: int) -> Segment:
    """Open a segment; raise LogCorruptionError with this source's advice if its header is damaged."""
    try:
        return Segment(place, base) if isinstance(place, Path) else place.open_segment(base)
    except LogCorruptionError as error:
        raise problem_of(error).error(SKIP_DAMAGE) from error


@dataclass
class SegmentRuns:
    """The batch runs of one file generation, extended as the file grows."""

    path: str
    header: SegmentHeader
    at: Position
    runs: list[BatchRun] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    sealed: bool = False
    remote: RemoteSegment | None = None

    @classmethod
    def shipped(cls, remote: RemoteSegment, index: Index) -> SegmentRuns:
        """Return the runs of a sealed segment in object storage; only its header and index are read."""
        path = Path(segment_name(remote.base))
        size = remote.size
        return cls(
            str(path), parse_header(remote.header(), path), Position(size, -1, index.next), index.runs(size),
            sealed=True, remote=remote,
        )  # fmt: skip

    @classmethod
    def of(cls, segment: Segment) -> SegmentRuns:
        """Return the runs of a segment: those of its index if it has a valid one, else none yet."""
        found = cls(str(segment.path), segment.header, segment.start())
        index = load_index(segment.path.parent, segment.base, segment.header.salt)
        if index is not None and is_newer(
            segment.path.with_name(index_name(segment.base)), segment
        ):
            found.sealed, found.at = True, Position(segment.size, -1, index.next)
            found.runs = index.runs(segment.size)
        return found

    def extend(self, segment: Segment, needed: int, *, skip: bool) -> None:
        """
        Walk up to offset `needed`, which is published, or to the end of the file.

        Damage before that is raised, or skipped and kept in `problems`. Nothing after it is read: a batch that is
        not published may be cut off by recovery and replaced.
        """
        end = segment.size
        while not self.sealed and self.at.pos < end and self.at.next < needed:
            entries, pos, prev, following, state, _, last_time = kernel.index(
                segment.fd, self.at.pos, end, self.header.salt, self.at.prev, self.at.next, needed,
                INDEX_STEP_BYTES,
            )  # fmt: skip
            self.at = Position(pos, prev, following)
            # A run ends where the next one begins, and no batch in it is later than that one's first.
            bounds = [*entries, (pos, following, last_time)]
            self.runs += [
                BatchRun(*(at, end), *(base, after), *(begun, ended))
                for (at, base, begun), (end, after, ended) in pairwise(bounds)
            ]
            self.sealed = state == Status.SEAL
            if state in REASONS and following < needed:
                problem, behind = describe_damage(segment, self.at, end, REASONS[Status(state)])
                if not skip:
                    raise problem.error(SKIP_DAMAGE)
                self.problems.append(problem)
                self.at = behind or Position(end, -1, FOREVER)


def is_newer(index: Path, segment: Segment) -> bool:
    """Return whether an index is newer than its segment: a repair moves batches and leaves the index."""
    try:
        return index.stat().st_mtime_ns >= os.fstat(segment.fd).st_mtime_ns
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Ends:
    """The range of a log: offsets from `first`, readable up to (not including) `end`."""

    first: int
    end: int
    epoch: int


class Plan:
    """Plans reads of one log directory; keeps the log open."""

    def __init__(
        self, root: str, *, skip_corruption: bool = False, skip_gaps: bool = False
    ) -> None:
        self.skip_corruption = skip_corruption
        self.skip_gaps = skip_gaps
        self.log = virta.open(root, create=False, read_only=True)
        self.root = self.log.path
        self.indexes: dict[int, SegmentRuns] = {}
        self.unreadable: dict[int, Problem] = {}  # segments without a valid header
        self.known: Ends | None = None
        self.known_until = 0.0

    def close(self) -> None:
        self.log.close()

    def ends(self) -> Ends:
        """
        Return the readable range; the log is made durable up to its end first, as for any reader.

        An idle stream asks a hundred times a second. That is cheap while a writer is open; without one the last
        segment has to be walked, so a result is cached for a time that grows with its cost.
        """
        bases = self.log.source.bases()
        if not bases:
            return Ends(0, 0, 0)
        begun = time.monotonic()
        if self.known is None or begun >= self.known_until:
            end = self.log.next_offset
            bases = self.log.source.bases()  # again: the end may be in a new segment
            if segment_bases(self.root) and (self.known is None or end != self.known.end):
                with open_segment(self.root, bases[-1]) as segment:
                    os.fdatasync(segment.fd)
            self.known = Ends(bases[0], end, self.log.epoch)
            now = time.monotonic()
            self.known_until = now + ENDS_COST_RATIO * (now - begun)
        return replace(self.known, first=bases[0])

    def splits(
        self,
        start: int,
        stop: int,
        *,
        time_from: int = 0,
        time_to: int = FOREVER,
        split_bytes: int = SPLIT_BYTES,
    ) -> list[Split]:
        """
        Return the splits of offsets `start` to `stop` (not included) within the times given.

        Raises:
            LogGapError: offsets at the start were removed (retention) and gaps are not skipped.
            LogCorruptionError: a header in the range is damaged and damage is not skipped.
        """
        splits: list[Split] = []
        reached = start
        last = self.log.source.bases()[-1:]
        for base in self.segments(start, stop):
            if base > reached:
                self.gap(reached, base)
            try:
                index = self.readable(base, stop)
            except FileNotFoundError:
                continue  # removed by retention just now: the next segment's base shows the gap
            if index is None:
                reached = max(reached, self.unreadable[base].offset_to or stop)
                continue
            for run in index.runs:
                if run.next <= start or run.base >= stop:
                    continue
                if run.last_time < time_from or run.time >= time_to:
                    continue
                add_run(splits, run, index, (start, stop), split_bytes)
            reached = max(reached, index.at.next)
            if reached < stop and [base] == last and not self.skip_corruption:
                # Published, but not in the file: it was truncated.
                at = index.at.pos
                raise Problem(index.path, at, at, reached, stop, "short").error(SKIP_DAMAGE)
        if reached < stop:
            self.gap_after(reached, stop)
        if len(splits) > SPLITS_MAX:
            raise LogFormatError(
                f"{len(splits)} splits are over the limit of {SPLITS_MAX}: raise splitBytes"
            )
        return splits

    def segments(self, start: int, stop: int) -> list[int]:
        """Return the bases of the segments that overlap the range, oldest first."""
        bases = self.log.source.bases()
        for removed in self.indexes.keys() - set(bases):
            del self.indexes[removed]
        first = max(bisect_right(bases, start) - 1, 0)
        return [base for base in bases[first:] if base < stop]

    def readable(self, base: int, stop: int) -> SegmentRuns | None:
        """Return the runs of a segment up to offset `stop`, None to skip one without a valid header."""
        try:
            return self.index(base, stop)
        except LogCorruptionError:
            if not self.skip_corruption:
                raise
        path = self.root / segment_name(base)
        following = min((b for b in self.log.source.bases() if b > base), default=None)
        size = path.stat().st_size
        self.unreadable[base] = Problem(str(path), 0, size, base, following, "bad-header")
        return None

    def index(self, base: int, stop: int) -> SegmentRuns:
        """Return the runs of a segment, complete up to offset `stop` or the end of the file."""
        index = self.indexes.get(base)
        history = self.log.history
        remote = None
        if isinstance(history, TierHistory) and not (self.root / segment_name(base)).exists():
            remote = history.remote(base)
            if index is not None and index.sealed and index.remote == remote:
                return index
            shipped = None if remote is None else history.index(base)
            if remote is not None and shipped is not None:
                index = self.indexes[base] = SegmentRuns.shipped(remote, shipped)
                return index
        # A segment in object storage without an index is fetched whole: the active one, as far as it was shipped.
        with open_segment(self.log.source, base) as segment:
            if index is None or index.header != segment.header:
                index = self.indexes[base] = SegmentRuns.of(segment)
            index.extend(segment, stop, skip=self.skip_corruption)
            index.remote = remote
        return index

    def skipped(self, start: int, stop: int) -> list[Problem]:
        """Return the damage among these offsets that planning skipped."""
        found = [*self.unreadable.values()]
        found += [problem for index in self.indexes.values() for problem in index.problems]
        return [
            problem
            for problem in found
            if problem.offset_from < stop
            and (problem.offset_to is None or problem.offset_to > start)
        ]

    def gap(self, first: int, following: int) -> None:
        if not self.skip_gaps:
            raise gap_error(self.root, first, following, SKIP_GAPS)

    def gap_after(self, reached: int, stop: int) -> None:
        """Raise if retention just removed the end of a range, which only a later segment shows."""
        later = [base for base in self.log.source.bases() if base > reached]
        if later:
            self.gap(reached, min(later[0], stop))

    def bytes_end(self, start: int, stop: int, bytes_max: int) -> int:
        """Return the largest offset up to `stop` such that the batches from `start` fit in `bytes_max`."""
        spent = 0
        for base in self.segments(start, stop):
            try:
                index = self.readable(base, stop)
            except FileNotFoundError:
                continue  # `splits` of this range reports the gap
            for run in index.runs if index else ():
                if run.next <= start:
                    continue
                spent += run.end - run.pos
                if spent >= bytes_max or run.next >= stop:
                    # At least one run each time: a limit below one batch must not stall the query.
                    return min(run.next, stop)
        return stop


def add_run(
    splits: list[Split],
    run: BatchRun,
    index: SegmentRuns,
    wanted: tuple[int, int],
    split_bytes: int,
) -> None:
    """Append the run to the last split if it is adjacent and fits, else begin a new split."""
    start, stop = max(wanted[0], run.base), min(wanted[1], run.next)
    last = splits[-1] if splits else None
    if (
        last is not None
        and last.path == index.path
        and last.end == run.pos
        and run.end - last.pos <= split_bytes
    ):
        splits[-1] = replace(last, end=run.end, stop=stop)
        return
    salt = index.header.salt
    splits.append(Split(index.path, salt, run.pos, run.end, run.base, start, stop, index.remote))
