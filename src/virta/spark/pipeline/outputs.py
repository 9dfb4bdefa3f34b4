"""
Write a pipeline's rows to its sinks: the columns of each kind, and how they are written.

Exactly once: a channel (the query's id and the micro-batch's number are in the log's batch), Parquet (Spark's list of
committed files; dead letters by a directory per micro-batch), JDBC with keys or in mode complete. At least once:
JDBC without keys, Kafka. There a micro-batch that Spark repeats after a crash is written again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.log.limits import VALUE_BYTES_MAX
from virta.spark import transforms
from virta.spark.pipeline.jdbc import jdbc_batch, write_jdbc

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from virta.spark.pipeline.model import Pipeline, Sink


# A dead letter contains its value as Base64, four bytes for three, and must fit in a record.
LETTER_VALUE_MAX = VALUE_BYTES_MAX // 10 * 7
LARGE_BYTES = VALUE_BYTES_MAX // 2  # of values: events computed from smaller ones are not measured


def shape(rows: DataFrame, sink: Sink, pipeline: Pipeline) -> DataFrame:
    """Return the rows with the columns of a sink."""
    if sink.kind in {"channel", "kafka"}:
        return to_records(rows, sink, pipeline)
    if sink.kind == "parquet" and "day" in partitions(rows, sink) and "day" not in rows.columns:
        return rows.withColumn("day", F.to_date(F.col("timestamp")))
    if sink.kind in {"jdbc", "console"} and "data" in rows.columns:
        return rows.withColumn("data", F.to_json("data")).drop("value")
    return rows


def to_records(rows: DataFrame, sink: Sink, pipeline: Pipeline) -> DataFrame:
    """Return records: events unchanged, computed rows as events with the row as data."""
    assert sink.topic is not None
    if not pipeline.aggregate and not pipeline.columns and "value" in rows.columns:
        key = F.col(sink.key or "key").cast("binary")
        return rows.select(F.lit(sink.topic).alias("topic"), key.alias("key"), "value")
    if makes_events(sink, pipeline) and "value" in rows.columns:
        rows = rows.where(~too_large(rows, sink, pipeline))
    names = event_names(sink, pipeline)
    return transforms.to_events(rows.drop("value", "key"), topic=sink.topic, key=sink.key, **names)


def event_names(sink: Sink, pipeline: Pipeline) -> dict[str, str]:
    return {
        "type": sink.type or f"virta.pipeline.{pipeline.name}",
        "source": sink.source or f"/virta/pipelines/{pipeline.name}",
    }


def makes_events(sink: Sink, pipeline: Pipeline) -> bool:
    """Return whether a channel gets events made of single rows, which may be larger than the input."""
    return sink.kind == "channel" and bool(pipeline.columns) and pipeline.aggregate is None


def too_large(rows: DataFrame, sink: Sink, pipeline: Pipeline) -> Column:
    """Return a condition: the event made of the row is too large for a record."""
    made = transforms.event_value(rows.drop("value", "key"), **event_names(sink, pipeline))
    size = F.when(F.length("value") > LARGE_BYTES, F.octet_length(made)).otherwise(0)
    return size > VALUE_BYTES_MAX


def partitions(rows: DataFrame, sink: Sink) -> tuple[str, ...]:
    """Return the partition columns: the sink's own, else day and topic if the rows have them."""
    if sink.partition_by:
        return sink.partition_by
    return ("day", "topic") if {"timestamp", "topic"} <= set(rows.columns) else ()


def writer(rows: DataFrame, sink: Sink, pipeline: Pipeline, name: str) -> DataStreamWriter:
    """Return the writer of a sink; `name` is the sink's own in its pipeline."""
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
        mode = pipeline.aggregate.mode if pipeline.aggregate else "append"
        return stream.foreachBatch(jdbc_batch(sink, mode, f"{pipeline.checkpoint_path()}/{name}"))
    return stream.format(sink.kind)


def channel_batch(path: str, options: dict[str, str]) -> Callable[[DataFrame, int], None]:
    """
    Return a function that appends results in mode update or complete, which Spark refuses for a Python sink.

    Still exactly once: the query's id and the batch's number are in the log's batch header.
    """

    def append(batch: DataFrame, number: int) -> None:
        context = batch.sparkSession.sparkContext
        query = context.getLocalProperty("sql.streaming.queryId")
        batch.write.format("virta").mode("append").options(
            queryId=query, sequence=str(number), **options
        ).save(path)

    return append


# Dead letters.


def write_dead(rows: DataFrame, pipeline: Pipeline, name: str, number: int) -> int:
    """
    Write dead letters; return how many there were.

    `name` is the query and the kind (invalid, late, repeat), `number` the micro-batch: rows written again under both
    are in a channel or a directory once.
    """
    sink = pipeline.dead_letter
    assert sink is not None
    kept = rows.persist()
    try:
        count = kept.count()
        if count:
            write_letters(kept, sink, pipeline, name, number)
    finally:
        kept.unpersist()
    return count


def write_letters(rows: DataFrame, sink: Sink, pipeline: Pipeline, name: str, number: int) -> None:
    if sink.kind == "console":
        rows.show(truncate=False)
    elif sink.kind == "jdbc":
        write_jdbc(rows, sink, "append")
    elif sink.kind == "parquet":
        assert sink.path is not None
        query, _, kind = name.rpartition(".")
        place = f"{pipeline.path(sink.path)}/kind={kind}/batch={query[:8]}-{number}"
        codec = sink.options.get("compression", "zstd")
        rows.coalesce(1).write.mode("overwrite").option("compression", codec).parquet(place)
    else:
        write_events(rows, sink, pipeline, name, number)


def write_events(rows: DataFrame, sink: Sink, pipeline: Pipeline, name: str, number: int) -> None:
    """Write dead letters as events with the value's bytes and the reason."""
    assert sink.topic is not None
    large = F.length("value") > LETTER_VALUE_MAX
    left_out = F.format_string("%s; its %d bytes are left out here", "reason", F.length("value"))
    records = transforms.to_events(
        rows.withColumn("reason", F.when(large, left_out).otherwise(F.col("reason")))
        .withColumn("value", F.when(~large, F.base64("value")))
        .drop("key"),
        topic=sink.topic,
        type=sink.type or "virta.dead-letter",
        source=sink.source or f"/virta/pipelines/{pipeline.name}",
    )
    if sink.kind == "kafka":
        records.write.format("kafka").options(**dict(sink.options)).save()
        return
    log = sink.log or pipeline.source.log
    assert log is not None
    options: dict[str, Any] = {"durability": sink.durability} if sink.durability else {}
    records.coalesce(1).write.format("virta").mode("append").options(
        queryId=name, sequence=str(number), **options
    ).save(pipeline.path(log))
