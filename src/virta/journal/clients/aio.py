"""The asyncio client of the daemon: any number of commands at a time on one connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar, cast

from virta.journal.clients.client_protocol import (
    NOTIFICATIONS_MAX,
    ClientProtocol,
    connection_lost,
    unreachable,
)
from virta.journal.protocol import commands
from virta.journal.protocol.messages import PORT
from virta.journal.protocol.methods import AwaitedMethods

if TYPE_CHECKING:
    import ssl

    from virta.errors import JournalError
    from virta.journal.protocol.commands import Command
    from virta.journal.protocol.messages import Reply, Request

T = TypeVar("T")
# How long closing waits for what was written to leave.
CLOSE_S_MAX = 1.0


class AsyncClient(AwaitedMethods, asyncio.Protocol):
    """Any number of commands at a time; make it with `await AsyncClient.connect(...)`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._protocol: ClientProtocol[asyncio.Future[Reply]] = ClientProtocol(self._notify)
        self._out: list[bytes] = []
        self._lost: JournalError | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self._writable = asyncio.Event()
        self._writable.set()
        self.notifications: asyncio.Queue[Reply] = asyncio.Queue(NOTIFICATIONS_MAX)

    @classmethod
    async def connect(
        cls,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> AsyncClient:
        """Connect to a daemon; `token` and `tls` where it asks for them."""
        loop = asyncio.get_running_loop()
        try:
            _, client = await loop.create_connection(cls, host, port, ssl=tls)
        except OSError as error:
            raise unreachable(host, port, error) from error
        if token is not None:
            try:
                await client.call(commands.authenticate(token))
            except BaseException:
                await client.close()
                raise
        return client

    @property
    def connected(self) -> bool:
        """Return whether the connection is open."""
        return self._lost is None

    async def call(self, command: Command[T]) -> T:
        """Send one command and wait for its reply."""
        return command.result(await self.request(command.request))

    async def request(self, request: Request) -> Reply:
        """Send one request with an identifier of its own and return the reply."""
        await self._writable.wait()
        if self._lost is not None or self._transport is None:
            raise self._lost or connection_lost("not connected")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        encoded = self._protocol.send(request, future)
        if not self._out:
            loop.call_soon(self._flush)
        self._out.append(encoded)
        return await future

    def _flush(self) -> None:
        """Write what was asked in one turn of the loop at once."""
        out, self._out = self._out, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    def _notify(self, message: Reply) -> None:
        if self.notifications.full():
            self.notifications.get_nowait()
        self.notifications.put_nowait(message)

    async def close(self) -> None:
        """Close the connection; a daemon that reads nothing is waited for up to CLOSE_S_MAX seconds."""
        transport = self._transport
        if transport is None:
            return
        transport.close()
        try:
            # `wait`, as cancelling this task must not cancel the future.
            await asyncio.wait([self._closed], timeout=CLOSE_S_MAX)
        finally:
            if not self._closed.done():
                transport.abort()
        await asyncio.wait([self._closed])

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not instances of it

    def data_received(self, data: bytes) -> None:
        for future, reply in self._protocol.receive(data):
            if not future.done():
                future.set_result(reply)
        if self._protocol.error is not None and self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = connection_lost(self._protocol.error or exc or "closed")
        self._transport = None
        self._writable.set()
        for future in self._protocol.outstanding.values():
            if not future.done():
                future.set_exception(self._lost)
        self._protocol.outstanding.clear()
        self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
