"""
Write a micro-batch's rows to a sink: the columns of each kind, and how they are written.

Exactly once: a channel (the query's id, the sink's name and the micro-batch's number are in the log's batch), Parquet (a
directory per micro-batch, which a repeat replaces), Delta and Iceberg (virta.spark.lake.table_sink), JDBC with keys or in mode complete. At least once: JDBC without
keys, Kafka. There a micro-batch is written again if the driver died between the write and the record of it
(`virta.spark.pipeline.fan_out`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import ArrayType, MapType, StructType, VariantType

from virta.log.limits import VALUE_BYTES_MAX
from virta.spark import transforms
from virta.spark.lake.table_sink import TABLE_KINDS, write_table
from virta.spark.pipeline.checks import BATCH
from virta.spark.pipeline.jdbc import write_jdbc

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from virta.spark.pipeline.model import Pipeline, Sink


# A dead letter contains its value as Base64, four bytes for three, and must fit in a record.
LETTER_VALUE_MAX = VALUE_BYTES_MAX // 10 * 7
FILE_KINDS = frozenset(("parquet", *TABLE_KINDS))
LARGE_BYTES = VALUE_BYTES_MAX // 2  # of values: events computed from smaller ones are not measured
NESTED = (ArrayType, MapType, StructType, VariantType)
# A marker file per micro-batch would be in every directory; readers do not need it.
NO_MARKER = {"mapreduce.fileoutputcommitter.marksuccessfuljobs": "false"}


@dataclass(frozen=True)
class BatchId:
    """A micro-batch: the query's id, which is the same after restarts, and its number."""

    query: str
    number: int

    def directory(self) -> str:
        return f"{BATCH}={self.query[:8]}-{self.number}"


def shape(rows: DataFrame, sink: Sink, pipeline: Pipeline) -> DataFrame:
    """Return the rows with the columns of a sink."""
    if sink.kind in {"channel", "kafka"}:
        return to_records(rows, sink, pipeline)
    if sink.kind in FILE_KINDS and "day" in partitions(rows, sink) and "day" not in rows.columns:
        return rows.withColumn("day", F.to_date(F.col("timestamp")))
    if sink.kind in {"jdbc", "console"}:
        return as_table(rows)
    return rows


def as_table(rows: DataFrame) -> DataFrame:
    """Return the rows with plain columns: nested values as JSON, of events without the value, which has the same."""
    nested = [f.name for f in rows.schema.fields if isinstance(f.dataType, NESTED)]
    plain = rows.withColumns({name: F.to_json(name) for name in nested}) if nested else rows
    return plain.drop("value") if "data" in nested else plain


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
    """Return the partition columns: the sink's own, else for Parquet day and topic if the rows have them."""
    if sink.partition_by or sink.kind in TABLE_KINDS:
        return sink.partition_by
    return ("day", "topic") if {"timestamp", "topic"} <= set(rows.columns) else ()


def write_sink(rows: DataFrame, sink: Sink, pipeline: Pipeline, name: str, batch: BatchId) -> None:
    """Write the results of a micro-batch to a sink; `name` is the sink's own in its pipeline."""
    shaped = shape(rows, sink, pipeline)
    mode = pipeline.aggregate.mode if pipeline.aggregate else "append"
    if sink.kind == "channel":
        write_channel(shaped, sink, pipeline, BatchId(f"{batch.query}.{name}", batch.number))
    elif sink.kind == "parquet":
        write_parquet(shaped, sink, pipeline, batch.directory(), partitions(rows, sink))
    elif sink.kind in TABLE_KINDS:
        write_table(shaped, sink, pipeline, f"{batch.query}.{name}", batch.number)
    elif sink.kind == "jdbc":
        write_jdbc(shaped, sink, mode, f"{pipeline.checkpoint_path()}/{name}")
    else:
        if sink.kind == "console":
            print(f"{pipeline.name}.{name}, micro-batch {batch.number}")  # noqa: T201 - the sink's purpose
        shaped.write.format(sink.kind).mode("append").options(**dict(sink.options)).save()


def write_channel(rows: DataFrame, sink: Sink, pipeline: Pipeline, batch: BatchId) -> None:
    """Append records to the sink's log, once under the batch's id."""
    log = sink.log or pipeline.source.log
    assert log is not None
    options = {**sink.options, **({"durability": sink.durability} if sink.durability else {})}
    rows.write.format("virta").mode("append").options(
        queryId=batch.query, sequence=str(batch.number), **options
    ).save(pipeline.path(log))


def write_parquet(
    rows: DataFrame, sink: Sink, pipeline: Pipeline, directory: str, by: tuple[str, ...]
) -> None:
    """Write a directory of the sink's path, in place of what an earlier attempt left there."""
    assert sink.path is not None
    options = {"compression": "zstd", **NO_MARKER, **sink.options}
    writer = rows.write.mode("overwrite").options(**options)
    (writer.partitionBy(*by) if by else writer).parquet(f"{pipeline.path(sink.path)}/{directory}")


# Dead letters.


def write_dead(rows: DataFrame, pipeline: Pipeline, kind: str, batch: BatchId) -> int:
    """
    Write dead letters; return how many there were.

    `kind` is invalid, late or repeat: rows written again under the same kind and micro-batch are in a channel or a
    directory once.
    """
    sink = pipeline.dead_letter
    assert sink is not None
    kept = rows.persist()
    try:
        count = kept.count()
        if count:
            write_letters(kept, sink, pipeline, kind, batch)
    finally:
        kept.unpersist()
    return count


def write_letters(
    rows: DataFrame, sink: Sink, pipeline: Pipeline, kind: str, batch: BatchId
) -> None:
    if sink.kind == "console":
        rows.show(truncate=False)
    elif sink.kind == "jdbc":
        write_jdbc(rows, sink, "append")
    elif sink.kind in TABLE_KINDS:
        write_table(rows, sink, pipeline, f"{batch.query}.{kind}", batch.number)
    elif sink.kind == "parquet":
        place = f"kind={kind}/{batch.directory()}"
        write_parquet(rows.coalesce(1), sink, pipeline, place, ())
    else:
        write_events(rows, sink, pipeline, BatchId(f"{batch.query}.{kind}", batch.number))


def write_events(rows: DataFrame, sink: Sink, pipeline: Pipeline, batch: BatchId) -> None:
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
    else:
        write_channel(records.coalesce(1), sink, pipeline, batch)
