"""Checks of a WebSocket request before it is upgraded."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from virta.errors import RequestError, StreamIdError
from virta.hub.stream_consumer import QUEUED_MAX, QUEUED_MIN
from virta.streams import Segments, parse_stream_id

# Subtub accepts a sign and leading zeros; no valid number is longer.
INTEGER = re.compile(r"[+-]?[0-9]{1,20}")


def check_handshake(headers: dict[bytes, bytes]) -> None:
    """Refuse a handshake that lacks a header, in Subtub's words."""
    version = headers.get(b"sec-websocket-version")
    if version is None:
        raise RequestError(400, "bad-handshake", "Sec-WebSocket-Version header not present.")
    if version.strip() != b"13":
        raise RequestError(426, "bad-handshake", "This server only supports WebSocket version 13.")
    if b"sec-websocket-key" not in headers:
        raise RequestError(400, "bad-handshake", "Sec-WebSocket-Key header not present.")


def check_subscribe(query: bytes) -> tuple[list[Segments], int, bool]:
    """
    Parse the parameters of `/subscribe`: streams, queue length, whether drops are reported.

    Raises:
        RequestError: its message is the whole response.
    """
    values: dict[str, list[str | None]] = {}
    for part in query.split(b"&"):
        name, sign, value = part.replace(b"+", b" ").partition(b"=")
        # A name without `=` has no value and requests no stream; `streams=` requests the empty id.
        text = _query_text(value) if sign else None
        values.setdefault(_query_text(name), []).append(text)
    if "streams" not in values:
        raise RequestError(404, "not-found", "Not found")
    queued = values.get("max_queued", [None])[0] or ""
    if not INTEGER.fullmatch(queued):
        raise RequestError(
            400,
            "invalid-max-queued",
            f"max_queued must be an integer from 1 to 250, got {queued[:40]!r}",
        )
    if not QUEUED_MIN <= int(queued) <= QUEUED_MAX:
        raise RequestError(
            400, "invalid-max-queued", f"max_queued must be from 1 to 250, got {queued}"
        )
    asked = [text for text in values["streams"] if text is not None]
    if not asked:
        raise RequestError(400, "no-streams", "No streams requested")
    try:
        streams = [parse_stream_id(text) for text in asked]
    except StreamIdError as error:
        text = f"Malformed stream id: {error.message}"
        raise RequestError(400, "malformed-stream-id", text) from None
    return streams, int(queued), values.get("drops") == ["1"]


def _query_text(raw: bytes) -> str:
    """Decode a part of a query; two stream ids that are not UTF-8 must not become the same one."""
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise RequestError(400, "malformed-stream-id", "Malformed stream id") from None


def upgrade_protocol(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the protocol of an Upgrade header that the Connection header names."""
    fields = dict(headers)
    tokens = [token.strip().lower() for token in fields.get(b"connection", b"").split(b",")]
    return fields.get(b"upgrade", b"").lower() if b"upgrade" in tokens else None


def head_without_upgrade(
    method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]], *, keep: bool
) -> bytes:
    """Return the head of a request without its Upgrade header."""
    kept = [(n, v) for n, v in headers if n not in {b"upgrade", b"connection"}]
    if not keep:
        kept.append((b"connection", b"close"))
    lines = b"".join(b"%b: %b\r\n" % pair for pair in kept)
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), lines)
