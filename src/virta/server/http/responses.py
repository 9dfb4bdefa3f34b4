"""
Responses of the hot routes, as bytes.

Every response carries Thorium's common headers; JSON ones also the `ce-` headers that make the answer
itself an event. Heads are put together from prepared pieces, since a publisher's answer is the most
frequent thing the server writes.
"""

from __future__ import annotations

import base64
import os
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from virta.clock import time_text
from virta.server.http.response_queue import with_lines

if TYPE_CHECKING:
    from virta.errors import RequestError

JSON_TYPE = "application/json; charset=utf-8"
RESPONSE_TYPE = "name.djsweet.thorium.channel.send.response"
RETRY_AFTER_S = 1
RETRY_LATER = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
ACCEPTED_BODY = b'{"code":"accepted"}'
# The clock text in headers is renewed this often; its users do not need more.
CLOCK_S = 0.001

COMMON = b"Cache-Control: no-store\r\n"
KEEP = b"Connection: keep-alive\r\n"
CLOSE = b"Connection: close\r\n"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\n" + COMMON + KEEP + b"Content-Type: text/event-stream; charset=utf-8\r\n"
    b"X-Accel-Buffering: no\r\n"
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PREFLIGHT_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
PREFLIGHT_MAX_AGE_S = 86400


def status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


def empty(status: int, *, close: bool = True) -> bytes:
    """Say only a status: what a client that breaks the limits of HTTP gets."""
    again = b"Retry-After: %d\r\n" % RETRY_AFTER_S if status in RETRY_LATER else b""
    connection = CLOSE if close else KEEP
    return status_line(status) + COMMON + connection + again + b"Content-Length: 0\r\n\r\n"


def preflight(requested_headers: bytes, *, close: bool) -> bytes:
    """Return the response to a preflight: an allowed page may use every method and header."""
    allowed = requested_headers or b"Authorization, Content-Type, Last-Event-ID, Virta-Positions"
    return (
        b"%b%b%bAccess-Control-Allow-Methods: %b\r\nAccess-Control-Allow-Headers: %b\r\nAccess-Control-Max-Age: %d\r\n\r\n"
        % (
            status_line(204),
            COMMON,
            CLOSE if close else KEEP,
            PREFLIGHT_METHODS,
            allowed,
            PREFLIGHT_MAX_AGE_S,
        )
    )


def plain_text(status: int, text: str, *, close: bool, more: bytes = b"") -> bytes:
    """Subtub's kind of answer."""
    body = text.encode("utf-8", "replace")
    head = b"%b%b%bContent-Type: text/plain; charset=UTF-8\r\n%bContent-Length: %d\r\n\r\n" % (
        status_line(status),
        COMMON,
        CLOSE if close else KEEP,
        more,
        len(body),
    )
    return head + body


def without_body(response: bytes) -> bytes:
    """The answer to HEAD: the head of what another method would have got."""
    return response[: response.index(b"\r\n\r\n") + 4]


def timings(read_ms: int, parse_ms: int = -1) -> bytes:
    """Thorium's headers for what is known when a publication is refused; -1 is not known."""
    more = b"" if read_ms < 0 else b"Thorium-Body-Read-Time: %d ms\r\n" % read_ms
    return more if parse_ms < 0 else b"%bThorium-JSON-Parse-Time: %d ms\r\n" % (more, parse_ms)


def placed(offset: int | None, *, repeat: bool) -> bytes:
    """Make the headers with the offset of a publication, each preceded by a line end."""
    line = b"" if offset is None else b"\r\nVirta-Offset: %d" % offset
    return line + b"\r\nVirta-Duplicate: true" if repeat else line


class Responder:
    """Makes JSON responses; knows the server's name and counts its answers."""

    def __init__(self, source_name: str, durability: str, cors: bytes = b"") -> None:
        # Ids look like 15 random bytes in base64; 9 of them are, and number the answers for the rest.
        self._prefix = base64.b64encode(os.urandom(9))
        self._number = int.from_bytes(os.urandom(2), "big")
        self._clock_until = 0.0
        self._clock = b""
        self._events_headers = (
            f"Content-Type: {JSON_TYPE}\r\nce-specversion: 1.0\r\nce-datacontenttype: {JSON_TYPE}\r\n"
            f"ce-type: {RESPONSE_TYPE}\r\nce-source: {header_safe(source_name)}\r\n"
        ).encode()
        # `cors` is for every response made here; other responses get it from their exchange.
        self._accepted = (
            status_line(202)
            + COMMON
            + KEEP
            + self._events_headers
            + f"Virta-Durability: {durability}\r\nContent-Length: {len(ACCEPTED_BODY)}\r\n".encode()
        )
        self._quickly_accepted = with_lines(self._accepted, cors)

    def accepted(self, read_ms: int, parse_ms: int, encode_ms: int, place: bytes) -> bytes:
        """Return the 202 of a publication; `place` is the result of `placed`."""
        number = self.numbers(1)
        tail = self.accepted_tail(read_ms, parse_ms, encode_ms)
        return b"%b%08x%b%b" % (self._head(self._accepted), number & 0xFFFFFFFF, place, tail)

    def accepted_head(self) -> bytes:
        """Return a 202 of the fast path up to the number of the response, which has 8 hexadecimal digits."""
        return self._head(self._quickly_accepted)

    def _head(self, fixed: bytes) -> bytes:
        return b"%bce-time: %b\r\nce-id: %b" % (fixed, self._time(), self._prefix)

    def accepted_tail(self, read_ms: int, parse_ms: int, encode_ms: int) -> bytes:
        """The same from behind the number on."""
        return (
            b"\r\nThorium-Body-Read-Time: %d ms\r\nThorium-JSON-Parse-Time: %d ms\r\nThorium-Encode-Time: %d ms\r\n\r\n%b"
            % (read_ms, parse_ms, encode_ms, ACCEPTED_BODY)
        )

    def numbers(self, count: int) -> int:
        """Take so many numbers for answers; gives the first."""
        first = self._number
        self._number += count
        return first

    def refused(self, error: RequestError, *, close: bool, more: bytes = b"") -> bytes:
        """A refusal: `code`, often a message, and what the code promises beside them."""
        return self.json(error.status, refusal_body(error), close=close, more=more)

    def json(self, status: int, body: bytes, *, close: bool, more: bytes = b"") -> bytes:
        if status in RETRY_LATER:
            more += b"Retry-After: %d\r\n" % RETRY_AFTER_S
        return b"%b%b%b%bce-time: %b\r\nce-id: %b\r\n%bContent-Length: %d\r\n\r\n%b" % (
            status_line(status),
            COMMON,
            CLOSE if close else KEEP,
            self._events_headers,
            self._time(),
            self._id(),
            more,
            len(body),
            body,
        )

    def event_headers(self) -> dict[str, str]:
        """The same headers for responses that the framework writes."""
        lines = self._events_headers.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        return headers | {
            "Cache-Control": "no-store",
            "ce-time": self._time().decode(),
            "ce-id": self._id().decode(),
        }

    def _id(self) -> bytes:
        return b"%b%08x" % (self._prefix, self.numbers(1) & 0xFFFFFFFF)

    def _time(self) -> bytes:
        now = time.monotonic()
        if now >= self._clock_until:
            self._clock_until = now + CLOCK_S
            self._clock = time_text(time.time_ns() // 1000).encode()
        return self._clock


def refusal_body(error: RequestError) -> bytes:
    body: dict[str, object] = {"code": error.code}
    if error.message:
        body["message"] = error.message
    return msgspec.json.encode(body | error.members)


def header_safe(text: str) -> str:
    """A text that cannot break out of its header."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)
