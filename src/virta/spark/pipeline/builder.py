"""
Build the DataFrames of a pipeline: its source, the rows for its sinks, its dead letters.

Nothing runs here. The same functions build the stream, the bounded query, and one micro-batch read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.log.limits import VALUE_BYTES_MAX
from virta.spark import transforms
from virta.spark.matching.match import where
from virta.spark.pipeline.checks import interval_seconds
from virta.spark.pipeline.errors import located
from virta.spark.pipeline.outputs import makes_events, too_large
from virta.spark.schemas import RECORD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from virta.spark.pipeline.model import Pipeline, Source

RECORD_NAMES = tuple(RECORD.names)
APPENDED = "timestamp"  # the time that every record has


@dataclass(frozen=True)
class BuiltPipeline:
    """The DataFrames of a pipeline: rows for the sinks, and dead letters."""

    results: DataFrame
    dead: DataFrame | None


def build(spark: SparkSession, pipeline: Pipeline, *, streaming: bool = True) -> BuiltPipeline:
    """Return the DataFrames of a pipeline; nothing runs yet. Bounded with `streaming=False`."""
    events = read_source(spark, pipeline, streaming=streaming)
    dead = dead_letters(events, pipeline) if pipeline.dead_letter else None
    rows = with_time(transforms.valid_events(events), pipeline)
    rows = one_watermark(rows, pipeline)
    if pipeline.dedupe:
        dedupe = pipeline.dedupe
        rows = transforms.dedupe(rows, dedupe.by, within=dedupe.within, time=dedupe.time)
    rows = select_rows(rows, pipeline)
    if pipeline.aggregate:
        rows = aggregate(rows, pipeline)
    return BuiltPipeline(rows, dead)


def select_rows(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return the rows that pass the filters, with the pipeline's columns."""
    if pipeline.filters:
        rows = where(rows, [one.parsed() for one in pipeline.filters])
    for name, sql in pipeline.columns.items():
        with located(pipeline, "columns", name):
            rows = rows.withColumn(name, F.expr(sql))
    return rows


def watermark_column(pipeline: Pipeline) -> str | None:
    """Return the column whose watermark decides what is late, None when nothing is."""
    if pipeline.aggregate:
        return pipeline.aggregate.time
    return pipeline.dedupe.time if pipeline.dedupe else None


def with_time(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """
    Return the rows that have a time; Spark's windows would drop the others silently.

    If the time is one of [columns], it is computed here, before any filter.
    """
    time = watermark_column(pipeline)
    if time is None or time == APPENDED:
        return rows
    if time in pipeline.columns:
        with located(pipeline, "columns", time):
            rows = rows.withColumn(time, F.expr(pipeline.columns[time]))
    transforms.need(rows, [time], "the pipeline's time")
    return rows.where(F.col(time).isNotNull())


def dead_letters(events: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return values that are not events, and events that pass the filters but are too large or lack their time."""
    dead = transforms.dead_letters(events)
    time = watermark_column(pipeline)
    makers = [sink for sink in pipeline.sinks if makes_events(sink, pipeline)]
    if not makers and time in {None, APPENDED}:
        return dead
    rows = select_rows(transforms.valid_events(events), pipeline)
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
    """Return a stream with the watermark that deduplication and windows share: the longer of both."""
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
    """Return the rows without the pipeline's own results and dead letters, if it reads all topics of the log."""
    own = pipeline.own_topics()
    return rows if pipeline.source.topics or not own else rows.where(~F.col("topic").isin(own))


def read_range(
    spark: SparkSession, pipeline: Pipeline, first: int | str, end: int | str
) -> DataFrame:
    """Return the events of an offset range of the log, as a micro-batch reads them."""
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
    with located(pipeline, "aggregate", "aggregates"):
        if spec.session is not None:
            return transforms.sessionize(rows, spec.session, **common)
        assert spec.window is not None
        return transforms.window_aggregate(rows, spec.window, slide=spec.slide, **common)
