"""
Subscriptions to streams, over WebSocket: blocking and for asyncio; both need the `websockets` package.

When the connection is cut they reconnect and continue after the last message they returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

from virta.client.wire import Address, Cursor, check, is_final, unreachable
from virta.errors import ClientError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Generator

    from websockets.asyncio.client import ClientConnection as AsyncSocket
    from websockets.sync.client import ClientConnection as Socket

T = TypeVar("T")


class StreamSubscription:
    """An iterator of (stream id, text); `close` ends it, also from another thread."""

    def __init__(
        self,
        address: Address,
        cursor: Cursor,
        *,
        reconnect: bool,
        timeout: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._address = address
        self._cursor = cursor
        self._reconnect = reconnect
        self._timeout = timeout
        self._tls = tls
        self._closed = threading.Event()
        self._socket: Socket | None = None
        self._messages = self._run()

    @property
    def last_event_id(self) -> str | None:
        """Where a later subscription would continue."""
        return self._cursor.last_event_id

    def __iter__(self) -> StreamSubscription:
        return self

    def __next__(self) -> tuple[str, str]:
        return next(self._messages)

    def close(self) -> None:
        """End the subscription; a thread that waits for a message stops waiting."""
        self._closed.set()
        socket = self._socket
        if socket is not None:
            socket.close()
        with contextlib.suppress(ValueError):  # another thread is reading, and ends by itself
            self._messages.close()

    def __enter__(self) -> StreamSubscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> Generator[tuple[str, str], None, None]:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        while not self._closed.is_set():
            try:
                socket = self._open()
            except ClientError as error:
                if not self._reconnect or is_final(error):
                    raise
                self._cursor.unanswered(error)
                self._closed.wait(self._cursor.wait_s())
                continue
            self._cursor.connected(None)
            self._socket = socket
            with socket:
                if self._closed.is_set():  # closed while it was connecting
                    return
                try:
                    for text in socket:
                        message = self._cursor.take_message(text)
                        if message is not None:
                            yield message
                except ConnectionClosed:
                    pass
            self._socket = None
            if not self._reconnect:
                return
            self._closed.wait(self._cursor.wait_s())

    def _open(self) -> Socket:
        from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415
        from websockets.sync.client import connect  # noqa: PLC0415

        path, headers = self._cursor.request()
        try:
            return connect(
                self._address.websocket(path),
                additional_headers=self._address.headers | headers,
                ssl=self._tls,
                open_timeout=self._timeout,
                max_size=None,
            )
        except InvalidStatus as error:
            check(error.response.status_code, bytes(error.response.body or b""))
            raise
        except (OSError, InvalidHandshake) as error:
            raise unreachable(self._address, error) from error


class AsyncStreamSubscription:
    """An async iterator of (stream id, text); `close` ends it, also from another task."""

    def __init__(
        self,
        address: Address,
        cursor: Cursor,
        *,
        reconnect: bool,
        timeout: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._address = address
        self._cursor = cursor
        self._reconnect = reconnect
        self._timeout = timeout
        self._tls = tls
        self._closed = asyncio.Event()
        self._opening: asyncio.Task[AsyncSocket] | None = None
        self._socket: AsyncSocket | None = None

    @property
    def last_event_id(self) -> str | None:
        """Where a later subscription would continue."""
        return self._cursor.last_event_id

    def __aiter__(self) -> AsyncStreamSubscription:
        return self

    async def __anext__(self) -> tuple[str, str]:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        while not self._closed.is_set():
            if self._socket is None:
                await self._connect()
                continue
            try:
                message = self._cursor.take_message(await self._socket.recv())
                if message is not None:
                    return message
            except ConnectionClosed:
                self._socket = None
                if not self._reconnect:
                    self._closed.set()
                else:
                    await pause(self._closed, self._cursor.wait_s())
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the subscription; a task that waits for a message stops waiting."""
        self._closed.set()
        if self._opening is not None:
            self._opening.cancel()
        socket = self._socket
        if socket is not None:
            await socket.close()

    aclose = close

    async def __aenter__(self) -> AsyncStreamSubscription:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _connect(self) -> None:
        self._opening = asyncio.ensure_future(self._open())
        try:
            socket = await opened(
                self._opening, self._closed, self._cursor, reconnect=self._reconnect
            )
        finally:
            self._opening = None
        if socket is None:
            return
        self._cursor.connected(None)
        self._socket = socket
        if self._closed.is_set():  # closed while it was opening
            await socket.close()

    async def _open(self) -> AsyncSocket:
        from websockets.asyncio.client import connect  # noqa: PLC0415
        from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415

        path, headers = self._cursor.request()
        try:
            return await connect(
                self._address.websocket(path),
                additional_headers=self._address.headers | headers,
                ssl=self._tls,
                open_timeout=self._timeout,
                max_size=None,
            )
        except InvalidStatus as error:
            check(error.response.status_code, bytes(error.response.body or b""))
            raise
        except (OSError, InvalidHandshake) as error:
            raise unreachable(self._address, error) from error


async def opened(
    opening: asyncio.Task[T], closed: asyncio.Event, cursor: Cursor, *, reconnect: bool
) -> T | None:
    """
    Return the connection that a task opens; None if the subscription was closed or has to try again.

    Before it has to try again, this waits for the cursor's pause.

    Raises:
        ClientError: the server refused, or did not answer and `reconnect` is False.
    """
    try:
        return await opening
    except ClientError as error:
        if not reconnect or is_final(error):
            closed.set()
            raise
        cursor.unanswered(error)
        await pause(closed, cursor.wait_s())
        return None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if closed.is_set() and task is not None and not task.cancelling():
            return None
        raise


async def pause(closed: asyncio.Event, wait_s: float) -> None:
    """Wait for a number of seconds, or until the subscription is closed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await closed.wait()
