"""
An HTTP connection: serves the hot routes, and passes other requests to the ASGI application.

uvicorn accepts the sockets. A connection is composed of parts: a `FastInput` for publications whose head
is cached, a parser for everything else, a `ResponseQueue`, an `AsgiBridge`, and a deadline on the server's
timer wheel. It is in one of these states:

    HEAD      a request's head is arriving; too long is 414 or 431, too slow closes the connection
    BODY      a body is arriving; counted as it comes: 413 at the limit, 408 when it takes too long
    WAITING   requests are being processed; responses are sent in the order of the requests
    STREAM    the connection is a consumer (server-sent events or WebSocket); no more requests
    ENDED     the last response is written; what still arrives is ignored until the peer closes
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.utils import get_local_addr

from virta.access.principal import ANYONE
from virta.errors import FilterError, HubError, RequestError
from virta.server.consumers.handshake import head_without_upgrade, upgrade_protocol
from virta.server.consumers.live_socket import socket_type
from virta.server.consumers.websocket import WebSocket
from virta.server.http import limits, responses
from virta.server.http.asgi_bridge import AsgiBridge
from virta.server.http.deadlines import NEVER, UNSET
from virta.server.http.fast_publish import FastInput
from virta.server.http.requests import HttpRequest, hot_request_type
from virta.server.http.response_queue import PendingResponse, ResponseQueue, insert_headers

if TYPE_CHECKING:
    from virta.server.access.auth import Access
    from virta.server.consumers.live import LiveStream
    from virta.server.consumers.sse import SseConsumer
    from virta.server.http.server import HttpServer

# Requests of one connection in progress at once; the next is not read before some are answered.
PIPELINE_MAX = 64
TOO_SLOW = RequestError(408, "body-timeout")
# After the last response the peer has this long to read it and close.
LINGER_S = 2.0

# Streams have no requests: thousands of them share one queue.
NO_RESPONSES = ResponseQueue(None)


class HttpConnection(asyncio.Protocol):
    """One connection; it has at most 30 attributes, which CPython stores as compactly as slots."""

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.service = server.service
        self.loop = asyncio.get_running_loop()
        # On the timer wheel.
        self.deadline = NEVER
        self.slot = UNSET
        self._arrival_deadline = NEVER  # of the request that is arriving
        # Parts.
        self._fast = FastInput(self, server.fast)
        self.parser: Any = self._new_parser()
        self._sizes = limits.ArrivalSizes(self.service.head_bytes_max, self.service.line_bytes_max)
        self.responses = ResponseQueue(self)
        self.asgi: AsgiBridge | None = None
        self.consumer: SseConsumer | LiveStream | WebSocket | None = None
        # The request whose head was read last, and the hot one whose body is arriving.
        self.url = self._method = self.cors = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.request: HttpRequest | None = None
        self._access: Access | None = None
        self.principal = ANYONE  # who sends it
        # States.
        self.between_requests = True  # the next byte is the first of a request
        self._in_head = False
        self.ended = False
        self._eof = False
        self._ignoring_input = False  # it cannot be parsed any more
        self._reading_paused = self.write_paused = False
        self.local_address: str | None = None
        self._body_bytes = 0  # of the arriving body

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Bytes after the last request of a connection are ignored, not an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.server.connections.add(self)
        self.transport = transport
        address = get_local_addr(transport)
        self.local_address = address and address[0]
        service = self.service
        service.connections_opened += 1
        if service.draining:
            # Accepted while the server stopped listening: nothing else would close it.
            transport.close()
            return
        if len(self.server.connections) > service.config.max_connections:
            refusal = limits.too_many_connections(service.config.max_connections)
            transport.write(service.responder.refusal(refusal).to_bytes(close=True))
            self.end()
            return
        service.timers.set(self, self.loop.time() + service.idle_s)

    def data_received(self, data: bytes) -> None:
        if self.between_requests:
            data = self._fast.feed(data)
            if not data:
                return
        self.parse(data)

    def eof_received(self) -> bool:
        """Send the responses that the peer still waits for."""
        if self.consumer is not None or self.ended:
            return False
        self._fast.flush()
        if self.request is not None:
            error = RequestError(400, "partial-content", "the body ended before it was complete")
            self.request.refuse(error, close=True)
        self._eof = True
        if self.asgi is not None:
            self.asgi.on_eof()
        return len(self.responses) > 0

    def pause_writing(self) -> None:
        self.write_paused = True
        if self.consumer is not None:
            self.consumer.pause_writing()
            return
        if self.asgi is not None:
            self.asgi.flow.pause_writing()
        # A peer that does not read responses is disconnected, and its next requests are not read.
        deadline = self.loop.time() + self.service.idle_s
        self.service.timers.set(self, min(self.deadline, deadline))
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.consumer is not None:
            self.consumer.resume_writing()
        else:
            if self.asgi is not None:
                self.asgi.flow.resume_writing()
            if not self.ended:
                self.restart_deadline()
        self._resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop every reference to this connection: full garbage collections are rare."""
        self.ended = True
        self.between_requests = False
        self.server.connections.discard(self)
        if exc is None:
            self.transport.close()
        consumer, self.consumer = self.consumer, None
        if consumer is not None:
            consumer.connection_lost()
        self.service.timers.remove(self)
        self.service.unfinished.drop(self)
        if self.asgi is not None:
            self.asgi.close()
        self.responses.close()
        self._fast.close()
        self.asgi = self.request = self.parser = None

    def shutdown(self) -> None:
        """Drain: uvicorn calls this when the server stops."""
        if self.consumer is not None:
            self.consumer.drain()
            return
        self._fast.flush()
        if not self.responses:
            self.transport.close()
        # Else the last response closes the connection.

    # Called by the timer wheel and the limit on unfinished bodies.

    def expired(self, now: float) -> None:
        """React to the deadline of the present state."""
        self._fast.flush()
        waiting = len(self.responses) > 0 and not self.ended
        if self.consumer is not None and not self.ended:
            self.consumer.expired(now)
        elif self.transport.is_closing() or self.write_paused:
            self.transport.abort()  # the peer does not read what it requested
        elif self.request is not None:
            self.request.refuse(TOO_SLOW, close=True)
        elif waiting and self._body_is_arriving and len(self.responses) == 1:
            self._refuse_last(TOO_SLOW)
        elif waiting and not self._body_is_arriving:
            self.service.timers.set(self, now + self.service.idle_s)
        else:
            self.transport.close()
            self.service.timers.set(self, now + LINGER_S)

    def refuse_body(self) -> None:
        """Refuse the arriving body, because all unfinished ones together are too large."""
        self._fast.drop_piece()  # parsed now, it would count again, and another body would be refused
        self._fast.flush()
        self.ignore_input()
        error = limits.too_many_unfinished(self.service.unfinished)
        if isinstance(self.consumer, WebSocket):
            self.consumer.refuse_message(error.code)
        elif self.request is not None:
            self.request.refuse(error, close=True)
        else:
            self._refuse_last(error)

    # Parsing.

    def parse(self, data: bytes) -> None:
        """Read what is not a publication with a cached head."""
        if self.ended or self._ignoring_input:
            return
        if self.consumer is not None:
            self.consumer.data_received(data)
            return
        if self._fast.pending is not None:
            self._fast.flush()
        self._sizes.on_data(len(data))
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if not (self.ended or self._ignoring_input):
                self._refuse_unreadable(error)
            return
        if self.ended or self.consumer is not None:
            return  # type: ignore[unreachable]  # feeding the parser changes both
        arriving = self._in_head or self._body_is_arriving
        if self._sizes.is_too_large(self.url, in_head=self._in_head, in_body=arriving):
            self._refuse_unreadable(self._sizes.head_too_large())
            return
        if arriving:
            if self._body_bytes:
                self.service.unfinished.set(self, self._body_bytes)
            self.limit_arrival()
        elif not self.write_paused:
            self.restart_deadline()
        if len(self.responses) >= PIPELINE_MAX and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    @property
    def _body_is_arriving(self) -> bool:
        return self.request is not None or (self.asgi is not None and self.asgi.request is not None)

    def limit_arrival(self) -> None:
        """Give an arriving request its deadline, which counts from its first byte."""
        if self._arrival_deadline == NEVER:
            self._arrival_deadline = self.service.timers.now + self.service.body_s
            if not self.write_paused:
                self.service.timers.set(self, self._arrival_deadline)

    def restart_deadline(self) -> None:
        """Set the deadline of the request that is arriving, or else that of an idle connection."""
        deadline = self._arrival_deadline
        if deadline == NEVER:
            deadline = self.service.timers.now + self.service.idle_s
        if deadline < self.deadline or self.slot == UNSET:
            self.service.timers.set(self, deadline)
        else:
            self.deadline = deadline

    def forget_arrival(self) -> None:
        """End the limits of a request that is complete or refused."""
        self._arrival_deadline = NEVER
        if self._body_bytes:
            self._body_bytes = 0
            self.service.unfinished.drop(self)

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.ended or self._ignoring_input:
            raise ValueError("a request after the last response would never be answered")
        self.url = b""
        self.cors = self.service.auth.cors  # until the page is known
        self.headers = []
        self._sizes.on_message_begin()
        self._in_head = True
        self.between_requests = False

    def on_url(self, url: bytes) -> None:
        self.url += url
        if self._sizes.is_line_too_long(self.url):
            raise self._sizes.line_too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are not headers: the checks of the head have not seen them
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        service, parser = self.service, self.parser
        unknown_head, self._fast.unknown_head = self._fast.unknown_head, b""
        if self._sizes.is_head_too_large(self.headers):
            raise self._sizes.head_too_large()
        self._method = method = parser.get_method()
        version = parser.get_http_version()
        access = service.auth.check(
            version, method, self.url, self.headers, self.local_address, self.transport
        )
        self.cors, self.principal = access.cors, access.principal
        limits.check_encodings(self.headers)
        if parser.should_upgrade():
            self._access = access
            return  # the parser stops after this head and raises
        self.url = url = access.target
        service.requests += 1
        kind = hot_request_type(method, url)
        if kind is not None or access.refusal is not None:
            self.request = (kind or HttpRequest)(self, method, keep=parser.should_keep_alive())
            self.request.on_head(unknown_head, access.refusal)
        else:
            if self.asgi is None:
                self.asgi = AsgiBridge(self)
            self.asgi.start()

    def on_body(self, body: bytes) -> None:
        self._sizes.on_body()
        self._body_bytes += len(body)
        if self.request is not None:
            self.request.on_body(body)
        elif self.asgi is not None:
            self.asgi.on_body(body)

    def on_message_complete(self) -> None:
        self.between_requests = self.parser.should_keep_alive() and not self.ended
        self.forget_arrival()
        request, self.request = self.request, None
        if request is not None:
            request.on_complete()
        elif self.asgi is not None:
            self.asgi.on_message_complete()
        self._sizes.on_message_complete()

    # Responses.

    def write(self, data: bytes) -> None:
        if data and not self.ended and not self.transport.is_closing():
            self.transport.write(data)
        self._resume_reading()
        if self._eof and not self.responses:
            self.transport.close()

    def end(self) -> None:
        """Write nothing more; the peer may finish reading."""
        if self.ended:
            return
        self.ended = True
        self.between_requests = False
        self.request = None
        self.forget_arrival()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            # Closing at once would reset the connection of a peer that is still sending,
            # and the reset would overtake the response.
            self.transport.write_eof()
            self.service.timers.set(self, self.loop.time() + LINGER_S)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Continue after the ASGI application has written a response."""
        if not self.ended and not self.write_paused:
            self.restart_deadline()
        self.responses.remove_first()
        last = not self.responses and self.consumer is None
        if last and (self.service.draining or self._eof):
            self.end()

    def _resume_reading(self) -> None:
        """Read requests again, if few requests and responses are in progress."""
        if not self._reading_paused or self.write_paused or self.transport.is_closing():
            return
        if len(self.responses) < PIPELINE_MAX // 2:
            self._reading_paused = False
            self.transport.resume_reading()

    # Streams.

    def become(self, consumer: SseConsumer | LiveStream, request: HttpRequest) -> None:
        """Turn into a stream of server-sent events, which is the response to a request."""
        paused = self.write_paused
        self.consumer = consumer
        try:
            consumer.begin()
        except (FilterError, HubError, RequestError) as error:
            # The matcher, the hub or a budget does not accept it; nothing is written yet.
            consumer.connection_lost()
            self.consumer = None
            if not isinstance(error, RequestError):
                status = 400 if isinstance(error, FilterError) else 503
                error = RequestError(status, error.code, error.message)
            request.refuse(error, close=True)
            return
        self._release_http()
        if paused:
            consumer.pause_writing()  # the transport calls `pause_writing` only once
        if self.service.draining:
            consumer.drain()  # `shutdown` was called while it was queued

    def _release_http(self) -> None:
        """Free what only requests need: there may be thousands of streams."""
        self.responses.close()
        self.responses = NO_RESPONSES
        self._fast.close()
        self.between_requests = False
        if self.asgi is not None:
            self.asgi.close()
        self.asgi = self.parser = None
        self.headers = []
        self.url = b""

    def _upgrade(self, rest: bytes) -> None:
        """Open a WebSocket, or ignore the Upgrade header of a request (RFC 9110 §7.8)."""
        self.between_requests = False
        access, self._access = self._access, None
        assert access is not None, "it is set when the head is complete"
        if upgrade_protocol(self.headers) == b"websocket":
            if self.responses:
                self.ignore_input()
                text = "an upgrade cannot wait for other answers"
                self._refuse_last(RequestError(400, "invalid-request", text))
            elif access.refusal is not None:
                self._refuse_last(access.refusal)
            else:
                self.url = access.target
                self.consumer = socket_type(self.url)(self, self._method)
                self.consumer.open(rest)
                self._release_http()
        elif self._method == b"CONNECT":
            self._refuse_last(
                RequestError(405, "invalid-method", "this is no proxy", method="CONNECT")
            )
        else:
            # The parser cannot ignore it, so it reads the head again without it.
            version, keep = self.parser.get_http_version(), self.parser.should_keep_alive()
            head = head_without_upgrade(self._method, self.url, version, self.headers, keep=keep)
            self.parser = self._new_parser()
            self.data_received(head + rest)

    # Requests that cannot be parsed to their end.

    def ignore_input(self) -> None:
        """Process no more requests: the next response ends the connection."""
        self._ignoring_input = True
        self.between_requests = False

    def _refuse_unreadable(self, error: httptools.HttpParserError | RequestError) -> None:
        """Refuse what is not HTTP, or exceeds its limits; the parser cannot continue."""
        self.ignore_input()
        refusal = limits.parser_refusal(error, self.service.body_bytes_max)
        if refusal is None:
            self.service.logger.error("request_failed", exc_info=error.__context__)
            refusal = RequestError(500, "internal-failure")
        if self.request is not None:
            self.request.refuse(refusal, close=True)
        else:
            self._refuse_last(refusal)

    def _refuse_last(self, error: RequestError) -> None:
        """Refuse the request whose head was read last; the connection ends after the response."""
        head_only = self.parser is not None and self.parser.get_method() == b"HEAD"
        self._complete_last(self.service.responder.refusal(error), head_only=head_only)

    def _complete_last(
        self,
        refusal: responses.HttpResponse,
        pending: PendingResponse | None = None,
        *,
        head_only: bool = False,
    ) -> None:
        response = refusal.to_bytes(close=True, head_only=head_only)
        if self.asgi is not None and pending is None:
            pending = self.asgi.request
            if self.asgi.is_waiting_for_body:
                # The application waits for a body that will not arrive.
                self.write(insert_headers(response, self.cors))
                self.end()
                return
        pending = pending or self.responses.enqueue(self.cors)
        pending.start = None
        self.responses.complete(pending, response, close=True)
