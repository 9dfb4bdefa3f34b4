"""
Transforms of event streams: plain functions from DataFrame to DataFrame.

Each works on bounded and streaming DataFrames unless its docstring says otherwise, and names its columns in one
`select`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import DataType, StructField, StructType

from virta.errors import VirtaError
from virta.spark.schemas import ATTRIBUTES, RECORD, RESCUED
from virta.spark.source.events import EventDecoder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import Column

WATERMARK = "spark.watermarkDelayMs"  # where Spark records a watermark in a column's metadata
# Options of written JSON: one form of an instant, with full precision.
JSON = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
LATE = "10 minutes"  # how far an event may be behind the newest one before its window closes


class TransformError(VirtaError):
    """A transform that does not fit its input."""

    default_code = "transform_invalid"


def need(df: DataFrame, names: Iterable[str], of: str) -> None:
    """Raise TransformError, listing the existing columns, if one of `names` is missing."""
    missing = [name for name in names if name.split(".")[0] not in df.columns]
    if missing:
        raise TransformError(
            f"{of} needs the column {missing[0]!r}: there are {', '.join(df.columns)}"
        )


def key_names(by: str | Sequence[str], of: str) -> list[str]:
    """Return the columns of a key as a list; a single one may be a string."""
    names = [by] if isinstance(by, str) else list(by)
    if not names:
        raise TransformError(f"{of} by nothing: give at least one column")
    return names


def watermarked(df: DataFrame, time: str, delay: str) -> DataFrame:
    """
    Return a stream with a watermark: its own if it has one (Spark allows only one), else this.

    To use two transforms that need one on one stream, set it first: `df.withWatermark(column, delay)`.
    """
    if not df.isStreaming or any(WATERMARK in field.metadata for field in df.schema.fields):
        return df
    return df.withWatermark(time, delay)


# Events.


def decode_events(
    df: DataFrame, *, data: DataType | None = None, columns: Collection[str] | None = None
) -> DataFrame:
    """
    Add the CloudEvents columns to records: attributes, `extensions`, `data`, `data_binary`, `invalid`.

    The same decoding as the source's option `events`, for records from elsewhere (Kafka). With a type for `data`,
    `rescued` has the text of data that does not fit it. With `columns` the result has only these, and others are not
    decoded.
    """
    need(df, ["value"], "decode_events")
    added = list(ATTRIBUTES.fields)
    if data is not None:
        added[ATTRIBUTES.names.index("data")] = StructField("data", data)
        added.append(RESCUED)
    kept = [field for field in df.schema.fields if field.name not in {one.name for one in added}]
    if columns is not None:
        added = [field for field in added if field.name in columns]
        kept = [field for field in kept if field.name in columns]
    fields = {field.name: field.dataType for field in added}
    schema = StructType([*kept, *added])
    names = [field.name for field in kept]

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 - runs on the executor

        decoder = EventDecoder(fields)
        for batch in batches:
            values = batch.column("value").cast(pa.binary()).fill_null(b"")
            _, ends, data = values.buffers()
            bounds = memoryview(ends).cast("B")[4 * values.offset :][: 4 * (len(values) + 1)]
            arrays = decoder.decode(bounds, data or b"")
            yield pa.RecordBatch.from_arrays(
                [*(batch.column(n) for n in names), *(arrays[n] for n in fields)],
                names=[*names, *fields],
            )

    return df.mapInArrow(decode, schema)


def valid_events(df: DataFrame) -> DataFrame:
    """Return the rows that are events, without the column `invalid`."""
    need(df, ["invalid"], "valid_events")
    return df.where(F.col("invalid").isNull()).drop("invalid")


def dead_letters(df: DataFrame) -> DataFrame:
    """Return the rows that are not events: their position, their bytes, and the reason."""
    need(df, ["invalid", "value"], "dead_letters")
    return df.where(F.col("invalid").isNotNull()).select(
        *[name for name in RECORD.names if name in df.columns],
        F.col("invalid").alias("reason"),
    )


def to_events(
    df: DataFrame,
    *,
    topic: str,
    type: str,  # noqa: A002 - the CloudEvents name
    source: str,
    id: str | None = None,  # noqa: A002
    key: str | None = None,
    time: str | None = None,
) -> DataFrame:
    """
    Turn rows into records whose values are CloudEvents with the row as `data`.

    `id`, `key` and `time` name columns. Without `id`, or where it is null, the event's id is a hash of its
    row, so that the same row makes the same event again and consumers can drop repeats. Times are written
    in UTC, whatever the session's zone is.
    """
    need(df, [name for name in (id, key, time) if name], "to_events")
    value = event_value(df, type=type, source=source, id=id, time=time)
    record_key = F.lit("") if key is None else F.coalesce(F.col(key).cast("string"), F.lit(""))
    return df.select(
        F.lit(topic).alias("topic"),
        record_key.cast("binary").alias("key"),
        value.cast("binary").alias("value"),
    )


def event_value(
    df: DataFrame,
    *,
    type: str,  # noqa: A002 - the CloudEvents name
    source: str,
    id: str | None = None,  # noqa: A002
    time: str | None = None,
) -> Column:
    """Return the CloudEvent that `to_events` makes of a row, as JSON."""
    data = F.struct(*[F.col(name) for name in df.columns])
    identity = F.sha2(F.to_json(data, JSON), 256)
    if id is not None:
        identity = F.coalesce(F.col(id).cast("string"), identity)
    members = [
        F.lit("1.0").alias("specversion"),
        identity.alias("id"),
        F.lit(source).alias("source"),
        F.lit(type).alias("type"),
        F.lit("application/json").alias("datacontenttype"),
    ]
    if time is not None:
        members.append(F.col(time).cast("timestamp").alias("time"))
    return F.to_json(F.struct(*members, data.alias("data")), JSON)


# Keys.


def dedupe(
    df: DataFrame,
    by: str | Sequence[str] = ("source", "id"),
    *,
    within: str = LATE,
    time: str = "timestamp",
) -> DataFrame:
    """
    Drop repeats of the same key; the first is kept.

    A stream forgets a key once it is more than `within` behind the newest event, and drops later events than that.
    Of a bounded input the first of each key by time (and offset) is kept, whatever the distance.
    """
    by = key_names(by, "dedupe")
    need(df, [*by, time], "dedupe")
    if df.isStreaming:
        return watermarked(df, time, within).dropDuplicatesWithinWatermark(by)
    order = [F.col(time), *([F.col("offset")] if "offset" in df.columns else [])]
    window = Window.partitionBy(*by).orderBy(*order)
    return (
        df.withColumn("_nth", F.row_number().over(window))
        .where(F.col("_nth") == 1)
        .select(*df.columns)
    )


def latest_by_key(
    df: DataFrame, by: str | Sequence[str] = ("topic", "key"), *, order: str = "offset"
) -> DataFrame:
    """
    Return the row with the highest `order` of each key. A streaming result is in mode update or complete.

    An empty `value` is a deletion, as in the log's compaction: such a key has no latest row.
    """
    by = key_names(by, "latest_by_key")
    need(df, [*by, order], "latest_by_key")
    latest = df.groupBy(*by).agg(F.max_by(F.struct(*df.columns), F.col(order)).alias("_row"))
    rows = latest.select(*[F.col(f"_row.{name}").alias(name) for name in df.columns])
    if "value" not in df.columns:
        return rows
    return rows.where(F.length(F.col("value")) > 0)


def enrich(
    df: DataFrame, other: DataFrame, on: str | Sequence[str], *, how: str = "left", prefix: str = ""
) -> DataFrame:
    """
    Join a table to a stream of events; its columns get `prefix` so that none is overwritten.

    `how` is left (keep events that find nothing) or inner. Rows of `other` must be unique by `on`, or
    events multiply.
    """
    keys = key_names(on, "enrich")
    need(df, keys, "enrich")
    need(other, keys, "enrich")
    if how not in {"left", "inner"}:
        raise TransformError(f"enrich joins left or inner, not {how!r}")
    added = {name: f"{prefix}{name}" for name in other.columns if name not in keys}
    clash = [name for name in added.values() if name in df.columns]
    if clash:
        raise TransformError(f"both sides have the column {clash[0]!r}: give enrich a prefix")
    right = other.select(*keys, *[F.col(name).alias(renamed) for name, renamed in added.items()])
    return df.join(right, on=keys, how=how).select(*df.columns, *added.values())


# Time.


def window_aggregate(
    df: DataFrame,
    every: str,
    *,
    by: str | Sequence[str] = (),
    aggregates: Mapping[str, str],
    slide: str | None = None,
    late: str = LATE,
    time: str = "timestamp",
) -> DataFrame:
    """
    Aggregate by windows of `every` (sliding by `slide`) and the columns `by`.

    `aggregates` maps a column's name to a SQL expression: {"orders": "count(*)"}. On a stream a window
    closes when the newest event is `late` past its end.
    """
    by = [by] if isinstance(by, str) else by
    need(df, [*by, time], "window_aggregate")
    window = F.window(F.col(time), every, slide) if slide else F.window(F.col(time), every)
    return aggregate(df, window, by, aggregates, late, time)


def sessionize(
    df: DataFrame,
    gap: str,
    *,
    by: str | Sequence[str],
    aggregates: Mapping[str, str],
    late: str = LATE,
    time: str = "timestamp",
) -> DataFrame:
    """Aggregate by sessions: events of one key no further than `gap` apart. A stream appends them."""
    by = [by] if isinstance(by, str) else by
    need(df, [*by, time], "sessionize")
    return aggregate(df, F.session_window(F.col(time), gap), by, aggregates, late, time)


def aggregate(
    df: DataFrame,
    window: Column,
    by: Sequence[str],
    aggregates: Mapping[str, str],
    late: str,
    time: str,
) -> DataFrame:
    if not aggregates:
        raise TransformError('aggregates is empty: give names and expressions, {"n": "count(*)"}')
    rows = watermarked(df, time, late)
    columns = [F.expr(sql).alias(name) for name, sql in aggregates.items()]
    return (
        rows.groupBy(window.alias("_window"), *[F.col(name) for name in by])
        .agg(*columns)
        .select(
            F.col("_window.start").alias("start"),
            F.col("_window.end").alias("end"),
            *by,
            *aggregates,
        )
    )


# Changes.


def changes_to_table(df: DataFrame, columns: str, *, key: str | Sequence[str]) -> DataFrame:
    """
    Return the current table from change events (Debezium's form): the newest change of each key, without deleted rows.

    `columns` is the table's schema as DDL, `key` its primary key. The operation is `op` in the data or
    the extension `iodebeziumop`; rows are `after`, for deletions `before`. Changes whose key is null are left
    out; truncations (`t`, which Debezium omits by default) are ignored.
    A streaming result is in mode update or complete; in mode update a deletion does not show.
    """
    key = key_names(key, "changes_to_table")
    need(df, ["data", "offset"], "changes_to_table")
    schema = StructType.fromDDL(columns)
    assert isinstance(schema, StructType)
    unknown = [name for name in key if name not in schema.names]
    if unknown:
        raise TransformError(f"the key {unknown} is not among {schema.names}")

    def member(path: str, kind: str) -> Column:
        # Converters with schemas wrap the change in `payload`.
        return F.coalesce(
            F.try_variant_get("data", f"$.{path}", kind),
            F.try_variant_get("data", f"$.payload.{path}", kind),
        )

    operation = member("op", "string")
    if "extensions" in df.columns:
        operation = F.coalesce(operation, F.col("extensions")["iodebeziumop"])
    image = F.when(operation == "d", "before").otherwise("after")
    cells = [
        F.when(image == "before", member(f"before['{f.name}']", f.dataType.simpleString()))
        .otherwise(member(f"after['{f.name}']", f.dataType.simpleString()))
        .alias(f.name)
        for f in schema.fields
    ]
    changes = df.select(operation.alias("_op"), F.col("offset").alias("_offset"), *cells)
    known = changes.where(F.col("_op").isin("c", "r", "u", "d"))
    known = known.dropna("all", subset=key)
    latest = known.groupBy(*key).agg(
        F.max_by(F.struct("_op", *schema.names), F.col("_offset")).alias("_row")
    )
    return latest.where(F.col("_row._op") != "d").select(
        *[F.col(f"_row.{name}").alias(name) for name in schema.names]
    )
