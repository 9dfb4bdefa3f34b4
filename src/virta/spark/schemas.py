"""
The schemas of Virta's data source; reading with any other is refused with the reason.

Records:

    topic STRING, offset BIGINT, timestamp TIMESTAMP, key BINARY, value BINARY

Events (option `events`): the record's columns, then the CloudEvents attributes typed, `extensions`
as text by name, the data in one of `data` (JSON, or text, as VARIANT) and `data_binary`
(`data_base64`), and `invalid`: why the value is not an event, null when it is one. A row is never
dropped: a value that cannot be decoded has its reason in `invalid` and its bytes in `value`.

A schema of the caller's may give `data` another type, and add `rescued`: the text of data of which a part
did not fit that type.
"""

from __future__ import annotations

from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from virta.errors import VirtaError
from virta.spark.source.typed import refused_type

RECORD = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("timestamp", TimestampType(), nullable=False),
        StructField("key", BinaryType(), nullable=False),
        StructField("value", BinaryType(), nullable=False),
    ]
)

ATTRIBUTES = StructType(
    [
        StructField("id", StringType()),
        StructField("source", StringType()),
        StructField("type", StringType()),
        StructField("specversion", StringType()),
        StructField("datacontenttype", StringType()),
        StructField("dataschema", StringType()),
        StructField("subject", StringType()),
        StructField("time", TimestampType()),
        StructField("extensions", MapType(StringType(), StringType())),
        StructField("data", VariantType()),
        StructField("data_binary", BinaryType()),
        StructField("invalid", StringType()),
    ]
)

EVENT = StructType([*RECORD.fields, *ATTRIBUTES.fields])

# The text of data that does not fit the type it is read as; only a schema of the caller's has it.
RESCUED = StructField("rescued", StringType())

# What `match` adds to the columns that are kept.
FILTER_ID = StructField("filter_id", StringType(), nullable=False)

# With the option `filters`: the position of the event, and the matching filter.
MATCH = StructType([*(field for field in RECORD.fields if field.name != "value"), FILTER_ID])


class SchemaError(VirtaError):
    """A schema that the source does not support."""

    default_code = "schema_invalid"


def check_schema(schema: StructType, *, events: bool, filters: bool = False) -> None:
    """
    Refuse columns that do not exist or types they cannot have.

    `topic`, `key` and `value` may be STRING or BINARY; `data` any type that JSON can be read as
    (`virta.spark.source.typed`); every other column has its own type.
    """
    full = {field.name: field.dataType for field in (EVENT if events else RECORD).fields}
    if events:
        full[RESCUED.name] = RESCUED.dataType
    if filters:
        full[FILTER_ID.name] = FILTER_ID.dataType
    for field in schema.fields:
        if field.name not in full:
            hint = "" if events or field.name not in EVENT.names else " (with option events=true)"
            raise SchemaError(
                f"there is no column {field.name!r}{hint}: choose from {', '.join(full)}"
            )
        refused = refused_type(field.dataType) if field.name == "data" else None
        if refused is not None:
            raise SchemaError(
                f"column 'data' cannot have a part of type {refused.simpleString()}: JSON has no such"
                " values, or Virta does not read them; read that part as string or variant"
            )
        allowed = allowed_types(field.name, full[field.name])
        if allowed and not any(type(field.dataType) is type(kind) for kind in allowed):
            names = " or ".join(kind.simpleString() for kind in allowed)
            raise SchemaError(
                f"column {field.name!r} cannot be {field.dataType.simpleString()}: it is {names}"
            )


def allowed_types(name: str, kind: DataType) -> tuple[DataType, ...]:
    """Return the types that a column may be read as; none means any."""
    if name == "data":
        return ()
    return (StringType(), BinaryType()) if name in {"topic", "key", "value"} else (kind,)
