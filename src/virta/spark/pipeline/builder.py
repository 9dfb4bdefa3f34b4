"""
Build the DataFrames of a pipeline: its source, the rows for its sinks, its dead letters.

Nothing runs here. The same functions build the stream, the bounded query, and one micro-batch read again.

A pipeline without windows and deduplication streams its results and its dead letters as one DataFrame (`flow`), which
`split` divides in each micro-batch. With them Spark's stateful operator returns results only: there the stream
reports by `observe` where a micro-batch has rows that may be dead letters (`virta.spark.pipeline.late_rows`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from virta.log.limits import VALUE_BYTES_MAX
from virta.spark import transforms
from virta.spark.matching.match import columns_of, where
from virta.spark.pipeline.checks import interval_seconds
from virta.spark.pipeline.errors import located
from virta.spark.pipeline.outputs import LARGE_BYTES, makes_events, too_large
from virta.spark.pipeline.status import is_remote
from virta.spark.schemas import EVENT, RECORD

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from virta.spark.pipeline.model import Pipeline, Source

RECORD_NAMES = tuple(RECORD.names)
APPENDED = "timestamp"  # the time that every record has
STAR = re.compile(
    r"(?<!count)\s*\(\s*\*|[,.]\s*\*", re.IGNORECASE
)  # all columns, but not count(*) and products
SUSPECTS = "virta.suspects"  # the name of the observed metrics: first and last offset of possible dead letters


@dataclass(frozen=True)
class BuiltPipeline:
    """The DataFrames of a pipeline: rows for the sinks, dead letters, and what a run streams."""

    results: DataFrame
    dead: DataFrame | None
    flow: DataFrame


def build(
    spark: SparkSession, pipeline: Pipeline, *, streaming: bool = True, consumer: str | None = None
) -> BuiltPipeline:
    """
    Return the DataFrames of a pipeline; nothing runs yet. Bounded with `streaming=False`.

    `consumer` is the name under which a stream's position is stored in the log.
    """
    events = read_source(spark, pipeline, streaming=streaming, consumer=consumer)
    if not is_stateful(pipeline):
        flow = select_rows(
            events if pipeline.dead_letter else transforms.valid_events(events), pipeline
        )
        return BuiltPipeline(*split(flow, pipeline), flow)
    dead = dead_letters(events, pipeline) if pipeline.dead_letter else None
    if streaming and can_follow(pipeline):
        events = observed(events, pipeline)
    rows = watermark_rows(transforms.valid_events(events), pipeline)
    rows = one_watermark(rows, pipeline)
    if pipeline.dedupe:
        dedupe = pipeline.dedupe
        rows = transforms.dedupe(rows, dedupe.by, within=dedupe.within, time=dedupe.time)
        rows = select_rows(rows, pipeline)
    if pipeline.aggregate:
        rows = aggregate(rows, pipeline)
    return BuiltPipeline(rows, dead, rows)


def is_stateful(pipeline: Pipeline) -> bool:
    """Return whether Spark keeps a state between micro-batches."""
    return watermark_column(pipeline) is not None


def can_follow(pipeline: Pipeline) -> bool:
    """Return whether the dead letters of a stateful pipeline can be read again: from a log, with a local checkpoint."""
    return (
        pipeline.dead_letter is not None
        and is_stateful(pipeline)
        and pipeline.source.format == "virta"
        and not is_remote(pipeline)
    )


def split(flow: DataFrame, pipeline: Pipeline) -> tuple[DataFrame, DataFrame | None]:
    """Return the results and the dead letters of a stateless pipeline's rows."""
    if "invalid" not in flow.columns:
        return flow, None
    results = transforms.valid_events(flow)
    dead = transforms.dead_letters(flow)
    for refused in refused_rows(results, pipeline):
        dead = dead.unionByName(refused.select(*dead.columns))
    return results, dead


def select_rows(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return the rows that pass the filters, with the pipeline's columns; rows with `invalid` stay as they are."""
    if pipeline.filters:
        filters = [one.parsed() for one in pipeline.filters]
        rows = where(rows, filters, keep_invalid=True, decoded=True)
    marked = "invalid" in rows.columns
    for name, sql in pipeline.columns.items():
        with located(pipeline, "columns", name):
            # An expression may fail on a value that is not an event.
            value = F.when(F.col("invalid").isNull(), F.expr(sql)) if marked else F.expr(sql)
            rows = rows.withColumn(name, value)
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


def watermark_rows(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return the rows whose times move the watermark: before a deduplication all, before windows the filtered ones."""
    rows = with_time(rows, pipeline)
    return rows if pipeline.dedupe else select_rows(rows, pipeline)


def dead_letters(events: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return values that are not events, and events that pass the filters but are too large or lack their time."""
    dead = transforms.dead_letters(events)
    if not has_makers(pipeline) and watermark_column(pipeline) in {None, APPENDED}:
        return dead
    for refused in refused_rows(select_rows(transforms.valid_events(events), pipeline), pipeline):
        dead = dead.unionByName(refused.select(*dead.columns))
    return dead


def has_makers(pipeline: Pipeline) -> bool:
    return any(makes_events(sink, pipeline) for sink in pipeline.sinks)


def refused_rows(rows: DataFrame, pipeline: Pipeline) -> list[DataFrame]:
    """Return the selected rows that no sink can get, each with the column `reason`."""
    refused = []
    makers = [sink for sink in pipeline.sinks if makes_events(sink, pipeline)]
    for sink in makers[:1]:
        reason = F.lit(f"too large: the event made of it has over {VALUE_BYTES_MAX} bytes")
        refused.append(rows.where(too_large(rows, sink, pipeline)).withColumn("reason", reason))
    time = watermark_column(pipeline)
    if time is not None and time != APPENDED:
        transforms.need(rows, [time], "the pipeline's time")
        reason = F.lit(f"no time: the column {time} is empty")
        refused.append(rows.where(F.col(time).isNull()).withColumn("reason", reason))
    return refused


def observed(events: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return the events; each micro-batch's progress reports the range of those that may be dead letters."""
    at = F.when(suspect(events, pipeline), F.col("offset"))
    return events.observe(SUSPECTS, F.min(at).alias("first"), F.max(at).alias("last"))


def suspect(events: DataFrame, pipeline: Pipeline) -> Column:
    """Return a condition that holds for every value that is no event, lacks its time or may be too large."""
    invalid = F.col("invalid").isNotNull()
    time = watermark_column(pipeline)
    if time is not None and time != APPENDED:
        if time in pipeline.columns:
            with located(pipeline, "columns", time):
                at = F.expr(pipeline.columns[time])
        else:
            transforms.need(events, [time], "the pipeline's time")
            at = F.col(time)
        invalid = F.when(F.col("invalid").isNull(), at).isNull()
    return invalid | (F.length("value") > LARGE_BYTES) if has_makers(pipeline) else invalid


def one_watermark(rows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Return a stream with the watermark that deduplication and windows share: the longer of both."""
    dedupe, spec = pipeline.dedupe, pipeline.aggregate
    if not (dedupe and spec and rows.isStreaming):
        return rows
    return rows.withWatermark(spec.time, max(dedupe.within, spec.late, key=interval_seconds))


def watermark_delay(pipeline: Pipeline) -> int:
    """Return by how many milliseconds the watermark is behind the newest time."""
    dedupe, spec = pipeline.dedupe, pipeline.aggregate
    delays = [*([dedupe.within] if dedupe else []), *([spec.late] if spec else [])]
    return max(round(interval_seconds(delay) * 1000) for delay in delays)


def read_source(
    spark: SparkSession, pipeline: Pipeline, *, streaming: bool, consumer: str | None
) -> DataFrame:
    source = pipeline.source
    reader = spark.readStream if streaming else spark.read
    if source.format != "virta":
        rows = reader.format(source.format).options(**dict(source.options)).load()
        used = source_schema(pipeline).names
        read = [name for name in RECORD_NAMES if name == "value" or name in used]
        rows = rows.select(*[name for name in read if name in rows.columns])
        return transforms.decode_events(rows, columns=used)
    options = {**source_options(source), **source.options}
    if streaming and consumer is not None:
        options["consumer"] = consumer
    assert source.log is not None
    reader = reader.format("virta").options(**options).schema(source_schema(pipeline))
    return without_own(reader.load(pipeline.path(source.log)), pipeline)


def source_schema(pipeline: Pipeline) -> StructType:
    """
    Return the event columns that a pipeline uses: Spark does not tell a Python source, and others need not be decoded.

    A column is used if an expression has its name as a word, which may be one too many. Filters that have no exact
    Column use `value` only. Needs a session, as such Columns do.
    """
    if has_whole_rows(pipeline):
        return EVENT
    dedupe, spec = pipeline.dedupe, pipeline.aggregate
    texts = [*pipeline.columns.values(), *(sink.key or "" for sink in pipeline.sinks)]
    texts += [*dedupe.by, dedupe.time] if dedupe else []
    texts += [*spec.aggregates.values(), *spec.by, spec.time] if spec else ["key value"]
    used = {"invalid", *re.findall(r"\w+", " ".join(texts).lower())}
    if pipeline.filters:
        used |= columns_of([one.parsed() for one in pipeline.filters])
    if pipeline.dead_letter:
        used.update(RECORD_NAMES)
    if not pipeline.source.topics:
        used.add("topic")
    return StructType([field for field in EVENT.fields if field.name in used])


def has_whole_rows(pipeline: Pipeline) -> bool:
    """Return whether a sink or an expression may use every column."""
    spec = pipeline.aggregate
    texts = [*pipeline.columns.values(), *(spec.aggregates.values() if spec else ())]
    if any(STAR.search(text) for text in texts):
        return True
    if spec is not None:
        return False
    return bool(pipeline.columns) or any(
        sink.kind not in {"channel", "kafka"} for sink in pipeline.sinks
    )


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
