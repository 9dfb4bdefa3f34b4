"""Live views over a WebSocket: `GET /channels/NAME/live` with an upgrade. `live.py` has what both transports share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from websockets.frames import CloseCode

from virta.errors import RequestError
from virta.hub.frames import websocket_text
from virta.server.consumers.handshake import check_handshake
from virta.server.consumers.live import LiveDriver, LiveTransport
from virta.server.consumers.view_options import LIVE as LIVE_PATH
from virta.server.consumers.view_options import read_view_request
from virta.server.consumers.websocket import WebSocket

if TYPE_CHECKING:
    from virta.server.http.connection import HttpConnection


class LiveSocket(WebSocket, LiveTransport):
    """A live view over a WebSocket: each frame is one text."""

    texts = True
    form = "websocket"

    def __init__(self, connection: HttpConnection, method: bytes) -> None:
        WebSocket.__init__(self, connection, method)
        self._driver: LiveDriver | None = None
        self._task: asyncio.Task[None] | None = None
        self._early = b""
        self._stalled_since: float | None = None

    def open(self, rest: bytes) -> None:
        """Check the request; the handshake is answered when the view is ready."""
        connection = self._connection
        path, _, query = connection.url.partition(b"?")
        headers = dict(connection.headers)
        self._early = rest
        try:
            check_handshake(headers)
            request = read_view_request(self._service, path, query, headers, self._principal)
            self._driver = LiveDriver(self._service, request, self)
        except RequestError as error:
            self._refuse(error)
            return
        self._task = asyncio.ensure_future(self._begin_view(connection.headers))

    async def _begin_view(self, headers: list[tuple[bytes, bytes]]) -> None:
        assert self._driver is not None
        try:
            await self._driver.connect()
        except RequestError as error:
            self._refuse(error)
            return
        if self._connection.ended or self._connection.transport.is_closing():
            return
        self._connection.headers = headers  # they were released with the request
        early, self._early = self._early, b""
        self._complete_handshake(early)
        self._connection.headers = []
        if self._open:
            self._driver.begin()

    def data_received(self, data: bytes) -> None:
        if self._open:
            super().data_received(data)
        else:
            self._early += data

    def _on_frame(self, frame: Any) -> None:
        """Ignore texts: a client of a view only receives."""

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._driver is not None:
            self._driver.pause()
        self._stalled_since = self._connection.loop.time()

    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()
        if self._driver is not None:
            self._driver.pump()

    def _ping(self, now: float) -> float | None:
        if not self._open:
            return now + float(self._service.ping_s)
        stall_s = self._service.views.limits.view_stall_s
        if self._stalled_since is not None and now - self._stalled_since >= stall_s:
            self.end(f"nothing was taken for {stall_s} s")
            return None
        due = now - self._pinged_at >= self._service.ping_s
        frame = self._driver.ping() if due and self._driver is not None else None
        if frame is not None and not self.write_blocked:
            assert self._driver is not None
            self._driver.send([frame])
        return super()._ping(now)

    def connection_lost(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._driver is not None:
            self._driver.close()
        super().connection_lost()

    @property
    def write_blocked(self) -> bool:
        return not self._open or self._connection.write_paused

    def join(self, frames: list[bytes]) -> bytes:
        return b"".join([websocket_text(frame) for frame in frames])

    def finish_live(self, reason: str) -> None:
        if self._driver is not None:
            self._driver.close()
        self._close(CloseCode.TRY_AGAIN_LATER, reason)


def socket_type(url: bytes) -> type[WebSocket]:
    """Return the type of a WebSocket for a URL."""
    return LiveSocket if LIVE_PATH.match(url) else WebSocket
