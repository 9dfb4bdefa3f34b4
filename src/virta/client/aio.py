"""
`AsyncClient`: the server from asyncio; the same methods as `Client`, awaited.

Requests share a pool of kept connections; each subscription has its own connection and reconnects
and resumes exactly like a blocking one (they share `ResumeState` and `FrameReader`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from virta.client import calls
from virta.client.async_pool import AsyncConnection, AsyncPool
from virta.client.calls import TIMEOUT_S, UNREADABLE, URL_DEFAULT, Address, Published
from virta.client.frames import Frame, FrameReader, Received
from virta.client.live import CurrentRows, LiveChange, LiveState
from virta.client.resume import SILENCE_S, ResumeState
from virta.client.stream_socket import StreamSocket
from virta.client.subscribing import SubscribingClient, SubscribingFilters
from virta.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from websockets.asyncio.client import ClientConnection as AsyncSocket

    from virta.event import Event

T = TypeVar("T")
S = TypeVar("S")  # what is open: a connection, a WebSocket
P = TypeVar("P")  # what arrives on it: frames, messages


class AsyncClient(
    SubscribingClient["AsyncSubscription", "AsyncLiveRows", "AsyncStreamSubscription"]
):
    """A client of one server; see `virta.client.Client` for what each method does."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
        tls: ssl_module.SSLContext | None = None,
    ) -> None:
        address = Address(url, token)
        trust = tls or (ssl_module.create_default_context() if address.tls else None)
        self._pool = AsyncPool(address, timeout, trust)
        self._socket = StreamSocket(address, timeout, trust)
        self.filters = AsyncFilters(self._pool)

    async def close(self) -> None:
        """Close every kept connection."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Channels.

    async def publish(self, channel: str, *events: Event | Mapping[str, Any]) -> Published:
        """Publish events, several as one batch; many publications may run at once."""
        return await self._pool.call(calls.publish(channel, events))

    # Streams.

    async def publish_streams(self, *messages: tuple[str, str]) -> None:
        """Send (stream id, text) messages."""
        await self._pool.call(calls.publish_streams(messages))

    # What subscriptions of each kind are.

    def _subscription(self, state: ResumeState) -> AsyncSubscription:
        return AsyncSubscription(self._pool, state)

    def _live_rows(self, state: LiveState) -> AsyncLiveRows:
        return AsyncLiveRows(self._pool, state)

    def _stream_subscription(self, state: ResumeState) -> AsyncStreamSubscription:
        return AsyncStreamSubscription(self._socket, state)

    # Requests.

    async def ready(self) -> bool:
        """Return whether the server serves requests right now."""
        return await self._pool.call(calls.ready())

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[Any, dict[str, str]]:
        """Send one request; return the JSON of the answer and its headers, in lower case."""
        return await self._pool.call(calls.plain_request(method, path, body, headers))


class AsyncFilters(SubscribingFilters["AsyncSubscription"]):
    """Registered filters of a server; see `virta.client.sync.Filters`."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool

    async def register(
        self, index: str, collection: str, filter_: Any, *, dialect: str = "koncorde"
    ) -> dict[str, Any]:
        """Register a filter; return `{id, diff}`."""
        return await self._pool.call(calls.register_filter(index, collection, filter_, dialect))

    async def ids(self, index: str, collection: str) -> list[str]:
        """Return the ids of a collection's filters."""
        return await self._pool.call(calls.filter_ids(index, collection))

    async def exists(self, index: str, collection: str) -> bool:
        """Return whether a collection has filters."""
        return await self._pool.call(calls.collection_exists(index, collection))

    async def test(
        self, index: str, collection: str, document: Any, document_id: str | None = None
    ) -> list[str]:
        """Return the ids of the filters that a document satisfies."""
        return await self._pool.call(calls.test_document(index, collection, document, document_id))

    async def validate(self, filter_: Any, *, dialect: str = "koncorde") -> dict[str, Any]:
        """Check a filter without registering it; return the server's report."""
        return await self._pool.call(calls.validate_filter(filter_, dialect))

    async def remove(self, id_: str) -> None:
        """Remove a filter."""
        await self._pool.call(calls.remove_filter(id_))

    def _subscription(self, state: ResumeState) -> AsyncSubscription:
        return AsyncSubscription(self._pool, state)


class AsyncResumingIterator(Generic[T, S, P]):
    """
    An async iterator over a connection that is opened again when it is cut; `close` ends it, from any task.

    A read that is cancelled, by `asyncio.wait_for` for instance, loses nothing: the next one continues.
    """

    def __init__(self, state: ResumeState) -> None:
        self._state = state
        self._closed = asyncio.Event()
        self._opening: asyncio.Task[S] | None = None
        self._source: S | None = None
        # What was received and not yet returned.
        self._pending: deque[P] = deque()
        self._reading = False

    @property
    def last_event_id(self) -> str | None:
        """Return the id after which a later subscription would continue."""
        return self._state.last_event_id

    @property
    def connected(self) -> bool:
        """Return whether the connection is open now."""
        return self._source is not None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._reading:
            raise RuntimeError("another task is reading this subscription: give each task its own")
        self._reading = True
        try:
            while not self._closed.is_set():
                while self._pending:
                    item = self._read(self._pending.popleft())
                    if item is not None:
                        return item
                if self._source is None:
                    await self._connect()
                elif not await self._receive(self._source):
                    await self._reconnect()
        finally:
            self._reading = False
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the subscription; a task that waits for the next item stops waiting."""
        self._closed.set()
        if self._opening is not None:
            self._opening.cancel()
        source, self._source = self._source, None
        if source is not None:
            await self._disconnect(source)

    aclose = close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _connect(self) -> None:
        """Open the connection; wait before the next attempt if that failed."""
        self._opening = opening = asyncio.ensure_future(self._open())
        try:
            source = await opening
        except ClientError as error:
            if not self._state.failed(error):
                self._closed.set()
                raise
            await self._pause()
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed.is_set() and task is not None and not task.cancelling():
                return  # `close` cancelled the opening, not the caller
            raise
        finally:
            self._opening = None
            del opening  # its error refers to this frame, which would keep the subscription alive
        if self._closed.is_set():  # closed while it was opening
            await self._disconnect(source)
        else:
            self._source = source

    async def _reconnect(self) -> None:
        """Give up a connection that was cut; wait before the next attempt."""
        source, self._source = self._source, None
        if source is not None:
            await self._disconnect(source)
        if self._state.reconnect:
            await self._pause()
        else:
            self._closed.set()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._state.wait_s()):
                await self._closed.wait()

    async def _open(self) -> S:
        """Return an open connection. Raises ClientError."""
        raise NotImplementedError

    async def _receive(self, source: S) -> bool:
        """Wait for more and add it to `_pending`; return False if the connection was cut."""
        raise NotImplementedError

    async def _disconnect(self, source: S) -> None:
        raise NotImplementedError

    def _read(self, piece: P) -> T | None:
        """Return the item that a piece delivers, if any."""
        raise NotImplementedError


class AsyncFrameIterator(AsyncResumingIterator[T, AsyncConnection, Frame]):
    """An async iterator over the frames of server-sent events."""

    def __init__(self, pool: AsyncPool, state: ResumeState) -> None:
        super().__init__(state)
        self._pool = pool
        self._frames = FrameReader()

    def __del__(self) -> None:
        source = getattr(self, "_source", None)
        if source is not None:
            source.abort()

    async def _open(self) -> AsyncConnection:
        path, request_headers = self._state.request()
        connection, headers = await self._pool.stream(path, request_headers)
        self._frames = FrameReader()
        self._state.connected(headers.get("virta-position"))
        return connection

    async def _receive(self, source: AsyncConnection) -> bool:
        try:
            async with asyncio.timeout_at(source.received_at + SILENCE_S):
                data = await source.read()
            self._pending.extend(self._frames.feed(data))
        except UNREADABLE:
            return False
        except ClientError:
            await self.close()
            raise
        return bool(data)

    async def _disconnect(self, source: AsyncConnection) -> None:
        source.abort()


class AsyncSubscription(AsyncFrameIterator[Received]):
    """An async iterator of `Received`; `close` ends it, also from another task."""

    def _read(self, piece: Frame) -> Received | None:
        return self._state.read_frame(piece)


class AsyncLiveRows(CurrentRows, AsyncFrameIterator[LiveChange]):
    """An async iterator of changes that keeps `rows` current; `close` ends it, also from another task."""

    def __init__(self, pool: AsyncPool, state: LiveState) -> None:
        super().__init__(pool, state)
        self._live = state

    def _read(self, piece: Frame) -> LiveChange | None:
        return self._live.read_change(piece)


class AsyncStreamSubscription(AsyncResumingIterator[tuple[str, str], "AsyncSocket", "str | bytes"]):
    """An async iterator of (stream id, text) over a WebSocket; `close` ends it, also from another task."""

    def __init__(self, socket: StreamSocket, state: ResumeState) -> None:
        super().__init__(state)
        self._socket = socket

    async def _open(self) -> AsyncSocket:
        from websockets.asyncio.client import connect  # noqa: PLC0415

        with self._socket.refusals():
            socket = await connect(**self._socket.options(self._state))
        self._state.connected()
        return socket

    async def _receive(self, source: AsyncSocket) -> bool:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        try:
            self._pending.append(await source.recv())
        except ConnectionClosed:
            return False
        return True

    async def _disconnect(self, source: AsyncSocket) -> None:
        await source.close()

    def _read(self, piece: str | bytes) -> tuple[str, str] | None:
        return self._state.read_message(piece)
