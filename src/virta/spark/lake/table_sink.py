"""
Write micro-batches to Delta and Iceberg tables, each once, through their connectors.

Delta keeps (application, version) in the commit itself and ignores a repeat. Iceberg keeps the query and the number of
the micro-batch as properties of the snapshot; they are looked up before an append. A pipeline has one run at a time
(virta.spark.pipeline.status), so no other run appends between the check and the append. Snapshots may be expired, except
the newest one of this query: it tells what was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from virta.spark.pipeline.model import Pipeline, Sink

TABLE_KINDS = frozenset(("delta", "iceberg"))
QUERY = "virta.query"
BATCH = "virta.batch"
# The first version of Iceberg's format that has VARIANT.
ICEBERG_VERSION = "3"


def write_table(rows: DataFrame, sink: Sink, pipeline: Pipeline, writer: str, number: int) -> None:
    """Append rows, unless `writer` (a query and a sink) has appended those of this micro-batch before."""
    if sink.kind == "delta":
        assert sink.path is not None
        made = rows.write.format("delta").mode("append").options(**dict(sink.options))
        if sink.partition_by:
            made = made.partitionBy(*sink.partition_by)
        made.options(txnAppId=writer, txnVersion=str(number)).save(pipeline.path(sink.path))
    else:
        append_iceberg(rows, sink, writer, number)


def append_iceberg(rows: DataFrame, sink: Sink, writer: str, number: int) -> None:
    assert sink.table is not None
    spark = rows.sparkSession
    if not spark.catalog.tableExists(sink.table):
        made = rows.limit(0).writeTo(sink.table).using("iceberg")
        made = made.tableProperty("format-version", ICEBERG_VERSION)
        if sink.partition_by:
            first, *more = map(F.col, sink.partition_by)
            made = made.partitionedBy(first, *more)
        made.create()
    elif last_batch(spark, sink.table, writer) >= number:
        return
    properties = {f"snapshot-property.{QUERY}": writer, f"snapshot-property.{BATCH}": str(number)}
    rows.write.format("iceberg").mode("append").options(**dict(sink.options), **properties).save(
        sink.table
    )


def last_batch(spark: SparkSession, table: str, writer: str) -> int:
    """Return the number of the newest micro-batch of `writer` in an Iceberg table, -1 if there is none."""
    snapshots = spark.read.format("iceberg").load(f"{table}.snapshots")
    own = snapshots.where(F.col("summary")[QUERY] == writer)
    found = own.agg(F.max(F.col("summary")[BATCH].cast("long"))).first()
    return -1 if found is None or found[0] is None else int(found[0])
