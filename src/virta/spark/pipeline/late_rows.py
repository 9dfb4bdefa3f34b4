"""
Find the dead letters of a stateful query: rows it dropped (late ones, repeats), and rows that never reached its state.

Spark only counts what it drops, and its operator returns nothing else. So after the commit of a micro-batch that has such
rows, by Spark's own counts and by what the stream observes (`builder.observed`), its range of the log is read again:

    invalid  no event, no time, or too large: only the range between the first and the last of them is read
    late     its last window (or its time, with deduplication) had ended at the watermark of the previous
             micro-batch, which Spark compares with
    repeat   its key was in the state after the previous micro-batch, or earlier in this micro-batch

Invariant: where a micro-batch begins, and its watermark, are stored (`dropped.json`) before it can be committed: from the
progress report of the one before, or, if that was lost in a crash, from the stream's position as a consumer of the log and
the times in that range. Each is processed in order and delivered under its number; the number of the last one is
stored. After a crash the last may be delivered again under the same number, which a channel refuses and a
directory replaces.
"""

from __future__ import annotations

import ast
import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.errors import VirtaError
from virta.spark.pipeline.builder import (
    RECORD_NAMES,
    SUSPECTS,
    dead_letters,
    read_range,
    select_rows,
    watermark_column,
    watermark_delay,
    watermark_rows,
    with_time,
)
from virta.spark.pipeline.checks import interval_seconds
from virta.spark.pipeline.status import read_json, write_json
from virta.spark.transforms import valid_events

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column, DataFrame, SparkSession

    from virta.spark.pipeline.model import Pipeline

ACCOUNT = "dropped.json"
DEDUPE_OPERATOR = "dedupeWithinWatermark"
BATCHES_MAX = 100_000  # that are not processed yet


class DroppedError(VirtaError):
    """Dropped rows that cannot be computed."""

    default_code = "dropped_unknown"


@dataclass(frozen=True)
class BatchStart:
    """Where a micro-batch begins: the offset (or the pipeline's start), and the watermark it has."""

    start: int | str
    watermark_ms: int


@dataclass(frozen=True)
class Findings:
    """What Spark reported of a micro-batch: the range of suspect offsets, and whether it dropped rows."""

    suspects: tuple[int, int] | None
    has_dropped: bool


class DroppedRows:
    """
    Follows one query.

    `deliver(rows, kind, batch)` writes rows and returns their number; `keep(offset)` is called with the offset from which
    the log is still needed.
    """

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        checkpoint: str,
        deliver: Callable[[DataFrame, str, int], int],
        keep: Callable[[int], None],
    ) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._checkpoint = checkpoint
        self._deliver = deliver
        self._keep = keep
        self._kept: int | str | None = None
        self._lock = (
            threading.Lock()
        )  # Spark's thread, the run's and the one that processes use the account
        self._query = ""
        self._handled = -1
        self._ended = -1  # the last micro-batch whose report was stored
        self._batches: dict[int, BatchStart] = {}
        self._findings: dict[int, Findings] = {}  # of this run
        self.late = 0
        self.repeats = 0

    # The account.

    def resume(self, query: str) -> None:
        """Continue where the last run of a query stopped, from the beginning for a new one."""
        with self._lock:
            if self._query == query:
                return
            self._query = query
            kept = read_json(self._pipeline, ACCOUNT)
            if kept.get("query") == query and "starts" in kept:
                self._handled = kept["batch"]
                self._batches = {int(n): BatchStart(*found) for n, found in kept["starts"].items()}
            else:
                self._batches = {0: BatchStart(self._pipeline.source.start, 0)}
            self._keep_unprocessed()

    def begin(self, number: int, position: Callable[[], int | None]) -> None:
        """
        Store the beginning of a micro-batch before it runs, unless it is known.

        `position` returns the stream's stored position.
        """
        known = self._batches.get(number)
        if known is None or known.start == "latest":
            start = position()
            if start is None:
                return
            with self._lock:
                if number and number - 1 not in self._batches:
                    # The account was removed: what earlier micro-batches dropped is not known any more.
                    self._batches, self._handled = {}, number - 1
                self._batches[number] = BatchStart(start, self._watermark_at(number, start))
        with self._lock:
            self._store()

    def end(self, progress: Any) -> None:
        """Store what the report of a finished micro-batch says about it and the next one."""
        number, event_time = progress["batchId"], progress["eventTime"] or {}
        source = progress["sources"][0]
        start, end = offset_in(source["startOffset"]), offset_in(source["endOffset"])
        if end is None or number <= self._ended:
            return
        watermark = millis(event_time.get("watermark"))
        with self._lock:
            # Spark does not report the start of the first one.
            known = self._batches.get(number) or BatchStart(self._pipeline.source.start, 0)
            self._batches[number] = BatchStart(known.start if start is None else start, watermark)
            newest = millis(event_time.get("max")) - watermark_delay(self._pipeline)
            self._batches[number + 1] = BatchStart(end, max(watermark, newest))
            self._findings[number] = found_in(progress)
            self._ended = number
            self._store()

    def idle(self, progress: Any) -> None:
        """Use the report of a query that waits: where the next micro-batch will begin."""
        number = progress["batchId"]
        start = offset_in(progress["sources"][0]["startOffset"])
        if start is not None and number and number not in self._batches:
            with self._lock:
                self._batches[number] = BatchStart(start, self._watermark_at(number, start))
                self._store()

    def _watermark_at(self, number: int, start: int) -> int:
        """Return the watermark of a micro-batch whose predecessor's report was lost, from the times in its range."""
        before = self._batches.get(number - 1)
        if before is None or not number:
            return 0
        time = watermark_column(self._pipeline)
        assert time is not None
        rows = valid_events(read_range(self._spark, self._pipeline, before.start, start))
        newest = watermark_rows(rows, self._pipeline).agg(
            F.max(F.unix_millis(F.col(time).cast("timestamp"))).alias("at")
        )
        found = newest.first()
        if found is None or found.at is None:
            return before.watermark_ms
        return max(before.watermark_ms, int(found.at) - watermark_delay(self._pipeline))

    def _store(self) -> None:
        if len(self._batches) > BATCHES_MAX:
            raise DroppedError(
                f"{len(self._batches)} micro-batches wait for their dead letters: at most {BATCHES_MAX};"
                " use larger micro-batches or a longer trigger"
            )
        starts = {n: [one.start, one.watermark_ms] for n, one in sorted(self._batches.items())}
        write_json(
            self._pipeline,
            ACCOUNT,
            {"query": self._query, "batch": self._handled, "starts": starts},
        )
        self._keep_unprocessed()

    def _keep_unprocessed(self) -> None:
        """Report where the oldest micro-batch begins that is not processed."""
        oldest = self._batches.get(self._handled + 1)
        if oldest is not None and isinstance(oldest.start, int) and oldest.start != self._kept:
            self._kept = oldest.start
            self._keep(oldest.start)

    # Dead letters.

    def catch_up(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """
        Process the finished micro-batches that were not yet; return the number of rows found.

        It ends early, between two micro-batches, once `stopping` returns true.
        """
        found = 0
        while not stopping():
            with self._lock:
                number = self._handled + 1
                known = [self._batches.get(n) for n in (number - 1, number, number + 1)]
                findings = self._findings.pop(number, None)
            before, this, following = known
            if this is None or following is None:
                break
            limit = before.watermark_ms if before is not None else 0
            found += self._process(number, (this.start, following.start), limit, findings)
            with self._lock:
                self._handled = number
                self._batches.pop(number - 1, None)
                self._store()
        return found

    def _process(
        self, number: int, span: tuple[int | str, int | str], limit: int, findings: Findings | None
    ) -> int:
        """Deliver the dead letters of a micro-batch; those of a lost report are looked for in all of it."""
        if span[0] in {span[1], "latest"}:
            return 0
        count = 0
        if findings is None or findings.suspects is not None:
            narrow = span if findings is None or findings.suspects is None else findings.suspects
            events = read_range(self._spark, self._pipeline, *narrow)
            count += self._deliver(dead_letters(events, self._pipeline), "invalid", number)
        if findings is None or findings.has_dropped:
            count += self._process_dropped(number, span, limit)
        return count

    def _process_dropped(self, number: int, span: tuple[int | str, int | str], limit: int) -> int:
        pipeline = self._pipeline
        rows = with_time(valid_events(read_range(self._spark, pipeline, *span)), pipeline)
        over = deadline(pipeline)
        late = (over <= F.lit(limit * 1000)) & F.lit(has_late(pipeline))
        lost = select_rows(rows, pipeline).where(late)
        lost = lost.withColumn("reason", late_reason(over, limit))
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
            known = self._known_keys(by, number - 1).withColumn("_known", F.lit(1))
            marked = marked.drop("_known").join(known, list(by), "left")
        again = marked.where((F.col("_known") == 1) | (F.col("_nth") > 1)).select(*rows.columns)
        return again.withColumn("reason", F.lit(f"a repeat of {', '.join(by)}"))

    def _known_keys(self, by: tuple[str, ...], number: int) -> DataFrame:
        """Return the keys in the state after a micro-batch, by Spark's reader of states."""
        reader = self._spark.read.format("state-metadata").load(self._checkpoint)
        operator = reader.where(F.col("operatorName") == DEDUPE_OPERATOR).first()
        if operator is None:
            raise DroppedError(f"{self._checkpoint} has no state of a deduplication")
        state = (
            self._spark.read.format("statestore")
            .option("batchId", number)
            .option("operatorId", operator.operatorId)
            .load(self._checkpoint)
        )
        return state.select(*[F.col(f"key.{name}").alias(name) for name in by])


def has_late(pipeline: Pipeline) -> bool:
    """Return whether a row can be late: mode complete closes no window."""
    complete = pipeline.aggregate is not None and pipeline.aggregate.mode == "complete"
    return pipeline.dedupe is not None or not complete


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


def late_reason(over: Column, limit_ms: int) -> Column:
    return F.concat(
        F.lit("too late: over at "),
        F.timestamp_micros(over).cast("string"),
        F.lit(", the watermark was "),
        F.timestamp_micros(F.lit(limit_ms * 1000)).cast("string"),
    )


def letters(rows: DataFrame) -> DataFrame:
    return rows.select(*RECORD_NAMES, "reason")


# Progress reports of Spark.


def found_in(progress: Any) -> Findings:
    observed = (progress["observedMetrics"] or {}).get(SUSPECTS)
    suspects = None
    if observed is not None and observed["first"] is not None:
        suspects = (observed["first"], observed["last"] + 1)
    dropped = count_of(progress, "late") + count_of(progress, "repeat")
    return Findings(suspects, bool(dropped))


def count_of(progress: Any, name: str) -> int:
    """Return how many rows a micro-batch dropped, by Spark's own count (of groups, where it aggregates first)."""
    return sum(
        state["numRowsDroppedByWatermark"]
        if name == "late"
        else int(state["customMetrics"].get("numDroppedDuplicateRows", 0))
        for state in progress["stateOperators"]
    )


def offset_in(reported: Any) -> int | None:
    """Return the offset in a position of the log as Spark reports it, None if it is another source's."""
    found = decoded(reported)
    return int(found["offset"]) if isinstance(found, dict) and "offset" in found else None


def decoded(offset: Any) -> Any:
    """Return a reported position as a value: pyspark gives JSON, or in 4.1 the text of a Python dict."""
    if not isinstance(offset, str):
        return offset
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return read(offset)
    return None


def millis(instant: str | None) -> int:
    """Return the milliseconds since 1970 of a time in a report, 0 for none."""
    if instant is None:
        return 0
    return round(datetime.fromisoformat(instant).timestamp() * 1000)
