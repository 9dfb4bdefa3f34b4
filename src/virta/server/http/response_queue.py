"""
Responses of one connection, sent in the order of its requests.

HTTP/1.1 clients may send the next request before they have the last response. Responses become ready in
any order (a refusal at once, a publication after the log's sync), and those of the ASGI application are
written by it: the queue sends each when everything before it is sent.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class ResponseWriter(Protocol):
    """A connection."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    def end(self) -> None:
        """Send nothing more."""


def insert_headers(response: bytes, lines: bytes) -> bytes:
    """Return a response with further header lines."""
    at = response.index(b"\r\n") + 2
    return response[:at] + lines + response[at:]


class PendingResponse:
    """
    The response to one request.

    `start` is called when all earlier responses are sent; `response` are the bytes, None until they are
    known. `cors` are the headers that let the requesting page read it; programs get none.
    """

    __slots__ = ("close", "cors", "response", "start")

    def __init__(self, start: Callable[[], None] | None = None, cors: bytes = b"") -> None:
        self.start = start
        self.cors = cors
        self.response: bytes | None = None
        self.close = False


class ResponseQueue:
    """The requests of one connection that are not yet answered."""

    __slots__ = ("_connection", "_pending")

    def __init__(self, connection: ResponseWriter | None) -> None:
        self._connection = connection
        self._pending: deque[PendingResponse] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, pending: PendingResponse) -> None:
        self._pending.append(pending)
        if pending.start is not None and len(self._pending) == 1:
            self.advance()

    def enqueue(self, cors: bytes) -> PendingResponse:
        """Queue a response that is completed later."""
        pending = PendingResponse(cors=cors)
        self._pending.append(pending)
        return pending

    def complete(self, pending: PendingResponse, response: bytes, *, close: bool = False) -> None:
        """Send a response when its turn comes; `close` ends the connection after it."""
        if pending.cors:
            response = insert_headers(response, pending.cors)
        pending.response = response
        pending.close = close
        self.advance()

    def advance(self) -> None:
        """Send what can be sent now."""
        queue = self._pending
        while queue and self._connection is not None:
            first = queue[0]
            if first.start is not None:
                start, first.start = first.start, None
                start()
                if not queue or queue[0] is not first:
                    continue
            if first.response is None:
                return
            queue.popleft()
            self._connection.write(first.response)
            if first.close:
                queue.clear()
                self._connection.end()
                return

    def remove_first(self) -> None:
        """Continue after a response that the ASGI application has written."""
        if self._pending:
            self._pending.popleft()
            self.advance()

    def close(self) -> None:
        """Release the connection, which is lost or a stream now; later responses are dropped."""
        self._pending.clear()
        self._connection = None
