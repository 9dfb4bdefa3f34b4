"""
Consumers over WebSockets: Subtub's `/subscribe`, and CloudEvents on `/channels/NAME` (cloudevents.json).

The protocol is `websockets`' sans-I/O core; outgoing events are frames that the hub makes once for all
consumers. A consumer is attached before the handshake is answered, so a client that has seen the 101 gets
everything published after it. One that asks for history (`/from/…`, `Last-Event-ID`) gets it first; missing
records are reported by an event of type `virta.gap`.

A client that requests positions gets one with every message, and also messages that carry nothing
else: `virta.connect` first, `virta.ping` when the log has grown without an event for this client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from virta.clock import now_us, time_text
from virta.errors import FilterError, HubError, LogError, RequestError
from virta.event import EVENT_BYTES_MAX
from virta.hub.delivery import POSITION_ATTRIBUTE, STREAMS, WEBSOCKET, WEBSOCKET_POSITIONS
from virta.hub.event_matcher import all_satisfy
from virta.hub.frames import websocket_text
from virta.hub.stream_consumer import StreamConsumer
from virta.hub.subscription import ChannelSubscription
from virta.server.access.rules import refused, require
from virta.server.consumers.base import ACCESS_ENDED, HttpConsumer, parse_query
from virta.server.consumers.handshake import check_handshake, check_subscribe
from virta.server.event_input import STRUCTURED, check_channel, read_events
from virta.server.http.routes import CHANNELS, parse_channel_path
from virta.server.http.stream_options import StreamOptions, read_options
from virta.streams import canonical_stream_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.hub.resume.positions import Place
    from virta.hub.resume.replay import Start
    from virta.server.http.connection import HttpConnection

SUBSCRIBE = b"/subscribe"
CLOUDEVENTS = Subprotocol("cloudevents.json")
PING = b"\x89\x00"
# A client that sends nothing for this long, not even pongs, is disconnected.
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


class WebSocket(HttpConsumer):
    """One upgraded connection."""

    __slots__ = (
        "_channel",
        "_last_received",
        "_message",
        "_method",
        "_offset_sent",
        "_open",
        "_pinged_at",
        "_positions",
        "_protocol",
        "_reading_paused",
        "_slicing",
        "_start",
        "_unread",
    )

    def __init__(self, connection: HttpConnection, method: bytes) -> None:
        super().__init__(connection)
        self._method = method
        self._protocol = _ServerProtocol(subprotocols=[CLOUDEVENTS], max_size=EVENT_BYTES_MAX)
        self._channel: str | None = None  # None: a socket of streams
        self._start: Place | None = None
        self._positions = False
        self._offset_sent = -1  # the offset of the last position that was sent without an event
        self._message = bytearray()
        self._unread = b""
        self._reading_paused = False
        self._slicing = False
        self._last_received = self._pinged_at = connection.loop.time()
        self._open = False

    # The handshake.

    def open(self, rest: bytes) -> None:
        """Check the request, attach, answer; `rest` is what already followed the head."""
        connection = self._connection
        path, _, query = connection.url.partition(b"?")
        try:
            if path == SUBSCRIBE and self._method == b"GET":
                self._open_streams(query)
            else:
                self._open_channel(path, query)
        except RequestError as error:
            self._refuse(error)
            return
        except (FilterError, HubError) as error:
            # The matcher or the hub does not accept it.
            status = 400 if isinstance(error, FilterError) else 503
            self._refuse(RequestError(status, error.code, error.message))
            return
        self._complete_handshake(rest)

    def _options(self, query: bytes) -> StreamOptions:
        """Read the client's options; one that resumes by the URL gets positions too."""
        options = read_options(query, dict(self._connection.headers))
        self._positions = options.positions or options.in_url
        self._start = options.seen
        return options

    def _open_streams(self, query: bytes) -> None:
        options = self._options(query)
        streams, queued, drops = check_subscribe(options.query)
        for segments in streams:
            name = canonical_stream_id(segments)
            if not self._principal.rights.covers("read", name):
                raise refused(self._service, self._principal, "read", name)
        check_handshake(dict(self._connection.headers))
        self.subscriber = StreamConsumer(
            self,
            streams,
            queued,
            report_drops=drops or self._positions,
            positions=self._positions,
        )
        if self._start is None:
            self._attach()

    def _open_channel(self, path: bytes, query: bytes) -> None:
        if not path.startswith(CHANNELS):
            raise RequestError(404, "not-found", "Not found")
        place = parse_channel_path(path)
        row_filter = require(self._service, self._principal, "read", place.channel)
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
            row_filter=row_filter,
        )
        if self._positions:
            subscription.report_overflow = self._send_overflow
        self._reserve(subscription)
        self.subscriber = subscription
        if self._start is None:
            self._attach()
        self._channel = place.channel
        self._service.hub.announce(subscription, registered=True)

    def _complete_handshake(self, rest: bytes) -> None:
        connection, protocol = self._connection, self._protocol
        head = b"".join(b"%b: %b\r\n" % pair for pair in connection.headers)
        # The path is already checked, and may be longer than this reader allows.
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
        if self.subscriber is not None:
            self.subscriber.put = connection.transport.write
        self._service.timers.set(connection, connection.loop.time() + self._service.ping_s)
        if self._start is not None:
            self._replay_from(self._channel or STREAMS, self._start)
        elif self._positions:
            self._send_position(CONNECT, self._service.hub.position)
        if rest:
            self.data_received(rest)

    def _refuse(self, error: RequestError) -> None:
        text = self._connection.url.startswith(SUBSCRIBE) and bool(error.message)
        refusal = self._service.responder.refusal(error, text=text)
        self._connection.transport.write(refusal.to_bytes(close=True))
        self._connection.end()

    # Called by the hub.

    def write(self, payload: bytes) -> None:
        if self._open:
            self._connection.transport.write(payload)

    # Called by the connection.

    def data_received(self, data: bytes) -> None:
        """
        Read bytes, one slice in each turn of the loop.

        A read may contain tens of thousands of small frames: other connections get their turn between
        them. And while the client does not read, what it sends (pings that need pongs) has to wait.
        """
        self._last_received = self._connection.loop.time()
        self._unread += data
        if not self._slicing and not self._reading_paused:
            self._read_slice()

    def _read_slice(self) -> None:
        self._slicing = False
        connection = self._connection
        data, self._unread = self._unread[:SLICE_BYTES], self._unread[SLICE_BYTES:]
        if data and not connection.ended:
            self._feed(data)
        if connection.ended or connection.transport.is_closing():
            self._unread = b""
            if self._reading_paused and not connection.transport.is_closing():
                # Whatever still arrives is ignored: a peer that cannot finish sending does not close.
                self._reading_paused = False
                connection.transport.resume_reading()
            return
        paused = bool(self._unread) or connection.write_paused
        if paused and not self._reading_paused:
            connection.transport.pause_reading()
        elif self._reading_paused and not paused:
            connection.transport.resume_reading()
        self._reading_paused = paused
        if self._unread and not connection.write_paused:
            self._slicing = True
            connection.loop.call_soon(self._read_slice)

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
        self._stop_events_after_close()
        if self._protocol.close_expected():
            self._connection.end()

    def resume_writing(self) -> None:
        if self._reading_paused and not self._slicing:
            self._read_slice()
        super().resume_writing()

    def drain(self) -> None:
        """Close the socket because the server stops."""
        self._close(CloseCode.GOING_AWAY, "the server is stopping")
        self._connection.transport.close()

    def disconnect(self, reason: str) -> None:
        self._close(CloseCode.GOING_AWAY, reason)
        self._connection.transport.close()

    def refuse_message(self, code: str) -> None:
        """Refuse the arriving message, because all unfinished bodies together are too large."""
        self._close(CloseCode.TRY_AGAIN_LATER, code)
        self._message = bytearray()
        self._connection.end()

    def connection_lost(self) -> None:
        subscriber = self.subscriber
        super().connection_lost()
        if isinstance(subscriber, ChannelSubscription):
            self._service.hub.announce(subscriber, registered=False)
        self._protocol.parser.close()  # a generator that refers to its protocol

    def _ping(self, now: float) -> float | None:
        if now - self._last_received >= SILENCE_S:
            self._connection.transport.abort()
            return None
        ping_s: float = self._service.ping_s
        if now - self._pinged_at >= ping_s:
            self._pinged_at = now
            if self._protocol.state is State.OPEN:
                self._connection.transport.write(PING)
                self._send_progress()
        return self._pinged_at + ping_s

    # Control messages.

    def _send_start(self, start: Start) -> None:
        if self._positions:
            # A client that is disconnected here has to get the gap when it resumes.
            again = None if start.gap is None else start.again
            self._send_position(CONNECT, start.offset, again)
        if start.gap is not None:
            self._send_gap(start.gap, start.offset)

    def _send_gap(self, gap: dict[str, object], offset: int) -> None:
        self._offset_sent = max(self._offset_sent, offset)
        self._send(GAP, gap, self._service.hub.position_text(offset))

    def _send_overflow(self, data: dict[str, object]) -> None:
        """Report dropped events without a position, so that a client that resumes gets them."""
        self._send(OVERFLOW, data, None)

    def _send_progress(self) -> None:
        """Send the client's position if it has moved since the last one and nothing is queued."""
        subscriber = self.subscriber
        if not self._positions or subscriber is None or subscriber.blocked or self._offset_sent < 0:
            return
        offset = self._offset()
        if offset > self._offset_sent:
            self._send_position(PING_TYPE, offset)

    def _send_position(self, kind: str, offset: int, again: str | None = None) -> None:
        """Send a message that carries only a position: that of an offset, or another one to resume from."""
        self._offset_sent = max(self._offset_sent, offset)
        self._send(kind, {}, again or self._service.hub.position_text(offset))

    def _send(self, kind: str, data: dict[str, object], position: str | None) -> None:
        """Send a control message; on a channel it is an event, because its subprotocol allows nothing else."""
        message: dict[str, Any]
        if self._channel is None:
            message = {kind: data}
            if self._positions:
                message["position"] = position
        else:
            now = time_text(now_us())
            message = {
                "specversion": "1.0",
                "id": f"{self._service.hub.instance_id} {now}",
                "source": self._service.config.source,
                "type": f"virta.{kind}",
                "time": now,
                "data": data,
            }
            if self._positions and position is not None:
                message[POSITION_ATTRIBUTE] = position
        self.write(websocket_text(msgspec.json.encode(message)))

    def _fail(self, code: str) -> None:
        policy = code == ACCESS_ENDED
        self._close(CloseCode.POLICY_VIOLATION if policy else CloseCode.INTERNAL_ERROR, code)

    # Frames from the client.

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode not in {Opcode.TEXT, Opcode.BINARY, Opcode.CONT}:
            return  # the library answers pings and echoes closes
        if frame.opcode is Opcode.BINARY:
            # Both subprotocols use text only; an ignored message would look as if it were accepted.
            self._close(CloseCode.UNSUPPORTED_DATA, BINARY_REFUSED)
            return
        if self._channel is None:
            return  # Subtub's clients only receive
        self._message += frame.data
        if not frame.fin:
            return
        body, self._message = bytes(self._message), bytearray()
        try:
            self._publish(self._channel, body)
        except RequestError as error:
            self._service.responder.count_refusal(error)
            codes = {429: CloseCode.TRY_AGAIN_LATER, 403: CloseCode.POLICY_VIOLATION}
            self._close(codes.get(error.status, CloseCode.INVALID_DATA), error.code)

    def _publish(self, channel: str, body: bytes) -> None:
        """Publish one structured event; a socket has no responses, so a refusal closes it."""
        row_filter = require(self._service, self._principal, "publish", channel)
        check_channel(channel)
        if self._service.publisher.overloaded:
            raise self._service.overloaded(1)
        drafts = read_events(channel, [], STRUCTURED, STRUCTURED, body)
        if row_filter is not None and not all_satisfy(row_filter, drafts):
            raise RequestError(403, "row-filter", "the event does not satisfy the row filter")
        self._service.publisher.submit(drafts, self._published)

    def _published(self, error: LogError | None) -> None:
        if error is not None:
            self._close(CloseCode.INTERNAL_ERROR, error.code)

    def _close(self, code: CloseCode, reason: str) -> None:
        if self._protocol.state is State.OPEN:
            try:
                self._protocol.send_close(code, reason[:REASON_BYTES_MAX])
            except ProtocolError as error:
                self._service.logger.debug("close_failed", reason=str(error))
            self._flush()
            self._stop_events_after_close()

    def _stop_events_after_close(self) -> None:
        """After a close frame nothing is sent: events that are still delivered are discarded."""
        if self._open and self._protocol.state is not State.OPEN:
            self._open = False
            if self.subscriber is not None:
                self.subscriber.put = self.write

    def _flush(self) -> None:
        transport = self._connection.transport
        for data in self._protocol.data_to_send():
            if data:
                # A publication may be refused after its sender has disconnected.
                if not transport.is_closing():
                    transport.write(data)
            elif transport.can_write_eof():
                self._connection.end()
