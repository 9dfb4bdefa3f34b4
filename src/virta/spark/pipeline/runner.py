"""
Run a pipeline as Spark queries: start, watch, stop.

Each sink (and the dead-letter output) is a separate query with its own checkpoint, so one that fails or lags does not
delay the others, and each is exactly once by itself. The state of a run is in `status.json` beside the
checkpoints, replaced as a whole, for `virta pipeline status` and the server.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from virta.errors import VirtaError
from virta.spark.pipeline.builder import build
from virta.spark.pipeline.errors import explain
from virta.spark.pipeline.late_rows import DroppedRows, can_follow, count_of
from virta.spark.pipeline.outputs import write_dead, writer
from virta.spark.pipeline.status import run_status, write_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from virta.spark.pipeline.model import Pipeline

DEAD_LETTER = "dead-letter"
JVM_ERRORS = (Py4JError, OSError)  # raised when the JVM has ended
JVM_ENDED = (
    "Spark's JVM has ended: it was killed, or had no memory left; a new run goes on from here"
)
POLL_SECONDS = 0.5
STOP_SECONDS_MAX = 5.0  # for rows that were dropped before a stop; the next run finds the rest
# Only the report of a micro-batch that ran has this duration. An idle query reports too, every ten seconds, under
# the number of the next micro-batch, which is still to be counted.
EXECUTED = "addBatch"


class RunError(VirtaError):
    """A query of a pipeline ended with an error."""

    default_code = "pipeline_failed"


def begin(stream: DataStreamWriter, name: str, pipeline: Pipeline) -> StreamingQuery:
    if pipeline.trigger == "available-now":
        stream = stream.trigger(availableNow=True)
    elif pipeline.trigger != "continuous":
        stream = stream.trigger(processingTime=pipeline.trigger)
    return (
        stream.queryName(f"{pipeline.name}.{name}")
        .option("checkpointLocation", str(Path(pipeline.checkpoint_path()) / name))
        .start()
    )


def run(
    spark: SparkSession,
    pipeline: Pipeline,
    *,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """
    Run a pipeline until its input is used up (trigger available-now), or until `stopping`.

    Returns the last status; `on_progress` gets one whenever a query has moved.

    Raises:
        RunError: a query failed; the others are stopped.
    """
    return PipelineRun(spark, pipeline, on_progress).go(stopping)


class PipelineRun:
    """One run: its queries, their totals, and the rows they dropped."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        on_progress: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._on_progress = on_progress
        self._queries: dict[str, StreamingQuery] = {}
        self._lock = threading.Lock()
        names = [*pipeline.sink_names(), *([DEAD_LETTER] if pipeline.dead_letter else [])]
        self._counts = {name: QueryCounter() for name in names}
        # Lateness depends on a sink's micro-batches; the dead letters use those of the first sink.
        self._first = self._counts[names[0]]
        self._dropped = self._follow(names[0]) if can_follow(pipeline) else None
        # Finding dropped rows may take minutes after a crash: reports must not wait for it.
        self._thread = ThreadPoolExecutor(1, "virta-dropped-rows")
        self._catching_up: Future[int] | None = None
        self._gives_up = False
        self._is_behind = True  # a run that was killed may have left some after its last commit

    def go(self, stopping: Callable[[], bool]) -> dict[str, Any]:
        try:
            # At once: until the first report, the status is that of the run before.
            self._report("running", None)
            self._start()
            while any(query.isActive for query in self._queries.values()) and not stopping():
                if self._failure() is not None:
                    break
                self._catch_up()
                time.sleep(POLL_SECONDS)
                if self._collect():
                    self._report("running", None)
            self._stop()
            self._collect()
            failed = self._failure()
            self._finish_catching_up(stopping)
        except JVM_ERRORS as error:
            # A signal to the whole process group, as service managers send it, ends the JVM as well.
            if not stopping():
                self._fail(RunError(f"{JVM_ENDED} ({type(error).__name__})"))
            return self._report("stopped", None)
        except (PySparkException, VirtaError) as error:
            self._fail(error if isinstance(error, VirtaError) else RunError(explain(error)))
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if failed is not None and not stopping():
            self._fail(RunError(f"{self._pipeline.name}.{failed[0]}: {explain(failed[1])}"))
        return self._report("stopped" if stopping() else "finished", None)

    def _start(self) -> None:
        pipeline = self._pipeline
        built = build(self._spark, pipeline)
        for name, sink in zip(pipeline.sink_names(), pipeline.sinks, strict=True):
            mode = pipeline.aggregate.mode if pipeline.aggregate else "append"
            stream = writer(built.results, sink, pipeline, name).outputMode(mode)
            self._queries[name] = begin(stream, name, pipeline)
        if self._dropped is not None:
            self._dropped.resume()
        if built.dead is not None:
            stream = built.dead.writeStream.foreachBatch(self._write_invalid)
            self._queries[DEAD_LETTER] = begin(stream, DEAD_LETTER, pipeline)

    def _write_invalid(self, batch: DataFrame, number: int) -> None:
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        self._count_dead(write_dead(batch, self._pipeline, f"{query}.invalid", number))

    def _follow(self, first: str) -> DroppedRows:
        def deliver(rows: DataFrame, kind: str, number: int) -> int:
            query = self._queries[first].id
            count = write_dead(rows, self._pipeline, f"{query}.{kind}", number)
            self._count_dead(count)
            return count

        return DroppedRows(self._spark, self._pipeline, first, deliver)

    def _count_dead(self, count: int) -> None:
        with self._lock:  # invalid rows come from Spark's thread, dropped ones from ours
            self._counts[DEAD_LETTER].dead += count

    def _collect(self) -> bool:
        """Collect new progress of the queries; return whether there was any."""
        moved = [self._counts[name].collect(query) for name, query in self._queries.items()]
        self._is_behind |= moved[0]
        return any(moved)

    def _catch_up(self) -> None:
        """Process dropped rows in the thread, unless it still does."""
        if self._dropped is None or (self._catching_up and not self._catching_up.done()):
            return
        if self._catching_up is not None:
            self._catching_up.result()  # raises what it raised
            self._first.late = self._dropped.late
            self._catching_up = None
        if self._is_behind:
            self._is_behind = False
            self._dropped.clean |= self._first.clean
            self._first.clean.clear()
            self._catching_up = self._thread.submit(self._find_dropped)

    def _find_dropped(self) -> int:
        assert self._dropped is not None
        # Makes this session the thread's active one: without it Spark does not find the format `virta`.
        self._spark.createDataFrame([], "nothing INT")
        return self._dropped.catch_up(lambda: self._gives_up)

    def _finish_catching_up(self, stopping: Callable[[], bool]) -> None:
        """Process all dropped rows; a run that is stopped leaves the rest to the next one after some seconds."""
        deadline = time.monotonic() + STOP_SECONDS_MAX
        while self._dropped is not None and (self._is_behind or self._catching_up is not None):
            self._gives_up = stopping() and time.monotonic() > deadline
            self._catch_up()
            if self._catching_up is not None:
                wait([self._catching_up], POLL_SECONDS)

    def _failure(self) -> tuple[str, BaseException] | None:
        for name, query in self._queries.items():
            error = query.exception()
            if error is not None:
                return name, error
        return None

    def _stop(self) -> None:
        for query in self._queries.values():
            query.stop()

    def _fail(self, error: VirtaError) -> NoReturn:
        with suppress(PySparkException, *JVM_ERRORS):
            self._stop()
        self._report("failed", error.message)
        raise error

    def _report(self, state: str, reason: str | None) -> dict[str, Any]:
        queries = {name: counter.as_dict() for name, counter in self._counts.items()}
        status = run_status(self._pipeline, state, reason, queries)
        write_status(self._pipeline, status)
        if self._on_progress is not None:
            self._on_progress(status)
        return status


class QueryCounter:
    """Totals of one query, from its progress reports."""

    def __init__(self) -> None:
        self.batch = -1
        self.rows = 0
        self.seconds = 0.0
        self.late = 0
        self.repeats = 0
        self.dead = 0
        self.clean: set[int] = set()  # batches that dropped nothing
        self.lag: int | None = None
        self.offset: int | None = None
        self.watermark: str | None = None  # RFC 3339; None without a window or deduplication

    def collect(self, query: StreamingQuery) -> bool:
        """Add new progress; return whether there was any."""
        moved = False
        for progress in query.recentProgress:
            if progress["batchId"] <= self.batch:
                continue
            if EXECUTED not in progress["durationMs"]:
                moved |= self.update_position(progress)
                continue
            self.batch, moved = progress["batchId"], True
            self.rows += progress["numInputRows"]
            self.seconds += progress["durationMs"].get("triggerExecution", 0) / 1000
            self.drops(progress)
            self.update_position(progress)
            self.watermark = (progress["eventTime"] or {}).get("watermark") or self.watermark
        return moved

    def drops(self, progress: Any) -> None:
        late, repeats = count_of(progress, "late"), count_of(progress, "repeat")
        self.late += late
        self.repeats += repeats
        if not late and not repeats:
            self.clean.add(progress["batchId"])

    def update_position(self, progress: Any) -> bool:
        """Update the query's position in the log; return whether it changed."""
        before = self.offset, self.lag
        for source in progress["sources"]:
            end, latest = decoded(source["endOffset"]), decoded(source["latestOffset"])
            if isinstance(end, dict) and "offset" in end:
                self.offset = end["offset"]
                if isinstance(latest, dict) and "offset" in latest:
                    self.lag = max(0, latest["offset"] - end["offset"])
        return (self.offset, self.lag) != before

    def as_dict(self) -> dict[str, Any]:
        rate = self.rows / self.seconds if self.seconds else 0.0
        return {
            "batches": self.batch + 1,
            "rows": self.rows,
            "rows_per_second": round(rate, 1),
            "late": self.late,
            "repeats": self.repeats,
            "dead": self.dead,
            "offset": self.offset,
            "lag": self.lag,
            "watermark": self.watermark,
        }


def decoded(offset: Any) -> Any:
    if isinstance(offset, str):
        try:
            return json.loads(offset)
        except ValueError:
            return None
    return offset
