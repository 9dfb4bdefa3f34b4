"""
Damage and gaps: how they are described, and where reading can continue after them.

Readers, verify, repair and Spark's decoder all use these, so that damage has one description and is skipped to the
same place everywhere.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from virta.errors import LogCorruptionError, LogGapError
from virta.log.format.codec import find_header
from virta.log.format.segment import Position, Segment, Walk
from virta.log.limits import BATCH_HEADER_BYTES, GAP_MAX, READ_CHUNK_BYTES

if TYPE_CHECKING:
    from pathlib import Path

# Far above any real gap of offsets; keeps a forged header from claiming 2^64.
LOST_MAX: Final = GAP_MAX


class Problem(NamedTuple):
    """A damaged range: where, which offsets as far as known, and why."""

    segment: str
    byte_from: int
    byte_to: int
    offset_from: int
    offset_to: int | None  # None: not known
    reason: str

    def error(
        self,
        advice: str = "`virta log verify` shows all damage, `virta log repair` sets it aside",
    ) -> LogCorruptionError:
        """Return the exception to raise for it; `advice` ends the message."""
        upto = "on" if self.offset_to is None else f"up to {self.offset_to}"
        return LogCorruptionError(
            f"{self.segment}: bytes {self.byte_from} to {self.byte_to} are damaged "
            f"({self.reason}); they contained offsets {self.offset_from} {upto}. {advice}",
            **self._asdict(),
        )


def problem_of(exc: LogCorruptionError, offset_to: int | None = None) -> Problem:
    """Return the description of a damaged segment header; `offset_to` is the next segment's base, if known."""
    after = exc.offset_to if offset_to is None else offset_to
    return Problem(exc.segment, exc.byte_from, exc.byte_to, exc.offset_from, after, exc.reason)


def gap_error(
    directory: Path | str, first: int, following: int, advice: str = "on_gap='skip'"
) -> LogGapError:
    """Return the exception for offsets that are no longer in the log; `advice` names the option that skips them."""
    return LogGapError(
        f"offsets {first} to {following - 1} of {directory} are not there any more "
        f"(retention or repair); read from {following}, or with {advice}",
        first=first,
        next=following,
    )


def find_batch(segment: Segment, pos: int, size: int, at_least: int) -> tuple[int, int] | None:
    """Return (position, base) of the first valid batch from byte `pos` on whose base is at least `at_least`."""
    while pos < size:
        data = os.pread(segment.fd, READ_CHUNK_BYTES, pos)
        at = 0
        while found := find_header(data, at, segment.header.salt, at_least, at_least + LOST_MAX):
            start = Position(pos + found.pos, -1, found.base)
            if next(iter(Walk(segment, start, size, check_payload=True)), None):
                return start.pos, start.next
            at = found.pos + 1
        if len(data) < READ_CHUNK_BYTES:
            return None
        pos += len(data) - BATCH_HEADER_BYTES + 1
    return None


def describe_damage(
    segment: Segment, at: Position, limit: int, reason: str
) -> tuple[Problem, Position | None]:
    """Return the damage that begins at `at`, and where the next valid batch before `limit` starts, if there is one."""
    found = find_batch(segment, at.pos + 1, limit, at.next)
    end, following = found or (limit, None)
    problem = Problem(str(segment.path), at.pos, end, at.next, following, reason)
    return problem, None if following is None else Position(end, -1, following)
