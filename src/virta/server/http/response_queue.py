"""
One request and its answer on a connection, in the order the requests came.

HTTP/1.1 clients may send the next request before the last answer. Answers of the hot routes become
ready in any order (a refusal at once, a publication after the log's sync), those of the framework
are written by it: the queue lets each out only when everything before it is out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# In the scope of a request: an event of its connection that is set when the peer sends no more.
GONE = "virta.gone"
# Key in the scope of a request: the CORS headers of its response (`virta.server.auth`).
CORS = "virta.cors"


def with_lines(response: bytes, lines: bytes) -> bytes:
    """Return a response with further header lines."""
    at = response.index(b"\r\n") + 2
    return response[:at] + lines + response[at:]


class Exchange:
    """
    `start` is called when it is this request's turn to write; `response` is what a hot route says.

    `cors` are the headers that let the requesting page read the response; programs get none.
    """

    __slots__ = ("close", "cors", "response", "start")

    def __init__(self, start: Callable[[], None] | None = None, cors: bytes = b"") -> None:
        self.start = start
        self.cors = cors
        self.response: bytes | None = None
        self.close = False


class ExchangeQueue:
    """The requests of one connection that are not yet answered."""

    __slots__ = ("_end", "_exchanges", "_write")

    def __init__(self, write: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self._write = write
        self._end = end
        self._exchanges: deque[Exchange] = deque()

    def __len__(self) -> int:
        return len(self._exchanges)

    def __bool__(self) -> bool:
        return bool(self._exchanges)

    def add(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)
        if exchange.start is not None and len(self._exchanges) == 1:
            self.advance()

    def answer(self, exchange: Exchange, response: bytes, *, close: bool = False) -> None:
        """Give an exchange its bytes; they go out when its turn comes."""
        if exchange.cors:
            response = with_lines(response, exchange.cors)
        exchange.response = response
        exchange.close = close
        exchanges = self._exchanges
        if len(exchanges) == 1 and exchanges[0] is exchange and not close:
            exchanges.clear()
            self._write(response)
            return
        self.advance()

    def advance(self) -> None:
        """Write whatever may be written now."""
        exchanges = self._exchanges
        while exchanges:
            head = exchanges[0]
            if head.start is not None:
                start, head.start = head.start, None
                start()
                if not exchanges or exchanges[0] is not head:
                    continue
            if head.response is None:
                return
            exchanges.popleft()
            self._write(head.response)
            if head.close:
                exchanges.clear()
                self._end()
                return

    def finish_head(self) -> None:
        """The first exchange has written its answer itself."""
        if self._exchanges:
            self._exchanges.popleft()
            self.advance()

    def clear(self) -> None:
        self._exchanges.clear()

    def close(self) -> None:
        """Drop all references to a lost connection; later responses are not written."""
        self._exchanges.clear()
        self._write, self._end = _write_nothing, _end_nothing


def _write_nothing(data: bytes) -> None:
    """Ignore a response whose connection is lost."""


def _end_nothing() -> None:
    """Ignore the end of a connection that is lost."""
