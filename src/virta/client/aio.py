"""
`AsyncClient`: the server from asyncio; the same methods, awaited.

Requests go over asyncio's streams, one connection each; subscriptions are async iterators that
reconnect and resume exactly like the blocking ones (they share `Cursor` and `FrameReader`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
from typing import TYPE_CHECKING, Any

import msgspec

from virta.client.frames import FrameReader, Received
from virta.client.sync import filter_path
from virta.client.wire import (
    SILENCE_S,
    TIMEOUT_S,
    URL_DEFAULT,
    Address,
    Cursor,
    Start,
    channel_path,
    check,
    messages_body,
    publication,
    streams_query,
)
from virta.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from virta.event import Event

HEAD_BYTES_MAX = 65536
JSON = {"Content-Type": "application/json"}


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
        self.filters = AsyncFilters(self)

    async def publish(self, channel: str, *events: Event | Mapping[str, Any]) -> str:
        """Publish events; returns the durability that was met."""
        path, kind, body = publication(channel, events)
        _, headers = await self.request("POST", path, body, {"Content-Type": kind})
        return headers.get("virta-durability", "none")

    def subscribe(
        self,
        channel: str,
        query: str = "",
        *,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> AsyncIterator[Received]:
        """Hear the events of a channel that satisfy a query."""
        cursor = Cursor(lambda s: channel_path(channel, s, query), start, last_event_id, on_gap)
        return self.follow(cursor, reconnect=reconnect)

    async def publish_streams(self, *messages: tuple[str, str]) -> None:
        """Send (stream id, text) messages."""
        await self.request("POST", "/publish", messages_body(messages), JSON)

    async def subscribe_streams(
        self, *streams: str, max_queued: int = 250
    ) -> AsyncIterator[tuple[str, str]]:
        """Hear messages as (stream id, text); needs the `websockets` package."""
        from websockets.asyncio.client import connect  # noqa: PLC0415
        from websockets.exceptions import InvalidStatus  # noqa: PLC0415

        url = self._address.websocket(streams_query(streams, max_queued))
        try:
            socket = await connect(
                url, additional_headers=self._address.headers, ssl=self._tls, max_size=None
            )
        except InvalidStatus as error:
            check(error.response.status_code, bytes(error.response.body or b""))
            raise
        async with socket:
            async for text in socket:
                message = msgspec.json.decode(text)
                yield message["publish_to"], message["payload"]

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
        """One request, read whole."""
        async with asyncio.timeout(self._timeout):
            reader, writer, status, received = await self._send(method, path, body, headers or {})
            try:
                length = int(received.get("content-length", "0"))
                bodiless = method == "HEAD" or status in {204, 304}
                answer = b"" if bodiless else await reader.readexactly(length)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise self._unreachable(error) from error
            finally:
                await _shut(writer)
        return check(status, answer), received

    async def follow(self, cursor: Cursor, *, reconnect: bool) -> AsyncIterator[Received]:
        """Read a stream, again and again."""
        while True:
            path, headers = cursor.request()
            try:
                async with asyncio.timeout(self._timeout):
                    opened = await self._send("GET", path, None, headers)
            except (ClientError, TimeoutError) as error:
                if not reconnect:
                    raise
                cursor.unanswered(error)
                await asyncio.sleep(cursor.wait_s())
                continue
            reader, writer, status, received = opened
            try:
                if status != 200:
                    body = await reader.readexactly(int(received.get("content-length", "0")))
                    check(status, body)
                cursor.connected(received.get("virta-position"))
                async for one in self._read(reader, cursor):
                    yield one
            finally:
                await _shut(writer)
            if not reconnect:
                return
            await asyncio.sleep(cursor.wait_s())

    async def _read(self, reader: asyncio.StreamReader, cursor: Cursor) -> AsyncIterator[Received]:
        frames = FrameReader()
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    size = int(await reader.readuntil(b"\r\n"), 16)
                    data = (await reader.readexactly(size + 2))[:-2]
            except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
                return
            if not size:
                return
            for frame in frames.feed(data):
                event = cursor.take(frame)
                if event is not None:
                    assert frame.id is not None
                    yield Received(event, frame.id)

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, dict[str, str]]:
        address = self._address
        try:
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=self._tls, limit=HEAD_BYTES_MAX
            )
        except OSError as error:
            raise self._unreachable(error) from error
        lines = {"Host": f"{address.host}:{address.port}"} | address.headers | headers
        if body is not None:
            lines["Content-Length"] = str(len(body))
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        try:
            writer.write(
                f"{method} {address.prefix}{path} HTTP/1.1\r\n{text}\r\n".encode() + (body or b"")
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            await _shut(writer)
            raise self._unreachable(error) from error
        pairs = (line.partition(":") for line in head[1:] if line)
        received = {name.lower(): value.strip() for name, _, value in pairs}
        return reader, writer, int(head[0].split()[1]), received

    def _unreachable(self, error: Exception) -> ClientError:
        place = f"{self._address.host}:{self._address.port}"
        return ClientError(f"no answer from {place}: {error}", code="unreachable")


class AsyncFilters:
    """Registered filters of a server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def register(
        self, index: str, collection: str, filter_: Any, *, dialect: str = "koncorde"
    ) -> dict[str, Any]:
        """Register a filter; gives `{id, diff}`."""
        body = msgspec.json.encode({"filter": filter_, "dialect": dialect})
        answer, _ = await self._client.request("POST", f"/filters/{index}/{collection}", body, JSON)
        return dict(answer)

    async def ids(self, index: str, collection: str) -> list[str]:
        answer, _ = await self._client.request("GET", f"/filters/{index}/{collection}")
        return list(answer["ids"])

    async def test(
        self, index: str, collection: str, document: Any, document_id: str | None = None
    ) -> list[str]:
        """Ids of the filters that a document satisfies."""
        body = {"document": document}
        if document_id is not None:
            body["documentId"] = document_id
        answer, _ = await self._client.request(
            "POST", f"/filters/{index}/{collection}/test", msgspec.json.encode(body), JSON
        )
        return list(answer["ids"])

    async def remove(self, id_: str) -> None:
        await self._client.request("DELETE", f"/filters/{id_}")

    def events(
        self,
        *ids: str,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> AsyncIterator[Received]:
        """Hear what registered filters let through."""
        cursor = Cursor(filter_path(ids), start, last_event_id, on_gap)
        return self._client.follow(cursor, reconnect=reconnect)


async def _shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, ssl_module.SSLError):
        await writer.wait_closed()
