"""
The columns of a lake's tables, and the types of a topic's data.

A table has the record's columns, the attributes, and `data`: of its declared or inferred type with `rescued` beside
it (the text of data that does not fit), or, for topics without a type, VARIANT in format parquet and text in the others.
`value` always has the whole event: nothing is lost in a lake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    IntegerType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimeType,
    VariantType,
)

from virta.spark.lake.ddl import parse_type
from virta.spark.lake.directory import Lake, LakeError
from virta.spark.schemas import ATTRIBUTES, RECORD, RESCUED
from virta.spark.source.typed import refused_type

if TYPE_CHECKING:
    from collections.abc import Iterator

DAY = StructField("day", DateType())
# Delta refuses them in names of columns, unless a table maps names.
NAME_REFUSED = frozenset(" ,;{}()\n\t=")


def table_schema(lake: Lake, topic: str | None) -> StructType:
    """Return the columns in the files of a table; `topic` is that of a table with a type."""
    if topic is not None:
        kind = data_type(lake, topic)
    else:
        kind = VariantType() if lake.format == "parquet" else StringType()
    attributes = [
        StructField("data", kind) if known.name == "data" else known for known in ATTRIBUTES.fields
    ]
    return StructType([*RECORD.fields, *attributes, *([] if topic is None else [RESCUED])])


def data_type(lake: Lake, topic: str) -> DataType:
    """Return the type of a topic's data."""
    found: StructField = StructField.fromJson(
        {"name": "data", "type": lake.types[topic], "nullable": True, "metadata": {}}
    )
    return found.dataType


def check_type(kind: str | DataType, topic: str, form: str) -> Any:
    """
    Return a declared type as JSON for lake.json.

    Raises:
        LakeError: the type is not readable, or the format or JSON has no such values.
    """
    try:
        found = parse_type(kind) if isinstance(kind, str) else kind
    except ValueError as error:
        raise LakeError(f"the type of {topic!r}: {error}") from error
    refused = refused_type(found)
    if refused is not None:
        raise LakeError(f"the type of {topic!r}: JSON has no values of {refused.simpleString()}")
    parts = list(walk(found))
    if any(isinstance(part, TimeType) for part in parts):
        raise LakeError(
            f"the type of {topic!r} has a part of type time, which lakes do not have: read that part as string"
        )
    if form != "parquet" and any(isinstance(part, VariantType) for part in parts):
        raise LakeError(
            f"the type of {topic!r} has a part of type variant, which only format parquet has here:"
            " read that part as string"
        )
    for part in parts:
        if isinstance(part, StructType):
            check_names(part, topic)
    return (widened(found) if form == "iceberg" else found).jsonValue()


def check_names(struct: StructType, topic: str) -> None:
    problem = name_problem(struct.names)
    if problem is not None:
        raise LakeError(f"the type of {topic!r}: {problem}")


def name_problem(names: list[str]) -> str | None:
    """Return why a table cannot have a struct with these fields, None if it can."""
    if not names:
        return "a struct without fields cannot be stored"
    seen: dict[str, str] = {}
    for name in names:
        if not name or NAME_REFUSED & set(name):
            return f"the field {name!r} has a name that tables refuse: none of ' ,;{{}}()=' and no blanks"
        other = seen.setdefault(name.lower(), name)
        if other is not name:
            return f"the fields {other!r} and {name!r} differ by case only"
    return None


def walk(kind: DataType) -> Iterator[DataType]:
    yield kind
    if isinstance(kind, ArrayType):
        yield from walk(kind.elementType)
    elif isinstance(kind, MapType):
        yield from walk(kind.valueType)
    elif isinstance(kind, StructType):
        for part in kind.fields:
            yield from walk(part.dataType)


def widened(kind: DataType) -> DataType:
    """Return a type with INT for the smaller integers, which Iceberg does not have."""
    if isinstance(kind, ByteType | ShortType):
        return IntegerType()
    if isinstance(kind, ArrayType):
        return ArrayType(widened(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(kind.keyType, widened(kind.valueType))
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, widened(f.dataType)) for f in kind.fields])
    return kind
