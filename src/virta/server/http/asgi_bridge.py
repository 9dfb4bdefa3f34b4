"""
The part of a connection that hands requests to the ASGI application.

Requests of one connection are worked on one at a time, each when its turn to answer has come; others may
have arrived behind it. Invariant: whoever is worked on hears when the peer sends no more and when the
connection is lost. uvicorn tells only the request that arrived last.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from virta.errors import RequestError
from virta.server.http.fast_connection import QuickLane
from virta.server.http.response_queue import CORS, GONE, Exchange, with_lines


class ColdLane(QuickLane):
    """A connection's way to the framework."""

    __slots__ = ("_gone", "_running", "_starting", "cold")

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # The request whose body arrives.
        self.cold: Exchange | None = None
        # Set when the peer sends no more; made for the first request that may want to know.
        self._gone: asyncio.Event | None = None
        self._running: Any = None
        self._starting: list[Any] = []

    def hand_over(self) -> None:
        """Give a request to the ASGI application when its turn comes."""
        headers, url = self.headers, self.url
        HttpToolsProtocol.on_message_begin(self)
        self.url = url
        self.headers[:] = headers
        self.expect_100_continue = (b"expect", b"100-continue") in headers
        try:
            httptools.parse_url(url).path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
            error = RequestError(400, "invalid-request", "the request's path cannot be read")
            self.refuse_last(error)
            return
        self.cycle = None  # type: ignore[assignment]
        self._starting = []
        HttpToolsProtocol.on_headers_complete(self)
        if self._gone is None:
            self._gone = asyncio.Event()
        started = self._starting
        started[0].scope[GONE] = self._gone
        started[0].scope[CORS] = self.cors
        self.cold = Exchange(lambda: self._run(*started), self.cors)
        self.exchanges.add(self.cold)

    def _run(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._starting = [cycle, app]

    def tell_gone(self) -> None:
        """The peer sends no more."""
        if self._gone is not None:
            self._gone.set()

    def release(self) -> None:
        """Notify the request in progress that the connection is lost, and drop all references."""
        self.tell_gone()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._gone = self._running = self.cold = None
        self._starting = []
        self.cycle = self.scope = None  # type: ignore[assignment]
        super().release()

    def answer_last(self, exchange: Exchange | None, response: bytes) -> None:
        """Refuse a request that cannot be parsed, after the responses to earlier ones."""
        exchange = exchange or self.cold
        if exchange is not None and exchange is self.cold and exchange.start is None:
            # The framework is waiting for a body that will not arrive.
            self.write(with_lines(response, exchange.cors))
            self.end()
            return
        exchange = exchange or self.enter(self.cors)
        exchange.start = None
        self.exchanges.answer(exchange, response, close=True)

    def head_without_upgrade(self, method: bytes) -> bytes:
        """Return the head of the current request without its upgrade."""
        kept = [(n, v) for n, v in self.headers if n not in {b"upgrade", b"connection"}]
        if not self.parser.should_keep_alive():
            kept.append((b"connection", b"close"))
        version = self.parser.get_http_version().encode()
        lines = b"".join(b"%b: %b\r\n" % pair for pair in kept)
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, lines)
