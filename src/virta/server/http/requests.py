"""
Requests of the hot routes, from head to answer.

    head ──► checks that need no body ──► body, counted ──► checks that do ──► publish ──► 202

The order of the checks is Thorium's: the first that fails answers. A request that is refused while
its body is still to come ends the connection behind the answer; one that is refused later keeps it.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from virta.errors import LogError, RequestError
from virta.server.consumers.sse import open_filter_stream, open_stream
from virta.server.event_input import (
    BATCH,
    check_channel,
    content_mode,
    may_be_empty,
    read_batch,
    read_events,
    read_messages,
)
from virta.server.http import responses
from virta.server.http.fast_publish import log_refusal
from virta.server.http.response_queue import Exchange
from virta.server.http.routes import ChannelPath, parse_channel_path

if TYPE_CHECKING:
    from virta.hub.publisher import Part
    from virta.server.http.connection import HotProtocol

WRITING = frozenset({b"POST", b"PUT"})
# `origin`: the response to a page differs from that to a program.
LONG_WAY = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"origin"})
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


def _number(length: bytes) -> int:
    """A length that the parser has read; any number of zeros may stand before it."""
    return int(length.strip().lstrip(b"0") or b"0")


class HotRequest(Exchange):
    """
    What the hot routes have in common: a body that is counted as it arrives.

    `ROUTES` of each kind lists its (method, path)s, as `/openapi.json` has to name them.
    """

    ROUTES: ClassVar[tuple[tuple[str, str], ...]]

    __slots__ = (
        "_body",
        "_keep",
        "_parse_ms",
        "_part",
        "_read_ms",
        "_size",
        "_started",
        "announced",
        "head",
        "method",
        "protocol",
    )

    def __init__(self, protocol: HotProtocol, method: bytes, *, keep: bool) -> None:
        self.start = None
        self.response = None
        self.close = False
        self.cors = protocol.cors
        self.protocol = protocol
        self.method = method
        self.announced = False  # the head announced a body
        self._keep = keep
        # One piece as it came, several in one buffer: a list of tiny ones would take many times their bytes.
        self._body: bytes | bytearray = b""
        self._size = 0
        self._started = perf_counter()
        self._read_ms = self._parse_ms = -1  # not known yet
        self._part: Part = ()
        protocol.exchanges.add(self)

    def on_head(self) -> None:
        """Check what can be checked without the body."""
        # The last of repeated headers.
        head = self.head = dict(self.protocol.headers)
        try:
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
        if not self._body:
            self._body = body
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += body

    def on_complete(self) -> None:
        if self.response is not None:
            return  # refused without a body to wait for
        body, self._body = bytes(self._body), b""  # the same object if it came in one piece
        try:
            self.complete(body)
        except RequestError as error:
            self.refuse(error, close=False)
        except Exception:
            # Nobody foresaw this one; unanswered it would hold up the line.
            self.protocol.service.logger.exception("request_failed")
            self.refuse(RequestError(500, "internal-failure"), close=False)

    def refuse(self, error: RequestError, *, close: bool) -> None:
        shut = close or self.is_last
        more = responses.timings(self._read_ms, self._parse_ms)
        self._body = b""  # the response may have to wait for earlier ones
        self.protocol.refuse(self, error, close=shut, more=more)
        if close:
            self.protocol.request = None

    @property
    def is_last(self) -> bool:
        """Whether the connection ends behind this answer: the client said so, or the server drains."""
        return not self._keep or self.protocol.service.draining

    def check_length(self, *, empty: bool = False) -> None:
        """
        Refuse an invalid length; a chunked body has none and is counted instead.

        `empty` allows a length of 0.
        """
        head = self.head
        length = head.get(b"content-length")
        if length is not None:
            # The parser has seen to it that it is a number.
            size = _number(length)
            if size == 0 and not empty:
                raise RequestError(400, "invalid-content-length")
            if size > self.protocol.service.body_bytes_max:
                raise self._too_large()
        elif b"transfer-encoding" not in head:
            raise RequestError(400, "missing-content-length")
        if b"expect" in head and head[b"expect"].lower() == b"100-continue" and self._is_1_1():
            self.protocol.transport.write(responses.CONTINUE)

    def _is_1_1(self) -> bool:
        return bool(self.protocol.parser.get_http_version() == "1.1")

    def publish(self, part: Part) -> None:
        """Hand events to the publisher, which answers when they are durable."""
        service = self.protocol.service
        if service.publisher.full:
            raise service.overloaded(len(part))
        self._started = perf_counter()
        self._part = part
        service.publisher.submit(part, self.published)

    def published(self, error: LogError | None) -> None:
        """The events are as durable as promised, or lost."""
        if error is not None:
            self.refuse(log_refusal(error), close=False)
            return
        protocol = self.protocol
        response = self.success()
        close = self.is_last
        if close:
            response = response.replace(responses.KEEP, responses.CLOSE, 1)
        protocol.exchanges.answer(self, response, close=close)

    def success(self) -> bytes:
        encode_ms = int((perf_counter() - self._started) * 1000)
        service = self.protocol.service
        offset, repeat = service.publisher.place(self._part)
        place = responses.placed(offset, repeat=repeat)
        return service.responder.accepted(self._read_ms, self._parse_ms, encode_ms, place)

    def _too_large(self) -> RequestError:
        limit = self.protocol.service.body_bytes_max
        return RequestError(413, "body-too-large", maxBytes=limit)


class ChannelRequest(HotRequest):
    """`/channels/NAME`: publish with POST or PUT, consume with GET."""

    ROUTES = (
        ("POST", "/channels/{name}"),
        ("PUT", "/channels/{name}"),
        ("GET", "/channels/{name}"),
        ("GET", "/channels/{name}/from/{start}"),
    )

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
            self.check_length(empty=may_be_empty(self._content_type, self._mode))
            if protocol.head_bytes:
                self._teach(protocol.head_bytes)
        elif self.method == b"GET":
            if self.announced:
                raise RequestError(400, "unexpected-body")
        else:
            raise RequestError(405, "invalid-method", method=self.method.decode("ascii"))

    def complete(self, body: bytes) -> None:
        if self.method == b"GET":
            self._consume()
            return
        protocol = self.protocol
        service = protocol.service
        read = perf_counter()
        self._read_ms = int((read - self._started) * 1000)
        channel = self._path.channel
        part: Part | None = read_batch(channel, body) if self._mode is BATCH else None
        if part is None:
            part = read_events(
                channel,
                protocol.headers,
                self._content_type,
                self._mode,
                body,
                percent=protocol.way.percent,
            )
        took = perf_counter() - read
        service.translation_seconds += took
        service.translations += 1
        self._parse_ms = int(took * 1000)
        self.publish(part)

    def _teach(self, head: bytes) -> None:
        """Everything about this head is fine: the next one like it may take the quick way."""
        length = self.head.get(b"content-length")
        # A length beside chunks, an `Expect` and a last request are matters for the long way.
        if length is None or not self._keep or self.head.keys() & LONG_WAY:
            return
        self.protocol.way.learn(
            head, self._path.channel, self._content_type, self._mode, _number(length)
        )

    def _consume(self) -> None:
        """Turn the connection into a consumer once all earlier answers are out."""
        protocol = self.protocol
        stream = open_stream(
            protocol,
            channel=self._path.channel,
            start=self._path.start,
            query=self._query,
        )
        self.start = lambda: protocol.become(stream)
        protocol.exchanges.advance()

    def _answer_preflight(self) -> None:
        wanted = self.head.get(b"access-control-request-headers", b"")
        close = self.announced or self.is_last
        response = responses.preflight(wanted, close=close)
        self.protocol.exchanges.answer(self, response, close=close)


class FilterEventsRequest(HotRequest):
    """`GET /filters/ID[,ID…]/events`: what registered filters let through."""

    ROUTES = (("GET", "/filters/{id}/events"),)

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
        self.start = lambda: protocol.become(stream)
        protocol.exchanges.advance()


class MessagesRequest(HotRequest):
    """`POST /publish`: messages for streams; answers are plain text, as Subtub's."""

    ROUTES = (("POST", "/publish"),)

    __slots__ = ()

    def check_head(self) -> None:
        protocol = self.protocol
        if self.method == b"OPTIONS":
            close = self.announced or self.is_last
            response = responses.preflight(b"", close=close)
            protocol.exchanges.answer(self, response, close=close)
            return
        protocol.service.door.admit(protocol.headers, protocol.url.partition(b"?")[2])
        if self.method != b"POST":
            raise RequestError(404, "not-found", "Not found")
        if self.announced and (b"content-length", b"0") not in protocol.headers:
            self.check_length()

    def complete(self, body: bytes) -> None:
        self.publish(read_messages(body))

    def refuse(self, error: RequestError, *, close: bool) -> None:
        if error.status in {400, 404} and error.message:
            shut = close or self.is_last
            response = responses.plain_text(error.status, error.message, close=shut)
            if self.method == b"HEAD":
                response = responses.without_body(response)
            self.protocol.exchanges.answer(self, response, close=shut)
            if close:
                self.protocol.request = None
        else:
            HotRequest.refuse(self, error, close=close)

    def success(self) -> bytes:
        return self.protocol.service.streams_accepted
