"""CloudEvents 1.0.2: an immutable value and its JSON, batch and HTTP forms (`virta.event.model`)."""

from __future__ import annotations

from msgspec import UNSET

from virta.event.document import RecordEvent, document_of, filter_view, record_event
from virta.event.model import Event, decode_batch, encode_batch, from_http
from virta.event.rules import (
    BATCH_BYTES_MAX,
    BATCH_EVENTS_MAX,
    BATCH_TYPE,
    EVENT_BYTES_MAX,
    JSON_TYPE,
    STRUCTURED_TYPE,
    is_json_type,
)
from virta.event.times import format_time, parse_time

__all__ = [
    "BATCH_BYTES_MAX",
    "BATCH_EVENTS_MAX",
    "BATCH_TYPE",
    "EVENT_BYTES_MAX",
    "JSON_TYPE",
    "STRUCTURED_TYPE",
    "UNSET",
    "Event",
    "RecordEvent",
    "decode_batch",
    "document_of",
    "encode_batch",
    "filter_view",
    "format_time",
    "from_http",
    "is_json_type",
    "parse_time",
    "record_event",
]
