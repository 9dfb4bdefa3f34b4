"""
`Client`: the server from blocking code.

One client may be used by many threads, which share its kept connections. A subscription is an iterator that
reconnects by itself and continues after the last event it returned: without gap or duplicate as long as the
log still has what was missed (otherwise `on_gap` is called).
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from virta.client import calls
from virta.client.blocking_pool import BlockingConnection, BlockingPool
from virta.client.calls import TIMEOUT_S, UNREADABLE, URL_DEFAULT, Address, Published
from virta.client.frames import Frame, FrameReader, Received
from virta.client.live import CurrentRows, LiveChange, LiveState
from virta.client.stream_socket import StreamSocket
from virta.client.subscribing import SubscribingClient, SubscribingFilters
from virta.errors import ClientError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator, Mapping

    from websockets.sync.client import ClientConnection as Socket

    from virta.client.resume import ResumeState
    from virta.event import Event

T = TypeVar("T")


class Client(SubscribingClient["Subscription", "LiveRows", "StreamSubscription"]):
    """
    A client of one server.

    Arguments:
        token: bearer token, where the server asks for one.
        timeout: seconds for a request; subscriptions live on the server's pings.
        tls: how to check an https server; the system's trust by default.
    """

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        address = Address(url, token)
        self._pool = BlockingPool(address, timeout, tls)
        self._socket = StreamSocket(address, timeout, tls)
        self.filters = Filters(self._pool)

    def close(self) -> None:
        """Close every kept connection."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Channels.

    def publish(self, channel: str, *events: Event | Mapping[str, Any]) -> Published:
        """
        Publish events, several as one batch.

        Returns the durability that was met, as a string, with the `offset` of the (first) event and whether
        it was a `duplicate`.

        Events are `virta.event.Event` or the JSON object of one; any other mapping becomes the data of a
        new event. Repeating a publication is safe: the server drops repeats by source and id.

        Raises:
            ClientError: refused, or no answer.
        """
        return self._pool.call(calls.publish(channel, events))

    # Streams.

    def publish_streams(self, *messages: tuple[str, str]) -> None:
        """Send (stream id, text) messages."""
        self._pool.call(calls.publish_streams(messages))

    # What subscriptions of each kind are.

    def _subscription(self, state: ResumeState) -> Subscription:
        return Subscription(self._pool, state)

    def _live_rows(self, state: LiveState) -> LiveRows:
        return LiveRows(self._pool, state)

    def _stream_subscription(self, state: ResumeState) -> StreamSubscription:
        return StreamSubscription(self._socket, state)

    # Requests.

    def ready(self) -> bool:
        """Return whether the server serves requests right now."""
        return self._pool.call(calls.ready())

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[Any, dict[str, str]]:
        """
        Send one request; return the JSON of the answer and its headers, in lower case.

        Raises:
            ClientError: refused, or no answer.
        """
        return self._pool.call(calls.plain_request(method, path, body, headers))


class Filters(SubscribingFilters["Subscription"]):
    """Registered filters of a server."""

    def __init__(self, pool: BlockingPool) -> None:
        self._pool = pool

    def register(
        self, index: str, collection: str, filter_: Any, *, dialect: str = "koncorde"
    ) -> dict[str, Any]:
        """Register a filter; return `{id, diff}`."""
        return self._pool.call(calls.register_filter(index, collection, filter_, dialect))

    def ids(self, index: str, collection: str) -> list[str]:
        """Return the ids of a collection's filters."""
        return self._pool.call(calls.filter_ids(index, collection))

    def exists(self, index: str, collection: str) -> bool:
        """Return whether a collection has filters."""
        return self._pool.call(calls.collection_exists(index, collection))

    def test(
        self, index: str, collection: str, document: Any, document_id: str | None = None
    ) -> list[str]:
        """Return the ids of the filters that a document satisfies."""
        return self._pool.call(calls.test_document(index, collection, document, document_id))

    def validate(self, filter_: Any, *, dialect: str = "koncorde") -> dict[str, Any]:
        """Check a filter without registering it; return the server's report."""
        return self._pool.call(calls.validate_filter(filter_, dialect))

    def remove(self, id_: str) -> None:
        """Remove a filter."""
        self._pool.call(calls.remove_filter(id_))

    def _subscription(self, state: ResumeState) -> Subscription:
        return Subscription(self._pool, state)


class ResumingIterator(Generic[T]):
    """An iterator over a connection that is opened again when it is cut; `close` ends it, from any thread."""

    def __init__(self, state: ResumeState) -> None:
        self._state = state
        self._closed = threading.Event()
        self._cut: Callable[[], None] | None = None  # ends the present connection
        self._connected = False
        self._items = self._run()

    @property
    def last_event_id(self) -> str | None:
        """Return the id after which a later subscription would continue."""
        return self._state.last_event_id

    @property
    def connected(self) -> bool:
        """Return whether the connection is open now."""
        return self._connected

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return next(self._items)

    def close(self) -> None:
        """End the subscription; a thread that waits for the next item stops waiting."""
        self._closed.set()
        cut = self._cut
        if cut is not None:
            cut()
        with contextlib.suppress(ValueError):  # another thread is reading, and ends by itself
            self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> Generator[T, None, None]:
        while not self._closed.is_set():
            try:
                items = self._open()
            except ClientError as error:
                self._cut = None
                if self._closed.is_set():
                    return
                if not self._state.failed(error):
                    raise
                self._closed.wait(self._state.wait_s())
                continue
            try:
                self._connected = True
                yield from items
            finally:
                self._cut = None
                self._connected = False
                items.close()
            if not self._state.reconnect:
                return
            self._closed.wait(self._state.wait_s())

    def _open(self) -> Generator[T, None, None]:
        """Connect; return a generator that ends with the connection, and closes it."""
        raise NotImplementedError

    def _set_cut(self, cut: Callable[[], None]) -> None:
        """Make the connection known to `close`; if that was called before, end it now."""
        self._cut = cut
        if self._closed.is_set():
            cut()


class FrameIterator(ResumingIterator[T]):
    """An iterator over the frames of server-sent events."""

    def __init__(self, pool: BlockingPool, state: ResumeState) -> None:
        super().__init__(state)
        self._pool = pool

    def _open(self) -> Generator[T, None, None]:
        path, request_headers = self._state.request()
        connection, headers = self._pool.stream(
            path, request_headers, lambda made: self._set_cut(made.cut)
        )
        self._state.connected(headers.get("virta-position"))
        return self._items_of(connection)

    def _items_of(self, connection: BlockingConnection) -> Generator[T, None, None]:
        frames = FrameReader()
        with contextlib.closing(connection):
            while not self._closed.is_set():
                try:
                    data = connection.read()
                except UNREADABLE:
                    return
                if not data:
                    return
                for frame in frames.feed(data):
                    item = self._read(frame)
                    if item is not None:
                        yield item

    def _read(self, frame: Frame) -> T | None:
        """Return the item that a frame delivers, if any."""
        raise NotImplementedError


class Subscription(FrameIterator[Received]):
    """An iterator of `Received`; `close` ends it, also from another thread."""

    def _read(self, frame: Frame) -> Received | None:
        return self._state.read_frame(frame)


class LiveRows(CurrentRows, FrameIterator[LiveChange]):
    """An iterator of changes that keeps `rows` current; `close` ends it, also from another thread."""

    def __init__(self, pool: BlockingPool, state: LiveState) -> None:
        super().__init__(pool, state)
        self._live = state

    def _read(self, frame: Frame) -> LiveChange | None:
        return self._live.read_change(frame)


class StreamSubscription(ResumingIterator[tuple[str, str]]):
    """An iterator of (stream id, text) over a WebSocket; `close` ends it, also from another thread."""

    def __init__(self, socket: StreamSocket, state: ResumeState) -> None:
        super().__init__(state)
        self._socket = socket

    def _open(self) -> Generator[tuple[str, str], None, None]:
        from websockets.sync.client import connect  # noqa: PLC0415

        with self._socket.refusals():
            socket = connect(**self._socket.options(self._state))
        self._set_cut(socket.close)
        self._state.connected()
        return self._read(socket)

    def _read(self, socket: Socket) -> Generator[tuple[str, str], None, None]:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        with socket, contextlib.suppress(ConnectionClosed):
            for text in socket:
                message = self._state.read_message(text)
                if message is not None:
                    yield message
