"""
Record values decoded as CloudEvents, into Arrow columns.

Parsing is lenient, as in the server: an event needs `source` and `id`, everything else is kept unchanged. A value
that is not an event (no JSON, no id, invalid data) keeps its row: every attribute null and the reason in `invalid`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pyarrow as pa
from msgspec import UNSET
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, VariantType

from virta.errors import EventError
from virta.event import EVENT_BYTES_MAX, Event, parse_time
from virta.event.document import UNREADABLE
from virta.jsontext import check_depth, valid_text
from virta.spark.source.typed import DataFitter, data_text
from virta.spark.source.variant import variant_pair

if TYPE_CHECKING:
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
        kind = to_arrow_type(self.fields[name], timezone="UTC")
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
