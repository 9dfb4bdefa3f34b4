"""
`AsyncClient`: the server from asyncio; the same methods as `Client`, awaited.

Requests share a pool of kept connections; each subscription has its own connection and reconnects
and resumes exactly like a blocking one (they share `Cursor` and `FrameReader`).
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from virta.client.frames import Frame, FrameReader, Received
from virta.client.pool import UNREADABLE, Connection, Pool
from virta.client.streams import AsyncStreamSubscription, opened, pause
from virta.client.wire import (
    JSON,
    SILENCE_S,
    TIMEOUT_S,
    URL_DEFAULT,
    Address,
    Cursor,
    Published,
    Start,
    channel_path,
    collection_path,
    filter_path,
    messages_body,
    publication,
    streams_cursor,
)
from virta.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from virta.event import Event


class AsyncClient:
    """A client of one server; see `virta.client.Client` for what each method does."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
        tls: ssl_module.SSLContext | None = None,
    ) -> None:
        self._address = Address(url, token)
        self._timeout = timeout
        self._tls = tls or (ssl_module.create_default_context() if self._address.tls else None)
        self._pool = Pool(self._address, timeout, self._tls)
        self.filters = AsyncFilters(self._pool)

    async def close(self) -> None:
        """Close every kept connection."""
        await self._pool.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Channels.

    async def publish(self, channel: str, *events: Event | Mapping[str, Any]) -> Published:
        """Publish events, several as one batch; many publications may run at once."""
        path, kind, body = publication(channel, events)
        _, headers = await self.request("POST", path, body, {"Content-Type": kind})
        return Published.of(headers)

    def subscribe(
        self,
        channel: str,
        query: str = "",
        *,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> AsyncSubscription:
        """Hear the events of a channel that satisfy a query."""
        cursor = Cursor(lambda s: channel_path(channel, s, query), start, last_event_id, on_gap)
        return AsyncSubscription(self._pool, cursor, reconnect=reconnect)

    # Streams.

    async def publish_streams(self, *messages: tuple[str, str]) -> None:
        """Send (stream id, text) messages."""
        await self.request("POST", "/publish", messages_body(messages), JSON)

    def subscribe_streams(
        self,
        *streams: str,
        max_queued: int = 250,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> AsyncStreamSubscription:
        """Subscribe to messages as (stream id, text); needs the `websockets` package."""
        return AsyncStreamSubscription(
            self._address,
            streams_cursor(streams, max_queued, last_event_id, on_gap),
            reconnect=reconnect,
            timeout=self._timeout,
            tls=self._tls,
        )

    # Requests.

    async def ready(self) -> bool:
        """Tell whether the server serves requests right now."""
        try:
            await self.request("GET", "/readyz")
        except ClientError:
            return False
        return True

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[Any, dict[str, str]]:
        """Send one request; return the JSON of the answer and its headers, in lower case."""
        return await self._pool.request(method, path, body, headers)


class AsyncSubscription:
    """
    An async iterator of `Received`; `close` ends it, also from another task.

    A read that is cancelled, by `asyncio.wait_for` for instance, loses nothing: the next one continues.
    """

    def __init__(self, pool: Pool, cursor: Cursor, *, reconnect: bool) -> None:
        self._pool = pool
        self._cursor = cursor
        self._reconnect = reconnect
        self._closed = asyncio.Event()
        self._opening: asyncio.Task[tuple[Connection, dict[str, str]]] | None = None
        self._connection: Connection | None = None
        self._reading = False
        self._reader = FrameReader()
        # Frames that were read and not yet returned: at most UNREAD_BYTES_MAX and one frame.
        self._frames: deque[Frame] = deque()

    @property
    def last_event_id(self) -> str | None:
        """Return the id from which a later subscription would continue."""
        return self._cursor.last_event_id

    @property
    def connected(self) -> bool:
        """Return whether the stream is open now."""
        return self._connection is not None

    def __aiter__(self) -> AsyncSubscription:
        return self

    async def __anext__(self) -> Received:
        if self._reading:
            raise RuntimeError("another task is reading this subscription: give each task its own")
        self._reading = True
        try:
            return await self._next()
        finally:
            self._reading = False

    async def _next(self) -> Received:
        while not self._closed.is_set():
            while self._frames:
                received = self._cursor.take(self._frames.popleft())
                if received is not None:
                    return received
            if self._connection is None:
                await self._connect()
            else:
                await self._read(self._connection)
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the subscription; a task that waits for an event stops waiting."""
        self._closed.set()
        if self._opening is not None:
            self._opening.cancel()
        self._disconnect()

    aclose = close

    async def __aenter__(self) -> AsyncSubscription:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.abort()

    async def _connect(self) -> None:
        path, headers = self._cursor.request()
        self._opening = asyncio.ensure_future(self._pool.stream(path, headers))
        try:
            stream = await opened(
                self._opening, self._closed, self._cursor, reconnect=self._reconnect
            )
        finally:
            self._opening = None
        if stream is None:
            return
        connection, received = stream
        if self._closed.is_set():  # closed while it was opening
            connection.abort()
            return
        self._connection, self._reader = connection, FrameReader()
        self._cursor.connected(received.get("virta-position"))

    async def _read(self, connection: Connection) -> None:
        """Read more frames; close a connection that was cut or silent for too long."""
        try:
            async with asyncio.timeout_at(connection.received_at + SILENCE_S):
                data = await connection.read()
            self._frames.extend(self._reader.feed(data))
        except UNREADABLE:
            data = b""
        except ClientError:
            self._closed.set()
            self._disconnect()
            raise
        if data:
            return
        self._disconnect()
        if not self._reconnect:
            self._closed.set()
        else:
            await pause(self._closed, self._cursor.wait_s())

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None


class AsyncFilters:
    """Registered filters of a server."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def register(
        self, index: str, collection: str, filter_: Any, *, dialect: str = "koncorde"
    ) -> dict[str, Any]:
        """Register a filter; gives `{id, diff}`."""
        path = collection_path(index, collection)
        answer: dict[str, Any] = await self._post(path, {"filter": filter_, "dialect": dialect})
        return answer

    async def ids(self, index: str, collection: str) -> list[str]:
        answer, _ = await self._pool.request("GET", collection_path(index, collection))
        return list(answer["ids"])

    async def exists(self, index: str, collection: str) -> bool:
        try:
            await self._pool.request("HEAD", collection_path(index, collection))
        except ClientError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def test(
        self, index: str, collection: str, document: Any, document_id: str | None = None
    ) -> list[str]:
        """Ids of the filters that a document satisfies."""
        body = {"document": document}
        if document_id is not None:
            body["documentId"] = document_id
        answer = await self._post(f"{collection_path(index, collection)}/test", body)
        return list(answer["ids"])

    async def validate(self, filter_: Any, *, dialect: str = "koncorde") -> dict[str, Any]:
        body = {"filter": filter_, "dialect": dialect}
        answer: dict[str, Any] = await self._post("/filters/validate", body)
        return answer

    async def remove(self, id_: str) -> None:
        await self._pool.request("DELETE", f"/filters/{id_}")

    def events(
        self,
        *ids: str,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> AsyncSubscription:
        """Hear what registered filters let through."""
        cursor = Cursor(filter_path(ids), start, last_event_id, on_gap)
        return AsyncSubscription(self._pool, cursor, reconnect=reconnect)

    async def _post(self, path: str, body: Any) -> Any:
        return (await self._pool.request("POST", path, msgspec.json.encode(body), JSON))[0]
