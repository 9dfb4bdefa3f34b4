"""
WebSockets: Subtub's `/subscribe`, and CloudEvents on `/channels/NAME` (subprotocol cloudevents.json).

The protocol itself is `websockets`' sans-I/O core; outgoing events are frames the hub made once for
everyone. A consumer is registered before the handshake is answered, so nothing published after a
client has seen the 101 can pass it by. One that asks for history (`/from/…`, `Last-Event-ID`) gets it
first; what is missing is told by an event of type `virta.gap`.

A client that requests positions gets one with every message, and also messages that carry nothing
else: `virta.connect` first, `virta.ping` when the log has grown without an event for this client.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from virta.errors import FilterError, HubError, LogError, RequestError
from virta.event import EVENT_BYTES_MAX
from virta.hub.delivery import POSITION_ATTRIBUTE, WEBSOCKET, WEBSOCKET_POSITIONS
from virta.hub.frames import timestamp_text, websocket_text
from virta.hub.hub import now_microseconds
from virta.hub.stream_consumer import StreamConsumer
from virta.hub.subscription import ChannelSubscription
from virta.hub.topics import STREAMS
from virta.server.consumers.handshake import check_handshake, check_subscribe
from virta.server.consumers.sse import parse_query
from virta.server.event_input import STRUCTURED, check_channel, read_events
from virta.server.http import responses
from virta.server.http.routes import CHANNELS, parse_channel_path
from virta.server.http.stream_options import StreamOptions, read_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.hub.resume.positions import Place
    from virta.hub.resume.replay import Start
    from virta.server.http.connection import HotProtocol

SUBSCRIBE = b"/subscribe"
CLOUDEVENTS = Subprotocol("cloudevents.json")
PING = b"\x89\x00"
# A client that sends nothing for this long, not even pongs, is gone.
SILENCE_S = 60.0
CONNECT, GAP, PING_TYPE, OVERFLOW = "connect", "gap", "ping", "overflow"
# Bytes from one client in one turn of the loop; as small frames, some ten milliseconds of work.
SLICE_BYTES = 8192
BINARY_REFUSED = "binary messages are not accepted: send text"
REASON_BYTES_MAX = 123  # of a close frame, RFC 6455 §5.5


class _ServerProtocol(ServerProtocol):
    """The library's protocol; a class, since a function given to it would make it refer to itself."""

    def select_subprotocol(self, subprotocols: Sequence[Subprotocol]) -> Subprotocol | None:
        return CLOUDEVENTS if CLOUDEVENTS in subprotocols else None


class WebSocket:
    """One upgraded connection."""

    def __init__(self, connection: HotProtocol, method: bytes) -> None:
        self._connection = connection
        self._service = connection.service
        self._method = method
        self._protocol = _ServerProtocol(subprotocols=[CLOUDEVENTS], max_size=EVENT_BYTES_MAX)
        self._streams: StreamConsumer | None = None
        self._subscription: ChannelSubscription | None = None
        self._channel: str | None = None
        self._start: Place | None = None
        self._positions = False
        self._offset_sent = -1  # the offset of the last position that was sent without an event
        self._replay: asyncio.Task[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._message = bytearray()
        self._unread = b""
        self._reading_paused = False
        self._slicing = False
        self._last_heard = self._pinged_at = connection.loop.time()
        self._open = False

    # The handshake.

    def open(self, rest: bytes) -> None:
        """Check, register, answer; `rest` is what already came behind the head."""
        connection = self._connection
        path, _, query = connection.url.partition(b"?")
        try:
            query = self._service.door.admit(connection.headers, query)
            if path == SUBSCRIBE and self._method == b"GET":
                self._open_streams(query)
            else:
                self._open_channel(path, query)
        except RequestError as error:
            self._refuse(error)
            return
        except (FilterError, HubError) as error:
            # The index or the hub will not take it.
            status = 400 if isinstance(error, FilterError) else 503
            self._refuse(RequestError(status, error.code, error.message))
            return
        self._answer(rest)

    def _options(self, query: bytes) -> StreamOptions:
        """Read the client's options; one that resumes by the URL gets positions too."""
        options = read_options(query, dict(self._connection.headers))
        self._positions = options.positions or options.in_url
        self._start = options.seen
        return options

    def _open_streams(self, query: bytes) -> None:
        options = self._options(query)
        streams, queued, tell = check_subscribe(options.query)
        check_handshake(dict(self._connection.headers))
        self._streams = StreamConsumer(
            self,
            streams,
            queued,
            tell_drops=tell or self._positions,
            positions=self._positions,
        )
        if self._start is None:
            self._service.hub.attach_streams(self._streams)

    def _open_channel(self, path: bytes, query: bytes) -> None:
        if not path.startswith(CHANNELS):
            raise RequestError(404, "not-found", "Not found")
        place = parse_channel_path(path)
        options = self._options(query)
        text = options.query.decode("latin-1")
        filter_ = parse_query(text, self._service.config.max_query_terms)
        headers = dict(self._connection.headers)
        offered = headers.get(b"sec-websocket-protocol", b"").decode("latin-1")
        if CLOUDEVENTS not in [name.strip() for name in offered.split(",")]:
            raise RequestError(
                400, "missing-subprotocol", f"offer the subprotocol {CLOUDEVENTS}, got {offered!r}"
            )
        check_handshake(headers)
        if self._start is None:
            self._start = place.start
        subscription = ChannelSubscription(
            self._service.hub.new_client_id(),
            place.channel,
            filter_,
            self,
            query=text,
            encoding=WEBSOCKET_POSITIONS if self._positions else WEBSOCKET,
            policy=self._service.slow_policy,
        )
        if self._positions:
            subscription.tell_overflow = self._tell_overflow
        if self._start is None:
            self._service.hub.attach(subscription)
        self._channel, self._subscription = place.channel, subscription
        self._service.hub.announce(subscription, registered=True)

    def _answer(self, rest: bytes) -> None:
        connection, protocol = self._connection, self._protocol
        head = b"".join(b"%b: %b\r\n" % pair for pair in connection.headers)
        # The path is settled, and may be longer than this reader allows.
        protocol.receive_data(b"GET / HTTP/1.1\r\n%b\r\n" % head)
        for request in protocol.events_received():
            if isinstance(request, Request):
                response = protocol.accept(request)
                protocol.send_response(response)
        self._flush()
        if protocol.state is not State.OPEN:
            connection.end()
            return
        self._open = True
        subscriber = self._streams or self._subscription
        if subscriber is not None:
            subscriber.put = connection.transport.write
        self._service.wheel.set(connection, connection.loop.time() + self._service.ping_s)
        if self._start is not None:
            self._replay = asyncio.ensure_future(self._catch_up(self._start))
        elif self._positions:
            position = self._service.hub.position
            self._tell(CONNECT, {}, self._service.hub.position_text(position), position)
        if rest:
            self.data_received(rest)

    def _refuse(self, error: RequestError) -> None:
        self._service.count_refusal(error)
        if self._connection.url.startswith(SUBSCRIBE) and error.message and error.status != 401:
            response = responses.plain_text(error.status, error.message, close=True)
        else:
            response = self._service.responder.refused(error, close=True)
        self._connection.transport.write(response)
        self._connection.end()

    # The hub's side.

    def write(self, payload: bytes) -> None:
        """Take ready-made frames."""
        if self._open:
            self._connection.transport.write(payload)

    def end(self, reason: str) -> None:
        """Drop a consumer that does not keep up."""
        self._service.hub.slow_disconnects += 1
        self._service.logger.info("socket_dropped", reason=reason)
        self._connection.transport.abort()

    # The connection's side.

    def data_received(self, data: bytes) -> None:
        """
        Take bytes, a slice in each turn of the loop.

        A read may hold tens of thousands of small frames: others have their turn between them. And
        while the client does not read, what it sends (pings that want their pongs) has to wait.
        """
        self._last_heard = self._connection.loop.time()
        self._unread += data
        if not self._slicing and not self._reading_paused:
            self._take_slice()

    def _take_slice(self) -> None:
        self._slicing = False
        connection = self._connection
        data, self._unread = self._unread[:SLICE_BYTES], self._unread[SLICE_BYTES:]
        if data and not connection.ended:
            self._feed(data)
        if connection.ended or connection.transport.is_closing():
            self._unread = b""
            if self._reading_paused and not connection.transport.is_closing():
                # What still arrives is dropped: a peer that cannot finish sending does not close.
                self._reading_paused = False
                connection.transport.resume_reading()
            return
        waits = bool(self._unread) or connection.flow.write_paused
        if waits and not self._reading_paused:
            connection.transport.pause_reading()
        elif self._reading_paused and not waits:
            connection.transport.resume_reading()
        self._reading_paused = waits
        if self._unread and not connection.flow.write_paused:
            self._slicing = True
            connection.loop.call_soon(self._take_slice)

    def _feed(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._on_frame(event)
        # A message is kept until its last byte, so it counts toward the limit of unfinished bodies.
        unfinished = len(self._message) + len(self._protocol.reader.buffer)
        if unfinished:
            self._service.unfinished.set(self._connection, unfinished)
        else:
            self._service.unfinished.drop(self._connection)
        self._flush()
        self._check_open()
        if self._protocol.close_expected():
            self._connection.end()

    def expired(self, now: float) -> None:
        """Time for a ping, or nobody there, or too long without taking anything."""
        subscription = self._subscription
        if subscription is not None and subscription.overdue(now):
            self.end(f"nothing was taken for {subscription.policy.seconds_max} s")
            return
        if now - self._last_heard >= SILENCE_S:
            self._connection.transport.abort()
            return
        ping_s = self._service.ping_s
        if now - self._pinged_at >= ping_s:
            self._pinged_at = now
            if self._protocol.state is State.OPEN:
                self._connection.transport.write(PING)
                self._tell_position()
        deadline = self._pinged_at + ping_s
        if subscription is not None and subscription.blocked_since is not None:
            deadline = min(deadline, subscription.blocked_since + subscription.policy.seconds_max)
        self._service.wheel.set(self._connection, max(deadline, now))

    def drain(self) -> None:
        """Say goodbye: the server goes away."""
        if self._protocol.state is State.OPEN:
            self._close(CloseCode.GOING_AWAY, "the server is stopping")
        self._connection.transport.close()

    def refuse_message(self, code: str) -> None:
        """Refuse the arriving message, because all unfinished bodies together are too large."""
        self._close(CloseCode.TRY_AGAIN_LATER, code)
        self._message = bytearray()
        self._connection.end()

    def gone(self) -> None:
        hub = self._service.hub
        replay, self._replay, self._room = self._replay, None, None
        if replay is not None:
            replay.cancel()
        streams, subscription = self._streams, self._subscription
        self._streams = self._subscription = None
        if streams is not None:
            hub.detach_streams(streams)
        if subscription is not None:
            hub.detach(subscription)
            hub.announce(subscription, registered=False)
        self._protocol.parser.close()  # a generator that refers to its protocol

    def full(self) -> None:
        if self._streams is not None:
            self._streams.block()
        if self._subscription is not None:
            now = self._connection.loop.time()
            self._subscription.block(now)
            overdue_at = now + self._subscription.policy.seconds_max
            if overdue_at < self._connection.deadline:
                self._service.wheel.set(self._connection, overdue_at)

    def room(self) -> None:
        if self._reading_paused and not self._slicing:
            self._take_slice()
        if self._streams is not None:
            self._streams.unblock()
        if self._subscription is not None:
            self._subscription.unblock(self._connection.loop.time())
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    # History.

    async def _catch_up(self, place: Place) -> None:
        """Send what matched since, then go live; as for server-sent events."""
        service = self._service
        subscriber = self._streams or self._subscription
        assert subscriber is not None
        try:
            start = await service.replayer.find(self._channel or STREAMS, place)
            if subscriber.closed:
                return
            self._begin_at(start)
            await service.replayer.run(
                subscriber, start, drained=self._drained, tell_gap=self._tell_gap
            )
        except (LogError, HubError, FilterError) as error:
            service.logger.warning("replay_failed", code=error.code, reason=error.message)
            self._close(CloseCode.INTERNAL_ERROR, error.code)
        except Exception:
            # Nobody foresaw this one; a consumer that is not told would wait for ever.
            service.logger.exception("replay_failed")
            self._close(CloseCode.INTERNAL_ERROR, "internal-failure")

    def _begin_at(self, start: Start) -> None:
        """Send `connect` with the start of the history, and a gap if records before it are missing."""
        if self._positions:
            text = self._service.hub.position_text(start.offset)
            # A client that is cut off here has to get the gap when it resumes.
            again = text if start.gap is None else start.again
            self._tell(CONNECT, {}, again, start.offset)
        if start.gap is not None:
            self._tell_gap(start.gap, start.offset)

    @property
    def _blocked(self) -> bool:
        if self._streams is not None:
            return self._streams.blocked
        return self._subscription is not None and self._subscription.blocked_since is not None

    def _drained(self) -> asyncio.Future[None] | None:
        if not self._blocked:
            return None
        if self._room is None:
            self._room = self._connection.loop.create_future()
        return self._room

    def _tell_gap(self, gap: dict[str, object], offset: int) -> None:
        self._tell(GAP, gap, self._service.hub.position_text(offset), offset)

    def _tell_overflow(self, data: dict[str, object]) -> None:
        """Report dropped events without a position, so that a client that resumes gets them."""
        self._tell(OVERFLOW, data)

    def _tell_position(self) -> None:
        """Send the client's position if it has moved since the last one and nothing is pending."""
        subscriber = self._streams or self._subscription
        if not self._positions or subscriber is None or self._blocked or self._offset_sent < 0:
            return
        hub = self._service.hub
        offset = hub.position if subscriber.reached is None else subscriber.reached
        if offset > self._offset_sent:
            self._tell(PING_TYPE, {}, hub.position_text(offset), offset)

    def _tell(
        self, kind: str, data: dict[str, object], position: str | None = None, offset: int = -1
    ) -> None:
        """Send a control message; on a channel it is an event, because its subprotocol allows nothing else."""
        self._offset_sent = max(self._offset_sent, offset)
        message: dict[str, Any]
        if self._streams is not None:
            message = {kind: data}
            if self._positions:
                message["position"] = position
        else:
            now = timestamp_text(now_microseconds())
            message = {
                "specversion": "1.0",
                "id": f"{self._service.hub.instance_id} {now}",
                "source": self._service.config.source_name,
                "type": f"virta.{kind}",
                "time": now,
                "data": data,
            }
            if self._positions and position is not None:
                message[POSITION_ATTRIBUTE] = position
        self.write(websocket_text(msgspec.json.encode(message)))

    # Frames from the client.

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode not in {Opcode.TEXT, Opcode.BINARY, Opcode.CONT}:
            return  # pings are answered and closes echoed by the protocol itself
        if frame.opcode is Opcode.BINARY:
            # Both subprotocols use text only; an ignored message would look as if it were accepted.
            self._close(CloseCode.UNSUPPORTED_DATA, BINARY_REFUSED)
            return
        if self._channel is None:
            return  # Subtub's subscribers only listen
        self._message += frame.data
        if not frame.fin:
            return
        body, self._message = bytes(self._message), bytearray()
        try:
            self._publish(self._channel, body)
        except RequestError as error:
            self._service.count_refusal(error)
            again = CloseCode.TRY_AGAIN_LATER if error.status == 429 else CloseCode.INVALID_DATA
            self._close(again, error.code)

    def _publish(self, channel: str, body: bytes) -> None:
        """Take one structured event; a socket has no answers, so a refusal closes it."""
        check_channel(channel)
        if self._service.publisher.full:
            raise self._service.overloaded(1)
        drafts = read_events(channel, [], STRUCTURED, STRUCTURED, body)
        self._service.publisher.submit(drafts, self._published)

    def _published(self, error: LogError | None) -> None:
        if error is not None and self._protocol.state is State.OPEN:
            self._close(CloseCode.INTERNAL_ERROR, error.code)

    def _close(self, code: CloseCode, reason: str) -> None:
        if self._protocol.state is State.OPEN:
            try:
                self._protocol.send_close(code, reason[:REASON_BYTES_MAX])
            except ProtocolError as error:
                self._service.logger.debug("close_failed", reason=str(error))
            self._flush()
            self._check_open()

    def _check_open(self) -> None:
        """Behind a close frame nothing is sent: what is still delivered goes nowhere."""
        if self._open and self._protocol.state is not State.OPEN:
            self._open = False
            subscriber = self._streams or self._subscription
            if subscriber is not None:
                subscriber.put = self.write

    def _flush(self) -> None:
        transport = self._connection.transport
        for data in self._protocol.data_to_send():
            if data:
                # A publication may be refused when its sender is long gone.
                if not transport.is_closing():
                    transport.write(data)
            elif transport.can_write_eof():
                self._connection.end()
