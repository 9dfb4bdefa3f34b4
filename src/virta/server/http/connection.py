"""
The HTTP protocol: hot routes served here, everything else handed to the ASGI application.

uvicorn hosts this class (sockets, TLS, signals). A connection is in one of these states:

    HEAD      a request's head is arriving; too long is 414 or 431, too slow ends the connection
    BODY      a body is arriving; counted as it comes: 413 at the limit, 408 when it takes too long
    WAITING   requests are being worked on; answers leave in the order of the requests
    STREAM    the connection is a consumer (server-sent events) or a WebSocket; no more requests
    ENDED     the last answer is written; what still arrives is thrown away until the peer closes

Publications with a head that is known take the quick way past all this (`virta.server.http.fast_connection`).

Hot routes are `/channels/…`, `POST /publish` and `/filters/ID/events`. Nothing here matches, frames or stores anything.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl

from virta.errors import FilterError, HubError, RequestError
from virta.server.auth import ABSOLUTE
from virta.server.consumers.websocket import WebSocket
from virta.server.http import responses
from virta.server.http.asgi_bridge import ColdLane
from virta.server.http.bodies import bad_length, check_encodings, too_many_unfinished
from virta.server.http.requests import (
    ChannelRequest,
    FilterEventsRequest,
    HotRequest,
    MessagesRequest,
)
from virta.server.http.response_queue import Exchange, ExchangeQueue, with_lines
from virta.server.http.routes import CHANNELS

if TYPE_CHECKING:
    from virta.server.consumers.sse import SseConsumer

PUBLISH = b"/publish"
FILTERS = b"/filters/"
# Ids of registered filters are 64 hexadecimal digits; an index of such a name is not likely.
FILTER_STREAM = re.compile(rb"/filters/[0-9a-f]{64}(?:,[0-9a-f]{64})*/events(?:$|\?)")
SUBSCRIBE = b"/subscribe"
# Subtub's head limit, which bounds how many streams one socket can name.
SUBSCRIBE_LINE_BYTES_MAX = 40 * 1024
# What HTTP demands beside a status; 405 is only met on channels.
MORE_HEADERS = {
    401: b'WWW-Authenticate: Bearer realm="virta"\r\n',
    405: b"Allow: GET, POST, PUT, OPTIONS\r\n",
    415: b"Accept-Encoding: identity\r\n",
}
# Method, blanks and version around a path.
REQUEST_LINE_REST_BYTES = 32
# Requests of one connection under way at once; a client that sends more has to wait.
PIPELINE_MAX = 64
TOO_SLOW = RequestError(408, "body-timeout")
# After the last answer the peer has this long to read it and close.
LINGER_S = 2.0

# Streams take no requests: thousands of them share these.
NO_EXCHANGES = ExchangeQueue(lambda _: None, lambda: None)
NO_PIPELINE: deque[Any] = deque()
NO_FLOW = FlowControl(asyncio.Transport())


class HotProtocol(ColdLane):
    """One connection."""

    # Together with the parent's members these would be too many for one layout of all connections.
    __slots__ = (
        "_abort",
        "_arriving",
        "_completed",
        "_deaf",
        "_eof",
        "_in_head",
        "_line_max",
        "_method",
        "_quiet",
        "_reading_paused",
        "_unfinished",
        "consumer",
        "ended",
        "request",
        "socket",
        "url",
    )

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.request: HotRequest | None = None
        self.consumer: SseConsumer | None = None
        self.socket: WebSocket | None = None
        self.ended = False
        self.url = b""
        self.headers = []
        self._in_head = False
        self._arriving = 0
        self._unfinished = 0
        self._quiet = 0
        self._completed = False
        self._line_max = self.service.line_bytes_max
        self._abort: int | None = None
        self._reading_paused = False
        self._method = b""
        self._eof = False
        # What could not be read is being answered; whatever comes behind it means nothing.
        self._deaf = False

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        service = self.service
        service.connections_opened += 1
        if service.draining:
            # Accepted while the server closed its doors: nobody would tell it to go any more.
            transport.close()
            return
        if len(self.connections) > service.config.max_connections:
            transport.write(responses.empty(503))
            self.end()
            return
        service.wheel.set(self, self.loop.time() + service.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        super().connection_lost(exc)
        consumer, socket = self.consumer, self.socket
        self.consumer = self.socket = self.request = None
        if consumer is not None:
            consumer.connection_lost()
        if socket is not None:
            socket.connection_lost()
        self.release()

    def parse(self, data: bytes) -> None:
        """The long way: whatever is no publication with a head that is known."""
        if self.ended or self._deaf or self.consumer is not None:
            return
        if self.socket is not None:
            self.socket.data_received(data)
            return
        if self.quick is not None:
            self.settle_quick()
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        self._arriving = len(data)
        self._completed = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._unreadable(error)
            return
        if self.ended or self.consumer is not None:
            return  # type: ignore[unreachable]  # feeding the parser changes both
        now = self.service.wheel.now
        if self._in_head:
            # A header is only seen when it is complete: what is under way is counted here.
            self._unfinished += len(data)
            over = self._unfinished - len(self.url) - REQUEST_LINE_REST_BYTES
        else:
            # What is no body in a body (trailers, the sizes of chunks) is a head of a kind.
            self._quiet += len(data)
            over = self._quiet if self.request is not None or self.cold is not None else 0
        if over > self.service.head_bytes_max:
            self._abort = 431
            self._unreadable(httptools.HttpParserError())
            return
        if self._in_head or self.request is not None or self.cold is not None:
            self.arrive_in_time(now)
        else:
            self.deadline = now + self.service.idle_s
        if len(self.exchanges) >= PIPELINE_MAX and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own contract
        """The peer sends no more; answers that it waits for are still written."""
        if self.consumer is not None or self.socket is not None or self.ended:
            return False
        self.settle_quick()
        if self.request is not None:
            error = RequestError(400, "partial-content", "the body ended before it was complete")
            self.request.refuse(error, close=True)
        self._eof = True
        self.tell_gone()  # whoever waits may have closed: only writing would tell
        return len(self.exchanges) > 0

    def expired(self, now: float) -> None:
        """The wheel: the deadline of whatever state this connection is in has passed."""
        self.settle_quick()
        if self.consumer is not None:
            self.consumer.expired(now)
        elif self.socket is not None and not self.ended:
            self.socket.expired(now)
        elif self.request is not None:
            self.request.refuse(TOO_SLOW, close=True)
        elif self.cold is not None and len(self.exchanges) == 1 and not self.ended:
            cors, self.cold = self.cold.cors, None
            self.write(with_lines(self.service.responder.refused(TOO_SLOW, close=True), cors))
            self.end()
        elif len(self.exchanges) and self.cold is None and not self.ended:
            self.service.wheel.set(self, now + self.service.idle_s)
        elif self.transport.is_closing() or self.flow.write_paused:
            self.transport.abort()  # the peer does not take what it asked for
        else:
            self.transport.close()
            self.service.wheel.set(self, now + LINGER_S)

    def end(self) -> None:
        """Nothing more will be written; the peer may finish reading."""
        if self.ended:
            return
        self.ended = True
        self.between = False
        self.request = None
        self.forget_body()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            # Closing at once would reset the connection under a peer that is still sending,
            # and the reset would overtake the answer.
            self.transport.write_eof()
            self.service.wheel.set(self, self.loop.time() + LINGER_S)
        else:
            self.transport.close()

    def refuse_body(self) -> None:
        """Refuse the arriving body, because all unfinished ones together are too large."""
        self.drop_first_piece()  # read now, it would count again, and another body would be refused for it
        self.settle_quick()
        self._deaf = True
        self.between = False
        error = too_many_unfinished(self.service.unfinished)
        if self.socket is not None:
            self.socket.refuse_message(error.code)
        elif self.request is not None:
            self.request.refuse(error, close=True)
        else:
            self.refuse_last(error)

    def shutdown(self) -> None:
        """uvicorn's sign that the server drains."""
        self.settle_quick()
        if self.consumer is not None:
            self.consumer.drain()
        elif self.socket is not None:
            self.socket.drain()
        elif len(self.exchanges) == 0:
            self.transport.close()
        # Else the answers of a draining server close the connection behind them.

    def pause_writing(self) -> None:
        if self.consumer is not None:
            self.consumer.pause_writing()
            return
        super().pause_writing()
        if self.socket is not None:
            self.socket.pause_writing()
        elif not self._reading_paused:
            # Who does not read answers is not asked for more requests.
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.consumer is not None:
            self.consumer.resume_writing()
        else:
            super().resume_writing()
        if self.socket is not None:
            self.socket.resume_writing()
        if self._reading_paused:
            self._read_on()

    def write(self, data: bytes) -> None:
        if data and not self.ended and not self.transport.is_closing():
            self.transport.write(data)
        if self._reading_paused:
            self._read_on()
        if self._eof and not len(self.exchanges):
            self.transport.close()

    def _read_on(self) -> None:
        """Read requests again, if both the requests and the answers under way are few."""
        few = len(self.exchanges) < PIPELINE_MAX // 2 and not self.flow.write_paused
        if self._reading_paused and few and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        self.url = b""
        self.cors = self.service.door.cors  # until the page is known
        self.headers = []
        # What arrived with it may belong to requests before it; then it is counted once complete.
        self._unfinished = 1 - self._arriving if self._completed else 0
        self._in_head = True
        self.between = False

    def on_url(self, url: bytes) -> None:
        self.url += url
        limit = self._line_max
        if self.url.startswith(SUBSCRIBE):
            limit = max(limit, SUBSCRIBE_LINE_BYTES_MAX)
        if len(self.url) > limit:
            self._abort = 414
            raise ValueError("the request line is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers: whoever checked the head has not seen them.
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        ColdLane.on_headers_complete(self)
        if self.ended or self.consumer is not None:
            return
        if self._arriving > self.service.head_bytes_max or self._unfinished > 0:
            self._check_head_size()
        self._quiet = -self._arriving
        self.cold = None
        parser, here = self.parser, self.server
        self.cors = self.service.door.check_head(
            parser.get_http_version(), parser.get_method(), self.url, self.headers, here and here[0]
        )
        check_encodings(self.headers)
        url = self.url
        if found := ABSOLUTE.match(url):
            # RFC 9112 §3.2.2: as proxies write it, with the server's own address.
            url = self.url = b"/" + url[found.end() :].removeprefix(b"/")
        if self.parser.should_upgrade():
            self._method = self.parser.get_method()
            return  # the parser stops behind this head and says so
        self.service.requests += 1
        if url.startswith(CHANNELS):
            self._hot(ChannelRequest)
        elif url.startswith(PUBLISH) and (len(url) == 8 or url[8:9] == b"?"):
            self._hot(MessagesRequest)
        elif url.startswith(FILTERS) and self._is_filter_stream():
            self._hot(FilterEventsRequest)
        else:
            self.hand_over()

    def _check_head_size(self) -> None:
        """Count the head; only worth it when what arrived could hold one that is too large."""
        size = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.service.head_bytes_max:
            self._abort = 431
            raise ValueError("the request head is too large")

    def _is_filter_stream(self) -> bool:
        return self.parser.get_method() == b"GET" and FILTER_STREAM.match(self.url) is not None

    def on_body(self, body: bytes) -> None:
        self._quiet = -self._arriving
        self.body_bytes += len(body)
        if self.request is not None:
            self.request.on_body(body)
        elif self.cold is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.between = self.parser.should_keep_alive() and not self.ended
        self.forget_body()
        if self.request is not None:
            request, self.request = self.request, None
            request.on_complete()
        elif self.cold is not None:
            self.cold = None
            super().on_message_complete()
        self._completed = True

    def on_response_complete(self) -> None:
        """The framework has written its answer."""
        if not self.ended:
            self.service.wheel.set(self, self.loop.time() + self.service.idle_s)
        self.flow.resume_reading()
        self.exchanges.finish_head()
        last = not len(self.exchanges) and self.consumer is None
        if last and (self.service.draining or self._eof):
            self.end()

    # Requests.

    def _hot(self, kind: type[HotRequest]) -> None:
        parser = self.parser
        request = kind(self, parser.get_method(), keep=parser.should_keep_alive())
        self.request = request
        request.on_head()

    def become(self, consumer: SseConsumer) -> None:
        """Turn into a stream: no more requests are read, so what reads them is let go."""
        full = self.flow.write_paused
        self.exchanges.clear()
        self.exchanges = NO_EXCHANGES
        self.flow = NO_FLOW
        self.between = False
        self.head_bytes = b""
        self.pipeline = NO_PIPELINE
        self.consumer = consumer
        self.parser = None  # type: ignore[assignment]
        self.headers = []
        self.url = b""
        try:
            consumer.begin()
        except (FilterError, HubError) as error:
            # The index or the hub will not take it; nothing is written yet.
            self.consumer = None
            self.exchanges = ExchangeQueue(self.write, self.end)
            status = 400 if isinstance(error, FilterError) else 503
            refusal = RequestError(status, error.code, error.message)
            self.service.count_refusal(refusal)
            self.write(
                with_lines(self.service.responder.refused(refusal, close=True), consumer.cors)
            )
            self.end()
            return
        if full:
            consumer.pause_writing()  # answers before it fill the transport, which says so only once
        if self.service.draining:
            consumer.drain()  # the others were told while this one waited for its turn

    def refuse(
        self, exchange: Exchange, error: RequestError, *, close: bool, more: bytes = b""
    ) -> None:
        """Answer with an error."""
        self.service.count_refusal(error)
        more += MORE_HEADERS.get(error.status, b"")
        response = self.service.responder.refused(error, close=close, more=more)
        if isinstance(exchange, HotRequest) and exchange.method == b"HEAD":
            response = responses.without_body(response)
        self.exchanges.answer(exchange, response, close=close)

    def _upgrade(self, rest: bytes) -> None:
        """The parser met an Upgrade header: WebSocket is taken up, anything else is ignored."""
        self.between = False
        if self._get_upgrade() == b"websocket" and self.exchanges:
            error = RequestError(400, "invalid-request", "an upgrade cannot wait for other answers")
            self._deaf = True
            self.refuse_last(error)
            return
        if self._get_upgrade() == b"websocket":
            self.socket = WebSocket(self, self._method)
            self.socket.open(rest)
            return
        if self._method == b"CONNECT":
            error = RequestError(405, "invalid-method", "this is no proxy", method="CONNECT")
            self.refuse_last(error)
            return
        # RFC 9110 §7.8: a server may ignore Upgrade. This parser cannot, so it reads again
        # without it; a body may already have followed.
        head = self.head_without_upgrade(self._method)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def _unreadable(self, error: httptools.HttpParserError) -> None:
        """Not HTTP, or beyond its limits; the parser is of no more use."""
        self._deaf = True
        self.between = False
        if self._abort is not None:
            self.answer_last(self.request, responses.empty(self._abort))
            return
        if isinstance(error, httptools.HttpParserCallbackError):
            cause = error.__context__
            refusal = RequestError(500, "internal-failure")
            if isinstance(cause, RequestError):
                refusal = cause
            else:
                self.service.logger.error("request_failed", exc_info=cause)
        elif "Content-Length" in str(error):
            refusal = bad_length(str(error), self.service.body_bytes_max)
        else:
            refusal = RequestError(400, "invalid-request", f"not readable as HTTP/1.1: {error}")
        if self.request is not None:
            self.request.refuse(refusal, close=True)
            return
        self.refuse_last(refusal)

    def refuse_last(self, error: RequestError) -> None:
        """Refuse the request whose head was read last; the connection ends after the response."""
        self.service.count_refusal(error)
        more = MORE_HEADERS.get(error.status, b"")
        response = self.service.responder.refused(error, close=True, more=more)
        if self.parser.get_method() == b"HEAD":
            response = responses.without_body(response)
        self.answer_last(None, response)
