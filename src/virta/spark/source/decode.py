"""
Read one split on an executor: bytes in, Arrow buffers out.

Invariant: the rows yielded are exactly the selected rows of the split's offset range, in order. Damage is an error
that names file and range, or is skipped and reported if the options say so. A file that was replaced (compaction)
or removed (retention) since planning is found again by offset.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.errors import LogError
from virta.log.format.codec import REASONS, Status
from virta.log.format.damage import Problem, describe_damage, gap_error
from virta.log.format.segment import Position
from virta.log.reader import FOREVER
from virta.spark.source.arrow import RECORD_COLUMNS, kernel, want_mask
from virta.spark.source.splits import SKIP_DAMAGE, SKIP_GAPS, SPLIT_BYTES, Plan, Split

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virta.log.format.segment import Segment

logger = logging.getLogger("virta.spark")

CHUNK_BYTES = 8 * 1024 * 1024
ROWS_MAX = 10_000  # per Arrow batch; the batch that passes the limit is still whole
BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True)
class ScanSpec:
    """What to read of each split, equal for all tasks of a query; pickled to the executors."""

    root: str
    topics: tuple[bytes, ...] | None = None
    time_from: int = 0
    time_to: int = FOREVER
    skip_gaps: bool = False
    skip_corruption: bool = False
    problems: str | None = None
    rows_max: int = ROWS_MAX


class DecodedRows(NamedTuple):
    """Some rows: their number and the buffers of each requested record column."""

    size: int
    columns: tuple[object, ...]
    not_text: int

    def is_text(self, name: str) -> bool:
        return not self.not_text & (1 << RECORD_COLUMNS.index(name))


def read_rows(
    scan: ScanSpec, split: Split, names: Sequence[str], text: Sequence[str]
) -> Iterator[DecodedRows]:
    """Yield the rows of a split; `names` are the record columns to read, `text` those read as strings."""
    try:
        with split.open() as segment:
            if segment.header.salt == split.salt:
                yield from walk(segment, scan, split, want_mask(names), want_mask(text))
                return
    except FileNotFoundError:
        pass
    for found in plan_again(scan, split.start, split.stop):
        yield from read_rows(scan, found, names, text)


def plan_again(scan: ScanSpec, start: int, stop: int) -> list[Split]:
    """Return new splits of an offset range whose file was replaced or removed."""
    plan = Plan(scan.root, skip_corruption=scan.skip_corruption, skip_gaps=scan.skip_gaps)
    try:
        first = plan.ends().first
        if start < first and not scan.skip_gaps:
            raise gap_error(scan.root, start, min(first, stop), SKIP_GAPS)
        splits = plan.splits(max(start, first), stop, split_bytes=SPLIT_BYTES)
        report_skipped(scan, plan, start, stop)
        return splits
    finally:
        plan.close()


def walk(
    segment: Segment, scan: ScanSpec, split: Split, want: int, text: int
) -> Iterator[DecodedRows]:
    at = Position(split.pos, -1, split.base)
    need = CHUNK_BYTES
    chunk, used = b"", 0
    while at.pos < split.end:
        if used >= len(chunk):
            size = min(need, split.end - at.pos)
            chunk = os.pread(segment.fd, size, at.pos)
            used, need = 0, CHUNK_BYTES
            if len(chunk) < size:  # the file was truncated
                cut = Problem(split.path, at.pos, split.end, at.next, split.stop, "short")
                raise cut.error(SKIP_DAMAGE)
        rows, columns, not_text, end, prev, following, state, detail = kernel.decode(
            chunk, used, len(chunk), split.salt, at.prev, at.next, split.start, split.stop,
            scan.time_from, scan.time_to, scan.topics, want, text, scan.skip_gaps, scan.rows_max,
            BYTES_MAX,
        )  # fmt: skip
        at = Position(at.pos + end - used, prev, following)
        used = end
        if rows:
            yield DecodedRows(rows, columns, not_text)
        if state in {Status.STOP, Status.SEAL}:
            return
        if state == Status.SHORT and at.pos + detail <= split.end:
            chunk, used, need = b"", 0, max(CHUNK_BYTES, detail)
        elif state == Status.REPAIR:
            raise gap_error(scan.root, at.next, at.next + detail, SKIP_GAPS)
        elif state in REASONS:
            problem, behind = describe_damage(segment, at, split.end, REASONS[Status(state)])
            if not scan.skip_corruption:
                raise problem.error(SKIP_DAMAGE)
            report(scan, problem)
            at = behind or Position(split.end, -1, FOREVER)
            chunk, used = b"", 0


def report_skipped(scan: ScanSpec, plan: Plan, start: int, stop: int) -> None:
    """Report the damage that planning skipped: it is in no split."""
    for problem in plan.skipped(start, stop):
        report(scan, problem)


def report(scan: ScanSpec, problem: Problem) -> None:
    """Log the damage; with the option `problems`, also write one file per damaged range there."""
    logger.warning("%s", problem.error(SKIP_DAMAGE).message)
    if scan.problems is None:
        return
    name = f"{Path(problem.segment).stem}-{problem.byte_from}-{problem.byte_to}.json"
    target = Path(scan.problems) / name
    try:
        files.make_directory(target.parent)
        # A random name: executors in containers may report the same damage under the same process id.
        draft = target.with_suffix(f".{secrets.token_hex(8)}")
        files.write_text(draft, json.dumps(problem._asdict()) + "\n")
        draft.replace(target)
    except OSError as exc:
        raise LogError(f"the report of damage cannot be written to {target}: {exc}") from exc
