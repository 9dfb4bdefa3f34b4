"""
A pipeline as DataFrames: what it reads, what its sinks get, what its dead letters are.

Nothing runs here; the same functions build the stream, its bounded twin, and a single micro-batch read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.log.limits import VALUE_BYTES_MAX
from virta.spark import transforms
from virta.spark.matching.match import where
from virta.spark.pipeline.checks import interval_seconds
from virta.spark.pipeline.errors import blamed_on
from virta.spark.pipeline.outputs import makes_events, too_large

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from virta.spark.pipeline.model import Pipeline, Source

RECORD_NAMES = ("topic", "offset", "timestamp", "key", "value")
APPENDED = "timestamp"  # the one time every record has


@dataclass(frozen=True)
class Built:
    """A pipeline's DataFrames: what the sinks get, what is dead-lettered."""

    results: DataFrame
    dead: DataFrame | None


def build(spark: SparkSession, pipeline: Pipeline, *, streaming: bool = True) -> Built:
    """Return the DataFrames of a pipeline; nothing runs yet. Bounded with `streaming=False`."""
    events = read_source(spark, pipeline, streaming=streaming)
    dead = dead_letters(events, pipeline) if pipeline.dead_letter else None
    rows = timed(transforms.valid_events(events), pipeline)
    rows = one_watermark(rows, pipeline)
    if pipeline.dedupe:
        dedupe = pipeline.dedupe
        rows = transforms.dedupe(rows, dedupe.by, within=dedupe.within, time=dedupe.time)
    rows = wanted(rows, pipeline)
    if pipeline.aggregate:
        rows = aggregate(rows, pipeline)
    return Built(rows, dead)


def wanted(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return the rows that pass the filters, with the pipeline's columns."""
    if pipeline.filters:
        rows = where(rows, [one.parsed() for one in pipeline.filters])
    for name, sql in pipeline.columns.items():
        with blamed_on(pipeline, "columns", name):
            rows = rows.withColumn(name, F.expr(sql))
    return rows


def clock(pipeline: Pipeline) -> str | None:
    """Return the column whose watermark decides what is late, None when nothing is."""
    if pipeline.aggregate:
        return pipeline.aggregate.time
    return pipeline.dedupe.time if pipeline.dedupe else None


def timed(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """
    Return the rows that have a time; Spark's windows would drop the others without a word.

    A column of the pipeline's own that is the time is computed here, before any filter.
    """
    time = clock(pipeline)
    if time is None or time == APPENDED:
        return rows
    if time in pipeline.columns:
        with blamed_on(pipeline, "columns", time):
            rows = rows.withColumn(time, F.expr(pipeline.columns[time]))
    transforms.need(rows, [time], "the pipeline's time")
    return rows.where(F.col(time).isNotNull())


def dead_letters(events: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return values that are no events; events that pass the filters but become too large, or lack the time they need."""
    dead = transforms.dead_letters(events)
    time = clock(pipeline)
    makers = [sink for sink in pipeline.sinks if makes_events(sink, pipeline)]
    if not makers and time in {None, APPENDED}:
        return dead
    rows = wanted(transforms.valid_events(events), pipeline)
    for sink in makers[:1]:
        reason = F.lit(f"too large: the event made of it has over {VALUE_BYTES_MAX} bytes")
        large = rows.where(too_large(rows, sink, pipeline)).withColumn("reason", reason)
        dead = dead.unionByName(large.select(*dead.columns))
    if time is None or time == APPENDED:
        return dead
    transforms.need(rows, [time], "the pipeline's time")
    reason = F.lit(f"no time: the column {time} is empty")
    untimed = rows.where(F.col(time).isNull()).withColumn("reason", reason)
    return dead.unionByName(untimed.select(*dead.columns))


def one_watermark(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return the watermark that deduplication and windows share, when a stream has both: the more patient one."""
    dedupe, spec = pipeline.dedupe, pipeline.aggregate
    if not (dedupe and spec and rows.isStreaming):
        return rows
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
    rows = reader.format("virta").options(**options).load(pipeline.path(source.log))
    return without_own(rows, pipeline)


def without_own(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return a pipeline that reads all topics of a log does not read its own results and dead letters there."""
    own = pipeline.own_topics()
    return rows if pipeline.source.topics or not own else rows.where(~F.col("topic").isin(own))


def read_range(
    spark: SparkSession, pipeline: Pipeline, first: int | str, end: int | str
) -> DataFrame:
    """Return the events of a stretch of the log that a micro-batch has read, read again."""
    source = pipeline.source
    assert source.log is not None
    options = {**source_options(source), **source.options, "start": str(first), "end": str(end)}
    rows = spark.read.format("virta").options(**options).load(pipeline.path(source.log))
    return without_own(rows, pipeline)


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
    with blamed_on(pipeline, "aggregate", "aggregates"):
        if spec.session is not None:
            return transforms.sessionize(rows, spec.session, **common)
        assert spec.window is not None
        return transforms.window_aggregate(rows, spec.window, slide=spec.slide, **common)
