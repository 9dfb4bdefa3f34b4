"""
Connections of `AsyncClient`: kept open between requests, bounded, each used by one request at a time.

A request uses the connection that was used last, or opens one while fewer than `CONNECTIONS_MAX` are in
use; further requests wait in order. A connection returns to the pool when its response was read completely
and both sides allow reuse; otherwise it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, TypeVar, cast

from virta.client.calls import UNREADABLE, Address, ServerCall, stream_request, unreachable
from virta.client.exchange import Exchange, IdleConnections, RequestBytes
from virta.client.http import READ_BYTES, ResponseReader, is_readable
from virta.errors import ClientError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

# Concurrent requests: enough to fill every group commit of the server.
CONNECTIONS_MAX = 16
# Time for TLS to shut down when the client is closed.
CLOSE_S_MAX = 1.0
# A connection with more than this that was not read stops reading from its socket.
UNREAD_BYTES_MAX = 256 * 1024

T = TypeVar("T")


class AsyncConnection(asyncio.BufferedProtocol):
    """
    One connection: sends a request and reads its response, whole or piece by piece.

    A protocol with a buffer of its own: asyncio's streams take a quarter more processor time for a request, and
    without the buffer asyncio allocates 256 KiB for each read, which the allocator may map and unmap every time.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._received: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: Exception | None = None
        self.exchange = Exchange("GET")
        self.received_at = 0.0
        self.closed = self._loop.create_future()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received.append(bytes(self._buffer[:nbytes]))
        self._size += nbytes
        self.received_at = self._loop.time()
        if self._size > UNREAD_BYTES_MAX:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, exc
        if not self.closed.done():
            self.closed.set_result(None)
        self._wake()

    # Called by the client.

    async def ask(self, request: RequestBytes) -> ResponseReader:
        """
        Send a request; return its response as far as the head. `read` returns the body.

        Raises:
            OSError: the connection was cut.
            ValueError: the bytes are not HTTP.
        """
        self.exchange = exchange = Exchange(request.method)
        self.received_at = self._loop.time()
        self._transport.write(request.data)
        exchange.sent = True  # some of it may have left
        while not exchange.reader.status:
            exchange.receive(await self._receive())
        return exchange.reader

    async def read(self) -> bytes:
        """Return what has arrived of the body, at least one byte; empty at its end. Raises as `ask`."""
        while not self.exchange.has_piece:
            self.exchange.receive(await self._receive())
        return self.exchange.take()

    async def read_all(self) -> None:
        """Read the rest of the response into `exchange`. Raises as `ask`."""
        while not self.exchange.reader.complete:
            self.exchange.receive(await self._receive())

    async def _receive(self) -> bytes:
        """Return what has arrived, at least one byte; empty at the end of the connection."""
        while not self._received:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return b""
            assert self._waiter is None, "one task at a time"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data = self._received[0] if len(self._received) == 1 else b"".join(self._received)
        if self._size > UNREAD_BYTES_MAX and not self._transport.is_closing():
            self.received_at = self._loop.time()  # silence is measured from here
            self._transport.resume_reading()
        self._received, self._size = [], 0
        return data

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def reusable(self) -> bool:
        """Return whether the request left and its response ended in a way that allows another one."""
        sent = self._transport.get_write_buffer_size() == 0
        return self.exchange.reusable and sent and not self._transport.is_closing()

    @property
    def quiet(self) -> bool:
        """Return whether it is open and nothing arrived since: that would be its end, or a stray response."""
        if self._received or self._transport.is_closing():
            return False
        # The loop may not have noticed yet what can be read.
        return not is_readable(self._transport.get_extra_info("socket").fileno())

    def close(self) -> None:
        """Close after what was written has left; `closed` is set then."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once; unsent bytes are dropped."""
        # The loop may be closed already when a forgotten subscription is collected.
        with contextlib.suppress(RuntimeError):
            self._transport.abort()


class AsyncPool:
    """The connections of one client to one server."""

    def __init__(self, address: Address, timeout: float, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._timeout = timeout
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._idle: IdleConnections[AsyncConnection] = IdleConnections()
        self._open: set[AsyncConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def call(self, call: ServerCall[T]) -> T:
        """
        Send a call and return what its answer means.

        Raises:
            ClientError: refused, or no answer.
        """
        self._attach()
        try:
            async with self._reaching():
                exchange = await self._send(RequestBytes.of(self._address, call))
            answer, headers = exchange.answer()
        except ClientError as error:
            return call.failed(error)
        return call.read(answer, headers)

    async def _send(self, request: RequestBytes) -> Exchange:
        """Send a request and read its whole response."""
        async with self._slots:
            while True:
                kept = self._pop_idle()
                connection = kept or await self._connect()
                self._open.add(connection)
                try:
                    await connection.ask(request)
                    await connection.read_all()
                except OSError as error:
                    self._drop(connection)
                    again = connection.exchange.may_repeat(request, error, kept=kept is not None)
                    if not again or self._closed:
                        raise
                except BaseException:
                    # Not close(): that would first send the rest of the body to a server that does not read.
                    self._drop(connection)
                    raise
                else:
                    self._give_back(connection)
                    return connection.exchange

    async def stream(
        self, path: str, headers: dict[str, str]
    ) -> tuple[AsyncConnection, dict[str, str]]:
        """
        Open a stream of events on its own connection, which the caller closes.

        Raises:
            ClientError: refused, or no answer.
        """
        async with self._reaching():
            connection = await self._connect()
            try:
                request = RequestBytes.of(self._address, stream_request(path, headers))
                response = await connection.ask(request)
                if response.status != 200:
                    await connection.read_all()
                connection.exchange.check_stream()
            except BaseException:
                connection.abort()
                raise
        return connection, response.headers

    async def close(self) -> None:
        """Close every connection; running requests fail, later ones keep no connection."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not asyncio.get_running_loop():
            return
        for connection in self._open:
            connection.close() if connection in self._idle else connection.abort()
        closing = [connection.closed for connection in self._open]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S_MAX)
        for connection in self._open:
            connection.abort()
        self._idle.clear()
        self._open.clear()

    @contextlib.asynccontextmanager
    async def _reaching(self) -> AsyncIterator[None]:
        """Limit the time of a request, and turn connection errors into `ClientError`."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            waited = error if error.errno else TimeoutError(f"none within {self._timeout} s")
            raise unreachable(self._address, waited) from None
        except UNREADABLE as error:
            raise unreachable(self._address, error) from error

    def _attach(self) -> None:
        """Use the running loop; drop connections of an earlier loop, which ended with it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
            self._idle.clear()
            self._open.clear()
            self._timer = None

    async def _connect(self) -> AsyncConnection:
        address = self._address
        _, connection = await asyncio.get_running_loop().create_connection(
            AsyncConnection, address.host, address.port, ssl=self._tls
        )
        return connection

    def _pop_idle(self) -> AsyncConnection | None:
        while (connection := self._idle.pop()) is not None and not connection.quiet:
            self._drop(connection)
        return connection

    def _drop(self, connection: AsyncConnection) -> None:
        connection.abort()
        self._open.discard(connection)

    def _give_back(self, connection: AsyncConnection) -> None:
        if self._closed or not connection.reusable:
            self._drop(connection)
            return
        assert self._loop is not None
        self._idle.add(connection, self._loop.time())
        if self._timer is None:
            self._start_timer()

    def expire(self) -> None:
        """Close connections that were not used for long."""
        assert self._loop is not None
        for connection in self._idle.pop_expired(self._loop.time()):
            self._drop(connection)
        self._start_timer()

    def _start_timer(self) -> None:
        """Call `expire` when the next connection expires."""
        assert self._loop is not None
        due = self._idle.next_expiry()
        self._timer = None if due is None else self._loop.call_at(due, _expire, weakref.ref(self))

    def __del__(self) -> None:
        # A client that is garbage collected closes its connections.
        for connection in self._open:
            connection.abort()


def _expire(pool: weakref.ref[AsyncPool]) -> None:
    """Expire idle connections of a pool; the timer's weak reference does not keep the pool alive."""
    found = pool()
    if found is not None:
        found.expire()
