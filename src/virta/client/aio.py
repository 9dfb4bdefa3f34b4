"""
`AsyncClient`: the server from asyncio; the same methods, awaited.

Requests go over asyncio's streams, one connection each; subscriptions are async iterators that
reconnect and resume exactly like the blocking ones (they share `Cursor` and `FrameReader`).
"""

from __future__ import annotations

import asyncio
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
    check_stream,
    collection_path,
    is_final,
    messages_body,
    publication,
    streams_cursor,
)
from virta.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from websockets.asyncio.client import ClientConnection

    from virta.event import Event

HEAD_BYTES_MAX = 65536
READ_BYTES = 65536
# What is unsent, or unsaid in TLS, may take so long when a connection is closed.
CLOSE_S_MAX = 1.0
# What reading may raise: cut off, or nothing that HTTP knows.
UNREADABLE = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)
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

    async def close(self) -> None:
        """Nothing is kept open between requests; here for the symmetry with `Client`."""

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

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
        self, *streams: str, max_queued: int = 250, reconnect: bool = True
    ) -> AsyncIterator[tuple[str, str]]:
        """Hear messages as (stream id, text); needs the `websockets` package."""
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        cursor = streams_cursor(streams, max_queued)
        while True:
            try:
                socket = await self._open_socket(cursor.request()[0])
            except ClientError as error:
                if not reconnect or is_final(error):
                    raise
                cursor.unanswered(error)
                await asyncio.sleep(cursor.wait_s())
                continue
            cursor.connected(None)
            async with socket:
                try:
                    async for text in socket:
                        message = msgspec.json.decode(text)
                        yield message["publish_to"], message["payload"]
                except ConnectionClosed:
                    pass
            if not reconnect:
                return
            await asyncio.sleep(cursor.wait_s())

    async def _open_socket(self, path: str) -> ClientConnection:
        from websockets.asyncio.client import connect  # noqa: PLC0415
        from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415

        try:
            return await connect(
                self._address.websocket(path),
                additional_headers=self._address.headers,
                ssl=self._tls,
                open_timeout=self._timeout,
                max_size=None,
            )
        except InvalidStatus as error:
            check(error.response.status_code, bytes(error.response.body or b""))
            raise
        except (OSError, InvalidHandshake) as error:
            raise self._unreachable(error) from error

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
        try:
            async with asyncio.timeout(self._timeout):
                opened = await self._send(method, path, body, headers or {})
                reader, writer, status, received = opened
                try:
                    bodiless = method == "HEAD" or status in {204, 304}
                    answer = b"" if bodiless else await _body(reader, received)
                except UNREADABLE as error:
                    raise self._unreachable(error) from error
                finally:
                    await _shut(writer)
        except TimeoutError:
            waited = TimeoutError(f"none within {self._timeout} s")
            raise self._unreachable(waited) from None
        return check(status, answer), received

    async def follow(self, cursor: Cursor, *, reconnect: bool) -> AsyncIterator[Received]:
        """Read a stream, again and again."""
        while True:
            path, headers = cursor.request()
            try:
                reader, writer, received = await self._open_stream(path, headers)
            except ClientError as error:
                if not reconnect or is_final(error):
                    raise
                cursor.unanswered(error)
                await asyncio.sleep(cursor.wait_s())
                continue
            try:
                cursor.connected(received.get("virta-position"))
                async for one in self._read(reader, received, cursor):
                    yield one
            finally:
                await _shut(writer)
            if not reconnect:
                return
            await asyncio.sleep(cursor.wait_s())

    async def _open_stream(
        self, path: str, headers: dict[str, str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, str]]:
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer, status, received = await self._send("GET", path, None, headers)
                try:
                    if status != 200:
                        check(status, await _body(reader, received))
                    check_stream(received.get("content-type"))
                except BaseException:
                    writer.transport.abort()
                    raise
                return reader, writer, received
        except UNREADABLE as error:
            raise self._unreachable(error) from error

    async def _read(
        self, reader: asyncio.StreamReader, received: dict[str, str], cursor: Cursor
    ) -> AsyncIterator[Received]:
        frames = FrameReader()
        chunked = _is_chunked(received)
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    data = await (_chunk(reader) if chunked else reader.read(READ_BYTES))
            except UNREADABLE:
                return
            if not data:
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
            first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(first.partition(" ")[2][:3])
        except BaseException as error:
            # Closed, it would first send the rest of the body, to a server that may be stuck.
            writer.transport.abort()
            if isinstance(error, UNREADABLE):
                raise self._unreachable(error) from error
            raise
        pairs = (line.partition(":") for line in rest if line)
        received = {name.lower(): value.strip() for name, _, value in pairs}
        return reader, writer, status, received

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
        path = collection_path(index, collection)
        answer, _ = await self._client.request("POST", path, body, JSON)
        return dict(answer)

    async def ids(self, index: str, collection: str) -> list[str]:
        answer, _ = await self._client.request("GET", collection_path(index, collection))
        return list(answer["ids"])

    async def exists(self, index: str, collection: str) -> bool:
        try:
            await self._client.request("HEAD", collection_path(index, collection))
        except ClientError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def validate(self, filter_: Any, *, dialect: str = "koncorde") -> dict[str, Any]:
        body = msgspec.json.encode({"filter": filter_, "dialect": dialect})
        answer, _ = await self._client.request("POST", "/filters/validate", body, JSON)
        return dict(answer)

    async def test(
        self, index: str, collection: str, document: Any, document_id: str | None = None
    ) -> list[str]:
        """Ids of the filters that a document satisfies."""
        body = {"document": document}
        if document_id is not None:
            body["documentId"] = document_id
        path = f"{collection_path(index, collection)}/test"
        answer, _ = await self._client.request("POST", path, msgspec.json.encode(body), JSON)
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


def _is_chunked(received: dict[str, str]) -> bool:
    return received.get("transfer-encoding", "").lower() == "chunked"


async def _body(reader: asyncio.StreamReader, received: dict[str, str]) -> bytes:
    """A whole body, however it is delimited: a proxy may have chosen another way than the server."""
    if _is_chunked(received):
        parts = []
        while part := await _chunk(reader):
            parts.append(part)
        return b"".join(parts)
    if "content-length" in received:
        return await reader.readexactly(int(received["content-length"]))
    return await reader.read()


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk; empty behind the last one."""
    size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:-2]


async def _shut(writer: asyncio.StreamWriter) -> None:
    """Close; a server that is stuck is not waited for."""
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await writer.wait_closed()
    except (TimeoutError, asyncio.CancelledError) as error:
        writer.transport.abort()
        if not isinstance(error, TimeoutError):
            raise
    except (OSError, ssl_module.SSLError):
        return
