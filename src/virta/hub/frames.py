"""
The bytes a hearer gets: server-sent events and WebSocket text, each made once and shared.

Frame of an event, as Thorium sends it (the comment is part of the frame; the offset in it is ours):

    : {"timestamp":"2024-01-03T00:35:27.123456Z","offset":4711}
    event: data
    id: %2F%2Fsomewhere+some-id
    data: {"source":"//somewhere",…}

For consumers that ask for positions the `id` is one (`virta.hub.resume.positions`).

Everything here is a pure function of its arguments.
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

# Sources repeat; ids do not. The cache spares the slow encoder for the half that repeats.
SOURCE_CACHE_MAX = 4096
# Neighbouring events share their second, those of one append even their microsecond.
SECONDS_CACHE_MAX = 64
LAST_CHUNK = b"0\r\n\r\n"
OPCODE_TEXT_FINAL = 0x81

_json = msgspec.json.Encoder()
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def form_encode(text: str) -> str:
    """
    Encode as an HTML form does in Java: only letters, digits and `.-*_` stay.

    But a blank becomes `%20`: the `+` between a source and an id is the only one, so no two events
    have one id.
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
    Make the frame of one event; `value` is its JSON on one line, its id source, `+` and id, encoded.

    An event that is in no log has the offset -1.
    """
    if offset < 0:
        return b': {"timestamp":"%b"}\nevent: data\nid: %b+%b\ndata: %b\n\n' % (
            _timestamp_bytes(timestamp),
            _encode_source(source),
            _encode_id(id_),
            value,
        )
    return b': {"timestamp":"%b","offset":%d}\nevent: data\nid: %b+%b\ndata: %b\n\n' % (
        _timestamp_bytes(timestamp),
        offset,
        _encode_source(source),
        _encode_id(id_),
        value,
    )


def position_frame(tag: bytes, value: bytes, timestamp: int, offset: int) -> bytes:
    """Make the same frame with the position after the event as its id; offset -1 has none."""
    if offset < 0:
        return b': {"timestamp":"%b"}\nevent: data\ndata: %b\n\n' % (
            _timestamp_bytes(timestamp),
            value,
        )
    return b': {"timestamp":"%b","offset":%d}\nevent: data\nid: %b.%d\ndata: %b\n\n' % (
        _timestamp_bytes(timestamp),
        offset,
        tag,
        offset + 1,
        value,
    )


def named_frame(
    name: str, data: object, *, id_: str | None = None, retry_ms: int | None = None
) -> bytes:
    """Make one of our own frames: connect, ping, gap, overflow, disconnect."""
    retry = b"" if retry_ms is None else b"retry: %d\n" % retry_ms
    id_line = b"" if id_ is None else b"id: %b\n" % id_.encode()
    return b"%bevent: %b\n%bdata: %b\n\n" % (
        retry,
        name.encode(),
        id_line,
        _json.encode(data),
    )


def with_member(value: bytes, name: str, text: str) -> bytes:
    """Add a string member to a JSON object that has members, replacing one of that name."""
    if b'"%b"' % name.encode() in value or not value.endswith(b"}"):
        try:
            return _json.encode(_decode_members(value) | {name: text})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # It was read when it was accepted, less deep in calls. Of two members, readers take the last.
            value = value.rstrip()
    return b'%b,"%b":"%b"}' % (value[:-1], name.encode(), text.encode())


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
