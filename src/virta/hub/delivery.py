"""
An event on its way out: what the log holds, decoded as far as delivery needs it.

`virta.event.document` decides which event a record is, and wraps a record that is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from virta.event.document import (
    RECORD_SOURCE,
    RecordLike,
    decode_head,
    document_of,
    one_line,
    read_event,
    record_event,
)
from virta.hub.frames import (
    chunk,
    event_frame,
    position_frame,
    websocket_text,
    with_member,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Delivery", "RecordLike", "decode_head", "from_record", "identity", "one_line"]

# The CloudEvents extension attribute that carries a position over a WebSocket.
POSITION_ATTRIBUTE = "virtaposition"

# Not JSON and not blank: a value that satisfies no filter.
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
        """Return the document that Koncorde filters apply to (`virta.event.document`)."""
        try:
            return document_of(self.value, self.id)
        except RecursionError:
            # It was parsed when accepted, with a shallower call stack. The matcher treats it as unreadable.
            return UNREADABLE


def from_record(record: RecordLike) -> Delivery:
    """Read a log record as an event, wrapping what is none."""
    channel = record.topic.decode("utf-8", "replace")
    event = record_event(record)
    value = one_line(event.value)
    return Delivery(channel, event.source, event.id, value, record.offset, record.timestamp)


def identity(record: RecordLike) -> tuple[str, str, str]:
    """Return the channel, source and id that `from_record` would give the event."""
    channel = record.topic.decode("utf-8", "replace")
    event = read_event(bytes(record.value))
    if event is None:
        return channel, RECORD_SOURCE + channel, str(record.offset)
    return channel, event.source, event.id


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


# Output formats of a subscriber; indexes into ENCODERS. The second three carry positions.
SSE_CHUNKED, SSE_PLAIN, WEBSOCKET = range(3)
SSE_CHUNKED_POSITIONS, SSE_PLAIN_POSITIONS, WEBSOCKET_POSITIONS = range(3, 6)
CHUNKED = frozenset({SSE_CHUNKED, SSE_CHUNKED_POSITIONS})
SOCKETS = frozenset({WEBSOCKET, WEBSOCKET_POSITIONS})
# Each is called with events and the log's tag.
ENCODERS: tuple[Callable[[Sequence[Delivery], bytes], bytes], ...] = (
    _chunked,
    _plain,
    _texts,
    _chunked_positions,
    _plain_positions,
    _text_positions,
)
