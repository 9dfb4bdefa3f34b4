"""
Find the rows that a stateful query dropped, late ones and repeats, for the dead letters.

Spark only counts them. But a checkpoint records, before each micro-batch runs, which offsets of the log it reads and
its watermark; so the rows it dropped can be computed from the log, exactly, also after a crash:

    late     its last window (or its time, with deduplication) had ended at the watermark of the previous
             micro-batch, which Spark compares with
    repeat   its key was in the state after the previous micro-batch, or earlier in this micro-batch

Invariant: each micro-batch is processed after its commit, in order, and delivered under its number; the number of the
last one is stored. After a crash the last may be delivered again under the same number, which a channel refuses
and a directory replaces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.errors import VirtaError
from virta.spark.pipeline.builder import (
    RECORD_NAMES,
    read_range,
    select_rows,
    watermark_column,
    with_time,
)
from virta.spark.pipeline.checks import interval_seconds
from virta.spark.pipeline.status import is_remote, read_json, write_json
from virta.spark.transforms import valid_events

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column, DataFrame, SparkSession

    from virta.spark.pipeline.model import Pipeline

HANDLED = "dropped.json"
DEDUPE_OPERATOR = "dedupeWithinWatermark"


class DroppedError(VirtaError):
    """Dropped rows that cannot be computed."""

    default_code = "dropped_unknown"


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch in the checkpoint: the offset where it ended, and the watermark it began with."""

    end: int | str
    watermark_ms: int


class DroppedRows:
    """Follows one query's checkpoint; `deliver(rows, kind, batch)` writes rows and returns their number."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        query: str,
        deliver: Callable[[DataFrame, str, int], int],
    ) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._checkpoint = Path(pipeline.checkpoint_path()) / query
        self._deliver = deliver
        self._handled = -1
        self.late = 0
        self.repeats = 0
        # Batches of this run in which Spark dropped nothing: not read again.
        self.clean: set[int] = set()

    def resume(self) -> None:
        """Continue where the last run stopped, from the beginning for a new checkpoint."""
        kept = read_json(self._pipeline, HANDLED)
        if kept and kept["query"] == self._identity():
            self._handled = kept["batch"]

    def catch_up(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """
        Process the committed micro-batches that were not yet; return the number of rows found.

        It ends early, between two micro-batches, once `stopping` returns true.
        """
        found = 0
        for number in self._committed():
            if stopping():
                break
            if number > self._handled:
                if number not in self.clean:
                    found += self._process(number)
                self.clean.discard(number)
                self._handled = number
                write_json(
                    self._pipeline, HANDLED, {"query": self._identity(), "batch": self._handled}
                )
        return found

    def _process(self, number: int) -> int:
        pipeline = self._pipeline
        # The first one began at the pipeline's start, and nothing is late in it.
        before = self._batch(number - 1) if number else MicroBatch(pipeline.source.start, 0)
        this = self._batch(number)
        if before.end in {this.end, "latest"}:
            return 0
        rows = valid_events(read_range(self._spark, pipeline, before.end, this.end))
        rows = with_time(rows, pipeline)
        over = deadline(pipeline)
        late = over <= F.lit(before.watermark_ms * 1000)
        lost = (
            select_rows(rows, pipeline).where(late).withColumn("reason", late_reason(over, before))
        )
        count = self._deliver(letters(lost), "late", number)
        self.late += count
        dedupe = pipeline.dedupe
        if dedupe is not None and dedupe.repeats != "drop":
            again = self._repeated(rows.where(~late), dedupe.by, number)
            repeats = self._deliver(letters(select_rows(again, pipeline)), "repeat", number)
            self.repeats += repeats
            count += repeats
        return count

    def _repeated(self, rows: DataFrame, by: tuple[str, ...], number: int) -> DataFrame:
        """Return the rows whose key was in the state, or that are not the first of their key in the micro-batch."""
        order = Window.partitionBy(*by).orderBy("offset")
        marked = rows.withColumn("_nth", F.row_number().over(order)).withColumn("_known", F.lit(0))
        if number:
            known = self._known(by, number - 1).withColumn("_known", F.lit(1))
            marked = marked.drop("_known").join(known, list(by), "left")
        again = marked.where((F.col("_known") == 1) | (F.col("_nth") > 1)).select(*rows.columns)
        return again.withColumn("reason", F.lit(f"a repeat of {', '.join(by)}"))

    def _known(self, by: tuple[str, ...], number: int) -> DataFrame:
        """Return the keys in the state after a micro-batch."""
        reader = self._spark.read.format("state-metadata").load(str(self._checkpoint))
        operator = reader.where(F.col("operatorName") == DEDUPE_OPERATOR).first()
        if operator is None:
            raise DroppedError(f"{self._checkpoint} has no state of a deduplication")
        state = (
            self._spark.read.format("statestore")
            .option("batchId", number)
            .option("operatorId", operator.operatorId)
            .load(str(self._checkpoint))
        )
        return state.select(*[F.col(f"key.{name}").alias(name) for name in by])

    def _committed(self) -> list[int]:
        directory = self._checkpoint / "commits"
        if not directory.is_dir():
            return []
        return sorted(int(file.name) for file in directory.iterdir() if file.name.isdecimal())

    def _batch(self, number: int) -> MicroBatch:
        try:
            _, metadata, offset = (
                (self._checkpoint / "offsets" / str(number)).read_text().split("\n")
            )
            end = json.loads(offset)["offset"]
            return MicroBatch(end, json.loads(metadata)["batchWatermarkMs"])
        except (OSError, ValueError, KeyError) as error:
            raise DroppedError(
                f"{self._checkpoint / 'offsets' / str(number)} cannot be read: {error}; rows that"
                " micro-batches dropped are not known any more"
            ) from error

    def _identity(self) -> str:
        """Return the query's id: the same after restarts, another for a new checkpoint."""
        return str(json.loads((self._checkpoint / "metadata").read_text())["id"])


def can_follow(pipeline: Pipeline) -> bool:
    """Return whether dropped rows can be computed: from a log, by a checkpoint on this machine."""
    complete = pipeline.aggregate is not None and pipeline.aggregate.mode == "complete"
    return (
        pipeline.dead_letter is not None
        and watermark_column(pipeline) is not None
        and not (complete and pipeline.dedupe is None)  # mode complete closes no window
        and pipeline.source.format == "virta"
        and not is_remote(pipeline)
    )


def deadline(pipeline: Pipeline) -> Column:
    """Return the time, in microseconds, that must be before the watermark for a row to be late."""
    time = watermark_column(pipeline)
    assert time is not None
    at = F.unix_micros(F.col(time).cast("timestamp"))
    spec = pipeline.aggregate
    if spec is None or pipeline.dedupe is not None:
        return at
    if spec.session is not None:
        return at + F.lit(micros(spec.session))
    assert spec.window is not None
    slide = micros(spec.slide or spec.window)
    # Of the newest window of the row: the others end earlier.
    return at - F.pmod(at, F.lit(slide)) + F.lit(micros(spec.window))


def micros(interval: str) -> int:
    return round(interval_seconds(interval) * 1_000_000)


def late_reason(over: Column, before: MicroBatch) -> Column:
    watermark = F.timestamp_micros(F.lit(before.watermark_ms * 1000))
    return F.concat(
        F.lit("too late: over at "),
        F.timestamp_micros(over).cast("string"),
        F.lit(", the watermark was "),
        watermark.cast("string"),
    )


def letters(rows: DataFrame) -> DataFrame:
    return rows.select(*RECORD_NAMES, "reason")


def count_of(progress: Any, name: str) -> int:
    """Return how many rows a micro-batch dropped, by Spark's own count (of groups, where it aggregates first)."""
    return sum(
        state["numRowsDroppedByWatermark"]
        if name == "late"
        else int(state["customMetrics"].get("numDroppedDuplicateRows", 0))
        for state in progress["stateOperators"]
    )
