"""
What both pools of connections share: a request and its response, and the connections between requests; no I/O.

An `Exchange` is driven by its connection: that sends the bytes of a request, passes what arrives to `receive`, and
returns what `take` gives. `IdleConnections` says which connection the next request uses and which are too old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from virta.client.calls import Address, ServerCall, check, check_stream, is_repeatable
from virta.client.http import ResponseReader, check_size, request_bytes

if TYPE_CHECKING:
    from typing import Any

# How long a connection is kept for the next request: far below the server's own idle timeout (180 s), so the
# server rarely closes one while it is being reused.
IDLE_S = 20.0

C = TypeVar("C")
T = TypeVar("T")


class RequestBytes(NamedTuple):
    """A whole request, and whether it may arrive twice without harm."""

    method: str
    data: bytes
    repeatable: bool

    @classmethod
    def of(cls, address: Address, call: ServerCall[Any]) -> RequestBytes:
        """
        Return the bytes of a call.

        Raises:
            ValueError: a header contains a line end.
        """
        data = request_bytes(address, call.method, call.path, call.headers, call.body)
        return cls(call.method, data, is_repeatable(call.method, call.path))


class Exchange:
    """One request and its response on a connection."""

    __slots__ = ("_parts", "_size", "answered", "reader", "sent")

    def __init__(self, method: str) -> None:
        self.reader = ResponseReader(method)
        # Whether the request left whole, and whether any byte of its response has arrived.
        self.sent = self.answered = False
        self._parts: list[bytes] = []  # of the body, not taken yet
        self._size = 0

    def receive(self, data: bytes) -> None:
        """
        Accept bytes of the connection; none are its end.

        Raises:
            OSError: the connection ended before the response.
            ValueError: the bytes are not HTTP, or more than a response may have.
        """
        if not data:
            self.reader.end()
            return
        self.answered = True
        piece = self.reader.feed(data)
        if piece:
            self._parts.append(piece)
            self._size += len(piece)
            check_size(self._size)

    @property
    def has_piece(self) -> bool:
        """Return whether `take` returns a part of the body, or its end."""
        return bool(self._parts) or self.reader.complete

    def take(self) -> bytes:
        """Return what has arrived of the body since the last call."""
        parts, self._parts, self._size = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def reusable(self) -> bool:
        """Return whether the response ended in a way that allows another request on the connection."""
        return self.reader.complete and self.reader.keep

    def may_repeat(self, request: RequestBytes, error: Exception, *, kept: bool) -> bool:
        """
        Return whether to send a request again, on a new connection, after this one failed.

        Only if the connection was kept, so that the server may have closed it meanwhile, no byte of an answer
        came, and the request did not leave whole or may arrive twice.
        """
        if not kept or self.answered or isinstance(error, TimeoutError):
            return False
        return request.repeatable or not self.sent

    def answer(self) -> tuple[Any, dict[str, str]]:
        """
        Return the JSON of a complete response, and its headers.

        Raises:
            ClientError: the server refused.
        """
        return check(self.reader.status, self.take()), self.reader.headers

    def check_stream(self) -> None:
        """
        Check that the response is a stream; the body of any other status is complete.

        Raises:
            ClientError: refused, or something else than a stream.
        """
        reader = self.reader
        body = b"" if reader.status == 200 else self.take()
        check_stream(reader.status, reader.headers, body)


class IdleConnections(Generic[C]):
    """Connections between two requests: the one that was used last is used next."""

    def __init__(self) -> None:
        self._idle: list[tuple[float, C]] = []

    def add(self, connection: C, now: float) -> None:
        """Keep a connection; `now` is in seconds, monotonic."""
        self._idle.append((now, connection))

    def pop(self) -> C | None:
        """Return the connection that was used last, None if there is none."""
        return self._idle.pop()[1] if self._idle else None

    def pop_expired(self, now: float) -> list[C]:
        """Return the connections that were not used for `IDLE_S`, oldest first."""
        count = 0
        while count < len(self._idle) and now - self._idle[count][0] >= IDLE_S:
            count += 1
        expired, self._idle = self._idle[:count], self._idle[count:]
        return [connection for _, connection in expired]

    def next_expiry(self) -> float | None:
        """Return when the next connection expires."""
        return self._idle[0][0] + IDLE_S if self._idle else None

    def clear(self) -> None:
        """Forget all of them."""
        self._idle.clear()

    def __contains__(self, connection: object) -> bool:
        return any(kept is connection for _, kept in self._idle)
