"""
The rows of a live view from history: the newest event of each key, if a filter holds for it.

    records ──► one change a key and Arrow batch ──► newest of each key ──► not deleted, not truncated ──► filter

What a record does to a row is decided by `virta.event.row_changes`, as in live views; the filter is the one of
`virta.spark.where`. Debezium's truncation removes all rows of its topic: keys are spread over BUCKETS and a
truncation is in each of them, so that one read and no shuffle by topic alone is needed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from virta.errors import ViewError
from virta.event.document import DOCUMENT_DIALECT
from virta.event.row_changes import (
    NONE,
    ROOT_AUTO,
    ROOTS,
    SET,
    TRUNCATE,
    KeyRule,
    read_change,
)
from virta.filters import Filter, parse
from virta.filters.tree import Everything
from virta.log.record import Name, Record
from virta.spark.matching.match import where
from virta.spark.schemas import RECORD
from virta.spark.transforms import TransformError, need
from virta.spark.versions import arrow_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

# Groups of keys, each with every truncation of its topic; at least as many as cores that share one topic.
BUCKETS: Final = 64

ROW: Final = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("key", StringType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("timestamp", TimestampType(), nullable=False),
        StructField("value", BinaryType(), nullable=False),
    ]
)
CHANGE: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("bucket", IntegerType()),
        StructField("key", StringType()),  # null for a truncation
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("kind", IntegerType()),
        StructField("value", BinaryType()),
    ]
)


def view(
    df: DataFrame,
    filter: Any = "",  # noqa: A002 - part of the public API
    key: str = "",
    *,
    dialect: str = "query-string",
    row: str = ROOT_AUTO,
) -> DataFrame:
    """
    Return the rows that `virta.views.open(log, channel, filter)` has: one for each topic and key.

    `df` has the record columns, as a read of the log has them; the result has topic, key, offset, timestamp and
    `value`, the JSON of the event as a consumer of the view gets it (`decode_events` turns it into columns).

    Args:
        filter: a filter, or its text (or object) in `dialect`; empty for all rows.
        key: JSON pointer to the key, from the event's root; else the record's key, else `subject`.
        row: "auto" shows Debezium's `after` as the event's data, "event" the event as it is.

    Raises:
        FilterError: the filter is invalid.
        TransformError: `df` is a stream, or a column is missing.
        ViewError: invalid-pointer, invalid-row.
    """
    if df.isStreaming:
        raise TransformError(
            "view needs a bounded DataFrame, not a stream: use virta.spark.read, or a live view for rows that change"
        )
    if row not in ROOTS:
        raise ViewError(f"row is {row!r}: write auto or event", code="invalid-row")
    need(df, RECORD.names, "view")
    own = filter if isinstance(filter, Filter) else parse(filter, dialect)
    rows = newest_rows(df, ChangeReader(KeyRule(key).text, row))
    if isinstance(own.tree, Everything):
        return rows
    return where(rows, own, on="data" if own.dialect == DOCUMENT_DIALECT else "event")


def newest_rows(df: DataFrame, reader: ChangeReader) -> DataFrame:
    """Return the row of each key that has one."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return reader.read(batches)

    records = df.select(
        "topic",
        "offset",
        "timestamp",
        F.col("key").cast("binary").alias("key"),
        F.col("value").cast("binary").alias("value"),
    )
    rest = [name for name in CHANGE.names if name not in {"topic", "bucket", "key"}]
    newest = (
        records.mapInArrow(read, CHANGE)
        .groupBy("topic", "bucket", "key")
        .agg(F.max_by(F.struct(*rest), F.col("offset")).alias("_change"))
        .select("topic", "bucket", "key", "_change.*")
    )
    truncated = F.max(F.when(F.col("kind") == TRUNCATE, F.col("offset")))
    everywhere = Window.partitionBy("topic", "bucket")
    return (
        newest.withColumn("_truncated", F.coalesce(truncated.over(everywhere), F.lit(-1)))
        .where((F.col("kind") == SET) & (F.col("offset") > F.col("_truncated")))
        .select(*ROW.names)
    )


@dataclass(frozen=True)
class ChangeReader:
    """Turns batches of records into the last change of each key in them; sent to the executors."""

    pointer: str
    root: str

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rule, schema = KeyRule(self.pointer), arrow_schema(CHANGE)
        for batch in batches:
            changes = self.changes(batch, rule)
            columns = [list(column) for column in zip(*changes, strict=True)]
            columns = columns or [[] for _ in CHANGE.names]
            arrays = [
                pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def changes(self, batch: pa.RecordBatch, rule: KeyRule) -> list[tuple[Any, ...]]:
        """Return rows of CHANGE; truncations once a bucket."""
        found: dict[tuple[str, str | None], tuple[Any, ...]] = {}
        stamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
        columns = [batch.column(name).to_pylist() for name in ("topic", "offset", "key", "value")]
        for topic, offset, key, value, stamp in zip(*columns, stamps, strict=True):
            record = Record(Name(topic.encode()), Name(key or b""), value or b"", offset, stamp)
            change = read_change(record, rule)
            if change.kind == NONE:
                continue
            place = (topic, change.key)
            if place in found and found[place][3] > offset:
                continue
            shown = change.row if self.root == ROOT_AUTO else change.event
            bucket = zlib.crc32((change.key or "").encode()) % BUCKETS
            kept = shown if change.kind == SET else b""
            found[place] = (topic, bucket, change.key, offset, stamp, change.kind, kept)
        return [
            one
            for change in found.values()
            for one in (spread(change) if change[5] == TRUNCATE else (change,))
        ]


def spread(change: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield a truncation for every bucket."""
    for bucket in range(BUCKETS):
        yield (change[0], bucket, *change[2:])
