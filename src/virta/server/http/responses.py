"""
Responses: the one place that renders refusals, preflights and the 202 of a publication.

Every response has `Cache-Control: no-store`; JSON ones also have the `ce-` headers that make the response
itself an event (Thorium). An `HttpResponse` becomes bytes on the connection or a response of the ASGI
application. The 202 is assembled from prepared bytes, since it is what the server writes most often.
"""

from __future__ import annotations

import base64
import os
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from virta.clock import now_us, time_text
from virta.errors import LogError, LogLimitError, LogLockTimeoutError, RequestError
from virta.journal.protocol import problems
from virta.server.http.response_queue import insert_headers

if TYPE_CHECKING:
    from collections.abc import Mapping

JSON_TYPE = "application/json; charset=utf-8"
PROBLEM_TYPE = "application/problem+json"
RESPONSE_TYPE = "virta.response"
THORIUM_RESPONSE_TYPE = "name.djsweet.thorium.channel.send.response"
# What would be right, for codes whose refusals say no more.
MESSAGES = {
    "body-timeout": "the body did not arrive in time: send it faster, or in smaller requests",
    "body-too-large": "the body is larger than `maxBytes`: send smaller requests",
    "channel-idempotency-too-large": "channel, source and id together are longer than `maxByteSize` bytes: shorten them",
    "conflicting-data-type-headers": "Content-Type and ce-datacontenttype differ: send one, or both with the same value",
    "disallowed-meta-channel-send": "only the server publishes to the channel meta: choose another name",
    "exceeded-outstanding-event-limit": "more events are being written than `limit`: try again after Retry-After",
    "internal-failure": "the server failed; its log has the reason. The request may be repeated",
    "invalid-content-length": "Content-Length has to be the number of bytes of the body, at least 1",
    "invalid-content-type": "send application/cloudevents+json, application/cloudevents-batch+json, or ce- headers",
    "invalid-method": "this method is not possible here: the header Allow lists those that are",
    "missing-content-length": "send Content-Length, or a chunked body",
    "missing-content-type": "send Content-Type: application/cloudevents+json, or ce- headers",
    "missing-event-id": "an event has an `id`, a text: send the member, or the header ce-id",
    "missing-event-source": "an event has a `source`, a text: send the member, or the header ce-source",
    "not-found": "there is nothing at this path: /openapi.json lists what there is",
    "unexpected-body": "this request has no body: leave it out",
}
NO_STORE = {"Cache-Control": "no-store"}
RETRY_AFTER_S = 1
# Headers that HTTP requires with a status, or with an error code; 405 is that of channels.
BY_STATUS = {
    401: {"WWW-Authenticate": 'Bearer realm="virta"'},
    405: {"Allow": "GET, POST, PUT, OPTIONS"},
    429: {"Retry-After": str(RETRY_AFTER_S)},
    503: {"Retry-After": str(RETRY_AFTER_S)},
}
BY_CODE = {"unsupported-content-encoding": {"Accept-Encoding": "identity"}}
# Refusals of Thorium's HTTP library, which have no body.
EMPTY_IN_THORIUM = frozenset({"request-line-too-long", "head-too-large", "too-many-connections"})
ACCEPTED_BODY = b'{"code":"accepted"}'
# The time in `ce-time` is renewed this often, and is not needed more precisely.
CLOCK_S = 0.001

KEEP = b"Connection: keep-alive\r\n"
CLOSE = b"Connection: close\r\n"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\n"
    + KEEP
    + b"Content-Type: text/event-stream; charset=utf-8\r\nX-Accel-Buffering: no\r\n"
)
STREAMS_ACCEPTED = (
    b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\n" + KEEP + b"Content-Length: 0\r\n\r\n"
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PREFLIGHT_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
PREFLIGHT_HEADERS = "Authorization, Content-Type, Last-Event-ID, Virta-Positions"
PREFLIGHT_MAX_AGE_S = 86400


class HttpResponse(NamedTuple):
    """A response that is not yet bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    def to_bytes(self, *, close: bool, more: bytes = b"", head_only: bool = False) -> bytes:
        """
        Return the response as it is sent.

        Args:
            close: whether the connection ends after it.
            more: further header lines.
            head_only: leave the body out, as in the response to HEAD.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        if self.status != HTTPStatus.NO_CONTENT:
            more += b"Content-Length: %d\r\n" % len(self.body)
        return b"%b%b%b%b\r\n%b" % (
            _status_line(self.status),
            CLOSE if close else KEEP,
            lines.encode("latin-1"),
            more,
            b"" if head_only else self.body,
        )


def preflight(requested_headers: bytes) -> HttpResponse:
    """Return the response to a preflight: an allowed page may use every method and header."""
    headers = {
        "Access-Control-Allow-Methods": PREFLIGHT_METHODS,
        "Access-Control-Allow-Headers": header_safe(requested_headers.decode("latin-1"))
        or PREFLIGHT_HEADERS,
        "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
    }
    return HttpResponse(204, NO_STORE | headers)


def _timings(read_ms: int, parse_ms: int = -1) -> bytes:
    lines = b"" if read_ms < 0 else b"Thorium-Body-Read-Time: %d ms\r\n" % read_ms
    return lines if parse_ms < 0 else b"%bThorium-JSON-Parse-Time: %d ms\r\n" % (lines, parse_ms)


def offset_headers(offset: int | None, repeat: bool) -> bytes:  # noqa: FBT001
    """Return the headers with the offset of a publication, each preceded by a line end."""
    line = b"" if offset is None else b"\r\nVirta-Offset: %d" % offset
    return line + b"\r\nVirta-Duplicate: true" if repeat else line


def problem_members(error: RequestError) -> dict[str, object]:
    """Return the members of every refusal: those of RFC 9457, `code` and `message`."""
    message = error.message or MESSAGES.get(error.code) or HTTPStatus(error.status).description
    return problems.document(error.code, error.status, message)


class Responder:
    """Renders the JSON responses of one server, and counts its refusals by status."""

    def __init__(
        self, source_name: str, durability: str, cors: bytes = b"", *, thorium: bool = False
    ) -> None:
        self._thorium = thorium  # use the names, headers and bodies of Thorium
        # Ids look like 15 random bytes in base64: 9 random bytes and a number.
        self._prefix = base64.b64encode(os.urandom(9))
        self._number = int.from_bytes(os.urandom(2), "big")
        self._clock_until = 0.0
        self._clock = b""
        self._event_headers = {
            "Content-Type": JSON_TYPE,
            "ce-specversion": "1.0",
            "ce-datacontenttype": JSON_TYPE,
            "ce-type": THORIUM_RESPONSE_TYPE if thorium else RESPONSE_TYPE,
            "ce-source": header_safe(source_name),
        }
        self.refusals: dict[int, int] = {}
        headers = NO_STORE | self._event_headers | {"Virta-Durability": durability}
        accepted = HttpResponse(202, headers, ACCEPTED_BODY).to_bytes(close=False, head_only=True)
        self._accepted = accepted.removesuffix(b"\r\n")
        # On the fast path every response has the same CORS headers; elsewhere the queue adds them.
        self._fast_accepted = insert_headers(self._accepted, cors)

    def accepted(self, read_ms: int, parse_ms: int, encode_ms: int, offset: bytes) -> bytes:
        """Return the 202 of a publication; `offset` is the result of `offset_headers`."""
        tail = self.accepted_tail(read_ms, parse_ms, encode_ms)
        return b"%b%08x%b%b" % (self._head(self._accepted), self.reserve_ids(1), offset, tail)

    def accepted_head(self) -> bytes:
        """Return a 202 of the fast path up to its number, which has 8 hexadecimal digits."""
        return self._head(self._fast_accepted)

    def _head(self, fixed: bytes) -> bytes:
        return b"%bce-time: %b\r\nce-id: %b" % (fixed, self._time(), self._prefix)

    def accepted_tail(self, read_ms: int, parse_ms: int, encode_ms: int) -> bytes:
        """Return what follows the headers with the offset in a 202."""
        if not self._thorium:
            return b"\r\n\r\n" + ACCEPTED_BODY
        return (
            b"\r\nThorium-Body-Read-Time: %d ms\r\nThorium-JSON-Parse-Time: %d ms\r\nThorium-Encode-Time: %d ms\r\n\r\n%b"
            % (read_ms, parse_ms, encode_ms, ACCEPTED_BODY)
        )

    def timings(self, read_ms: int, parse_ms: int = -1) -> bytes:
        """Return Thorium's header lines for the times of a refused publication; -1 is not known."""
        return _timings(read_ms, parse_ms) if self._thorium else b""

    def reserve_ids(self, count: int) -> int:
        """Reserve numbers for the ids of responses; return the first."""
        first = self._number
        self._number = (first + count) & 0xFFFFFFFF
        return first

    def refusal(
        self, error: RequestError, more: Mapping[str, str] | None = None, *, text: bool = False
    ) -> HttpResponse:
        """
        Render an error and count it.

        Args:
            error: its code, message and members are the JSON body.
            more: further headers.
            text: answer with the message alone, as plain text (Subtub).
        """
        self.count_refusal(error)
        headers = BY_STATUS.get(error.status, {}) | BY_CODE.get(error.code, {}) | dict(more or {})
        if text:
            headers = {"Content-Type": "text/plain; charset=UTF-8"} | headers
            body = error.message.encode("utf-8", "replace")
            return HttpResponse(error.status, NO_STORE | headers, body)
        if self._thorium and error.code in EMPTY_IN_THORIUM:
            return HttpResponse(error.status, NO_STORE | headers)
        if self._thorium:
            members: dict[str, object] = {"code": error.code}
            if error.message:
                members["message"] = error.message
        else:
            members = problem_members(error)
            headers = {"Content-Type": PROBLEM_TYPE, "ce-datacontenttype": PROBLEM_TYPE} | headers
        body = msgspec.json.encode(members | error.members)
        return HttpResponse(error.status, self.event_headers() | headers, body)

    def count_refusal(self, error: RequestError) -> None:
        self.refusals[error.status] = self.refusals.get(error.status, 0) + 1

    def event_headers(self) -> dict[str, str]:
        """Return the headers of every JSON response, with a new id."""
        return {
            **NO_STORE,
            **self._event_headers,
            "ce-time": self._time().decode(),
            "ce-id": f"{self._prefix.decode()}{self.reserve_ids(1):08x}",
        }

    def _time(self) -> bytes:
        now = time.monotonic()
        if now >= self._clock_until:
            self._clock_until = now + CLOCK_S
            self._clock = time_text(now_us()).encode()
        return self._clock


def log_refusal(error: LogError) -> RequestError:
    """Return the refusal of a publication that the log did not accept."""
    if isinstance(error, LogLimitError):
        return RequestError(413, "body-too-large", error.message)
    if error.code == "log_disk_full":
        return RequestError(507, "insufficient-storage", f"nothing was kept: {error.message}")
    if isinstance(error, LogLockTimeoutError):
        return RequestError(503, "log-busy", f"nothing was kept: {error.message}")
    return RequestError(500, "internal-failure", f"the log refused the write: {error.message}")


def header_safe(text: str) -> str:
    """Replace characters that a header cannot hold."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
