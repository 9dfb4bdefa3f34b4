"""
The directory of a lake, without Spark and without its tables' libraries.

    <lake>/lake.json                                            format, log, types of topics, and where the lake ends
    <lake>/range=<first>-<next>/<table>/day=<date>/*.parquet    format parquet
    <lake>/<table>/_delta_log/…, day=<date>/*.parquet           format delta
    <lake>/catalog.db, <table>/metadata/…, data/…               format iceberg

A table is `topics/<topic>` for a topic with a type, `events` for all others; other characters than letters, digits,
`_` and `-` of a topic are `~` and two hexadecimal digits a byte.

Invariant: all records of the log from `first` up to, not including, `next` are in the tables, each once. A range of
format parquet appears by one rename, and the ranges say where the lake ends. In the other formats each table is
committed by itself; `next` in lake.json moves, by one rename, when all of them are. So tables may have records from
`next` on after a crash; readers skip these, and the next compaction does not write them again.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virta import files
from virta.errors import VirtaError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FORMATS = ("parquet", "delta", "iceberg")
DESCRIPTION = "lake.json"
VERSION = 2
LOCK = "_lock"
DRAFT = "_draft-"
EVENTS = "events"  # the table of topics without a type
TOPICS = "topics"  # the directory of tables with one
TYPED_TOPICS_MAX = 1000  # each is a table, with files of its own
RANGE = re.compile(r"range=(\d{20})-(\d{20})")
ODD = re.compile(r"[^A-Za-z0-9_-]")
DAY = re.compile(r"day=\d{4}-\d\d-\d\d")


class LakeError(VirtaError):
    """A lake that does not fit its log, or is damaged."""

    default_code = "lake_invalid"


@dataclass(frozen=True)
class Lake:
    """
    What lake.json says.

    `types` has the type of `data` (Spark's JSON form) by topic, `typed_from` the offset from which a topic's records
    are in its own table (earlier ones are in `events`), `tables` the offset up to which each was committed.
    """

    path: Path
    format: str
    log: str | None = None  # the log's id; None in lakes of the first version
    first: int | None = None
    next: int | None = None
    types: Mapping[str, Any] = field(default_factory=dict)
    typed_from: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Lake | None:
        """
        Return the lake in a directory, None if there is none.

        Raises:
            LakeError: lake.json cannot be read, or ranges do not follow on each other.
        """
        root = Path(path)
        try:
            found = json.loads((root / DESCRIPTION).read_bytes())
            version, kind = found.pop("version"), found["format"]
            known = cls(path=root, **found)
        except FileNotFoundError:
            known = cls(root, "parquet")
            return known.at_ranges() if any(ranges(root)) else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LakeError(f"{root / DESCRIPTION} cannot be read: {error}") from error
        if version != VERSION or kind not in FORMATS:
            raise LakeError(
                f"{root / DESCRIPTION} has version {version} and format {kind!r}: expected"
                f" {VERSION} and one of {', '.join(FORMATS)}; a newer Virta may have made it"
            )
        return known.at_ranges() if kind == "parquet" else known

    def at_ranges(self) -> Lake:
        """Return the lake with the ends that its ranges have."""
        found = ranges(self.path)
        if not found:
            return replace(self, first=None, next=None)
        return replace(self, first=found[0][0], next=found[-1][1])

    def save(self) -> None:
        """Write lake.json, durably and as a whole."""
        content = {"version": VERSION, **asdict(self)}
        del content["path"]
        files.write_whole(self.path / DESCRIPTION, json.dumps(content, indent=1).encode() + b"\n")

    def table_names(self) -> dict[str, str | None]:
        """Return the tables that a lake may have, with the topic of those that have a type."""
        return {EVENTS: None, **{table_name(topic): topic for topic in self.types}}


def table_name(topic: str) -> str:
    """Return the table of a topic with a type: the name of a directory, without characters that URIs escape."""
    escaped = ODD.sub(lambda odd: "".join(f"~{byte:02X}" for byte in odd[0].encode()), topic)
    return f"{TOPICS}/{escaped or '~'}"


def ranges(path: str | Path) -> list[tuple[int, int, Path]]:
    """Return the ranges of a lake in format parquet, in order: (first, next, directory)."""
    found = []
    if Path(path).is_dir():
        for entry in Path(path).iterdir():
            matched = RANGE.fullmatch(entry.name)
            if matched:
                found.append((int(matched[1]), int(matched[2]), entry))
    found.sort()
    for (_, end, before), (start, _, after) in pairwise(found):
        if end != start:
            raise LakeError(
                f"{after.name} does not follow on {before.name}: offsets {end} to {start} are"
                " missing or doubled; restore the directory between them"
            )
    return found


@contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Lock the lake: concurrent compactions would write the same records and remove each other's drafts."""
    files.make_directory(root)
    try:
        lock = files.lock_file(root / LOCK)
    except BlockingIOError as error:
        raise LakeError(f"another compaction is writing to {root}: wait for its end") from error
    try:
        yield
    finally:
        files.unlock_file(lock)
