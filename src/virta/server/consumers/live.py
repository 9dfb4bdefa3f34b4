"""
Consumers of live views: `GET /channels/NAME/live` as server-sent events; `live_socket.py` has WebSockets.

    begin ──► table, pass (may take seconds) ──► head ──► frames of `virta.views.consumer`
                     └──► refusal, with its own status

The head is written when the view is ready, so that a view that cannot be opened is a refusal and not a broken
stream. A consumer that does not read is conflated, not cut: `pump` is called when the transport accepts bytes again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from virta.clock import now_us, time_text
from virta.errors import HubError, LogError, RequestError, ViewError
from virta.hub.frames import LAST_CHUNK, chunk, named_frame
from virta.server.consumers.base import HttpConsumer
from virta.server.consumers.view_options import (
    ViewRequest,
    read_view_request,
    refusal_of,
    release_view,
    reserve_view,
)
from virta.server.http.responses import CLOSE, KEEP, SSE_HEAD
from virta.views.aggregates import AggregateFold
from virta.views.frames import AGGREGATE, EMPTY_ID, LIVE, NO_ID, SNAPSHOT, FrameEncoder, ViewFrame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virta.server.access.scan_budget import ScanLease
    from virta.server.http.connection import HttpConnection
    from virta.server.service import Service
    from virta.views.consumer import ViewConsumer
    from virta.views.live_table import LiveTable
    from virta.views.view import View

# At most one `aggregate` in this time.
AGGREGATE_S = 0.1
RETRY_MS = 2000


class LiveDriver:
    """
    What both transports share: opens the view, calls `pump`, and folds aggregates.

    It is the sink of its consumer; `transport` writes bytes, and says whether it accepts them. There are very many
    drivers and streams, and an event may reach any of them: with slots they take fewer cache lines.
    """

    __slots__ = (
        "_aggregates_sent",
        "_fold",
        "_fold_ready",
        "_live",
        "_loop",
        "_payload_key",
        "_pumping",
        "_reading",
        "_request",
        "_scans",
        "_service",
        "_timer",
        "_transport",
        "consumer",
        "encoder",
        "tag",
    )

    def __init__(self, service: Service, request: ViewRequest, transport: LiveTransport) -> None:
        self._service = service
        self._request = request
        self._transport = transport
        self.tag = request.tag(service)
        self.encoder = FrameEncoder(self.tag, request.fields, texts=transport.texts)
        # Drivers with an equal key send equal bytes for equal frames.
        self._payload_key = repr((self.encoder.key, transport.form))
        self.consumer: ViewConsumer | None = None
        self._live: LiveTable | None = None
        self._pumping = False
        self._reading: asyncio.Task[None] | None = None
        self._fold = None if request.selection is None else AggregateFold(request.selection)
        self._fold_ready: asyncio.Future[None] | None = None
        self._aggregates_sent = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._scans: ScanLease | None = None

    async def connect(self) -> LiveTable:
        """
        Open the view and attach its consumer; return the view's table.

        Raises:
            RequestError: refused, or failed unexpectedly, which is logged.
        """
        try:
            live, view = await self._open()
            await self._attach(live, view)
        except RequestError:
            raise
        except Exception as error:
            self._service.logger.exception("view_failed")
            raise RequestError(500, "internal-failure") from error
        return live

    async def _open(self) -> tuple[LiveTable, View]:
        """
        Return the table and the view.

        Raises:
            RequestError: the view cannot be opened.
        """
        request = self._request
        self._scans = reserve_view(self._service, request)
        try:
            return await self._service.views.open(request.channel, request.rule, request.filter)
        except ViewError as error:
            raise refusal_of(error) from error
        except LogError as error:
            raise RequestError(503, error.code, error.message) from error
        except HubError as error:
            raise RequestError(503, error.code, error.message) from error

    async def _attach(self, live: LiveTable, view: View) -> None:
        """Begin the consumer; an aggregate is complete when this returns."""
        self._live = live
        position, reset = self._request.position(self.tag)
        if self._fold is not None:
            # Aggregates have no history: a resume gets all groups.
            self._fold_ready = self._loop.create_future()
            position, reset = None, ""
        try:
            consumer = await self._service.views.attach(live, view, self, position, reset)
        except ViewError as error:
            raise refusal_of(error) from error
        self.consumer = consumer
        stream = self._transport.stream_output
        if stream is not None and self._fold is None and self._request.fields is None:
            put, chunked = stream
            consumer.output = (put, self.tag.encode(), chunked)
        if self._fold_ready is not None:
            self.pump()
            await self._fold_ready
            assert self._fold is not None
            try:
                self._fold.check_numbers()
            except ViewError as error:
                raise refusal_of(error) from error

    def begin(self) -> None:
        """Send the first frames; the head is written."""
        if self._fold is None:
            self.pump()
        else:
            self._send_all_groups()

    def close(self) -> None:
        for task in (self._reading, self._timer):
            if task is not None:
                task.cancel()
        if self._fold_ready is not None and not self._fold_ready.done():
            self._fold_ready.cancel()
        if self.consumer is not None:
            self.consumer.close()
        if self._scans is not None:
            release_view(self._service, self._scans)
            self._scans = None

    def ping(self) -> ViewFrame | None:
        """Return a ping, or None before the first frame."""
        if self.consumer is None:
            return None
        return self.consumer.ping(time_text(now_us()))

    # As the sink of the consumer.

    @property
    def blocked(self) -> bool:
        # A fold takes everything at once; its frames are few.
        return self._fold is None and self._transport.write_blocked

    def write_frames(self, frames: Sequence[ViewFrame], payloads: dict[object, Any]) -> None:
        if self._fold is not None:
            self._fold.fold(frames)
            if self._fold_ready is not None and not self._fold_ready.done():
                if any(frame.name == LIVE for frame in frames):
                    self._fold_ready.set_result(None)
            elif self._fold.changed and self._timer is None:
                self._timer = self._loop.call_later(AGGREGATE_S, self._send_changed_groups)
            return
        payload = payloads.get(self._payload_key)
        if payload is None:
            payload = payloads[self._payload_key] = self._transport.join(
                self.encoder.encode(frames)
            )
        self._transport.write(payload)

    def wants_pump(self, consumer: ViewConsumer) -> None:  # noqa: ARG002 - there is one
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump_soon)

    def failed(self, error: ViewError) -> None:
        self._transport.finish_live(error.code)

    def pause(self) -> None:
        """Queue frames until the next `pump`: the transport accepts no bytes."""
        if self.consumer is not None:
            self.consumer.pause()

    # Sending.

    def _pump_soon(self) -> None:
        self._pumping = False
        self.pump()

    def pump(self) -> None:
        """Send what waits, if the transport accepts it; values that are not in memory are read in a thread."""
        if self.consumer is None or self._reading is not None:
            return
        missing = self.consumer.pump()
        if missing:
            self._reading = asyncio.ensure_future(self._read(missing))

    async def _read(self, missing: list[int]) -> None:
        assert self._live is not None
        assert self.consumer is not None
        try:
            while missing and not self.consumer.closed:
                values = await self._live.read_values(missing)
                missing = self.consumer.pump(values)
        except LogError as error:
            self._service.logger.warning("view_read_failed", code=error.code, reason=error.message)
            self._transport.finish_live(error.code)
        finally:
            self._reading = None
        if not self.consumer.idle:
            self.wants_pump(self.consumer)

    def send(self, frames: Sequence[ViewFrame]) -> None:
        self._transport.write(self._transport.join(self.encoder.encode(frames)))

    def _send_all_groups(self) -> None:
        assert self._fold is not None
        groups = self._fold.all_groups()
        count = len(groups["groups"])
        self.send([ViewFrame(SNAPSHOT, EMPTY_ID, data={"rows": count}), self._aggregate(groups)])
        position = self._position
        self.send([ViewFrame(LIVE, position, data={"offset": position, "rows": count})])
        self._aggregates_sent = True

    def _send_changed_groups(self) -> None:
        self._timer = None
        assert self._fold is not None
        if not self._aggregates_sent:
            return
        if self._transport.write_blocked:
            self._timer = self._loop.call_later(AGGREGATE_S, self._send_changed_groups)
        elif self._fold.changed:
            self.send([self._aggregate(self._fold.take_changes())])

    def _aggregate(self, groups: dict[str, Any]) -> ViewFrame:
        position = self._position
        return ViewFrame(AGGREGATE, position, data={"offset": position} | groups)

    @property
    def _position(self) -> int:
        return NO_ID if self.consumer is None else self.consumer.view.table.position


class LiveTransport:
    """What a driver needs of its connection."""

    __slots__ = ()

    texts = False
    form = ""

    @property
    def write_blocked(self) -> bool:
        raise NotImplementedError

    def write(self, payload: bytes) -> None:
        raise NotImplementedError

    @property
    def stream_output(self) -> tuple[Callable[[bytes], object], bool] | None:
        """Return the function that takes server-sent events unchanged, and whether as chunks; None if there is none."""
        return None

    def join(self, frames: list[bytes]) -> bytes:
        """Return encoded frames as one write."""
        raise NotImplementedError

    def finish_live(self, reason: str) -> None:
        """End the stream; the client may resume."""
        raise NotImplementedError


class LiveStream(HttpConsumer, LiveTransport):
    """A live view as server-sent events."""

    __slots__ = (
        "_blocked_since",
        "_chunked",
        "_driver",
        "_finished",
        "_open",
        "_task",
        "_written_at",
        "cors",
        "form",
    )

    def __init__(self, connection: HttpConnection, request: ViewRequest) -> None:
        HttpConsumer.__init__(self, connection)
        self._chunked = connection.parser.get_http_version() == "1.1"
        self.form = "chunked" if self._chunked else "plain"
        self.cors = connection.cors
        self._driver = LiveDriver(self._service, request, self)
        self._task: asyncio.Task[None] | None = None
        self._open = self._finished = False
        self._written_at = 0.0
        self._blocked_since: float | None = None

    # Called by the connection.

    def begin(self) -> None:
        """Open the view; the head follows when it is ready."""
        self._written_at = self._service.timers.now
        self._service.timers.set(self._connection, self._written_at + self._service.ping_s)
        self._task = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        try:
            live = await self._driver.connect()
        except RequestError as error:
            self._refuse(error)
            return
        if self._finished:
            return
        self._open = True
        fields = self.cors + b"Virta-Position: %d\r\n" % live.table.position
        head = SSE_HEAD + fields + b"Transfer-Encoding: chunked\r\n\r\n"
        if not self._chunked:
            head = SSE_HEAD.replace(KEEP, CLOSE) + fields + b"\r\n"
        self._connection.transport.write(head)
        self._driver.begin()

    def _refuse(self, error: RequestError) -> None:
        self._finished = True
        if not self._connection.transport.is_closing():
            response = self._service.responder.refusal(error).to_bytes(close=True, more=self.cors)
            self._connection.transport.write(response)
            self._connection.end()

    def pause_writing(self) -> None:
        self._driver.pause()
        self._blocked_since = self._connection.loop.time()
        self._service.timers.set(self._connection, min(self._stalls_at, self._connection.deadline))

    def resume_writing(self) -> None:
        self._blocked_since = None
        self._driver.pump()

    @property
    def _stalls_at(self) -> float:
        assert self._blocked_since is not None
        return self._blocked_since + self._service.views.limits.view_stall_s

    def expired(self, now: float) -> None:
        if self._finished:
            self._connection.transport.abort()
            return
        if self._access_ended():
            self._end_access()
            return
        if self._blocked_since is not None and self._stalls_at <= now:
            self.end(f"nothing was taken for {self._service.views.limits.view_stall_s} s")
            return
        ping_s = self._service.ping_s
        frame = self._driver.ping()
        if self._driver.consumer is not None:
            self._written_at = max(self._written_at, self._driver.consumer.written_at)
        if now - self._written_at >= ping_s:
            if frame is not None and self._open and not self.write_blocked:
                self._driver.send([frame])
            self._written_at = now
        deadline = self._written_at + ping_s
        if self._blocked_since is not None:
            deadline = min(deadline, self._stalls_at)
        self._service.timers.set(self._connection, max(deadline, now))

    def drain(self) -> None:
        self.finish_live("shutdown")

    def disconnect(self, reason: str) -> None:
        self.finish_live(reason)

    def _fail(self, code: str) -> None:
        self.finish_live(code)

    def connection_lost(self) -> None:
        self._finished = True
        if self._task is not None:
            self._task.cancel()
        self._driver.close()
        super().connection_lost()

    # As a transport.

    @property
    def write_blocked(self) -> bool:
        return not self._open or self._connection.write_paused

    def write(self, payload: bytes) -> None:
        if not self._finished:
            self._written_at = self._service.timers.now
            self._connection.transport.write(payload)

    @property
    def stream_output(self) -> tuple[Callable[[bytes], object], bool]:
        return self._connection.transport.write, self._chunked

    def join(self, frames: list[bytes]) -> bytes:
        body = b"".join(frames)
        return chunk(body) if self._chunked else body

    def finish_live(self, reason: str) -> None:
        if self._finished:
            return
        if not self._open:
            self._refuse(RequestError(503, reason))
            return
        data = {"timestamp": time_text(now_us()), "reason": reason}
        self.write(self.join([named_frame("disconnect", data, retry_ms=RETRY_MS)]))
        if self._chunked:
            self._connection.transport.write(LAST_CHUNK)
        self._finished = True
        self._driver.close()
        self._connection.transport.close()
        self._service.timers.set(self._connection, self._connection.loop.time() + 30.0)


def open_live(connection: HttpConnection) -> LiveStream:
    """
    Check a request for a live view.

    Raises:
        RequestError: 400 with the reason.
    """
    path, _, query = connection.url.partition(b"?")
    request = read_view_request(
        connection.service, path, query, dict(connection.headers), connection.principal
    )
    return LiveStream(connection, request)
