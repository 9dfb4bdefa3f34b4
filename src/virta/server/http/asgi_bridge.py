"""
The ASGI side of a connection: hands requests to the application and its responses to the transport.

Requests of one connection are processed one at a time, each when all earlier responses are sent.
Invariant: the application learns when the peer sends no more and when the connection is lost. uvicorn
itself notifies only the request that arrived last.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from virta.errors import RequestError
from virta.server.http.response_queue import PendingResponse

if TYPE_CHECKING:
    from virta.server.http.connection import HttpConnection

# Keys in the scope of a request: an event that is set when the peer sends no more, the CORS headers of the
# response, and who sends it (`virta.server.access.auth`).
DISCONNECTED = "virta.disconnected"
CORS = "virta.cors"
PRINCIPAL = "virta.principal"

logger = logging.getLogger("uvicorn.error")


class AsgiBridge:
    """The requests of one connection that the ASGI application answers."""

    __slots__ = ("_arriving", "_connection", "_disconnected", "_running", "flow", "request")

    def __init__(self, connection: HttpConnection) -> None:
        self._connection: HttpConnection | None = connection
        self.flow = FlowControl(connection.transport)
        if connection.write_paused:
            self.flow.pause_writing()
        # The request whose body is arriving.
        self.request: PendingResponse | None = None
        self._arriving: RequestResponseCycle | None = None
        self._running: RequestResponseCycle | None = None
        self._disconnected = asyncio.Event()

    def start(self) -> None:
        """
        Queue the request whose head the connection has read.

        Raises:
            RequestError: 400 for a path that cannot be read.
        """
        connection = self._connection
        assert connection is not None, "a lost connection has no requests"
        parser, version = connection.parser, connection.parser.get_http_version()
        cycle = self._arriving = RequestResponseCycle(
            scope=self._scope(connection, version),
            transport=connection.transport,
            flow=self.flow,
            logger=logger,
            access_logger=logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=any(
                name == b"expect" and value.lower() == b"100-continue"
                for name, value in connection.headers
            ),
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self._on_response,
        )
        self.request = PendingResponse(lambda: self._run(cycle), connection.cors)
        connection.responses.add(self.request)

    def _scope(self, connection: HttpConnection, version: str) -> Any:
        try:
            url = httptools.parse_url(connection.url)
            path = url.path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
            raise RequestError(
                400, "invalid-request", "the request's path cannot be read"
            ) from None
        transport = connection.transport
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
            "scheme": "https" if is_ssl(transport) else "http",
            "root_path": "",
            "headers": connection.headers,
            "state": {},
            "method": connection.parser.get_method().decode("ascii"),
            "path": unquote(path),
            "raw_path": url.path,
            "query_string": url.query or b"",
            DISCONNECTED: self._disconnected,
            CORS: connection.cors,
            PRINCIPAL: connection.principal,
        }

    def _run(self, cycle: RequestResponseCycle) -> None:
        if self._connection is not None:
            self._running = cycle
            server = self._connection.server
            task = self._connection.loop.create_task(cycle.run_asgi(server.app))
            task.add_done_callback(server.tasks.discard)
            server.tasks.add(task)

    def _on_response(self) -> None:
        self.flow.resume_reading()
        if self._connection is not None:
            self._connection.on_response_complete()

    def on_body(self, body: bytes) -> None:
        cycle = self._arriving
        if cycle is None or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        cycle = self._arriving
        self.request = self._arriving = None
        if cycle is not None and not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()

    @property
    def is_waiting_for_body(self) -> bool:
        """Whether the application processes the request whose body is arriving."""
        return self.request is not None and self.request.start is None

    def on_eof(self) -> None:
        """Notify the application that the peer sends no more: it may have closed."""
        self._disconnected.set()

    def close(self) -> None:
        """Notify the application that the connection is lost, and drop all references."""
        self._disconnected.set()
        self.flow.resume_writing()
        for cycle in (self._running, self._arriving):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._connection = self._running = self._arriving = self.request = None
