"""
The lake: sealed segments as Parquet files, and reads of lake and log together.

    <lake>/range=<first>-<next>/day=<date>/topic=<topic>/part-….parquet

Invariant: a directory `range=a-b` contains exactly the records of offsets a up to, not including, b, and appears by
one rename: a reader sees all of a range or nothing. Ranges are contiguous, so the lake ends at one offset;
`read_all` reads the lake before it and the log from it, without gap or overlap.

Files have the record (offset, timestamp, key, value) and the attributes to search by, typed; the whole event is in
`value`. They are sorted by offset and compressed with zstd.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import (
    BinaryType,
    DateType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import virta
from virta import files
from virta.errors import VirtaError
from virta.log.format.damage import gap_error
from virta.spark.launch.session import session
from virta.spark.schemas import RECORD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

LOCK = "_lock"
RANGE = re.compile(r"range=(\d{20})-(\d{20})")
ATTRIBUTES = ("id", "source", "type", "subject", "time")
FILES = StructType(
    [
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("id", StringType()),
        StructField("source", StringType()),
        StructField("type", StringType()),
        StructField("subject", StringType()),
        StructField("time", TimestampType()),
        StructField("day", DateType()),
        StructField("topic", StringType()),
    ]
)


class LakeError(VirtaError):
    """A lake that does not fit its log, or is damaged."""

    default_code = "lake_invalid"


@dataclass(frozen=True)
class LakeReport:
    """What one compaction did: offsets `first` to `next` (not included) are in the lake now."""

    first: int
    next: int
    records: int
    bytes: int


def lake_ranges(lake: str | Path) -> list[tuple[int, int, Path]]:
    """Return the ranges of a lake, in order: (first, next, directory)."""
    found = []
    if Path(lake).is_dir():
        for entry in Path(lake).iterdir():
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


def sealed_end(log_path: str) -> tuple[int, int]:
    """Return the first offset of the log and the offset after its last sealed segment."""
    with virta.open(log_path, create=False, read_only=True) as log:
        sealed = [segment.next for segment in log.segments() if segment.sealed]
        return log.first_offset, max(sealed, default=log.first_offset)


def pending(log_path: str, lake: str, *, on_gap: str = "raise") -> tuple[int, int, int]:
    """
    Return what a compaction would do, without Spark: the log's first offset, and the offsets from and to.

    Raises:
        LogGapError: the log no longer has the offset the lake ends at, and `on_gap` is not skip.
    """
    first, stop = sealed_end(log_path)
    ranges = lake_ranges(lake)
    start = ranges[-1][1] if ranges else first
    if start < first and on_gap != "skip":
        raise gap_error(log_path, start, first)
    return first, start, stop


def compact(
    log_path: str, lake: str, *, spark: SparkSession | None = None, on_gap: str = "raise"
) -> LakeReport:
    """
    Write the sealed segments that are not in the lake yet, as one new range.

    Raises:
        LogGapError: the log no longer has the offset the lake ends at, and `on_gap` is not skip.
    """
    ranges = lake_ranges(lake)
    first, start, stop = pending(log_path, lake, on_gap=on_gap)
    if stop <= start:
        return LakeReport(start, start, 0, 0)
    spark = spark or session()
    root = Path(lake)
    final = root / f"range={start:020d}-{stop:020d}"
    with only_writer(root):
        if lake_ranges(lake) != ranges:
            raise LakeError(f"another compaction has just written to {lake}: run this one again")
        for stale in root.glob("_draft-*"):
            shutil.rmtree(stale, ignore_errors=True)
        draft = root / f"_draft-{uuid.uuid4().hex}"
        write_range(spark, log_path, (max(start, first), stop), draft)
        publish(draft, final)
    files = list(final.rglob("*.parquet"))
    records = spark.read.schema(FILES).parquet(*map(str, files)).count() if files else 0
    return LakeReport(start, stop, records, sum(file.stat().st_size for file in files))


@contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Lock the lake: concurrent compactions would write the same range and remove each other's drafts."""
    files.make_directory(root)
    try:
        lock = files.lock_file(root / LOCK)
    except BlockingIOError as error:
        raise LakeError(f"another compaction is writing to {root}: wait for its end") from error
    try:
        yield
    finally:
        files.unlock_file(lock)


def write_range(spark: SparkSession, log_path: str, offsets: tuple[int, int], draft: Path) -> None:
    events = (
        spark.read.format("virta")
        .option("events", "true")
        .option("start", str(offsets[0]))
        .option("end", str(offsets[1]))
        .schema(
            "topic string, offset long, timestamp timestamp, key binary, value binary, id string,"
            " source string, type string, subject string, time timestamp"
        )
        .load(log_path)
    )
    (
        events.select(
            "offset",
            "timestamp",
            "key",
            "value",
            *ATTRIBUTES,
            F.to_date("timestamp").alias("day"),
            "topic",
        )
        .repartition("day", "topic")
        .sortWithinPartitions("day", "topic", "offset")
        .write.partitionBy("day", "topic")
        .option("compression", "zstd")
        .parquet(str(draft))
    )


def publish(draft: Path, final: Path) -> None:
    """Make a range visible: its files are synced before it gets its name."""
    for path in sorted(draft.rglob("*")):
        if path.is_file() and (path.name.startswith("_") or path.name.endswith(".crc")):
            path.unlink()
        else:
            sync(path)
    sync(draft)
    draft.rename(final)
    sync(final.parent)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_lake(lake: str, *, spark: SparkSession | None = None) -> DataFrame:
    """Return the records in the lake, with the columns of the log and the attributes."""
    spark = spark or session()
    return read_ranges(spark, lake, lake_ranges(lake))


def read_ranges(spark: SparkSession, lake: str, ranges: list[tuple[int, int, Path]]) -> DataFrame:
    if not ranges:
        return spark.createDataFrame([], FILES)
    return (
        spark.read.schema(FILES)
        .option("basePath", lake)
        .parquet(*[str(directory) for _, _, directory in ranges])
        # A partition directory cannot be named "": the empty topic comes back as null.
        .withColumn("topic", F.coalesce("topic", F.lit("")))
    )


def read_all(log_path: str, lake: str, *, spark: SparkSession | None = None) -> DataFrame:
    """
    Return all records ever written, from the lake where it has them and the log after that.

    Raises:
        LogGapError: retention removed offsets from the log that the lake does not have.
    """
    spark = spark or session()
    # The log before the lake: records that move from log to lake meanwhile are in the lake then.
    first, _ = sealed_end(log_path)
    ranges = lake_ranges(lake)
    seam = ranges[-1][1] if ranges else first
    if seam < first:
        raise gap_error(log_path, seam, first)
    live = spark.read.format("virta").option("start", str(seam)).load(log_path)
    if not ranges:
        return live
    # The ranges listed above, not a new list: a compaction may have added one meanwhile.
    return read_ranges(spark, lake, ranges).select(*RECORD.names).unionByName(live)
