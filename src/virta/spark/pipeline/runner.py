"""
Run a pipeline as a Spark query: start, watch, stop.

One query with one checkpoint reads each micro-batch once and writes it to all sinks (virta.spark.pipeline.fan_out). Only
the dead letters of a stateful pipeline whose source is not a log, or whose checkpoint is remote, need a second query.
The state of a run is in `status.json` beside the checkpoint, replaced as a whole, for `virta pipeline status` and the
server.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.errors import PySparkException

from virta.errors import VirtaError
from virta.log.consumers.positions import position_of, remove_positions
from virta.spark.pipeline.builder import build, can_follow
from virta.spark.pipeline.errors import JVM_ERRORS, explain, quiet_callbacks
from virta.spark.pipeline.fan_out import DEAD_LETTER, FanOut, query_id
from virta.spark.pipeline.late_rows import DroppedRows, count_of, decoded, offset_in
from virta.spark.pipeline.outputs import BatchId, write_dead
from virta.spark.pipeline.status import QUERY, check_checkpoint, run_status, write_status
from virta.spark.positions import StreamPosition

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from virta.spark.pipeline.model import Pipeline

logger = logging.getLogger("virta.spark")

POLL_SECONDS = 0.5
# For rows that were dropped before a stop, and for the position; the next run does the rest.
STOP_SECONDS_MAX = 5.0
POSITION_SECONDS = 0.1
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
        .option("checkpointLocation", f"{pipeline.checkpoint_path()}/{name}")
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

    Returns the last status; `on_progress` gets one whenever the query has moved.

    Raises:
        RunError: the query failed.
    """
    with quiet_callbacks():
        return PipelineRun(spark, pipeline, on_progress).go(stopping)


class PipelineRun:
    """One run: its query, the totals, and the rows it dropped."""

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
        self._first = QueryCounter()
        self._counts = {QUERY: self._first}
        self._consumer: str | None = None
        self._unsearched: str | None = None
        self._dropped = self._follow() if can_follow(pipeline) else None
        on_begin = None if self._dropped is None else self._begin_batch
        self._fan_out = FanOut(pipeline, on_begin=on_begin, on_dead=self._count_dead)
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
            self._store_position()
        except JVM_ERRORS as error:
            # A signal to the whole process group, as service managers send it, ends the JVM as well.
            if not stopping():
                self._fail(RunError(explain(error)))
            return self._report("stopped", None)
        except (PySparkException, VirtaError) as error:
            self._fail(error if isinstance(error, VirtaError) else RunError(explain(error)))
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if failed is not None and not stopping():
            name = self._fan_out.failing or failed[0]
            self._fail(RunError(f"{self._pipeline.name}.{name}: {explain(failed[1])}"))
        return self._report("stopped" if stopping() else "finished", None)

    def _start(self) -> None:
        pipeline = self._pipeline
        check_checkpoint(pipeline)
        self._consumer = find_consumer(pipeline)
        self._unsearched = find_unsearched(pipeline, self._consumer, self._dropped)
        built = build(self._spark, pipeline, consumer=self._consumer)
        mode = pipeline.aggregate.mode if pipeline.aggregate else "append"
        stream = built.flow.writeStream.outputMode(mode).foreachBatch(self._fan_out)
        self._queries[QUERY] = begin(stream, QUERY, pipeline)
        if self._dropped is not None:
            self._dropped.resume(str(self._queries[QUERY].id))
        elif built.dead is not None and built.flow is built.results:
            self._counts[DEAD_LETTER] = QueryCounter()
            stream = built.dead.writeStream.foreachBatch(self._write_invalid)
            self._queries[DEAD_LETTER] = begin(stream, DEAD_LETTER, pipeline)

    def _write_invalid(self, rows: DataFrame, number: int) -> None:
        batch = BatchId(query_id(rows), number)
        self._count_dead(write_dead(rows, self._pipeline, "invalid", batch))

    def _follow(self) -> DroppedRows:
        def deliver(rows: DataFrame, kind: str, number: int) -> int:
            batch = BatchId(str(self._queries[QUERY].id), number)
            count = write_dead(rows, self._pipeline, kind, batch)
            self._count_dead(count)
            return count

        def keep(offset: int) -> None:
            if self._unsearched is not None:
                move_consumer(self._pipeline, self._unsearched, offset, back=True)

        checkpoint = f"{self._pipeline.checkpoint_path()}/{QUERY}"
        return DroppedRows(self._spark, self._pipeline, checkpoint, deliver, keep)

    def _begin_batch(self, query: str, number: int) -> None:
        """Store where a micro-batch begins; in Spark's thread, before it runs."""
        dropped, log = self._dropped, self._pipeline.source.log
        assert dropped is not None
        assert log is not None
        dropped.resume(query)
        if QUERY in self._queries:
            for progress in self._queries[QUERY].recentProgress:
                if progress["batchId"] == number - 1 and EXECUTED in progress["durationMs"]:
                    dropped.end(progress)
        name = self._consumer
        path = self._pipeline.path(log)
        dropped.begin(number, lambda: None if name is None else position_of(Path(path), name))

    def _count_dead(self, count: int) -> None:
        with self._lock:  # invalid rows come from Spark's thread, dropped ones from ours
            self._first.dead += count

    def _collect(self) -> bool:
        """Collect new progress of the queries; return whether there was any."""
        moved = [
            self._counts[name].collect(query, self._dropped if name == QUERY else None)
            for name, query in self._queries.items()
        ]
        self._is_behind |= any(moved)
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

    def _store_position(self) -> None:
        """
        Store in the log where the next run begins.

        Spark 4.1 does not notify a source of the commit of its last micro-batch; and the source, in a process of
        its own, keeps the consumer briefly after the query has ended.
        """
        name, log, offset = self._consumer, self._pipeline.source.log, self._first.offset
        if name is None or log is None or offset is None:
            return
        path = Path(self._pipeline.path(log))
        deadline = time.monotonic() + STOP_SECONDS_MAX
        try:
            while (position_of(path, name) or 0) < offset and time.monotonic() < deadline:
                if move_consumer(self._pipeline, name, offset) is None:
                    return
                time.sleep(POSITION_SECONDS)
        except (VirtaError, OSError) as error:
            logger.warning(
                "the log does not store the position of %s: %s", self._pipeline.name, error
            )

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
        sinks = {name: dict(found) for name, found in self._fan_out.figures.items()}
        status = run_status(self._pipeline, state, reason, queries, sinks)
        write_status(self._pipeline, status)
        if self._on_progress is not None:
            self._on_progress(status)
        return status


def find_consumer(pipeline: Pipeline) -> str | None:
    """Return the name under which the log stores the pipeline's position, None if the log cannot store one."""
    log = pipeline.source.log
    if pipeline.source.format != "virta" or log is None or "://" in pipeline.path(log):
        return None
    name = f"pipeline.{pipeline.name}"
    return name if move_consumer(pipeline, name, 0) is not None else None


def find_unsearched(
    pipeline: Pipeline, consumer: str | None, dropped: DroppedRows | None
) -> str | None:
    """
    Return the consumer whose position is how far dropped rows were searched; None if they are not searched.

    Retention must keep the micro-batches that are committed, and not yet read again for their dead letters.
    """
    name = f"dead-letters.{pipeline.name}"
    if consumer is None:
        return None
    if dropped is not None:
        return name if move_consumer(pipeline, name, 0) is not None else None
    assert pipeline.source.log is not None
    with suppress(
        VirtaError, OSError
    ):  # left from a pipeline with other steps: it would never move again
        remove_positions(Path(pipeline.path(pipeline.source.log)), name)
    return None


def move_consumer(pipeline: Pipeline, name: str, offset: int, *, back: bool = False) -> int | None:
    """
    Move a consumer of the pipeline's log to an offset, unless another process owns it now; forward only without `back`.

    Returns the position before, None if the log cannot store one.
    """
    assert pipeline.source.log is not None
    path = pipeline.path(pipeline.source.log)
    topics = [topic.encode() for topic in pipeline.source.topics] or None
    try:
        at = position_of(Path(path), name) or 0
        store = StreamPosition(path, name, topics)
        store.move(offset if back else max(at, offset))
        store.close()
    except (VirtaError, OSError) as error:
        logger.warning("the log does not store the position of %s: %s", pipeline.name, error)
        return None
    return at


class QueryCounter:
    """Totals of one query, from its progress reports."""

    def __init__(self) -> None:
        self.batch = -1
        self.rows = 0
        self.seconds = 0.0
        self.late = 0
        self.repeats = 0
        self.dead = 0
        self.lag: int | None = None
        self.offset: int | None = None
        self.watermark: str | None = None  # RFC 3339; None without a window or deduplication

    def collect(self, query: StreamingQuery, dropped: DroppedRows | None) -> bool:
        """Add new progress, also to the account of dropped rows; return whether there was any."""
        moved = False
        for progress in query.recentProgress:
            if progress["batchId"] <= self.batch:
                continue
            if EXECUTED not in progress["durationMs"]:
                moved |= self.update_position(progress)
                if dropped is not None:
                    dropped.idle(progress)
                continue
            self.batch, moved = progress["batchId"], True
            self.rows += progress["numInputRows"]
            self.seconds += progress["durationMs"].get("triggerExecution", 0) / 1000
            self.late += count_of(progress, "late")
            self.repeats += count_of(progress, "repeat")
            self.update_position(progress)
            self.watermark = (progress["eventTime"] or {}).get("watermark") or self.watermark
            if dropped is not None:
                dropped.end(progress)
        return moved

    def update_position(self, progress: Any) -> bool:
        """Update the query's position in the log; return whether it changed."""
        before = self.offset, self.lag
        for source in progress["sources"]:
            end, latest = offset_in(source["endOffset"]), offset_in(source["latestOffset"])
            if end is not None:
                self.offset = end
                if latest is not None:
                    self.lag = max(0, latest - end)
            else:
                lag = kafka_lag(source["endOffset"], source["latestOffset"])
                # An idle query may not report the newest offsets.
                self.lag = self.lag if lag is None else lag
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


def kafka_lag(end: Any, latest: Any) -> int | None:
    """Return how many records Kafka has after a position: offsets by topic and partition. None for other sources."""
    try:
        at, newest = decoded(end), decoded(latest)
        return sum(
            max(0, int(offset) - int(at.get(topic, {}).get(partition, 0)))
            for topic, partitions in newest.items()
            for partition, offset in partitions.items()
        )
    except (AttributeError, TypeError, ValueError):
        return None
