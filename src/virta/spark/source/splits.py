"""
Where the records of an offset range lie: segments, their sparse indexes, and splits.

    log directory ── segments ── batches ── splits (file, salt, byte range, offset range)

Invariants: a split starts and ends on batch boundaries; the splits of a range cover every offset of
it once; offsets are the truth and bytes a hint: the salt in a split names the generation of the file,
and a reader that meets another one (compaction) plans again by offset.

A `Plan` remembers the index of each segment, so that a stream that plans many times a second reads
only headers it has not seen.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import virta
from virta.errors import LogCorruptionError, LogFormatError, LogGapError
from virta.log.format.directory import segment_bases
from virta.log.format.segment import SegmentHeader, parse_header
from virta.spark.source import arrow_plain as status
from virta.spark.source.arrow import FOREVER, kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

SEGMENT_HEADER_BYTES = 64
INDEX_STEP_BYTES = 64 * 1024  # as the log's own sparse index: splits are made of such pieces
SPLIT_BYTES = 32 * 1024 * 1024  # a task of a fifth of a second; small enough to balance two cores
ENDS_COST_RATIO = 10  # asking for the end takes at most a tenth of a stream's idle time
SPLITS_MAX = 100_000  # a plan larger than this belongs in several reads

REASONS = {
    status.SHORT: "short",
    status.BAD_HEADER: "bad-header",
    status.BAD_PAYLOAD: "bad-payload",
    status.BAD_RECORD: "bad-record",
    status.CHAIN: "chain",
    status.ZERO: "zero",
}


class Piece(NamedTuple):
    """A run of batches in a file: from `pos`, whose first batch has offset `base`, up to `end`."""

    pos: int
    base: int
    time: int
    prev: int
    end: int
    stop: int  # the offset after its last
    last_time: int  # no batch in it is younger


@dataclass(frozen=True)
class Split:
    """A task's share: batches of one file generation and the offsets wanted of them."""

    path: str
    salt: int
    pos: int
    end: int
    prev: int
    base: int
    start: int
    stop: int


@dataclass(frozen=True)
class Problem:
    """Damage found on the way, as it is reported when it is skipped."""

    segment: str
    byte_from: int
    byte_to: int
    offset_from: int
    offset_to: int | None
    reason: str

    def error(self) -> LogCorruptionError:
        upto = "the end" if self.offset_to is None else str(self.offset_to)
        return LogCorruptionError(
            f"{self.segment} is damaged in bytes {self.byte_from} to {self.byte_to}"
            f" (offsets {self.offset_from} to {upto}): {self.reason}."
            " Run `virta log repair`, or read with onCorruption=skip.",
            segment=self.segment,
            byte_from=self.byte_from,
            byte_to=self.byte_to,
            offset_from=self.offset_from,
            offset_to=self.offset_to,
            reason=self.reason,
        )


def read_header(fd: int, path: str) -> SegmentHeader:
    """
    Return the header at the start of a segment, verified: with a wrong salt or base nothing after it would be found.

    Raises:
        LogCorruptionError: it is damaged; what the segment holds is not known.
    """
    try:
        return parse_header(os.pread(fd, SEGMENT_HEADER_BYTES, 0), Path(path))
    except LogCorruptionError as error:
        base = int(Path(path).stem)
        problem = Problem(path, 0, SEGMENT_HEADER_BYTES, base, None, error.reason)
        raise problem.error() from error


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@dataclass
class SegmentIndex:
    """The pieces of one file generation, grown as the file grows."""

    path: str
    header: SegmentHeader
    pieces: list[Piece] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    pos: int = SEGMENT_HEADER_BYTES
    prev: int = -1
    following: int = 0
    sealed: bool = False

    def extend(self, fd: int, *, end: int, needed: int, skip: bool) -> None:
        """
        Index up to offset `needed`, which is published, or byte `end`.

        Damage before that is raised, or skipped and noted. Nothing behind it is looked at: a batch
        that is not published may be cut off by recovery and another one written in its place.
        """
        while not self.sealed and self.pos < end and self.following < needed:
            found = kernel.index(
                fd,
                self.pos,
                end,
                self.header.salt,
                self.prev,
                self.following,
                needed,
                INDEX_STEP_BYTES,
            )
            entries, pos, prev, following, state, _, last_time = found
            # A piece ends where the next begins, at a time no batch in it is past.
            bounds = [*((e[0], e[1], e[2]) for e in entries[1:]), (pos, following, last_time)]
            # Not strict: the one bound has no piece when the very first batch is damaged.
            self.pieces += [
                Piece._make((*entry, *bound)) for entry, bound in zip(entries, bounds, strict=False)
            ]
            self.pos, self.prev, self.following = pos, prev, following
            self.sealed = state == status.SEAL
            if state in REASONS and self.following < needed:
                self.skip_damage(fd, end, REASONS[state], skip=skip)

    def skip_damage(self, fd: int, end: int, reason: str, *, skip: bool) -> None:
        rest = os.pread(fd, end - self.pos, self.pos)
        at = kernel.resync(rest, 1, self.header.salt, self.following)
        byte_to = self.pos + at if at > 0 else end
        offset_to = int.from_bytes(rest[at + 8 : at + 16], "little") if at > 0 else None
        problem = Problem(self.path, self.pos, byte_to, self.following, offset_to, reason)
        if not skip:
            raise problem.error()
        self.problems.append(problem)
        self.pos, self.prev = byte_to, -1
        self.following = FOREVER if offset_to is None else offset_to


@dataclass(frozen=True)
class Ends:
    """What the log holds now: offsets from `first`, readable up to (not including) `end`."""

    first: int
    end: int
    epoch: int


class Plan:
    """Plans over one log directory; keeps the log open for reading."""

    def __init__(
        self, root: str, *, skip_corruption: bool = False, skip_gaps: bool = False
    ) -> None:
        self.root = root
        self.skip_corruption = skip_corruption
        self.skip_gaps = skip_gaps
        self.log = virta.open(root, create=False, read_only=True)
        self.indexes: dict[str, SegmentIndex] = {}
        self.lost: dict[str, Problem] = {}  # segments of which nothing can be read
        self.known: Ends | None = None
        self.known_until = 0.0

    def close(self) -> None:
        self.log.close()

    def ends(self) -> Ends:
        """
        Return the readable range now; what a query is about to see is made durable first, as for any reader.

        An idle stream asks a hundred times a second. The answer is cheap while a writer lives; without
        one the last segment has to be walked, so an answer is kept for a while that grows with its cost.
        """
        bases = segment_bases(Path(self.root))
        if not bases:
            return Ends(0, 0, 0)
        begun = time.monotonic()
        if self.known is None or begun >= self.known_until:
            end = self.log.next_offset
            bases = segment_bases(
                Path(self.root)
            )  # again: the end may lie in a segment that is new
            if self.known is None or end != self.known.end:
                with opened(self.segment_path(bases[-1])) as fd:
                    os.fdatasync(fd)
            self.known = Ends(bases[0], end, self.log.epoch)
            now = time.monotonic()
            self.known_until = now + ENDS_COST_RATIO * (now - begun)
        return replace(self.known, first=bases[0])

    def segment_path(self, base: int) -> str:
        return str(Path(self.root) / f"{base:020d}.puro")

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
            LogGapError: offsets at the start are gone (retention) and gaps are not skipped.
            LogCorruptionError: a header in the range is damaged and damage is not skipped.
        """
        splits: list[Split] = []
        reached = start
        bases = segment_bases(Path(self.root))
        for base, path in self.segments(start, stop):
            if base > reached:
                self.gap(reached, base)
            try:
                index = self.readable(path, stop)
            except FileNotFoundError:
                continue  # retention took it this moment: the next segment's base shows the gap
            if index is None:
                reached = max(reached, self.lost[path].offset_to or stop)
                continue
            for piece in index.pieces:
                if piece.stop <= start or piece.base >= stop:
                    continue
                if piece.last_time < time_from or piece.time >= time_to:
                    continue
                add_piece(splits, piece, index, (start, stop), split_bytes)
            reached = max(reached, index.following)
            if reached < stop and path == self.segment_path(bases[-1]) and not self.skip_corruption:
                # Published, and not in the file: it was cut short behind the log's back.
                raise Problem(path, index.pos, index.pos, reached, stop, "short").error()
        if reached < stop:
            self.gap_after(reached, stop)
        if len(splits) > SPLITS_MAX:
            raise LogFormatError(
                f"{len(splits)} splits are over the limit of {SPLITS_MAX}: raise splitBytes"
            )
        return splits

    def segments(self, start: int, stop: int) -> list[tuple[int, str]]:
        """Base and path of the segments that overlap the range, oldest first."""
        found = [(base, self.segment_path(base)) for base in segment_bases(Path(self.root))]
        gone = self.indexes.keys() - {path for _, path in found}
        for path in gone:
            del self.indexes[path]
        first = max(bisect_right(found, start, key=lambda s: s[0]) - 1, 0)
        return [segment for segment in found[first:] if segment[0] < stop]

    def readable(self, path: str, stop: int) -> SegmentIndex | None:
        """As `index`; None for a segment to be skipped, since nothing in it can be verified without its header."""
        try:
            return self.index(path, stop)
        except LogCorruptionError:
            if not self.skip_corruption:
                raise
        base, size = int(Path(path).stem), Path(path).stat().st_size
        following = min((b for b in segment_bases(Path(self.root)) if b > base), default=None)
        self.lost[path] = Problem(path, 0, size, base, following, "bad-header")
        return None

    def skipped(self, start: int, stop: int) -> list[Problem]:
        """Return the damage that planning has passed over among these offsets."""
        noted = [problem for index in self.indexes.values() for problem in index.problems]
        return [
            problem
            for problem in (*self.lost.values(), *noted)
            if problem.offset_from < stop
            and (problem.offset_to is None or problem.offset_to > start)
        ]

    def index(self, path: str, stop: int) -> SegmentIndex:
        """Return the segment's index, complete up to offset `stop` or the file's end."""
        with opened(path) as fd:
            header = read_header(fd, path)
            index = self.indexes.get(path)
            if index is None or index.header != header:
                index = SegmentIndex(path, header, prev=header.prev_crc, following=header.base)
                self.indexes[path] = index
            index.extend(fd, end=os.fstat(fd).st_size, needed=stop, skip=self.skip_corruption)
        return index

    def gap(self, first: int, following: int) -> None:
        if not self.skip_gaps:
            raise gap_error(first, following)

    def gap_after(self, reached: int, stop: int) -> None:
        """Retention may have taken the last of a range this moment: then only a segment behind it shows that."""
        later = [base for base in segment_bases(Path(self.root)) if base > reached]
        if later:
            self.gap(reached, min(later[0], stop))

    def bytes_end(self, start: int, stop: int, bytes_max: int) -> int:
        """Return the largest offset up to `stop` such that the batches from `start` fit in `bytes_max`."""
        spent = 0
        for _, path in self.segments(start, stop):
            try:
                index = self.readable(path, stop)
            except FileNotFoundError:
                continue  # as above: whoever plans this range finds the gap
            for piece in index.pieces if index else ():
                if piece.stop <= start:
                    continue
                spent += piece.end - piece.pos
                if spent >= bytes_max or piece.stop >= stop:
                    # At least one piece each time: a limit below one batch must not stall the query.
                    return min(piece.stop, stop)
        return stop


def add_piece(
    splits: list[Split],
    piece: Piece,
    index: SegmentIndex,
    wanted: tuple[int, int],
    split_bytes: int,
) -> None:
    """Join the piece to the last split when it follows on and fits, else begin a new one."""
    start, stop = max(wanted[0], piece.base), min(wanted[1], piece.stop)
    last = splits[-1] if splits else None
    if (
        last is not None
        and last.path == index.path
        and last.end == piece.pos
        and piece.end - last.pos <= split_bytes
    ):
        splits[-1] = replace(last, end=piece.end, stop=stop)
        return
    splits.append(
        Split(
            path=index.path,
            salt=index.header.salt,
            pos=piece.pos,
            end=piece.end,
            prev=piece.prev,
            base=piece.base,
            start=start,
            stop=stop,
        )
    )


def gap_error(first: int, following: int) -> LogGapError:
    return LogGapError(
        f"offsets {first} to {following} are no longer in the log (retention removed them):"
        " start later, or read with onGap=skip",
        first=first,
        next=following,
    )
