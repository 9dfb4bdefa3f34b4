"""
Deliveries: events and stream messages on their way into the log and out of it.

`virta.event.document` decides which event a record is, and wraps a record that is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from virta.event.document import (
    RECORD_SOURCE,
    RecordEvent,
    RecordLike,
    one_line_event,
    read_event,
)
from virta.hub.frames import chunk, event_frame, position_frame, websocket_text, with_member

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RESERVED_PREFIX = "$virta/"
STREAMS = RESERVED_PREFIX + "streams"  # key: stream id, value: the message as receivers see it
DEAD_LETTERS = (
    RESERVED_PREFIX + "dead-letters"
)  # events that no webhook accepted; read as a channel
META = "meta"  # Thorium's channel of registrations: in memory only, never in the log
# The CloudEvents extension attribute that carries a position over a WebSocket.
POSITION_ATTRIBUTE = "virtaposition"

_RESERVED = RESERVED_PREFIX.encode()
_STREAMS = STREAMS.encode()
_DEAD_LETTERS = DEAD_LETTERS.encode()


def is_reserved(channel: str) -> bool:
    """Return whether only the server publishes to this channel."""
    return channel.startswith(RESERVED_PREFIX)


def is_bookkeeping(topic: bytes) -> bool:
    """Return whether a topic has records that are no events: stream messages, and what the server stores."""
    return topic.startswith(_RESERVED) and topic != _DEAD_LETTERS


class Delivery(msgspec.Struct, gc=False):
    """
    One event or stream message.

    Its frames are made at most once. There are very many deliveries and they are part of no reference cycle,
    so the garbage collector does not track them.
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


def from_record(record: RecordLike) -> Delivery:
    """Return the delivery of a record, which is wrapped if it is no event."""
    return from_event(record, one_line_event(record))


def from_event(record: RecordLike, event: RecordEvent) -> Delivery:
    """Return the delivery of a record whose event is known."""
    channel = record.topic.decode("utf-8", "replace")
    return Delivery(channel, event.source, event.id, event.value, record.offset, record.timestamp)


def read_delivery(record: RecordLike) -> Delivery | None:
    """Return the delivery of a record of any topic: an event, a stream message, or None for bookkeeping."""
    topic = bytes(record.topic)
    if topic == _STREAMS:
        return read_message(record)
    return None if is_bookkeeping(topic) else from_record(record)


def identity(record: RecordLike) -> tuple[str, str, str]:
    """Return the channel, source and id that `from_record` would give the event."""
    channel = record.topic.decode("utf-8", "replace")
    event = read_event(bytes(record.value))
    if event is None:
        return channel, RECORD_SOURCE + channel, str(record.offset)
    return channel, event.source, event.id


class _Message(msgspec.Struct):
    publish_to: str


_decode_message = msgspec.json.Decoder(_Message).decode


def read_message(record: RecordLike) -> Delivery | None:
    """Return the delivery of a stream message; None if the record is none."""
    value = bytes(record.value)
    try:
        # A stream id that is too long for a key is in the value only.
        stream = bytes(record.key).decode() or _decode_message(value).publish_to
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return Delivery(STREAMS, "", stream, value, record.offset, record.timestamp)


# Output formats.


def _sse_chunks(deliveries: Sequence[Delivery], tag: bytes) -> bytes:  # noqa: ARG001
    if len(deliveries) == 1:
        return chunk(deliveries[0].frame)
    return chunk(b"".join([delivery.frame for delivery in deliveries]))


def _sse_frames(deliveries: Sequence[Delivery], tag: bytes) -> bytes:  # noqa: ARG001
    return b"".join([delivery.frame for delivery in deliveries])


def _websocket_texts(deliveries: Sequence[Delivery], tag: bytes) -> bytes:  # noqa: ARG001
    return b"".join([websocket_text(delivery.value) for delivery in deliveries])


def _chunked_positions(deliveries: Sequence[Delivery], tag: bytes) -> bytes:
    return chunk(_plain_positions(deliveries, tag))


def _plain_positions(deliveries: Sequence[Delivery], tag: bytes) -> bytes:
    return b"".join([delivery.positioned_frame(tag) for delivery in deliveries])


def _text_positions(deliveries: Sequence[Delivery], tag: bytes) -> bytes:
    return b"".join([delivery.positioned_text(tag) for delivery in deliveries])


# Indexes into ENCODERS. The second three carry positions.
SSE_CHUNKED, SSE_PLAIN, WEBSOCKET = range(3)
SSE_CHUNKED_POSITIONS, SSE_PLAIN_POSITIONS, WEBSOCKET_POSITIONS = range(3, 6)
CHUNKED = frozenset({SSE_CHUNKED, SSE_CHUNKED_POSITIONS})
SOCKETS = frozenset({WEBSOCKET, WEBSOCKET_POSITIONS})
# Each is called with deliveries and the log's tag.
ENCODERS: tuple[Callable[[Sequence[Delivery], bytes], bytes], ...] = (
    _sse_chunks,
    _sse_frames,
    _websocket_texts,
    _chunked_positions,
    _plain_positions,
    _text_positions,
)
