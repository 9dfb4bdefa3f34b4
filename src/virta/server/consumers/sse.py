"""
Consumers over server-sent events: a GET turns its connection into a stream.

    begin ──► head, connect ──► [gap] ──► [history] ──► attached: events as they come, pings in silence

The `id` of every frame is a place from which the consumer can resume without loss: that of an event names
the event or the position after it, all others are positions up to which everything was written to this
consumer. Frames without such a place (`overflow`, an end with queued events) have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from virta.clock import now_us, time_text
from virta.errors import RequestError
from virta.filters import Filter
from virta.filters.tree import any_of
from virta.hub.delivery import (
    SSE_CHUNKED,
    SSE_CHUNKED_POSITIONS,
    SSE_PLAIN,
    SSE_PLAIN_POSITIONS,
)
from virta.hub.frames import LAST_CHUNK, chunk, named_frame
from virta.hub.subscription import DISCONNECT, DROP_OLDEST, ChannelSubscription, SlowPolicy
from virta.server.access.rules import require
from virta.server.consumers.base import HttpConsumer, parse_query
from virta.server.http.responses import CLOSE, KEEP, SSE_HEAD
from virta.server.http.routes import parse_start
from virta.server.http.stream_options import StreamOptions, read_options

if TYPE_CHECKING:
    from virta.hub.resume.positions import Place
    from virta.hub.resume.replay import Start
    from virta.server.http.connection import HttpConnection
    from virta.server.service import Service

POLICY_HEADER = b"virta-slow-consumer"
# How long a client waits before it reconnects to a server that is shutting down.
RETRY_MS = 2000
# By whether the body is chunked and whether ids are positions.
ENCODINGS = {
    (True, False): SSE_CHUNKED,
    (True, True): SSE_CHUNKED_POSITIONS,
    (False, False): SSE_PLAIN,
    (False, True): SSE_PLAIN_POSITIONS,
}


def open_stream(
    protocol: HttpConnection,
    *,
    channel: str,
    start: Place | None,
    query: bytes,
    row_filter: Filter | None = None,
) -> SseConsumer:
    """
    Check a request for the events of a channel.

    Raises:
        RequestError: 400 with the query's own code.
    """
    options = read_options(query, dict(protocol.headers))
    text = options.query.decode("latin-1")
    filter_ = parse_query(text, protocol.service.config.max_query_terms)
    return SseConsumer(
        protocol,
        channel,
        filter_,
        query=text,
        start=start,
        options=options,
        row_filter=row_filter,
    )


def open_filter_stream(protocol: HttpConnection, ids: list[str], query: bytes) -> SseConsumer:
    """
    Check a request for the events of registered filters, which all belong to one channel.

    Raises:
        RequestError: 404 for an id that is not registered, 400 for filters that do not go together.
    """
    found = [protocol.service.registry.get(id_) for id_ in ids]
    registered = [one for one in found if one is not None]
    if len(registered) < len(ids):
        missing = ids[found.index(None)]
        raise RequestError(404, "not-found", f"no filter has the id {missing}")
    first = registered[0]
    if any((r.channel, r.dialect) != (first.channel, first.dialect) for r in registered):
        raise RequestError(
            400, "mixed-filters", "filters on one stream share their collection and dialect"
        )
    row_filter = require(protocol.service, protocol.principal, "read", first.channel)
    filter_ = first.filter
    if len(registered) > 1:
        filter_ = Filter(any_of([r.filter.tree for r in registered]), dialect=first.dialect)
    options = read_options(query, dict(protocol.headers))
    parameters = dict(parse_qsl(options.query.decode("latin-1")))
    return SseConsumer(
        protocol,
        first.channel,
        filter_,
        query=",".join(ids),
        start=parse_start(parameters["from"]) if "from" in parameters else None,
        options=options,
        filter_ids=tuple(ids),
        row_filter=row_filter,
    )


def read_policy(service: Service, requested: bytes | None) -> SlowPolicy:
    """Return the server's policy for slow consumers, with the action that a header names."""
    policy = service.slow_policy
    if requested is None:
        return policy
    action = requested.decode("latin-1")
    if action not in {DISCONNECT, DROP_OLDEST}:
        raise RequestError(
            400,
            "invalid-slow-consumer",
            f"{action!r} is no policy: write {DISCONNECT} or {DROP_OLDEST}",
        )
    return SlowPolicy(action, policy.bytes_max, policy.seconds_max)


class SseConsumer(HttpConsumer):
    """One stream of server-sent events."""

    __slots__ = ("_announced", "_chunked", "_filter_ids", "_start", "cors", "subscription")

    def __init__(
        self,
        protocol: HttpConnection,
        channel: str,
        filter_: Filter,
        *,
        query: str,
        start: Place | None,
        options: StreamOptions,
        filter_ids: tuple[str, ...] = (),
        row_filter: Filter | None = None,
    ) -> None:
        super().__init__(protocol)
        service = self._service
        self._start = start if options.seen is None else options.seen
        self._chunked = protocol.parser.get_http_version() == "1.1"
        self._announced = False
        self._filter_ids = filter_ids
        self.cors = protocol.cors
        self.subscriber = self.subscription = ChannelSubscription(
            service.hub.new_client_id(),
            channel,
            filter_,
            self,
            query=query,
            encoding=ENCODINGS[self._chunked, options.positions],
            policy=read_policy(service, dict(protocol.headers).get(POLICY_HEADER)),
            row_filter=row_filter,
        )
        self.subscription.put = protocol.transport.write

    def begin(self) -> None:
        """Write the head and `connect`, and start delivering."""
        service, subscription = self._service, self.subscription
        self._reserve(subscription)
        if self._start is None:
            self._attach()
        fields = self.cors + b"Virta-Position: %d\r\n" % service.hub.position
        head = SSE_HEAD + fields + b"Transfer-Encoding: chunked\r\n\r\n"
        if not self._chunked:  # HTTP/1.0: the body ends with the connection
            head = SSE_HEAD.replace(KEEP, CLOSE) + fields + b"\r\n"
        for id_ in self._filter_ids:
            service.filter_streams.setdefault(id_, set()).add(self)
        if self._start is None:
            self._connect(head, service.hub.position_text(service.hub.position))
        else:  # `connect` follows when the start is found
            self.write(head)
            self._replay_from(subscription.channel, self._start)
        if any(service.registry.get(id_) is None for id_ in self._filter_ids):
            self.finish("filter-removed")  # while the request was queued
        service.timers.set(self._connection, subscription.written_at + service.ping_s)

    def _connect(self, head: bytes, position: str) -> None:
        """Write `connect`, whose id is the first place to resume from."""
        client: dict[str, object] = {"clientID": self.subscription.id}
        self.write(head + self._frame("connect", client, position))
        self._service.hub.announce(self.subscription, registered=True)
        self._announced = True

    def write(self, payload: bytes) -> None:
        self.subscription.written_at = self._service.timers.now
        self._connection.transport.write(payload)

    def drain(self) -> None:
        """End the stream because the server stops; the client reconnects later."""
        self.finish("shutdown", retry_ms=RETRY_MS)

    def disconnect(self, reason: str) -> None:
        self.finish(reason)

    def finish(self, reason: str, *, retry_ms: int | None = None) -> None:
        """Write `disconnect` with a reason and end the body; nothing may follow its last chunk."""
        if self.subscription.closed:
            return
        position = self._position()
        self._detach()
        frame = self._frame("disconnect", {"reason": reason}, position, retry_ms)
        self.write(frame + (LAST_CHUNK if self._chunked else b""))
        self._connection.transport.close()
        # A client that does not read the end is disconnected after as long as for events.
        deadline = self._connection.loop.time() + self.subscription.policy.seconds_max
        self._service.timers.set(self._connection, deadline)

    def connection_lost(self) -> None:
        super().connection_lost()
        for id_ in self._filter_ids:
            streams = self._service.filter_streams.get(id_, set())
            streams.discard(self)
            if not streams:
                self._service.filter_streams.pop(id_, None)
        if self._announced:
            self._service.hub.announce(self.subscription, registered=False)

    def _ping(self, now: float) -> float:
        subscription = self.subscription
        ping_s: float = self._service.ping_s
        if subscription.blocked:
            return now + ping_s
        if not self._announced:  # `connect` is the first frame, and the start is not found yet
            subscription.written_at = now
        elif now - subscription.written_at >= ping_s:
            self.write(self._frame("ping", {}, self._position()))
        return subscription.written_at + ping_s

    def _send_start(self, start: Start) -> None:
        self.subscription.reached = start.offset
        if start.gap is None:
            self._connect(b"", self._service.hub.position_text(start.offset))
        else:
            # A consumer that is disconnected here has to get the gap when it resumes.
            self._connect(b"", start.again)
            self._send_gap(start.gap, start.offset)

    def _send_gap(self, gap: dict[str, object], offset: int) -> None:
        self.write(self._frame("gap", gap, self._service.hub.position_text(offset)))

    def _fail(self, code: str) -> None:
        self.finish(code)

    def _position(self) -> str | None:
        """Return the position up to which everything was written; None while events are queued."""
        if self.subscription.blocked or not self._announced:
            return None
        return self._service.hub.position_text(self._offset())

    def _frame(
        self, name: str, data: dict[str, object], position: str | None, retry_ms: int | None = None
    ) -> bytes:
        """Return a control frame; the id of a frame is the position."""
        data = {"timestamp": time_text(now_us())} | data
        frame = named_frame(name, data, id_=position, retry_ms=retry_ms)
        return chunk(frame) if self._chunked else frame
