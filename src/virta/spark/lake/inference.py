"""
Infer the type of a topic's data from its newest events.

Whole numbers are BIGINT, numbers DOUBLE, texts STRING, objects STRUCT with the fields of all events, arrays ARRAY.
What has several kinds, more than FIELDS_MAX fields or names that tables refuse is STRING, which holds any JSON as
text. Times in texts stay STRING: a later text may be none.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    NullType,
    StringType,
    StructField,
    StructType,
)

import virta
from virta.errors import EventError
from virta.spark.lake.columns import name_problem
from virta.spark.lake.directory import LakeError
from virta.spark.source.events import parse_lenient

if TYPE_CHECKING:
    from os import PathLike

SAMPLE_EVENTS = 10_000
FIELDS_MAX = 1000
DEPTH_MAX = 16
LONG_BITS = 63


def infer_schema(log: str | PathLike[str], topic: str, *, sample: int = SAMPLE_EVENTS) -> DataType:
    """
    Return the type of a topic's data, a StructType for objects, from at most `sample` of its newest events.

    Raises:
        LakeError: the topic has no event with data.
    """
    kind: DataType | None = None
    with virta.open(log, create=False, read_only=True) as opened:
        first, end = opened.first_offset, opened.next_offset
        step = sample
        while True:
            found = opened.read(topic, start=max(first, end - step), on_gap="skip")
            values = deque((bytes(record.value) for record in found), maxlen=sample)
            if len(values) >= sample or end - step <= first:
                break
            step *= 8
    for value in values:
        one = data_kind(value)
        if one is not None:
            kind = one if kind is None else merged(kind, one)
    if kind is None:
        raise LakeError(f"no event of {topic!r} has data in JSON: there is nothing to infer")
    return storable(kind)


def data_kind(value: bytes) -> DataType | None:
    try:
        data = parse_lenient(value).data
    except EventError:
        return None
    return None if data is UNSET or isinstance(data, bytes) else kind_of(data, 0)


def kind_of(value: Any, depth: int) -> DataType:
    if value is None:
        return NullType()
    if isinstance(value, bool):
        return BooleanType()
    if isinstance(value, int):
        return LongType() if -(1 << LONG_BITS) <= value < 1 << LONG_BITS else DoubleType()
    if isinstance(value, float):
        return DoubleType()
    if depth < DEPTH_MAX and isinstance(value, list):
        kind: DataType = NullType()
        for item in value:
            kind = merged(kind, kind_of(item, depth + 1))
        return ArrayType(kind)
    if depth < DEPTH_MAX and isinstance(value, dict) and len(value) <= FIELDS_MAX:
        return StructType([StructField(n, kind_of(v, depth + 1)) for n, v in value.items()])
    return StringType()


def merged(left: DataType, right: DataType) -> DataType:
    """Return a type that holds the values of both."""
    if left == right or isinstance(right, NullType):
        return left
    if isinstance(left, NullType):
        return right
    if isinstance(left, LongType | DoubleType) and isinstance(right, LongType | DoubleType):
        return DoubleType()
    if isinstance(left, ArrayType) and isinstance(right, ArrayType):
        return ArrayType(merged(left.elementType, right.elementType))
    if isinstance(left, StructType) and isinstance(right, StructType):
        kinds = {part.name: part.dataType for part in left.fields}
        for part in right.fields:
            known = kinds.get(part.name)
            kinds[part.name] = part.dataType if known is None else merged(known, part.dataType)
        if len(kinds) <= FIELDS_MAX:
            return StructType([StructField(name, kind) for name, kind in kinds.items()])
    return StringType()


def storable(kind: DataType) -> DataType:
    """Return a type that every format can store."""
    if isinstance(kind, NullType):
        return StringType()
    if isinstance(kind, ArrayType):
        return ArrayType(storable(kind.elementType))
    if isinstance(kind, StructType):
        if name_problem(kind.names) is not None:
            return StringType()
        return StructType([StructField(f.name, storable(f.dataType)) for f in kind.fields])
    return kind
