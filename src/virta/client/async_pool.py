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
from typing import TYPE_CHECKING, Any, TypeVar, cast

from virta.client.calls import (
    UNREADABLE,
    Address,
    ServerCall,
    check,
    check_stream,
    is_repeatable,
    unreachable,
)
from virta.client.http import (
    IDLE_S,
    Response,
    ResponseReader,
    check_size,
    is_readable,
    request_bytes,
)
from virta.errors import ClientError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

# Concurrent requests: enough to fill every group commit of the server.
CONNECTIONS_MAX = 16
# Time for TLS to shut down when the client is closed.
CLOSE_S_MAX = 1.0
# A subscription that is not read stops reading from its socket here.
UNREAD_BYTES_MAX = 256 * 1024

T = TypeVar("T")


class AsyncConnection(asyncio.Protocol):
    """One connection: sends a request and reads its response, whole or piece by piece."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reader: ResponseReader | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._streaming = False
        self._paused = False
        self._error: Exception | None = None
        self.closed = self._loop.create_future()
        # Whether the server has sent any byte of a response to the current request.
        self.answered = False
        self.received_at = 0.0

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:  # a response without a request, such as 408
            self.abort()
            return
        self.answered = True
        try:
            piece = reader.feed(data)
            if piece:
                self._body.append(piece)
                self._size += len(piece)
                self._limit()
        except ValueError as error:
            self._fail(error)
            return
        if self._streaming:
            self.received_at = self._loop.time()
        if self._streaming or reader.complete:
            self._wake()

    def eof_received(self) -> bool:
        if self._reader is not None:
            try:
                self._reader.end()
            except ConnectionError as error:
                self._fail(error)
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        if self._error is None:
            self._error = exc or ConnectionError("the connection was closed")
        if not self.closed.done():
            self.closed.set_result(None)
        self._wake()

    # Called by the client.

    @property
    def usable(self) -> bool:
        """Return whether another request may be sent."""
        assert self._transport is not None
        sent = self._transport.get_write_buffer_size() == 0
        whole = self._reader is None or (self._reader.complete and self._reader.keep)
        return sent and whole and self._error is None and not self._transport.is_closing()

    @property
    def quiet(self) -> bool:
        """Return whether nothing can be read: the loop may not have noticed the end of the connection yet."""
        assert self._transport is not None
        return not is_readable(self._transport.get_extra_info("socket").fileno())

    async def exchange(self, method: str, data: bytes) -> Response:
        """
        Send a request and return its complete response.

        Raises:
            OSError: the connection was cut.
            ValueError: the response is not HTTP, or too large.
        """
        reader = self._send(method, data)
        while not reader.complete:
            await self._wait()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body, self._size = [], 0
        return Response(reader.status, reader.headers, body)

    def mark_idle(self) -> None:
        """Expect nothing from the server until the next request."""
        self._reader = None

    async def open_stream(self, method: str, data: bytes) -> tuple[int, dict[str, str]]:
        """Send a request and return the head of its response; `read` returns the body."""
        reader = self._send(method, data)
        self._streaming = True
        while not reader.status:
            await self._wait()
        return reader.status, reader.headers

    async def read(self) -> bytes:
        """
        Return what has arrived of the body, at least one byte; empty at its end.

        Raises:
            OSError: the connection was cut.
            ValueError: the bytes are not HTTP.
        """
        assert self._reader is not None
        while not self._body:
            if self._reader.complete:
                return b""
            await self._wait()
        data = b"".join(self._body)
        self._body, self._size = [], 0
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self.received_at = self._loop.time()  # silence is measured from here
            self._transport.resume_reading()
        return data

    async def read_all(self) -> bytes:
        """Return the rest of the body."""
        body = await self.read()
        while piece := await self.read():
            body += piece
            check_size(len(body))
        return body

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; unsent bytes are dropped."""
        # The loop may be closed already when a forgotten subscription is collected.
        with contextlib.suppress(RuntimeError):
            if self._transport is not None:
                self._transport.abort()

    def _send(self, method: str, data: bytes) -> ResponseReader:
        assert self._transport is not None
        self._reader = reader = ResponseReader(method)
        self.answered = False
        self.received_at = self._loop.time()
        self._transport.write(data)
        return reader

    async def _wait(self) -> None:
        """Wait for more, or raise what ended the connection."""
        if self._error is not None:
            raise self._error
        assert self._waiter is None, "one task at a time"
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _limit(self) -> None:
        if self._streaming:
            if self._size > UNREAD_BYTES_MAX and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
        else:
            check_size(self._size)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self.abort()
        self._wake()


class AsyncPool:
    """The connections of one client to one server."""

    def __init__(self, address: Address, timeout: float, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._timeout = timeout
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._idle: list[tuple[float, AsyncConnection]] = []
        self._open: set[AsyncConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def call(self, call: ServerCall[T]) -> T:
        """Send a call and return what its answer means."""
        try:
            answer, headers = await self.request(call.method, call.path, call.body, call.headers)
        except ClientError as error:
            if call.refused is None:
                raise
            return call.refused(error)
        return call.read(answer, headers)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[Any, dict[str, str]]:
        """
        Send one request; return the JSON of its answer and its headers, in lower case.

        A kept connection that the server closes without a byte of an answer is replaced, and the
        request sent again, if it may arrive twice (`is_repeatable`).

        Raises:
            ClientError: refused, or no answer.
        """
        self._attach()
        async with self._reaching():
            data = request_bytes(self._address, method, path, headers, body)
            response = await self._exchange(method, data, repeat=is_repeatable(method, path))
        return check(response.status, response.body), response.headers

    async def _exchange(self, method: str, data: bytes, *, repeat: bool) -> Response:
        async with self._slots:
            while True:
                kept = self._kept()
                connection = kept or await self._connect()
                try:
                    response = await connection.exchange(method, data)
                except OSError:
                    self._drop(connection)
                    if kept is None or connection.answered or not repeat or self._closed:
                        raise
                    continue
                except BaseException:
                    # Not close(): that would first send the rest of the body to a server that does not read.
                    self._drop(connection)
                    raise
                self._give_back(connection)
                return response

    async def stream(
        self, path: str, headers: dict[str, str]
    ) -> tuple[AsyncConnection, dict[str, str]]:
        """
        Open a stream of events on its own connection, which the caller closes.

        Raises:
            ClientError: refused, or no answer.
        """
        async with self._reaching():
            connection = await self._open_connection()
            try:
                data = request_bytes(self._address, "GET", path, headers, None)
                status, received = await connection.open_stream("GET", data)
                body = b"" if status == 200 else await connection.read_all()
                check_stream(status, received, body)
            except BaseException:
                connection.abort()
                raise
        return connection, received

    async def close(self) -> None:
        """Close every connection; running requests fail, later ones keep no connection."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not asyncio.get_running_loop():
            return
        idle = {connection for _, connection in self._idle}
        for connection in self._open:
            connection.close() if connection in idle else connection.abort()
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

    def _kept(self) -> AsyncConnection | None:
        while self._idle:
            _, connection = self._idle.pop()
            if connection.usable and connection.quiet:
                return connection
            self._drop(connection)
        return None

    async def _connect(self) -> AsyncConnection:
        connection = await self._open_connection()
        self._open.add(connection)
        return connection

    async def _open_connection(self) -> AsyncConnection:
        address = self._address
        _, connection = await asyncio.get_running_loop().create_connection(
            AsyncConnection, address.host, address.port, ssl=self._tls
        )
        return connection

    def _drop(self, connection: AsyncConnection) -> None:
        connection.abort()
        self._open.discard(connection)

    def _give_back(self, connection: AsyncConnection) -> None:
        if self._closed or not connection.usable:
            self._drop(connection)
            return
        connection.mark_idle()
        assert self._loop is not None
        self._idle.append((self._loop.time(), connection))
        if self._timer is None:
            self._timer = self._loop.call_later(IDLE_S, _expire, weakref.ref(self))

    def expire(self) -> None:
        """Close connections that were not used for `IDLE_S`, oldest first."""
        assert self._loop is not None
        self._timer = None
        limit = self._loop.time() - IDLE_S
        while self._idle and self._idle[0][0] <= limit:
            self._drop(self._idle.pop(0)[1])
        if self._idle:
            wait = self._idle[0][0] - limit
            self._timer = self._loop.call_later(wait, _expire, weakref.ref(self))

    def __del__(self) -> None:
        # A client that is garbage collected closes its connections.
        for connection in self._open:
            connection.abort()


def _expire(pool: weakref.ref[AsyncPool]) -> None:
    """Expire idle connections of a pool; the timer's weak reference does not keep the pool alive."""
    found = pool()
    if found is not None:
        found.expire()
