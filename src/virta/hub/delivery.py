"""
An event on its way out: what the log holds, decoded as far as delivery needs it.

A record is an event when its value is a JSON object with text `source` and `id`. Anything else that
an embedded process appended is wrapped in an event of type `virta.record`, so that a channel's
consumers hear of every record of its topic.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from virta.hub.frames import chunk, event_frame, timestamp_text, websocket_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RECORD_TYPE = "virta.record"
RECORD_SOURCE = "/log/"


class RecordLike(Protocol):
    """The part of a log record that delivery needs."""

    @property
    def topic(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...
    @property
    def value(self) -> bytes: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...


class EventHead(msgspec.Struct):
    """The two attributes that identify an event; everything else is skipped, not decoded."""

    source: Any = None
    id: Any = None


class _EventData(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw(b"")
    # Decoded only when it is a text: a number of any size may stand here.
    subject: msgspec.Raw = msgspec.Raw(b"")


decode_head = msgspec.json.Decoder(EventHead).decode
_decode_data = msgspec.json.Decoder(_EventData).decode

# No JSON, and not blank: a value that satisfies no filter.
UNREADABLE = b"-"


class Delivery(msgspec.Struct, gc=False):
    """
    One event (or stream message) on its way into the log or out of it.

    The bytes of its frame are made at most once. There are very many of these and they refer to
    nothing that refers back, so the collector of cycles does not look at them.
    """

    channel: str
    source: str
    id: str
    value: bytes
    offset: int = -1  # known once it is in the log
    timestamp: int = 0
    key: bytes = b""
    made: bytes | None = None

    @property
    def frame(self) -> bytes:
        """The event as a server-sent event."""
        if self.made is None:
            self.made = event_frame(self.source, self.id, self.value, self.timestamp)
        return self.made

    def document(self) -> bytes:
        """
        The document that Koncorde's filters speak of: the event's data.

        `_id` is the event's subject, else its id, unless the data brings its own. An event without
        an object as data is the empty document with that `_id`.
        """
        try:
            held = _decode_data(self.value)
        except RecursionError:
            # It was read when it was accepted, less deep in calls. The matcher calls it unreadable.
            return UNREADABLE
        raw = bytes(held.data).strip()
        subject = bytes(held.subject).strip()
        identity = subject if subject.startswith(b'"') else msgspec.json.encode(self.id)
        if not raw.startswith(b"{"):
            return b'{"_id":%b}' % identity
        inner = raw[1:-1].strip()
        # Of equal names the last wins in every JSON reader, so the data's own `_id` stays.
        return b'{"_id":%b%b%b}' % (identity, b"," if inner else b"", inner)


def from_record(record: RecordLike) -> Delivery:
    """Read a log record as an event, wrapping what is none."""
    channel = record.topic.decode("utf-8", "replace")
    value = bytes(record.value)
    try:
        head = decode_head(value)
        source, id_ = head.source, head.id
        if isinstance(source, str) and isinstance(id_, str):
            return Delivery(channel, source, id_, one_line(value), record.offset, record.timestamp)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    return _wrapped(record, channel, value)


def one_line(value: bytes) -> bytes:
    """JSON without line ends; the spelling of its values stays."""
    if b"\n" in value or b"\r" in value:
        return bytes(msgspec.json.format(value, indent=-1))
    return value


def _wrapped(record: RecordLike, channel: str, value: bytes) -> Delivery:
    source, id_ = RECORD_SOURCE + channel, str(record.offset)
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": id_,
        "source": source,
        "type": RECORD_TYPE,
        "time": timestamp_text(record.timestamp),
    }
    if record.key:
        event["partitionkey"] = bytes(record.key).decode("utf-8", "replace")
    try:
        msgspec.json.decode(value)
        value.decode()
        event["data"] = msgspec.Raw(one_line(value))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        event["data_base64"] = b64encode(value).decode()
    return Delivery(
        channel, source, id_, msgspec.json.encode(event), record.offset, record.timestamp
    )


def _chunked(deliveries: Sequence[Delivery]) -> bytes:
    if len(deliveries) == 1:
        return chunk(deliveries[0].frame)
    return chunk(b"".join([delivery.frame for delivery in deliveries]))


def _plain(deliveries: Sequence[Delivery]) -> bytes:
    return b"".join([delivery.frame for delivery in deliveries])


def _texts(deliveries: Sequence[Delivery]) -> bytes:
    return b"".join([websocket_text(delivery.value) for delivery in deliveries])


# How a hearer wants its bytes; indexes into ENCODERS.
SSE_CHUNKED, SSE_PLAIN, WEBSOCKET = range(3)
ENCODERS: tuple[Callable[[Sequence[Delivery]], bytes], ...] = (_chunked, _plain, _texts)
