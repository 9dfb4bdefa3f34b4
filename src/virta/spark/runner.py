"""
Pipelines as Spark queries: built, started, watched, stopped.

Each sink (and the dead-letter output) is a query of its own with its own checkpoint, so one that fails
or lags does not hold the others, and each is exactly once by itself. What a run is doing stands in
`status.json` beside the checkpoints, replaced whole each time, for `virta pipeline status` and the server.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.errors import VirtaError
from virta.spark import transforms
from virta.spark.matching import where
from virta.spark.pipeline import Pipeline, Sink, Source, interval_seconds, sink_names
from virta.spark.status import write_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

DEAD_LETTER = "dead-letter"
POLL_SECONDS = 0.5
RECORD_NAMES = ("topic", "offset", "timestamp", "key", "value")

_PYTHON_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)


class RunError(VirtaError):
    """A query of a pipeline ended with an error."""

    default_code = "pipeline_failed"


@dataclass(frozen=True)
class Built:
    """A pipeline's DataFrames: decoded input, what the sinks get, what is dead-lettered."""

    results: DataFrame
    dead: DataFrame | None


# Building.


def build(spark: SparkSession, pipeline: Pipeline, *, streaming: bool = True) -> Built:
    """The DataFrames of a pipeline; nothing runs yet. Bounded with `streaming=False`."""
    events = read_source(spark, pipeline, streaming=streaming)
    dead = transforms.dead_letters(events) if pipeline.dead_letter else None
    rows = transforms.valid_events(events)
    rows = one_watermark(rows, pipeline)
    if pipeline.dedupe:
        dedupe = pipeline.dedupe
        rows = transforms.dedupe(rows, dedupe.by, within=dedupe.within, time=dedupe.time)
    if pipeline.filters:
        rows = where(rows, [one.parsed() for one in pipeline.filters])
    for name, sql in pipeline.columns.items():
        rows = rows.withColumn(name, F.expr(sql))
    if pipeline.aggregate:
        rows = aggregate(rows, pipeline)
    return Built(rows, dead)


def one_watermark(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """The watermark that deduplication and windows share, when a stream has both: the more patient one."""
    dedupe, spec = pipeline.dedupe, pipeline.aggregate
    if not (dedupe and spec and rows.isStreaming):
        return rows
    if spec.time in pipeline.columns:
        rows = rows.withColumn(spec.time, F.expr(pipeline.columns[spec.time]))
    return rows.withWatermark(spec.time, max(dedupe.within, spec.late, key=interval_seconds))


def read_source(spark: SparkSession, pipeline: Pipeline, *, streaming: bool) -> DataFrame:
    source = pipeline.source
    reader = spark.readStream if streaming else spark.read
    if source.format != "virta":
        rows = reader.format(source.format).options(**dict(source.options)).load()
        return transforms.decode_events(
            rows.select(*[name for name in RECORD_NAMES if name in rows.columns])
        )
    options = {**source_options(source), **source.options}
    assert source.log is not None
    return reader.format("virta").options(**options).load(pipeline.path(source.log))


def source_options(source: Source) -> dict[str, str]:
    options = {
        "events": "true",
        "start": source.start,
        "topics": ",".join(source.topics) or None,
        "startTime": source.start_time,
        "endTime": source.end_time,
        "onGap": source.on_gap,
        "onCorruption": source.on_corruption,
        "maxRecordsPerTrigger": source.max_records_per_trigger,
        "maxBytesPerTrigger": source.max_bytes_per_trigger,
    }
    return {name: str(value) for name, value in options.items() if value is not None}


def aggregate(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    spec = pipeline.aggregate
    assert spec is not None
    common: dict[str, Any] = {
        "by": spec.by,
        "aggregates": spec.aggregates,
        "late": spec.late,
        "time": spec.time,
    }
    if spec.session is not None:
        return transforms.sessionize(rows, spec.session, **common)
    assert spec.window is not None
    return transforms.window_aggregate(rows, spec.window, slide=spec.slide, **common)


# Sinks.


def shape(rows: DataFrame, sink: Sink, pipeline: Pipeline) -> DataFrame:
    """The columns a sink takes."""
    if sink.kind in {"channel", "kafka"}:
        return to_records(rows, sink, pipeline)
    if sink.kind == "parquet" and "day" in partitions(rows, sink) and "day" not in rows.columns:
        return rows.withColumn("day", F.to_date(F.col("timestamp")))
    if sink.kind in {"jdbc", "console"} and "data" in rows.columns:
        return rows.withColumn("data", F.to_json("data")).drop("value")
    return rows


def to_records(rows: DataFrame, sink: Sink, pipeline: Pipeline) -> DataFrame:
    """Events pass through as they are; anything computed becomes an event with the row as data."""
    assert sink.topic is not None
    if not pipeline.aggregate and not pipeline.columns and "value" in rows.columns:
        key = F.col(sink.key or "key").cast("binary")
        return rows.select(F.lit(sink.topic).alias("topic"), key.alias("key"), "value")
    plain = rows.drop("value", "key")
    return transforms.to_events(
        plain,
        topic=sink.topic,
        type=sink.type or f"virta.pipeline.{pipeline.name}",
        source=sink.source or f"/virta/pipelines/{pipeline.name}",
        key=sink.key,
    )


def partitions(rows: DataFrame, sink: Sink) -> tuple[str, ...]:
    """By day and topic unless the sink says otherwise; aggregates have neither."""
    if sink.partition_by:
        return sink.partition_by
    return ("day", "topic") if {"timestamp", "topic"} <= set(rows.columns) else ()


def writer(rows: DataFrame, sink: Sink, pipeline: Pipeline) -> DataStreamWriter:
    shaped = shape(rows, sink, pipeline)
    stream = shaped.writeStream.options(**dict(sink.options))
    if sink.kind == "channel":
        log = sink.log or pipeline.source.log
        assert log is not None
        options = {"durability": sink.durability} if sink.durability else {}
        if pipeline.aggregate and pipeline.aggregate.mode != "append":
            return shaped.writeStream.foreachBatch(channel_batch(pipeline.path(log), options))
        return stream.format("virta").options(**options).option("path", pipeline.path(log))
    if sink.kind == "parquet":
        assert sink.path is not None
        names = partitions(rows, sink)
        stream = stream.partitionBy(*names) if names else stream
        stream = stream.option("compression", sink.options.get("compression", "zstd"))
        return stream.format("parquet").option("path", pipeline.path(sink.path))
    if sink.kind == "jdbc":
        return stream.foreachBatch(jdbc_batch(sink))
    return stream.format(sink.kind)


def channel_batch(path: str, options: dict[str, str]) -> Callable[[DataFrame, int], None]:
    """
    Appends results in mode update or complete, which Spark does not let a Python sink take.

    Exactly once all the same: the query's id and the batch's number go into the log's batch header.
    """

    def append(batch: DataFrame, number: int) -> None:
        context = batch.sparkSession.sparkContext
        query = context.getLocalProperty("sql.streaming.queryId")
        batch.write.format("virta").mode("append").options(
            queryId=query, sequence=str(number), **options
        ).save(path)

    return append


def jdbc_batch(sink: Sink) -> Callable[[DataFrame, int], None]:
    """Appends to a table; a batch that Spark repeats is inserted again (at least once)."""
    assert sink.url is not None
    assert sink.table is not None
    url, table, options = sink.url, sink.table, dict(sink.options)

    def insert(batch: DataFrame, _: int) -> None:
        batch.write.jdbc(url, table, mode="append", properties=options)

    return insert


# Running.


def start(spark: SparkSession, pipeline: Pipeline) -> list[StreamingQuery]:
    """Start every query of the pipeline."""
    built = build(spark, pipeline)
    outputs = list(zip(sink_names(pipeline), pipeline.sinks, strict=True))
    queries = []
    try:
        for name, sink in outputs:
            queries.append(start_one(built.results, name, sink, pipeline))
        if built.dead is not None and pipeline.dead_letter is not None:
            queries.append(start_dead(built.dead, pipeline))
    except BaseException:
        for query in queries:
            query.stop()
        raise
    return queries


def start_one(rows: DataFrame, name: str, sink: Sink, pipeline: Pipeline) -> StreamingQuery:
    mode = pipeline.aggregate.mode if pipeline.aggregate else "append"
    return begin(writer(rows, sink, pipeline).outputMode(mode), name, pipeline)


def start_dead(dead: DataFrame, pipeline: Pipeline) -> StreamingQuery:
    """Dead letters keep their bytes; a channel gets them as events that carry the reason."""
    sink = pipeline.dead_letter
    assert sink is not None
    if sink.kind in {"channel", "kafka"}:
        assert sink.topic is not None
        records = transforms.to_events(
            dead.withColumn("value", F.base64("value")).drop("key"),
            topic=sink.topic,
            type=sink.type or "virta.dead-letter",
            source=sink.source or f"/virta/pipelines/{pipeline.name}",
        )
        plain = Pipeline(
            name=pipeline.name,
            source=pipeline.source,
            sinks=(sink,),
            directory=pipeline.directory,
        )
        return begin(
            writer(records, Sink(**{**vars(sink), "key": None}), plain), DEAD_LETTER, pipeline
        )
    return begin(writer(dead, sink, pipeline), DEAD_LETTER, pipeline)


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
    queries = start(spark, pipeline)
    counts: dict[str, Counter] = {query.name: Counter() for query in queries}
    state, reason = "running", None
    try:
        while any(query.isActive for query in queries) and not stopping():
            if all(query.exception() is None for query in queries):
                time.sleep(POLL_SECONDS)
            else:
                break
            moved = [counts[query.name].take(query) for query in queries]
            if any(moved):
                report(pipeline, queries, counts, state, None, on_progress)
    finally:
        for query in queries:
            query.stop()
    failed = next((query for query in queries if query.exception() is not None), None)
    for query in queries:
        counts[query.name].take(query)
    state = "failed" if failed else "stopped" if stopping() else "finished"
    if failed:
        reason = explain(failed.exception())
    status = report(pipeline, queries, counts, state, reason, on_progress)
    if failed:
        raise RunError(f"{failed.name}: {reason}")
    return status


class Counter:
    """What one query has done so far, from its progress reports."""

    def __init__(self) -> None:
        self.batch = -1
        self.rows = 0
        self.seconds = 0.0
        self.late = 0
        self.lag: int | None = None
        self.offset: int | None = None

    def take(self, query: StreamingQuery) -> bool:
        """Add the progress not seen yet; True when there was some."""
        moved = False
        for progress in query.recentProgress:
            if progress["batchId"] <= self.batch:
                continue
            self.batch, moved = progress["batchId"], True
            self.rows += progress["numInputRows"]
            self.seconds += progress["durationMs"].get("triggerExecution", 0) / 1000
            self.late += sum(
                state["numRowsDroppedByWatermark"] for state in progress["stateOperators"]
            )
            self.place(progress)
        return moved

    def place(self, progress: Any) -> None:
        for source in progress["sources"]:
            end, latest = decoded(source["endOffset"]), decoded(source["latestOffset"])
            if isinstance(end, dict) and "offset" in end:
                self.offset = end["offset"]
                if isinstance(latest, dict) and "offset" in latest:
                    self.lag = max(0, latest["offset"] - end["offset"])

    def as_dict(self) -> dict[str, Any]:
        rate = self.rows / self.seconds if self.seconds else 0.0
        return {
            "batches": self.batch + 1,
            "rows": self.rows,
            "rows_per_second": round(rate, 1),
            "late": self.late,
            "offset": self.offset,
            "lag": self.lag,
        }


def decoded(offset: Any) -> Any:
    if isinstance(offset, str):
        try:
            return json.loads(offset)
        except ValueError:
            return None
    return offset


def report(
    pipeline: Pipeline,
    queries: list[StreamingQuery],
    counts: dict[str, Counter],
    state: str,
    reason: str | None,
    on_progress: Callable[[dict[str, Any]], None] | None,
) -> dict[str, Any]:
    status = {
        "pipeline": pipeline.name,
        "state": state,
        "pid": os.getpid(),
        "updated": round(time.time(), 3),
        "reason": reason,
        "queries": {
            query.name.partition(".")[2] or query.name: counts[query.name].as_dict()
            for query in queries
        },
    }
    write_status(pipeline, status)
    if on_progress is not None:
        on_progress(status)
    return status


def explain(error: BaseException | None) -> str:
    """The one sentence in a Spark error that a person needs: the Python part, if there is one."""
    text = str(error)
    found = _PYTHON_ERROR.findall(text)
    wanted = [m for m in found if not m[0].startswith(("Py4J", "StreamingQuery", "PySpark"))]
    if wanted:
        name, message = wanted[-1]
        return f"{name}: {message}"
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
