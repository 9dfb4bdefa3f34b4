"""
Limits on what is arriving: the head, the framing and the encoding of a request, and unfinished bodies.

A body is kept in memory until it is complete. One connection's is bounded by `--max-body-size-bytes`; all
together are bounded by `UnfinishedBodies`. When they exceed the limit, the one that began first is
refused: a normal publisher's body is complete within milliseconds, so it is not the one that is refused,
and no request has to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import httptools

from virta.errors import RequestError

if TYPE_CHECKING:
    from virta.server.event_input import Headers

SUBSCRIBE = b"/subscribe"
# Subtub's head limit, which bounds how many streams one socket can name.
SUBSCRIBE_LINE_BYTES_MAX = 40 * 1024
# Method, spaces and version around a path.
REQUEST_LINE_REST_BYTES = 32
IDENTITY = frozenset({b"", b"identity"})


class Uploading(Protocol):
    """A connection with a body that is not complete."""

    def refuse_body(self) -> None:
        """Refuse the body and release its memory."""


class UnfinishedBodies:
    """Counts the bytes of bodies that are not complete, over all connections."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.refused = 0
        self._sizes: dict[Uploading, int] = {}  # the oldest first

    def set(self, connection: Uploading, size: int) -> None:
        """Record how much of a body has arrived; refuse the oldest bodies if the total is over the limit."""
        self.bytes += size - self._sizes.get(connection, 0)
        self._sizes[connection] = size
        while self.bytes > self.bytes_max:
            oldest = next(iter(self._sizes))
            self.drop(oldest)
            self.refused += 1
            oldest.refuse_body()

    def drop(self, connection: Uploading) -> None:
        """Forget a body: it is complete, refused or lost."""
        self.bytes -= self._sizes.pop(connection, 0)


class ArrivalSizes:
    """
    Counts the bytes of an arriving request that are not body.

    The parser reports a header when it is complete, so the bytes of an incomplete head are counted as they
    arrive. The framing of a body (sizes of chunks, trailers) has the limit of the head.
    """

    __slots__ = ("_arriving", "_framing", "_head", "_head_max", "_line_max", "_message_ended")

    def __init__(self, head_bytes_max: int, line_bytes_max: int) -> None:
        self._head_max = head_bytes_max
        self._line_max = line_bytes_max
        self._arriving = 0  # bytes that the parser is reading
        self._head = 0  # bytes of the head so far
        self._framing = 0  # bytes since the last of a body
        self._message_ended = False  # within what is being read

    def on_data(self, size: int) -> None:
        """Note how much the parser is about to read."""
        self._arriving = size
        self._message_ended = False

    def on_message_begin(self) -> None:
        # What arrived with it may belong to earlier requests; then the head is counted once complete.
        self._head = 1 - self._arriving if self._message_ended else 0

    def on_body(self) -> None:
        self._framing = -self._arriving

    def on_message_complete(self) -> None:
        self._message_ended = True

    def is_line_too_long(self, url: bytes) -> bool:
        if len(url) <= self._line_max:
            return False
        return not url.startswith(SUBSCRIBE) or len(url) > SUBSCRIBE_LINE_BYTES_MAX

    def is_head_too_large(self, headers: Headers) -> bool:
        """Check a complete head."""
        self._framing = -self._arriving
        if self._arriving <= self._head_max and self._head <= 0:
            return False  # all that arrived is not larger than a head may be
        return sum(len(name) + len(value) + 4 for name, value in headers) > self._head_max

    def is_too_large(self, url: bytes, *, in_head: bool, in_body: bool) -> bool:
        """Check what is incomplete after the parser has read what arrived."""
        if in_head:
            self._head += self._arriving
            return self._head - len(url) - REQUEST_LINE_REST_BYTES > self._head_max
        self._framing += self._arriving
        return in_body and self._framing > self._head_max

    def line_too_long(self) -> RequestError:
        limit = self._line_max
        return RequestError(
            414,
            "request-line-too-long",
            f"the request line is longer than {limit} bytes: send a shorter query, or raise "
            "--max-request-line-bytes",
            maxBytes=limit,
        )

    def head_too_large(self) -> RequestError:
        limit = self._head_max
        return RequestError(
            431,
            "head-too-large",
            f"the headers are larger than {limit} bytes: send less, or raise --max-header-bytes",
            maxBytes=limit,
        )


def too_many_connections(limit: int) -> RequestError:
    return RequestError(
        503,
        "too-many-connections",
        f"{limit} connections are open: close some, or raise --max-connections",
        limit=limit,
    )


def too_many_unfinished(bodies: UnfinishedBodies) -> RequestError:
    return RequestError(
        503,
        "too-many-unfinished-bodies",
        f"bodies that are still arriving have more than {bodies.bytes_max} bytes, and this one began "
        "first: send it again, faster or in smaller requests",
        maxBytes=bodies.bytes_max,
    )


def check_encodings(headers: Headers) -> None:
    """
    Refuse a body that would have to be decoded first.

    Raises:
        RequestError: 415 for a content encoding, 501 for a transfer encoding other than chunked. One with a
            length is ambiguous: the parser refuses it with 400.
    """
    framed = any(name == b"content-length" for name, _ in headers)
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in IDENTITY:
            raise RequestError(
                415,
                "unsupported-content-encoding",
                f"a body with Content-Encoding {_quoted(value)} cannot be read: send it without",
            )
        coded = name == b"transfer-encoding" and value.strip().lower() != b"chunked"
        if coded and not framed:
            raise RequestError(
                501,
                "unsupported-transfer-encoding",
                f"Transfer-Encoding {_quoted(value)} is not known here: use chunked or Content-Length",
            )


def parser_refusal(
    error: httptools.HttpParserError | RequestError, bytes_max: int
) -> RequestError | None:
    """Return the refusal of a request that the parser could not read; None for an error of the server."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, httptools.HttpParserCallbackError):
        return error.__context__ if isinstance(error.__context__, RequestError) else None
    reason = str(error)
    if "Content-Length" not in reason:
        return RequestError(400, "invalid-request", f"not readable as HTTP/1.1: {reason}")
    if "overflow" in reason.lower():  # too large for the parser
        return RequestError(413, "body-too-large", maxBytes=bytes_max)
    return RequestError(400, "invalid-content-length")


def _quoted(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))
