"""
Record values decoded as CloudEvents, into Arrow columns.

`EventDecoder` has two engines: native/jsoncols.c for ordinary events, `EventColumns` for the unusual ones and where the
native one was not built. `EventColumns` is the reference.

Parsing is lenient, as in the server: an event needs `source` and `id`, everything else is kept unchanged. A value
that is not an event (no JSON, no id, invalid data) keeps its row: every attribute null and the reason in `invalid`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
    VariantType,
)

from virta.errors import EventError
from virta.event import EVENT_BYTES_MAX, Event, parse_time
from virta.event.document import UNREADABLE
from virta.jsontext import check_depth, valid_text
from virta.native import load
from virta.spark.source.typed import DataFitter, data_text
from virta.spark.source.variant import variant_pair
from virta.spark.versions import arrow_schema, arrow_type

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

TEXT_ATTRIBUTES = (
    "id",
    "source",
    "type",
    "specversion",
    "datacontenttype",
    "dataschema",
    "subject",
)


# In the order of `enum role` and `enum kind` in native/jsoncols.c.
ROLES = (*TEXT_ATTRIBUTES, "time", "extensions", "data", "data_binary", "invalid", "rescued")
KINDS: tuple[type[DataType], ...] = (
    *(BooleanType, ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType, DecimalType),
    *(StringType, BinaryType, DateType, TimestampType, TimestampNTZType, TimeType),
    *(ArrayType, MapType, StructType, VariantType),
)

native: Any = load("virta.spark._jsoncols")


class PlainEvent(msgspec.Struct, forbid_unknown_fields=True):
    """
    The common case of an event: text attributes, no extensions, data as JSON.

    Other events are refused here and parsed as `Event`, with the same result in three times the time.
    """

    id: str
    source: str
    type: str = ""
    specversion: str = ""
    datacontenttype: str | None = None
    dataschema: str | None = None
    subject: str | None = None
    time: str | None = None
    data: Any = UNSET
    extensions: ClassVar[dict[str, Any]] = {}


_plain = msgspec.json.Decoder(PlainEvent).decode


def parse_lenient(raw: bytes) -> Event | PlainEvent:
    """Return an event, read as leniently as by the server; raise EventError if it is none."""
    if len(raw) <= EVENT_BYTES_MAX:
        try:
            check_depth(raw)
            return _plain(raw)
        except UNREADABLE:
            pass
    return Event.from_json(raw, lenient=True)


class EventDecoder:
    """
    Decodes the values of Arrow batches to the wanted event columns; made once a task.

    `misfits` counts the rows whose data did not fit its type.
    """

    def __init__(self, fields: dict[str, DataType]) -> None:
        self.fields = fields
        self.misfits = 0
        columns = StructType([StructField(name, kind) for name, kind in fields.items()])
        self._schema = arrow_schema(columns)
        roles = tuple(ROLES.index(name) for name in fields)
        self._plan = native and native.plan(column_spec("", columns), roles)

    def decode(self, ends: Any, data: Any) -> dict[str, pa.Array]:
        """Return the columns of values: `data` has their bytes, `ends` int32 offsets, one more than values."""
        bounds = np.frombuffer(ends, np.int32)
        rows = len(bounds) - 1
        if self._plan is None:
            return self._decode_plain(bounds, data, range(rows))
        array, left, misfits = native.decode(self._plan, ends, data)
        self.misfits += misfits
        batch = pa.record_batch(_ExportedArray(array, self._schema))
        found = dict(zip(batch.schema.names, batch.columns, strict=True))
        if not left:
            return found
        numbers = np.frombuffer(left, np.int64)
        rest = self._decode_plain(bounds, data, numbers.tolist())
        order = np.arange(rows)
        order[numbers] = rows + np.arange(len(numbers))
        return {
            name: pa.concat_arrays([array, rest[name].cast(array.type)]).take(pa.array(order))
            for name, array in found.items()
        }

    def _decode_plain(self, bounds: Any, data: Any, rows: Iterable[int]) -> dict[str, pa.Array]:
        columns = EventColumns(self.fields)
        view = memoryview(data)
        for row in rows:
            columns.add(bytes(view[bounds[row] : bounds[row + 1]]))
        self.misfits += columns.misfits
        return columns.arrays()


class _ExportedArray:
    """Arrow's C data interface for pyarrow: the native engine's arrays with Spark's types."""

    def __init__(self, array: Any, schema: pa.Schema) -> None:
        self._array, self._schema = array, schema

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        return self._schema.__arrow_c_schema__(), self._array


def column_spec(name: str, kind: DataType) -> tuple[int, str, int, int, tuple[Any, ...]]:
    """Return a column for the native engine: (kind, name, precision, scale, children)."""
    number = next(i for i, known in enumerate(KINDS) if isinstance(kind, known))
    children: tuple[Any, ...] = ()
    if isinstance(kind, ArrayType):
        children = (column_spec("", kind.elementType),)
    elif isinstance(kind, MapType):
        pair = (column_spec("", kind.keyType), column_spec("", kind.valueType))
        children = ((KINDS.index(StructType), "", 0, 0, pair),)
    elif isinstance(kind, StructType):
        children = tuple(column_spec(field.name, field.dataType) for field in kind.fields)
    elif isinstance(kind, VariantType):
        children = (column_spec("", BinaryType()),) * 2
    precision = scale = 0
    if isinstance(kind, DecimalType):
        precision, scale = kind.precision, kind.scale
    return number, name, precision, scale, children


class EventColumns:
    """
    Collects the wanted event columns of one Arrow batch.

    `misfits` counts the rows whose data did not fit its type; `rescued` has the text of their data.
    """

    def __init__(self, fields: dict[str, DataType]) -> None:
        self.fields = fields
        self.values: dict[str, list[Any]] = {name: [] for name in fields}
        self.texts = [(n, self.values[n].append) for n in TEXT_ATTRIBUTES if n in fields]
        self.others = [n for n in fields if n not in TEXT_ATTRIBUTES]
        kind = fields.get("data")
        self.is_variant = isinstance(kind, VariantType)
        self.fitter = None if kind is None or self.is_variant else DataFitter(kind)
        self.misfits = 0

    def add(self, raw: bytes) -> None:
        try:
            event = parse_lenient(raw)
            data, rescued = self.data(event, raw)
        except EventError as error:
            self.add_invalid(error.message)
            return
        for name, append in self.texts:
            append(clean(getattr(event, name)) or None)
        for name in self.others:
            if name == "data":
                value = data
            elif name == "time":
                value = event_time(event)
            elif name == "extensions":
                value = [(clean(k), extension_text(v)) for k, v in event.extensions.items()]
            elif name == "data_binary":
                value = event.data if isinstance(event.data, bytes) else None
            else:
                value = rescued if name == "rescued" else None
            self.values[name].append(value)

    def data(self, event: Event | PlainEvent, raw: bytes) -> tuple[Any, str | None]:
        """Return the data as its type, and its text if a part of it did not fit."""
        if event.data is UNSET or isinstance(event.data, bytes):
            return None, None
        if self.is_variant:
            return variant_pair(event.data), None
        if self.fitter is None:
            return None, None
        text = data_text(raw, event.data)
        before = self.fitter.misfits
        value = self.fitter.fit(text)
        if self.fitter.misfits == before:
            return value, None
        self.misfits += 1
        return value, text.decode()

    def add_invalid(self, reason: str) -> None:
        for name, column in self.values.items():
            column.append(clean(reason) if name == "invalid" else None)

    def arrays(self) -> dict[str, pa.Array]:
        return {name: self.array(name, column) for name, column in self.values.items()}

    def array(self, name: str, column: list[Any]) -> pa.Array:
        if name == "extensions":
            return make_map(column)
        kind = arrow_type(self.fields[name])
        if name == "data" and self.is_variant:
            return make_variant(column, kind)
        return pa.array(column, kind)


def make_map(column: list[Any]) -> pa.Array:
    """Return a map column; pyarrow's own conversion takes twenty times as long for mostly empty maps."""
    pairs = [pair for entry in column if entry for pair in entry]
    ends, total = [], 0
    for entry in column:
        ends.append(None if entry is None else total)
        total += len(entry or ())
    keys = pa.array([name for name, _ in pairs], pa.string())
    values = pa.array([value for _, value in pairs], pa.string())
    return pa.MapArray.from_arrays(pa.array([*ends, total], pa.int32()), keys, values)


def make_variant(column: list[tuple[bytes, bytes] | None], kind: pa.StructType) -> pa.Array:
    """Return a VARIANT column, in a third of the time that pyarrow takes for dicts."""
    nothing = (b"", b"")
    pairs = [pair or nothing for pair in column]
    parts = [pa.array([pair[i] for pair in pairs], pa.binary()) for i in range(2)]
    mask = pa.array([pair is None for pair in column], pa.bool_())
    return pa.StructArray.from_arrays(parts, fields=list(kind), mask=mask)


def clean(text: str | None) -> str | None:
    """Return text that Arrow can encode; JSON may spell lone surrogates."""
    return None if text is None else valid_text(text)


def extension_text(value: Any) -> str | None:
    return clean(value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))


def event_time(event: Event | PlainEvent) -> datetime | None:
    """Return the event's time, None if it is missing or not a time: lenient events may have any text."""
    if event.time is None:
        return None
    try:
        return parse_time(event.time)
    except EventError:
        return None
