"""
Record values decoded as CloudEvents, into Arrow columns.

Parsing is lenient, as the server's is: an event needs `source` and `id`, everything else is kept as it
came. A value that is not an event (no JSON, no id, data where none can be) keeps its row: every
attribute null and the reason in `invalid`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

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
from virta.event import Event, parse_time
from virta.spark.variant import encode_variant

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


class EventColumns:
    """Collects the wanted event columns of one Arrow batch."""

    def __init__(self, fields: dict[str, DataType]) -> None:
        self.fields = fields
        self.values: dict[str, list[Any]] = {name: [] for name in fields}
        self.convert = data_converter(fields["data"]) if "data" in fields else None

    def add(self, raw: bytes) -> None:
        try:
            event = Event.from_json(raw, lenient=True)
            time = event_time(event)
            data = None if self.convert is None else self.data(event)
        except EventError as error:
            self.add_invalid(error.message)
            return
        values = self.values
        for name in values:
            if name in TEXT_ATTRIBUTES:
                values[name].append(clean(getattr(event, name)) or None)
            elif name == "time":
                values[name].append(time)
            elif name == "extensions":
                values[name].append(
                    [(clean(k), extension_text(v)) for k, v in event.extensions.items()]
                )
            elif name == "data":
                values[name].append(data)
            elif name == "data_binary":
                values[name].append(event.data if isinstance(event.data, bytes) else None)
            else:
                values[name].append(None)

    def data(self, event: Event) -> Any:
        assert self.convert is not None
        if event.data is UNSET or isinstance(event.data, bytes):
            return None
        return self.convert(event.data)

    def add_invalid(self, reason: str) -> None:
        for name, column in self.values.items():
            column.append(clean(reason) if name == "invalid" else None)

    def arrays(self) -> dict[str, pa.Array]:
        return {
            name: make_map(column)
            if name == "extensions"
            else pa.array(column, to_arrow_type(self.fields[name], timezone="UTC"))
            for name, column in self.values.items()
        }


def make_map(column: list[Any]) -> pa.Array:
    """A map column; pyarrow takes twenty times as long to find out that most maps are empty."""
    pairs = [pair for entry in column if entry for pair in entry]
    ends, total = [], 0
    for entry in column:
        ends.append(None if entry is None else total)
        total += len(entry or ())
    keys = pa.array([name for name, _ in pairs], pa.string())
    values = pa.array([value for _, value in pairs], pa.string())
    return pa.MapArray.from_arrays(pa.array([*ends, total], pa.int32()), keys, values)


def clean(text: str | None) -> str | None:
    """Text that UTF-8 can hold: JSON may spell lone surrogates, Arrow may not. They become U+FFFD."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def extension_text(value: Any) -> str | None:
    return clean(value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))


def event_time(event: Event) -> datetime | None:
    """The event's time; a lenient event may carry text that is no time, which is no reason to refuse it."""
    if event.time is None:
        return None
    try:
        return parse_time(event.time)
    except EventError:
        return None


def data_converter(kind: DataType) -> Callable[[Any], Any]:
    """From a JSON value to what Arrow takes for `kind`; a value that does not fit becomes null."""
    if isinstance(kind, VariantType):
        return encode_variant
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
