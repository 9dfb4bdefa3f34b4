"""
Reading one split on an executor: bytes in, Arrow record batches out.

Invariant: the batches yielded hold exactly the selected rows of the split's offset range, in order;
what cannot be read is an error that names file and range, or, when the options say so, a `Problem`
handed to the reporter. A file that is no longer the one planned for (compaction replaced it) or is
gone (retention) is found again by offset.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.errors import LogError
from virta.spark.source import arrow_plain as status
from virta.spark.source.arrow import FOREVER, RECORD_COLUMNS, kernel, want_mask
from virta.spark.source.splits import (
    REASONS,
    SPLIT_BYTES,
    Plan,
    Problem,
    Split,
    gap_error,
    opened,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger("virta.spark")

CHUNK_BYTES = 8 * 1024 * 1024
ROWS_MAX = 10_000  # per Arrow batch; the batch that passes the limit is still whole
BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True)
class Reading:
    """What to read of each split, the same for all tasks of a query; it travels to the executors."""

    root: str
    topics: tuple[bytes, ...] | None = None
    time_from: int = 0
    time_to: int = FOREVER
    skip_gaps: bool = False
    skip_corruption: bool = False
    problems: str | None = None
    rows_max: int = ROWS_MAX


class Rows(NamedTuple):
    """Some rows: their number and the buffers of each wanted record column."""

    size: int
    columns: tuple[object, ...]
    not_text: int

    def is_text(self, name: str) -> bool:
        return not self.not_text & (1 << RECORD_COLUMNS.index(name))


class Cursor:
    """The state of a walk over one file: where it stands, and what the next batch must look like."""

    def __init__(self, split: Split) -> None:
        self.pos = split.pos
        self.prev = split.prev
        self.following = split.base


def read_rows(
    reading: Reading, split: Split, names: Sequence[str], text: Sequence[str]
) -> Iterator[Rows]:
    """Yield the rows of a split; `names` are the record columns wanted, `text` those wanted as strings."""
    cursor = Cursor(split)
    try:
        with opened(split.path) as fd:
            if read_header(fd, split.path).salt == split.salt:
                yield from walk(fd, reading, split, cursor, want_mask(names), want_mask(text))
                return
    except FileNotFoundError:
        pass
    # The file was replaced or removed after planning; offsets are the truth.
    first = max(cursor.following, split.start)
    for found in planned_again(reading, first, split.stop):
        yield from read_rows(reading, found, names, text)


def planned_again(reading: Reading, start: int, stop: int) -> list[Split]:
    plan = Plan(reading.root, skip_corruption=reading.skip_corruption, skip_gaps=reading.skip_gaps)
    try:
        first = plan.ends().first
        if start < first and not reading.skip_gaps:
            raise gap_error(start, min(first, stop))
        splits = plan.splits(max(start, first), stop, split_bytes=SPLIT_BYTES)
        report_skipped(reading, plan, start, stop)
        return splits
    finally:
        plan.close()


def walk(
    fd: int, reading: Reading, split: Split, cursor: Cursor, want: int, text: int
) -> Iterator[Rows]:
    need = CHUNK_BYTES
    chunk, at = b"", 0
    while cursor.pos < split.end:
        if at >= len(chunk):
            wanted = min(need, split.end - cursor.pos)
            chunk = os.pread(fd, wanted, cursor.pos)
            at, need = 0, CHUNK_BYTES
            if len(chunk) < wanted:  # the file ended before the split did: it was cut
                raise Problem(
                    split.path, cursor.pos, split.end, cursor.following, split.stop, "short"
                ).error()
        found = kernel.decode(
            chunk,
            at,
            len(chunk),
            split.salt,
            cursor.prev,
            cursor.following,
            split.start,
            split.stop,
            reading.time_from,
            reading.time_to,
            reading.topics,
            want,
            text,
            reading.skip_gaps,
            reading.rows_max,
            BYTES_MAX,
        )
        rows, columns, not_text, end, cursor.prev, cursor.following, state, detail = found
        cursor.pos += end - at
        at = end
        if rows:
            yield Rows(rows, columns, not_text)
        if state in {status.STOP, status.SEAL}:
            return
        if state == status.SHORT and cursor.pos + detail <= split.end:
            chunk, at, need = b"", 0, max(CHUNK_BYTES, detail)
        elif state == status.REPAIR:
            raise gap_error(cursor.following, cursor.following + detail)
        elif state in REASONS:
            skip_damage(fd, reading, split, cursor, REASONS[state])
            chunk, at = b"", 0


def skip_damage(fd: int, reading: Reading, split: Split, cursor: Cursor, reason: str) -> None:
    """Raise, or report and move the cursor behind the damage."""
    rest = os.pread(fd, split.end - cursor.pos, cursor.pos)
    at = kernel.resync(rest, 1, split.salt, cursor.following)
    byte_to = cursor.pos + at if at > 0 else split.end
    offset_to = int.from_bytes(rest[at + 8 : at + 16], "little") if at > 0 else None
    problem = Problem(split.path, cursor.pos, byte_to, cursor.following, offset_to, reason)
    if not reading.skip_corruption:
        raise problem.error()
    report(reading, problem)
    cursor.pos, cursor.prev = byte_to, -1
    cursor.following = FOREVER if offset_to is None else offset_to


def report_skipped(reading: Reading, plan: Plan, start: int, stop: int) -> None:
    """Return what planning has passed over is not in any split: it is reported by whoever plans."""
    for problem in plan.skipped(start, stop):
        report(reading, problem)


def report(reading: Reading, problem: Problem) -> None:
    """Log the damage; with the option `problems`, also leave one file per damaged range there."""
    logger.warning("%s", problem.error().message)
    if reading.problems is None:
        return
    name = f"{Path(problem.segment).stem}-{problem.byte_from}-{problem.byte_to}.json"
    target = Path(reading.problems) / name
    try:
        files.make_directory(target.parent)
        # A name of its own: executors in containers may report the same damage, under the same process id.
        draft = target.with_suffix(f".{secrets.token_hex(8)}")
        files.write_text(draft, json.dumps(asdict(problem)) + "\n")
        draft.replace(target)
    except OSError as exc:
        raise LogError(f"the report of damage cannot be written to {target}: {exc}") from exc
