"""
A consumer over server-sent events: a connection that a GET has turned into a subscription.

    begin ──► head, connect ──► [gap] ──► [replay] ──► attached: events as they come, pings in silence

Every frame's `id` is a place from which the consumer can resume without loss: that of an
event names the event or the position after it, all others are positions up to which everything was
written to this consumer. Frames without such a place (`overflow`, an end with pending events) have none.

The consumer's bytes come ready-made from the hub; here they only meet the transport. When it is full
the subscription waits and its policy decides (`virta.hub.subscription`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from virta.errors import FilterError, HubError, LogError, RequestError
from virta.filters import Filter
from virta.filters.query_string import parse
from virta.filters.tree import any_of
from virta.hub.delivery import (
    SSE_CHUNKED,
    SSE_CHUNKED_POSITIONS,
    SSE_PLAIN,
    SSE_PLAIN_POSITIONS,
)
from virta.hub.frames import LAST_CHUNK, chunk, named_frame, timestamp_text
from virta.hub.hub import now_microseconds
from virta.hub.subscription import DISCONNECT, DROP_OLDEST, ChannelSubscription, SlowPolicy
from virta.server.http.responses import CLOSE, KEEP, SSE_HEAD
from virta.server.http.routes import parse_start
from virta.server.http.stream_options import read_options

if TYPE_CHECKING:
    from virta.hub.resume.positions import Place
    from virta.hub.resume.replay import Start
    from virta.server.http.connection import HotProtocol
    from virta.server.service import Service

POLICY_HEADER = b"virta-slow-consumer"
# What a client waits before it comes back to a server that drains.
RETRY_MS = 2000
# By whether the body is chunked and whether ids are positions.
ENCODINGS = {
    (True, False): SSE_CHUNKED,
    (True, True): SSE_CHUNKED_POSITIONS,
    (False, False): SSE_PLAIN,
    (False, True): SSE_PLAIN_POSITIONS,
}


def open_stream(
    protocol: HotProtocol, *, channel: str, start: Place | None, query: bytes
) -> SseConsumer:
    """
    Check everything a consumer asks for.

    Raises:
        RequestError: 400 with the query's own code.
    """
    service = protocol.service
    headers = dict(protocol.headers)
    options = read_options(query, headers)
    text = options.query.decode("latin-1")
    filter_ = parse_query(text, service.config.max_query_terms)
    return SseConsumer(
        protocol,
        channel,
        filter_,
        query=text,
        start=start if options.seen is None else options.seen,
        positions=options.positions,
        policy=read_policy(service, headers.get(POLICY_HEADER)),
        chunked=protocol.parser.get_http_version() == "1.1",
    )


def open_filter_stream(protocol: HotProtocol, ids: list[str], query: bytes) -> SseConsumer:
    """
    Check a request for the events of registered filters, which all stand on one channel.

    Raises:
        RequestError: 404 for an id that is not registered, 400 for filters that do not go together.
    """
    service = protocol.service
    found = [service.registry.get(id_) for id_ in ids]
    registered = [one for one in found if one is not None]
    if len(registered) < len(ids):
        missing = ids[found.index(None)]
        raise RequestError(404, "not-found", f"no filter has the id {missing}")
    first = registered[0]
    if any((r.channel, r.dialect) != (first.channel, first.dialect) for r in registered):
        raise RequestError(
            400, "mixed-filters", "filters on one stream share their collection and dialect"
        )
    filter_ = first.filter
    if len(registered) > 1:
        filter_ = Filter(any_of([r.filter.tree for r in registered]), dialect=first.dialect)
    headers = dict(protocol.headers)
    options = read_options(query, headers)
    parameters = dict(parse_qsl(options.query.decode("latin-1")))
    start = parse_start(parameters["from"]) if "from" in parameters else None
    return SseConsumer(
        protocol,
        first.channel,
        filter_,
        query=",".join(ids),
        start=start if options.seen is None else options.seen,
        positions=options.positions,
        policy=read_policy(service, headers.get(POLICY_HEADER)),
        chunked=protocol.parser.get_http_version() == "1.1",
        filter_ids=tuple(ids),
    )


def parse_query(text: str, terms_max: int) -> Filter:
    """Parse a channel's query; the error is Thorium's 400."""
    try:
        return parse(text, terms_max=terms_max)
    except FilterError as error:
        raise filter_refusal(error) from error


def filter_refusal(error: FilterError) -> RequestError:
    return RequestError(400, error.code, error.message, **error.members)


def read_policy(service: Service, asked: bytes | None) -> SlowPolicy:
    """The server's policy, or the one a consumer chose by header."""
    if asked is None:
        return service.slow_policy
    action = asked.decode("latin-1")
    if action not in {DISCONNECT, DROP_OLDEST}:
        raise RequestError(
            400,
            "invalid-slow-consumer",
            f"{action!r} is no policy: write {DISCONNECT} or {DROP_OLDEST}",
        )
    held = service.slow_policy
    return SlowPolicy(action, held.bytes_max, held.seconds_max)


class SseConsumer:
    """The sink of one subscription."""

    __slots__ = (
        "_announced",
        "_chunked",
        "_filter_ids",
        "_protocol",
        "_replay",
        "_room",
        "_service",
        "_start",
        "cors",
        "subscription",
    )

    def __init__(
        self,
        protocol: HotProtocol,
        channel: str,
        filter_: Filter,
        *,
        query: str,
        start: Place | None,
        positions: bool,
        policy: SlowPolicy,
        chunked: bool,
        filter_ids: tuple[str, ...] = (),
    ) -> None:
        self._protocol = protocol
        self._service = protocol.service
        self._start = start
        self._chunked = chunked
        self.cors = protocol.cors
        self._room: asyncio.Future[None] | None = None
        self._replay: asyncio.Task[None] | None = None
        self._announced = False
        self._filter_ids = filter_ids
        self.subscription = ChannelSubscription(
            self._service.hub.new_client_id(),
            channel,
            filter_,
            self,
            query=query,
            encoding=ENCODINGS[chunked, positions],
            policy=policy,
        )
        self.subscription.put = protocol.transport.write

    # The stream's life.

    def begin(self) -> None:
        """Write the head and `connect`, and start delivering."""
        service, subscription = self._service, self.subscription
        if self._start is None:
            service.hub.attach(subscription)
        place = b"Virta-Position: %d\r\n" % service.hub.position
        place = self.cors + place
        head, framing = SSE_HEAD, place + b"Transfer-Encoding: chunked\r\n\r\n"
        if not self._chunked:  # HTTP/1.0: the body ends where the connection does
            head, framing = SSE_HEAD.replace(KEEP, CLOSE), place + b"\r\n"
        for id_ in self._filter_ids:
            service.filter_streams.setdefault(id_, set()).add(self)
        if self._start is None:
            self._connect(head + framing, service.hub.position_text(service.hub.position))
        else:  # `connect` follows once the start is found
            self.write(head + framing)
            self._replay = asyncio.ensure_future(self._catch_up(self._start))
        if any(service.registry.get(id_) is None for id_ in self._filter_ids):
            self.finish("filter-removed")  # while the request waited for its turn
        service.wheel.set(self._protocol, subscription.written_at + service.ping_s)

    def _connect(self, head: bytes, position: str) -> None:
        """Write `connect`, whose id is the first place to resume from."""
        subscription = self.subscription
        data = {"timestamp": timestamp_text(now_microseconds()), "clientID": subscription.id}
        self.write(head + self._framed(named_frame("connect", data, id_=position)))
        self._service.hub.announce(subscription, registered=True)
        self._announced = True

    def write(self, payload: bytes) -> None:
        """Take bytes from the hub."""
        self.subscription.written_at = self._service.wheel.now
        self._protocol.transport.write(payload)

    def end(self, reason: str) -> None:
        """Drop a consumer that does not keep up; it cannot be told, since it does not read."""
        self._service.hub.detach(self.subscription)
        self._service.hub.slow_disconnects += 1
        self._service.logger.info("consumer_dropped", client=self.subscription.id, reason=reason)
        self._protocol.transport.abort()

    def drain(self) -> None:
        """Say when to come back."""
        self.finish("shutdown", retry_ms=RETRY_MS)

    def finish(self, reason: str, *, retry_ms: int | None = None) -> None:
        """Say why, and end the body properly: nothing may follow its last chunk."""
        if self.subscription.closed:
            return
        position = self._position()
        self._service.hub.detach(self.subscription)
        data = {"timestamp": timestamp_text(now_microseconds()), "reason": reason}
        frame = self._framed(named_frame("disconnect", data, id_=position, retry_ms=retry_ms))
        self.write(frame + (LAST_CHUNK if self._chunked else b""))
        self._protocol.transport.close()
        # Who does not take the end has as long as it had for events.
        deadline = self._protocol.loop.time() + self.subscription.policy.seconds_max
        self._service.wheel.set(self._protocol, deadline)

    def gone(self) -> None:
        """The connection is lost."""
        # A task refers to its subject, and so does the exception of its wait.
        replay, self._replay, self._room = self._replay, None, None
        if replay is not None:
            replay.cancel()
        self._service.hub.detach(self.subscription)
        for id_ in self._filter_ids:
            streams = self._service.filter_streams.get(id_, set())
            streams.discard(self)
            if not streams:
                self._service.filter_streams.pop(id_, None)
        if self._announced:
            self._service.hub.announce(self.subscription, registered=False)

    # The transport's signs.

    def full(self) -> None:
        now = self._protocol.loop.time()
        self.subscription.block(now)
        self._service.wheel.set(self._protocol, now + self.subscription.policy.seconds_max)

    def room(self) -> None:
        self.subscription.unblock(self._protocol.loop.time())
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    def expired(self, now: float) -> None:
        """Time for a ping, or too long without taking anything."""
        if self.subscription.closed:
            self._protocol.transport.abort()  # its end is written: nothing may follow
            return
        if self.subscription.overdue(now):
            self.end(f"nothing was taken for {self.subscription.policy.seconds_max} s")
            return
        if not self._announced:  # the search for the start is still running: `connect` comes first
            self.subscription.written_at = now
        if (
            self.subscription.blocked_since is None
            and now - self.subscription.written_at >= self._service.ping_s
        ):
            data = {"timestamp": timestamp_text(now_microseconds())}
            self.write(self._framed(named_frame("ping", data, id_=self._position())))
        deadline = self.subscription.written_at + self._service.ping_s
        if self.subscription.blocked_since is not None:
            deadline = self.subscription.blocked_since + self.subscription.policy.seconds_max
        self._service.wheel.set(self._protocol, max(deadline, now))

    # History.

    async def _catch_up(self, place: Place) -> None:
        replayer = self._service.replayer
        try:
            start = await replayer.find(self.subscription.channel, place)
            if self.subscription.closed:
                return
            self._begin_at(start)
            await replayer.run(
                self.subscription, start, drained=self._drained, tell_gap=self._tell_gap
            )
        except (LogError, HubError, FilterError) as error:
            self._service.logger.warning("replay_failed", code=error.code, reason=error.message)
            self.finish(error.code)
        except Exception:
            # Nobody foresaw this one; a consumer that is not told would wait for ever.
            self._service.logger.exception("replay_failed")
            self.finish("internal-failure")

    def _begin_at(self, start: Start) -> None:
        """Write `connect`, and a gap if records before the start are missing."""
        self.subscription.reached = start.offset
        if start.gap is None:
            self._connect(b"", self._service.hub.position_text(start.offset))
        else:
            # A consumer that is cut off here has to get the gap when it resumes.
            self._connect(b"", start.again)
            self._tell_gap(start.gap, start.offset)

    def _position(self) -> str | None:
        """Return the position up to which everything was written; None while events are pending."""
        subscription = self.subscription
        if subscription.blocked_since is not None or not self._announced:
            return None
        reached = subscription.reached
        hub = self._service.hub
        return hub.position_text(hub.position if reached is None else reached)

    def _drained(self) -> asyncio.Future[None] | None:
        if self.subscription.blocked_since is None:
            return None
        if self._room is None:
            self._room = self._protocol.loop.create_future()
        return self._room

    def _tell_gap(self, gap: dict[str, object], offset: int) -> None:
        data = {"timestamp": timestamp_text(now_microseconds())} | gap
        position = self._service.hub.position_text(offset)
        self.write(self._framed(named_frame("gap", data, id_=position)))

    def _framed(self, frame: bytes) -> bytes:
        return chunk(frame) if self._chunked else frame
