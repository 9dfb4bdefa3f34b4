"""
Record values decoded as CloudEvents, into Arrow columns.

Parsing is lenient, as in the server: an event needs `source` and `id`, everything else is kept unchanged. A value
that is not an event (no JSON, no id, invalid data) keeps its row: every attribute null and the reason in `invalid`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pyarrow as pa
from msgspec import UNSET
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
    VariantType,
)

from virta.errors import EventError
from virta.event import EVENT_BYTES_MAX, Event, parse_time
from virta.event.document import UNREADABLE
from virta.jsontext import check_depth, valid_text
from virta.spark.source.variant import variant_pair

if TYPE_CHECKING:
    from collections.abc import Callable

INTEGER_BITS = {LongType: 63, IntegerType: 31}
TEXT_ATTRIBUTES = (
    "id",
    "source",
    "type",
    "specversion",
    "datacontenttype",
    "dataschema",
    "subject",
)


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


class EventColumns:
    """Collects the wanted event columns of one Arrow batch."""

    def __init__(self, fields: dict[str, DataType]) -> None:
        self.fields = fields
        self.values: dict[str, list[Any]] = {name: [] for name in fields}
        self.texts = [(n, self.values[n].append) for n in TEXT_ATTRIBUTES if n in fields]
        self.others = [n for n in fields if n not in TEXT_ATTRIBUTES]
        self.convert = data_converter(fields["data"]) if "data" in fields else None

    def add(self, raw: bytes) -> None:
        try:
            event = parse_lenient(raw)
            data = None if self.convert is None else self.data(event)
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
                value = None
            self.values[name].append(value)

    def data(self, event: Event | PlainEvent) -> Any:
        assert self.convert is not None
        if event.data is UNSET or isinstance(event.data, bytes):
            return None
        return self.convert(event.data)

    def add_invalid(self, reason: str) -> None:
        for name, column in self.values.items():
            column.append(clean(reason) if name == "invalid" else None)

    def arrays(self) -> dict[str, pa.Array]:
        return {name: self.array(name, column) for name, column in self.values.items()}

    def array(self, name: str, column: list[Any]) -> pa.Array:
        if name == "extensions":
            return make_map(column)
        kind = to_arrow_type(self.fields[name], timezone="UTC")
        if name == "data" and isinstance(self.fields[name], VariantType):
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


def data_converter(kind: DataType) -> Callable[[Any], Any]:
    """Return the conversion of a JSON value to `kind` for Arrow; a value that does not fit becomes null."""
    if isinstance(kind, VariantType):
        return variant_pair
    if isinstance(kind, StringType):
        return lambda value: value if isinstance(value, str) else json.dumps(value)
    return lambda value: fit(value, kind)


def fit(value: Any, kind: DataType) -> Any:  # noqa: PLR0911 - one line per type
    if value is None:
        return None
    if isinstance(kind, StringType):
        return clean(value if isinstance(value, str) else json.dumps(value))
    if isinstance(kind, BooleanType):
        return value if isinstance(value, bool) else None
    if isinstance(kind, LongType | IntegerType):
        bits = INTEGER_BITS[type(kind)]
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and -(1 << bits) <= value < 1 << bits else None
    if isinstance(kind, DoubleType | FloatType):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number else None
    if isinstance(kind, TimestampType):
        return fit_time(value)
    if isinstance(kind, ArrayType):
        element = kind.elementType
        return [fit(item, element) for item in value] if isinstance(value, list) else None
    if isinstance(kind, MapType):
        if not isinstance(value, dict):
            return None
        return [(clean(name), fit(item, kind.valueType)) for name, item in value.items()]
    if isinstance(kind, StructType):
        if not isinstance(value, dict):
            return None
        return {field.name: fit(value.get(field.name), field.dataType) for field in kind.fields}
    return None


def fit_time(value: Any) -> datetime | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return datetime.fromtimestamp(value, UTC)
        except (ValueError, OverflowError, OSError):
            return None
    if not isinstance(value, str):
        return None
    try:
        return parse_time(value)
    except EventError:
        return None
