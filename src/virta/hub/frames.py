"""
The bytes a hearer gets: server-sent events and WebSocket text, each made once and shared.

Frame of an event, as Thorium sends it (the comment is part of the frame):

    : {"timestamp":"2024-01-03T00:35:27.123456Z"}
    event: data
    id: %2F%2Fsomewhere+some-id
    data: {"source":"//somewhere",…}

Everything here is a pure function of its arguments.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote_plus

import msgspec

from virta.event.records import timestamp_text

__all__ = [
    "LAST_CHUNK",
    "chunk",
    "event_frame",
    "form_encode",
    "named_frame",
    "timestamp_text",
    "websocket_text",
]

# Sources repeat; ids do not. The cache spares the slow encoder for the half that repeats.
SOURCE_CACHE_MAX = 4096
# Neighbouring events share their second, those of one append even their microsecond.
SECONDS_CACHE_MAX = 64
LAST_CHUNK = b"0\r\n\r\n"
OPCODE_TEXT_FINAL = 0x81

_json = msgspec.json.Encoder()


def form_encode(text: str) -> str:
    """Encode as an HTML form does in Java: only letters, digits and `.-*_` stay."""
    return quote_plus(text, safe="*", errors="replace").replace("~", "%7E")


@lru_cache(SOURCE_CACHE_MAX)
def _encode_source(source: str) -> bytes:
    return form_encode(source).encode()


def _encode_id(id_: str) -> bytes:
    return (id_ if id_.isascii() and id_.isalnum() else form_encode(id_)).encode()


@lru_cache(SECONDS_CACHE_MAX)
def _timestamp_bytes(microseconds: int) -> bytes:
    return timestamp_text(microseconds).encode()


def event_frame(source: str, id_: str, value: bytes, timestamp: int) -> bytes:
    """One event; `value` is its JSON on one line, its id source, blank and id, form-encoded."""
    return b': {"timestamp":"%b"}\nevent: data\nid: %b+%b\ndata: %b\n\n' % (
        _timestamp_bytes(timestamp),
        _encode_source(source),
        _encode_id(id_),
        value,
    )


def named_frame(name: str, data: object, *, retry_ms: int | None = None) -> bytes:
    """One of our own events: connect, ping, gap, overflow, drain."""
    retry = b"" if retry_ms is None else b"retry: %d\n" % retry_ms
    return b"%bevent: %b\ndata: %b\n\n" % (retry, name.encode(), _json.encode(data))


def chunk(body: bytes) -> bytes:
    """Wrap bytes as one chunk of HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def websocket_text(payload: bytes) -> bytes:
    """One unmasked, final text frame (RFC 6455 §5.2)."""
    size = len(payload)
    if size < 126:
        return b"%c%c%b" % (OPCODE_TEXT_FINAL, size, payload)
    if size < 65536:
        return b"%c\x7e%b%b" % (OPCODE_TEXT_FINAL, size.to_bytes(2, "big"), payload)
    return b"%c\x7f%b%b" % (OPCODE_TEXT_FINAL, size.to_bytes(8, "big"), payload)
