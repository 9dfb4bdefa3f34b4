"""
Checks of a body before it is read: its encoding, and the memory of all bodies that are still arriving.

A body is kept in memory until it is complete. One connection's is bounded by `--max-body-size-bytes`; all together are
bounded here. When they exceed the limit, the one that began first is refused: a normal publisher's body
is complete within milliseconds, so it is not the one that is refused, and no request has to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from virta.errors import RequestError

if TYPE_CHECKING:
    from virta.server.event_input import Headers

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
            length could be read in two ways: the parser refuses that with 400.
    """
    framed = any(name == b"content-length" for name, _ in headers)
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in IDENTITY:
            raise RequestError(
                415,
                "unsupported-content-encoding",
                f"a body with Content-Encoding {_shown(value)} cannot be read: send it without",
            )
        coded = name == b"transfer-encoding" and value.strip().lower() != b"chunked"
        if coded and not framed:
            raise RequestError(
                501,
                "unsupported-transfer-encoding",
                f"Transfer-Encoding {_shown(value)} is not known here: use chunked or Content-Length",
            )


def bad_length(reason: str, bytes_max: int) -> RequestError:
    """Refuse a length that is too large for the parser: the body is too large."""
    if "overflow" in reason.lower():
        return RequestError(413, "body-too-large", maxBytes=bytes_max)
    return RequestError(400, "invalid-content-length")


def _shown(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))
