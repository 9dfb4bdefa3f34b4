"""
Requests of the hot routes, from the head to the response.

    head ──► checks that need no body ──► body, counted ──► checks that do ──► publish ──► 202

The order of the checks is Thorium's: the first that fails decides the response. A request that is refused
while its body is arriving ends the connection after the response; one that is refused later does not.
"""

from __future__ import annotations

import re
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from virta.access.credentials import is_limited
from virta.errors import LogError, RequestError
from virta.hub.event_matcher import all_satisfy
from virta.server.access.rules import refused, require, require_whole
from virta.server.consumers.live import LiveStream, open_live
from virta.server.consumers.sse import SseConsumer, open_filter_stream, open_stream
from virta.server.consumers.view_options import LIVE, ROWS
from virta.server.event_input import (
    check_channel,
    content_mode,
    may_be_empty,
    read_events,
    read_messages,
)
from virta.server.http import responses
from virta.server.http.head_cache import HeadAccess
from virta.server.http.response_queue import PendingResponse
from virta.server.http.routes import CHANNELS, parse_channel_path

if TYPE_CHECKING:
    from virta.filters import Filter
    from virta.hub.publisher import Part
    from virta.server.http.connection import HttpConnection

PUBLISH = re.compile(rb"/publish(?:$|\?)")
# Ids of registered filters are 64 hexadecimal digits; an index of such a name is not likely.
FILTER_STREAM = re.compile(rb"/filters/[0-9a-f]{64}(?:,[0-9a-f]{64})*/events(?:$|\?)")
WRITING = frozenset({b"POST", b"PUT"})
# Headers of heads that are not cached. `origin`: the response to a page differs from that to a program.
NOT_CACHED = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"origin"})
# Paths repeat: a publisher sends to few channels.
PATH_CACHE_MAX = 4096

channel_path = lru_cache(PATH_CACHE_MAX)(parse_channel_path)


def hot_request_type(method: bytes, url: bytes) -> type[HttpRequest] | None:
    """Return the type of a request for a hot route; None if the ASGI application has to answer it."""
    if url.startswith(CHANNELS):
        if LIVE.match(url):
            return LiveRequest
        return None if ROWS.match(url) else ChannelRequest
    if PUBLISH.match(url):
        return MessagesRequest
    if method == b"GET" and FILTER_STREAM.match(url):
        return FilterEventsRequest
    return None


def _length(value: bytes) -> int:
    """Return a length that the parser has checked; it may have any number of leading zeros."""
    return int(value.strip().lstrip(b"0") or b"0")


class HttpRequest(PendingResponse):
    """
    What the hot routes have in common: a body that is counted as it arrives.

    `ROUTES` of each type lists its (method, path)s for `/openapi.json`. This type itself only refuses.
    """

    ROUTES: ClassVar[tuple[tuple[str, str], ...]] = ()
    # Statuses of refusals whose message is the whole response.
    TEXT_STATUSES: ClassVar[frozenset[int]] = frozenset()

    __slots__ = (
        "_body",
        "_body_bytes",
        "_keep",
        "_parse_ms",
        "_part",
        "_read_ms",
        "_row_filter",
        "_started",
        "announced",
        "connection",
        "head",
        "method",
    )

    def __init__(self, connection: HttpConnection, method: bytes, *, keep: bool) -> None:
        super().__init__(cors=connection.cors)
        self.connection = connection
        self.method = method
        # The last of repeated headers.
        self.head = dict(connection.headers)
        # Whether the head announces a body.
        self.announced = b"content-length" in self.head or b"transfer-encoding" in self.head
        self._keep = keep
        # Several pieces are in one buffer: a list of tiny ones would take many times their bytes.
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._started = perf_counter()
        self._read_ms = self._parse_ms = -1  # not known yet
        self._part: Part = ()
        self._row_filter: Filter | None = None  # of the principal
        connection.responses.add(self)

    def on_head(self, raw_head: bytes, refusal: RequestError | None) -> None:
        """Check what needs no body; `raw_head` are the bytes of a head that may be cached."""
        try:
            if refusal is not None:
                raise refusal
            if self.method == b"OPTIONS":
                self._answer_preflight()
            else:
                self.check_head(raw_head)
        except RequestError as error:
            self.refuse(error, close=self.announced)

    def check_head(self, raw_head: bytes) -> None:
        raise NotImplementedError

    def complete(self, body: bytes) -> None:
        raise NotImplementedError

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.connection.service.body_bytes_max:
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
        body, self._body = bytes(self._body), b""  # not copied if it came in one piece
        try:
            self.complete(body)
        except RequestError as error:
            self.refuse(error, close=False)
        except Exception:
            # Unexpected; without a response later ones could not be sent either.
            self.connection.service.logger.exception("request_failed")
            self.refuse(RequestError(500, "internal-failure"), close=False)

    def refuse(self, error: RequestError, *, close: bool) -> None:
        """Respond with an error; `close` ends the connection even if the client would keep it."""
        connection = self.connection
        self._body = b""  # the response may have to wait for earlier ones
        text = error.status in self.TEXT_STATUSES and bool(error.message)
        response = connection.service.responder.refusal(error, text=text).to_bytes(
            close=close or self.is_last,
            more=connection.service.responder.timings(self._read_ms, self._parse_ms),
            head_only=self.method == b"HEAD",
        )
        connection.responses.complete(self, response, close=close or self.is_last)
        if close:
            connection.request = None
            connection.ignore_input()

    @property
    def is_last(self) -> bool:
        """Whether the connection ends after this response: the client requests it, or the server drains."""
        return not self._keep or self.connection.service.draining

    def check_length(self, *, empty: bool = False) -> None:
        """
        Refuse an invalid length; a chunked body has none and is counted instead.

        `empty` allows a length of 0.
        """
        head = self.head
        length = head.get(b"content-length")
        if length is not None:
            size = _length(length)
            if size == 0 and not empty:
                raise RequestError(400, "invalid-content-length")
            if size > self.connection.service.body_bytes_max:
                raise self._too_large()
        elif b"transfer-encoding" not in head:
            raise RequestError(400, "missing-content-length")
        expects = head.get(b"expect", b"").lower() == b"100-continue"
        if expects and self.connection.parser.get_http_version() == "1.1":
            self.connection.transport.write(responses.CONTINUE)

    def publish(self, part: Part) -> None:
        """Hand events to the publisher, which answers when they are durable."""
        service = self.connection.service
        if self._row_filter is not None:
            check_row_filter(self._row_filter, part)
        if service.publisher.overloaded:
            raise service.overloaded(len(part))
        self._started = perf_counter()
        self._part = part
        service.publisher.submit(part, self._on_published)

    def _on_published(self, error: LogError | None) -> None:
        if error is not None:
            self.refuse(responses.log_refusal(error), close=False)
            return
        tracing = self.connection.service.tracing
        if tracing is not None:
            tracing.published(self._part, self._started)
        response, close = self.success(), self.is_last
        if close:
            response = response.replace(responses.KEEP, responses.CLOSE, 1)
        self.connection.responses.complete(self, response, close=close)

    def success(self) -> bytes:
        """Return the 202 of a publication."""
        encode_ms = int((perf_counter() - self._started) * 1000)
        service = self.connection.service
        place = responses.offset_headers(*service.publisher.place(self._part))
        return service.responder.accepted(self._read_ms, self._parse_ms, encode_ms, place)

    def require(self, verb: str, name: str) -> Filter | None:
        """Return the principal's row filter for a name; raise RequestError if it has no right to it."""
        return require(self.connection.service, self.connection.principal, verb, name)

    def consume(self, stream: SseConsumer | LiveStream) -> None:
        """Turn the connection into a stream when all earlier responses are sent."""
        connection = self.connection
        self.start = lambda: connection.become(stream, self)
        connection.responses.advance()

    def _answer_preflight(self) -> None:
        requested = self.head.get(b"access-control-request-headers", b"")
        close = self.announced or self.is_last
        response = responses.preflight(requested).to_bytes(close=close)
        self.connection.responses.complete(self, response, close=close)

    def _too_large(self) -> RequestError:
        limit = self.connection.service.body_bytes_max
        return RequestError(413, "body-too-large", maxBytes=limit)


def check_row_filter(row_filter: Filter, part: Part) -> None:
    """Refuse a publication with an event that its publisher could not read."""
    if not all_satisfy(row_filter, part):
        raise RequestError(
            403, "row-filter", "an event does not satisfy the row filter of your token"
        )


class ChannelRequest(HttpRequest):
    """`/channels/NAME`: publish with POST or PUT, consume with GET."""

    ROUTES = (
        ("POST", "/channels/{name}"),
        ("PUT", "/channels/{name}"),
        ("GET", "/channels/{name}"),
        ("GET", "/channels/{name}/from/{start}"),
    )

    __slots__ = ("_content_type", "_mode", "_path", "_query")

    def check_head(self, raw_head: bytes) -> None:
        path, _, self._query = self.connection.url.partition(b"?")
        self._path = channel_path(path)
        if self.method in WRITING and self._path.start is None:
            self._row_filter = self.require("publish", self._path.channel)
            if self._path.reserved:
                check_channel(self._path.channel)
            self._content_type, self._mode = content_mode(self.head)
            self.check_length(empty=may_be_empty(self._content_type, self._mode))
            length = self.head.get(b"content-length")
            if raw_head and length and self._keep and NOT_CACHED.isdisjoint(self.head):
                self.connection.server.heads.add(
                    raw_head,
                    self._path.channel,
                    self._content_type,
                    self._mode,
                    _length(length),
                    self._head_access(),
                )
        elif self.method == b"GET":
            self._row_filter = self.require("read", self._path.channel)
            if self.announced:
                raise RequestError(400, "unexpected-body")
        else:
            raise RequestError(405, "invalid-method", method=self.method.decode("ascii"))

    def _head_access(self) -> HeadAccess | None:
        """Return what has to be checked for every publication with this head, or None."""
        connection = self.connection
        principal, auth = connection.principal, connection.service.auth
        if is_limited(principal) or auth.is_rate_limited:
            return HeadAccess(principal, self._row_filter)
        return None

    def complete(self, body: bytes) -> None:
        connection, channel = self.connection, self._path.channel
        if self.method == b"GET":
            stream = open_stream(
                connection,
                channel=channel,
                start=self._path.start,
                query=self._query,
                row_filter=self._row_filter,
            )
            self.consume(stream)
            return
        service = connection.service
        read = perf_counter()
        self._read_ms = int((read - self._started) * 1000)
        part = read_events(
            channel,
            connection.headers,
            self._content_type,
            self._mode,
            body,
            percent=service.percent_decode,
        )
        took = perf_counter() - read
        service.translation_seconds += took
        service.translations += 1
        self._parse_ms = int(took * 1000)
        self.publish(part)


class LiveRequest(HttpRequest):
    """`GET /channels/NAME/live`: a live view."""

    ROUTES = (("GET", "/channels/{name}/live"),)

    __slots__ = ()

    def check_head(self, raw_head: bytes) -> None:  # noqa: ARG002
        if self.method != b"GET":
            raise RequestError(405, "invalid-method", method=self.method.decode("ascii"))
        if self.announced:
            raise RequestError(400, "unexpected-body")

    def complete(self, body: bytes) -> None:  # noqa: ARG002
        self.consume(open_live(self.connection))


class FilterEventsRequest(HttpRequest):
    """`GET /filters/ID[,ID…]/events`: the events that registered filters match."""

    ROUTES = (("GET", "/filters/{id}/events"),)

    __slots__ = ()

    def check_head(self, raw_head: bytes) -> None:  # noqa: ARG002
        if self.announced:
            raise RequestError(400, "unexpected-body")

    def complete(self, body: bytes) -> None:  # noqa: ARG002
        path, _, query = self.connection.url.partition(b"?")
        ids = path.split(b"/")[2].decode("ascii").split(",")
        self.consume(open_filter_stream(self.connection, ids, query))


class MessagesRequest(HttpRequest):
    """`POST /publish`: messages for streams; responses are plain text, as Subtub's."""

    ROUTES = (("POST", "/publish"),)
    TEXT_STATUSES = frozenset({400, 404})

    __slots__ = ()

    def check_head(self, raw_head: bytes) -> None:  # noqa: ARG002
        if self.method != b"POST":
            raise RequestError(404, "not-found", "Not found")
        if self.announced and (b"content-length", b"0") not in self.connection.headers:
            self.check_length()

    def complete(self, body: bytes) -> None:
        service, principal = self.connection.service, self.connection.principal
        if not principal.rights.has_all("publish"):
            if not principal.rights.has("publish"):
                raise refused(service, principal, "publish", "")
            for message in (messages := read_messages(body)):
                require_whole(service, principal, "publish", message.id)
            self.publish(messages)
            return
        self.publish(read_messages(body))

    def success(self) -> bytes:
        return responses.STREAMS_ACCEPTED
