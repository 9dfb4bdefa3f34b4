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

from virta.hub.frames import (
    chunk,
    event_frame,
    position_frame,
    timestamp_text,
    websocket_text,
    with_member,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RECORD_TYPE = "virta.record"
RECORD_SOURCE = "/log/"
# The CloudEvents extension attribute that carries a position over a WebSocket.
POSITION_ATTRIBUTE = "virtaposition"


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
    made_positioned: bytes | None = None

    @property
    def frame(self) -> bytes:
        """The event as a server-sent event."""
        if self.made is None:
            self.made = event_frame(self.source, self.id, self.value, self.timestamp, self.offset)
        return self.made

    def positioned_frame(self, tag: bytes) -> bytes:
        """Return the event as a server-sent event with its position as id."""
        if self.made_positioned is None:
            self.made_positioned = position_frame(tag, self.value, self.timestamp, self.offset)
        return self.made_positioned

    def positioned_text(self, tag: bytes) -> bytes:
        """Return the event as a WebSocket message with its position as an attribute."""
        if self.offset < 0:
            return websocket_text(self.value)
        position = f"{tag.decode()}.{self.offset + 1}"
        return websocket_text(with_member(self.value, POSITION_ATTRIBUTE, position))

    def document(self) -> bytes:
        """
        The document that Koncorde's filters speak of: the event's data.

        `_id` is the event's subject, else its id, unless the data brings its own. An event without
        an object as data is the empty document with that `_id`.
        """
        held = _decode_data(self.value)
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
    pair = _source_and_id(value)
    if pair is None:
        return _wrapped(record, channel, value)
    return Delivery(channel, *pair, one_line(value), record.offset, record.timestamp)


def identity(record: RecordLike) -> tuple[str, str, str]:
    """Return the channel, source and id that `from_record` would give the event."""
    channel = record.topic.decode("utf-8", "replace")
    pair = _source_and_id(record.value)
    if pair is None:
        return channel, RECORD_SOURCE + channel, str(record.offset)
    return channel, *pair


def _source_and_id(value: bytes) -> tuple[str, str] | None:
    """Read what identifies an event; None when the value is no event."""
    try:
        head = decode_head(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    source, id_ = head.source, head.id
    return (source, id_) if isinstance(source, str) and isinstance(id_, str) else None


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


def _chunked(deliveries: Sequence[Delivery], tag: bytes) -> bytes:  # noqa: ARG001
    if len(deliveries) == 1:
        return chunk(deliveries[0].frame)
    return chunk(b"".join([delivery.frame for delivery in deliveries]))


def _plain(deliveries: Sequence[Delivery], tag: bytes) -> bytes:  # noqa: ARG001
    return b"".join([delivery.frame for delivery in deliveries])


def _texts(deliveries: Sequence[Delivery], tag: bytes) -> bytes:  # noqa: ARG001
    return b"".join([websocket_text(delivery.value) for delivery in deliveries])


def _chunked_positions(deliveries: Sequence[Delivery], tag: bytes) -> bytes:
    return chunk(_plain_positions(deliveries, tag))


def _plain_positions(deliveries: Sequence[Delivery], tag: bytes) -> bytes:
    return b"".join([delivery.positioned_frame(tag) for delivery in deliveries])


def _text_positions(deliveries: Sequence[Delivery], tag: bytes) -> bytes:
    return b"".join([delivery.positioned_text(tag) for delivery in deliveries])


# How a hearer wants its bytes; indexes into ENCODERS. The second three carry positions.
SSE_CHUNKED, SSE_PLAIN, WEBSOCKET = range(3)
SSE_CHUNKED_POSITIONS, SSE_PLAIN_POSITIONS, WEBSOCKET_POSITIONS = range(3, 6)
CHUNKED = frozenset({SSE_CHUNKED, SSE_CHUNKED_POSITIONS})
SOCKETS = frozenset({WEBSOCKET, WEBSOCKET_POSITIONS})
# Each takes events and the log's tag.
ENCODERS: tuple[Callable[[Sequence[Delivery], bytes], bytes], ...] = (
    _chunked,
    _plain,
    _texts,
    _chunked_positions,
    _plain_positions,
    _text_positions,
)
