"""
Requests of the hot routes, from head to answer.

    head ──► checks that need no body ──► body, counted ──► checks that do ──► publish ──► 202

The order of the checks is Thorium's: the first that fails answers. A request that is refused while
its body is still to come ends the connection behind the answer; one that is refused later keeps it.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from virta.errors import LogError, LogLimitError, RequestError
from virta.server import responses
from virta.server.exchange import Exchange
from virta.server.intake import check_channel, content_mode, read_events, read_messages
from virta.server.paths import ChannelPath, parse_channel_path
from virta.server.sse import open_filter_stream, open_stream

if TYPE_CHECKING:
    from virta.hub.delivery import Delivery
    from virta.server.protocol import HotProtocol

WRITING = frozenset({b"POST", b"PUT"})
# Paths repeat: a publisher sends to few channels.
PATH_CACHE_MAX = 4096

_paths: dict[bytes, ChannelPath] = {}


def channel_path(path: bytes) -> ChannelPath:
    """Read a channel's path, remembering the last few thousand."""
    found = _paths.get(path)
    if found is None:
        found = parse_channel_path(path)
        if len(_paths) >= PATH_CACHE_MAX:
            _paths.clear()
        _paths[path] = found
    return found


class HotRequest:
    """What the two hot routes have in common: a body that is counted as it arrives."""

    __slots__ = (
        "_chunks",
        "_exchange",
        "_keep",
        "_size",
        "_started",
        "announced",
        "head",
        "method",
        "protocol",
        "timings",
    )

    def __init__(self, protocol: HotProtocol, method: bytes, *, keep: bool) -> None:
        self.protocol = protocol
        self.method = method
        self.head: dict[bytes, bytes] = {}  # the last of repeated headers
        self.announced = False  # the head announced a body
        self.timings = b""  # headers that tell how long the stages so far took
        self._keep = keep
        self._chunks: list[bytes] = []
        self._size = 0
        self._started = perf_counter()
        self._exchange = Exchange()
        protocol.exchanges.add(self._exchange)

    def on_head(self) -> None:
        """Check what can be checked without the body."""
        try:
            head = self.head = dict(self.protocol.headers)
            self.announced = b"content-length" in head or b"transfer-encoding" in head
            self.check_head()
        except RequestError as error:
            self.refuse(error, close=self.announced)

    def check_head(self) -> None:
        raise NotImplementedError

    def complete(self, body: bytes) -> None:
        raise NotImplementedError

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self.protocol.service.body_bytes_max:
            self.refuse(self._too_large(), close=True)
            return
        self._chunks.append(body)

    def on_complete(self) -> None:
        if self._exchange.response is not None:
            return  # refused without a body to wait for
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        try:
            self.complete(body)
        except RequestError as error:
            self.refuse(error, close=False)

    def refuse(self, error: RequestError, *, close: bool) -> None:
        shut = close or not self._keep
        self.protocol.refuse(self._exchange, error, close=shut, more=self.timings)
        if close:
            self.protocol.request = None

    def check_length(self) -> None:
        """Refuse a length that cannot be; a chunked body has none and is counted instead."""
        length = self.head.get(b"content-length")
        if length is not None:
            if not length.isdigit() or int(length) == 0:
                raise RequestError(400, "invalid-content-length")
            if int(length) > self.protocol.service.body_bytes_max:
                raise self._too_large()
        elif b"transfer-encoding" not in self.head:
            raise RequestError(400, "missing-content-length")
        if self.head.get(b"expect", b"").lower() == b"100-continue":
            self.protocol.transport.write(responses.CONTINUE)

    def publish(self, drafts: list[Delivery], read_ms: int, parse_ms: int) -> None:
        """Hand events to the publisher and answer when they are durable."""
        service = self.protocol.service
        if service.publisher.full:
            raise service.overloaded(len(drafts))
        submitted = perf_counter()

        def answer(error: LogError | None) -> None:
            protocol = self.protocol
            if error is not None:
                self.refuse(_log_refusal(error), close=False)
                return
            close = not self._keep or service.draining
            encode_ms = int((perf_counter() - submitted) * 1000)
            response = self.success(read_ms, parse_ms, encode_ms)
            if close:
                response = response.replace(responses.KEEP, responses.CLOSE, 1)
            protocol.exchanges.answer(self._exchange, response, close=close)

        service.publisher.submit(drafts, answer)

    def success(self, read_ms: int, parse_ms: int, encode_ms: int) -> bytes:
        return self.protocol.service.responder.accepted(read_ms, parse_ms, encode_ms)

    def _too_large(self) -> RequestError:
        limit = self.protocol.service.body_bytes_max
        return RequestError(413, "body-too-large", maxBytes=limit)


class ChannelRequest(HotRequest):
    """`/channels/NAME`: publish with POST or PUT, consume with GET."""

    __slots__ = ("_content_type", "_mode", "_path", "_query")

    def check_head(self) -> None:
        protocol = self.protocol
        if self.method == b"OPTIONS":
            self._answer_preflight()
            return
        path, _, query = protocol.url.partition(b"?")
        door = protocol.service.door
        self._query = query if door.open else door.admit(protocol.headers, query)
        self._path = channel_path(path)
        if self.method in WRITING and self._path.start is None:
            if self._path.reserved:
                check_channel(self._path.channel)
            self._content_type, self._mode = content_mode(self.head)
            self.check_length()
        elif self.method == b"GET":
            if self.announced:
                raise RequestError(400, "unexpected-body")
        else:
            raise RequestError(405, "invalid-method", method=self.method.decode("ascii"))

    def complete(self, body: bytes) -> None:
        if self.method == b"GET":
            self._consume()
            return
        service = self.protocol.service
        read = perf_counter()
        path = self._path
        read_ms = int((read - self._started) * 1000)
        self.timings = b"Thorium-Body-Read-Time: %d ms\r\n" % read_ms
        drafts = read_events(
            path.channel, self.protocol.headers, self._content_type, self._mode, body
        )
        parsed = perf_counter()
        service.translation_seconds += parsed - read
        service.translations += 1
        parse_ms = int((parsed - read) * 1000)
        self.timings += b"Thorium-JSON-Parse-Time: %d ms\r\n" % parse_ms
        self.publish(drafts, read_ms, parse_ms)

    def _consume(self) -> None:
        """Turn the connection into a consumer once all earlier answers are out."""
        protocol = self.protocol
        stream = open_stream(
            protocol,
            channel=self._path.channel,
            start=self._path.start,
            query=self._query,
        )
        self._exchange.start = lambda: protocol.become(stream)
        protocol.exchanges.advance()

    def _answer_preflight(self) -> None:
        wanted = self.head.get(b"access-control-request-headers", b"")
        response = responses.preflight(wanted, close=self.announced or not self._keep)
        close = self.announced or not self._keep
        self.protocol.exchanges.answer(self._exchange, response, close=close)


class FilterEventsRequest(HotRequest):
    """`GET /filters/ID[,ID…]/events`: what registered filters let through."""

    __slots__ = ("_query",)

    def check_head(self) -> None:
        protocol = self.protocol
        query = protocol.url.partition(b"?")[2]
        self._query = protocol.service.door.admit(protocol.headers, query)
        if self.announced:
            raise RequestError(400, "unexpected-body")

    def complete(self, body: bytes) -> None:  # noqa: ARG002
        protocol = self.protocol
        ids = protocol.url.split(b"/")[2].decode("ascii").split(",")
        stream = open_filter_stream(protocol, ids, self._query)
        self._exchange.start = lambda: protocol.become(stream)
        protocol.exchanges.advance()


class MessagesRequest(HotRequest):
    """`POST /publish`: messages for streams; answers are plain text, as Subtub's."""

    __slots__ = ()

    def check_head(self) -> None:
        protocol = self.protocol
        if self.method == b"OPTIONS":
            response = responses.preflight(b"", close=self.announced or not self._keep)
            protocol.exchanges.answer(self._exchange, response, close=not self._keep)
            return
        protocol.service.door.admit(protocol.headers, protocol.url.partition(b"?")[2])
        if self.method != b"POST":
            raise RequestError(404, "not-found", "Not found")
        if self.announced and (b"content-length", b"0") not in protocol.headers:
            self.check_length()

    def complete(self, body: bytes) -> None:
        self.publish(read_messages(body), 0, 0)

    def refuse(self, error: RequestError, *, close: bool) -> None:
        if error.status in {400, 404} and error.message:
            shut = close or not self._keep
            response = responses.plain_text(error.status, error.message, close=shut)
            self.protocol.exchanges.answer(self._exchange, response, close=shut)
            if close:
                self.protocol.request = None
        else:
            HotRequest.refuse(self, error, close=close)

    def success(self, read_ms: int, parse_ms: int, encode_ms: int) -> bytes:  # noqa: ARG002
        return self.protocol.service.streams_accepted


def _log_refusal(error: LogError) -> RequestError:
    if isinstance(error, LogLimitError):
        return RequestError(413, "body-too-large", error.message)
    return RequestError(500, "internal-failure", f"the log refused the write: {error.message}")
