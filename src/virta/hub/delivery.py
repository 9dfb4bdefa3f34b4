"""
An event on its way out: what the log holds, decoded as far as delivery needs it.

Which event a record is, and what is made of a record that is none: `virta.event.records`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from virta.event.records import RecordLike, decode_head, document_of, one_line, record_event
from virta.hub.frames import chunk, event_frame, websocket_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Delivery", "RecordLike", "decode_head", "from_record", "one_line"]


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
        """The document that Koncorde's filters speak of (`virta.event.records`)."""
        return document_of(self.value, self.id)


def from_record(record: RecordLike) -> Delivery:
    """Read a log record as an event, wrapping what is none."""
    channel = record.topic.decode("utf-8", "replace")
    event = record_event(record)
    value = one_line(event.value)
    return Delivery(channel, event.source, event.id, value, record.offset, record.timestamp)


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
