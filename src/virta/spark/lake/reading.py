"""
Read a lake, and lake and log as one history, into DataFrames.

The files of a table are listed on the driver, by the format's own library, and read as Parquet: Delta and Iceberg
tables of a lake need no connector. Rows from the lake's end on, which a killed compaction may have left in a table,
are not read.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.log.format.damage import gap_error
from virta.spark.lake.columns import table_schema
from virta.spark.lake.compaction import sealed_end
from virta.spark.lake.directory import EVENTS, Lake, LakeError
from virta.spark.lake.formats import ParquetTables, format_of
from virta.spark.launch.session import session
from virta.spark.schemas import EVENT, RECORD
from virta.spark.transforms import decode_events

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def read_lake(
    path: str | Path, *, topic: str | None = None, spark: SparkSession | None = None
) -> DataFrame:
    """
    Return the events in a lake; with `topic` those of one topic, the data with its type in the lake.

    Raises:
        LakeError: there is no lake.
    """
    lake = Lake.load(path)
    if lake is None:
        raise LakeError(f"there is no lake in {path}: `virta lake compact` makes one")
    return lake_rows(spark or session(), lake, topic)


def read_all(
    log_path: str,
    path: str | Path,
    *,
    topic: str | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """
    Return all events ever written, from the lake where it has them and from the log after that.

    Columns are those of events; with a `topic` that has a type in the lake, `data` has that type and `rescued` the
    text of data that does not fit.

    Raises:
        LogGapError: retention removed offsets from the log that the lake does not have.
    """
    spark = spark or session()
    # The log before the lake: records that move from log to lake meanwhile are in the lake then.
    _, first, _ = sealed_end(log_path)
    lake = Lake.load(path)
    seam = first if lake is None or lake.next is None else lake.next
    if seam < first:
        raise gap_error(log_path, seam, first)
    columns = EVENT if lake is None else columns_of(lake, topic)
    reader = spark.read.format("virta").option("events", "true").option("start", str(seam))
    if topic and "," not in topic:  # the option's separator
        reader = reader.option("topics", topic)
    live = reader.schema(columns).load(log_path)
    if topic is not None:
        live = live.where(F.col("topic") == topic)
    if lake is None:
        return live
    return lake_rows(spark, lake, topic).unionByName(live)


def columns_of(lake: Lake, topic: str | None) -> StructType:
    """Return the columns of events; with a topic that has a type, those of its table."""
    return table_schema(lake, topic) if topic in lake.types else EVENT


def lake_rows(spark: SparkSession, lake: Lake, topic: str | None) -> DataFrame:
    columns = columns_of(lake, topic)
    tables = format_of(lake)
    wanted = wanted_tables(lake, topic)
    parts = []
    for table, typed in wanted.items():
        found = tables.files(table)
        if not found:
            continue
        rows = spark.read.schema(table_schema(lake, typed)).parquet(*found)
        end = lake.next or 0
        committed = tables.committed(table)  # after the files: it may only be later than theirs
        # A condition makes Spark read its column: only where a table may have other rows, and before they are decoded.
        if committed is None or committed > end:
            rows = rows.where(F.col("offset") < end)
        if topic not in {None, typed}:
            rows = rows.where(F.col("topic") == topic)
        parts.append(as_columns(rows, columns))
    if isinstance(tables, ParquetTables) and EVENTS in wanted:
        found = tables.old_files()
        if found:
            rows = old_records(spark, lake, found)
            rows = rows if topic is None else rows.where(F.col("topic") == topic)
            parts.append(as_columns(rows, columns))
    if not parts:
        return spark.createDataFrame([], columns)
    return reduce(lambda left, right: left.unionByName(right), parts)


def wanted_tables(lake: Lake, topic: str | None) -> dict[str, str | None]:
    """Return the tables that may have rows of a topic (None: of any), with the topic of those that have a type."""
    if topic is None:
        return lake.table_names()
    wanted = {name: one for name, one in lake.table_names().items() if one in {None, topic}}
    begin = lake.typed_from.get(topic)
    # Every further table is a branch of the plan, whose events a Python stage decodes by the type.
    if begin is not None and lake.first is not None and begin <= lake.first:
        del wanted[EVENTS]
    return wanted


def as_columns(rows: DataFrame, columns: StructType) -> DataFrame:
    """Return stored rows with the wanted columns: events of another type are decoded again."""
    wanted = [(field.name, field.dataType) for field in columns.fields]
    if [(field.name, field.dataType) for field in rows.schema.fields] == wanted:
        return rows
    kind = columns["data"].dataType if "rescued" in columns.names else None
    return decode_events(rows.select(*RECORD.names), data=kind).select(*columns.names)


def old_records(spark: SparkSession, lake: Lake, found: list[str]) -> DataFrame:
    """Return records of ranges in the first layout, whose topic is in the name of their directory."""
    rows = spark.read.schema(RECORD).option("basePath", str(lake.path)).parquet(*found)
    # A partition directory cannot be named "": the empty topic comes back as null.
    return rows.withColumn("topic", F.coalesce("topic", F.lit("")))
