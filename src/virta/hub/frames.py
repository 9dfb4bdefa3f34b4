"""
The bytes that subscribers get: server-sent events and WebSocket text frames.

The frame of an event, as Thorium sends it (the comment is part of the frame; Virta adds the offset):

    : {"timestamp":"2024-01-03T00:35:27.123456Z","offset":4711}
    event: data
    id: %2F%2Fsomewhere+some-id
    data: {"source":"//somewhere",…}

For consumers that request positions the `id` is one (`virta.hub.resume.positions`).

All functions are pure.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

import msgspec

from virta.clock import time_text

__all__ = [
    "LAST_CHUNK",
    "chunk",
    "event_frame",
    "form_encode",
    "named_frame",
    "websocket_text",
]

# Sources repeat, ids do not.
SOURCE_CACHE_MAX = 4096
# The events of one append share their time.
SECONDS_CACHE_MAX = 64
LAST_CHUNK = b"0\r\n\r\n"
OPCODE_TEXT_FINAL = 0x81

_json = msgspec.json.Encoder()
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def form_encode(text: str) -> str:
    """
    Encode as an HTML form does in Java (only letters, digits and `.-*_` stay), but a blank as `%20`.

    So the `+` between a source and an id is the only one, and no two events have one id.
    """
    return quote(text, safe="*", errors="replace").replace("~", "%7E")


@lru_cache(SOURCE_CACHE_MAX)
def _encode_source(source: str) -> bytes:
    return form_encode(source).encode()


def _encode_id(id_: str) -> bytes:
    return (id_ if id_.isascii() and id_.isalnum() else form_encode(id_)).encode()


@lru_cache(SECONDS_CACHE_MAX)
def _timestamp_bytes(microseconds: int) -> bytes:
    return time_text(microseconds).encode()


def event_frame(source: str, id_: str, value: bytes, timestamp: int, offset: int) -> bytes:
    """
    Return the frame of one event; its id is source, `+` and id, encoded.

    Args:
        value: the event's JSON on one line.
        offset: -1 for an event that is not in the log.
    """
    return _frame(
        b"id: %b+%b\n" % (_encode_source(source), _encode_id(id_)), value, timestamp, offset
    )


def position_frame(tag: bytes, value: bytes, timestamp: int, offset: int) -> bytes:
    """Return the same frame with the position after the event as its id; offset -1 has none."""
    id_line = b"" if offset < 0 else b"id: %b.%d\n" % (tag, offset + 1)
    return _frame(id_line, value, timestamp, offset)


def _frame(id_line: bytes, value: bytes, timestamp: int, offset: int) -> bytes:
    comment = b"" if offset < 0 else b',"offset":%d' % offset
    return b': {"timestamp":"%b"%b}\nevent: data\n%bdata: %b\n\n' % (
        _timestamp_bytes(timestamp),
        comment,
        id_line,
        value,
    )


def named_frame(
    name: str, data: object, *, id_: str | None = None, retry_ms: int | None = None
) -> bytes:
    """Return a control frame: connect, ping, gap, overflow, disconnect."""
    retry = b"" if retry_ms is None else b"retry: %d\n" % retry_ms
    id_line = b"" if id_ is None else b"id: %b\n" % id_.encode()
    return b"%bevent: %b\n%bdata: %b\n\n" % (
        retry,
        name.encode(),
        id_line,
        _json.encode(data),
    )


def with_member(value: bytes, name: str, text: str) -> bytes:
    """Return a JSON object that has members with another one, a string; it replaces one of that name."""
    if b'"%b"' % name.encode() in value or not value.endswith(b"}"):
        try:
            return _json.encode(_decode_members(value) | {name: text})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # It was parsed when it was accepted, with a shallower stack. Readers use the last of equal names.
            value = value.rstrip()
    return b'%b,"%b":"%b"}' % (value[:-1], name.encode(), text.encode())


def chunk(body: bytes) -> bytes:
    """Return bytes as one chunk of the chunked transfer coding of HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def websocket_text(payload: bytes) -> bytes:
    """Return a text as one unmasked, final frame (RFC 6455 §5.2)."""
    size = len(payload)
    if size < 126:
        return b"%c%c%b" % (OPCODE_TEXT_FINAL, size, payload)
    if size < 65536:
        return b"%c\x7e%b%b" % (OPCODE_TEXT_FINAL, size.to_bytes(2, "big"), payload)
    return b"%c\x7f%b%b" % (OPCODE_TEXT_FINAL, size.to_bytes(8, "big"), payload)
