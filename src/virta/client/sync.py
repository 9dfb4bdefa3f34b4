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
from virta.client.calls import TIMEOUT_S, UNREADABLE, URL_DEFAULT, Address, Published, Start
from virta.client.frames import FrameReader, Received
from virta.client.live import LiveChange, LiveState
from virta.client.resume import ResumeState
from virta.errors import ClientError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator, Mapping

    from websockets.sync.client import ClientConnection as Socket

    from virta.event import Event

T = TypeVar("T")


class Client:
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
        self._address = Address(url, token)
        self._timeout = timeout
        self._tls = tls
        self._pool = BlockingPool(self._address, timeout, tls)
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

    def subscribe(
        self,
        channel: str,
        query: str = "",
        *,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> Subscription:
        """
        Subscribe to the events of a channel that satisfy a query.

        Args:
            query: terms as in a URL, e.g. `status=paid&/total=>100`.
            start: "earliest", "latest", an offset, a position or a datetime; without it only new events.
            last_event_id: continue after this: the `id` of what was received.
            reconnect: come back after a cut; without it iteration ends there.
            on_gap: called with the server's report when events could not be resumed.
        """

        def path(start: Start | None) -> str:
            return calls.channel_path(channel, start, query)

        state = ResumeState(path, start, last_event_id, reconnect=reconnect, on_gap=on_gap)
        return Subscription(self._pool, state)

    def live(
        self,
        channel: str,
        query: str = "",
        *,
        filter: str = "",  # noqa: A002 - as in virta.views.open
        dialect: str = "",
        key: str = "",
        row: str = "",
        fields: str = "",
        select: str = "",
        group: str = "",
        since: str | None = None,
        reconnect: bool = True,
    ) -> LiveRows:
        """
        Follow the rows of a channel that satisfy a query: `rows` stays current while changes are iterated.

        Args:
            query: terms as in a URL, e.g. `status=paid&/total=>100`.
            filter, dialect: a filter in another dialect instead, as text.
            key: JSON pointer to the key of a row, from the event's root.
            row: "event" shows Debezium's events as they are.
            fields: JSON pointers, separated by commas, to what is sent.
            select, group: aggregates, as in `count,sum(/data/total)` and `/data/country`; see `groups`.
            since: a position to continue from; then `rows` has only what changed since.
            reconnect: come back after a cut; without it iteration ends there.
        """
        options = {
            "filter": filter,
            "dialect": dialect,
            "key": key,
            "row": row,
            "fields": fields,
            "select": select,
            "group": group,
        }
        return LiveRows(self._pool, LiveState(channel, query, options, since, reconnect=reconnect))

    # Streams.

    def publish_streams(self, *messages: tuple[str, str]) -> None:
        """Send (stream id, text) messages."""
        self._pool.call(calls.publish_streams(messages))

    def subscribe_streams(
        self,
        *streams: str,
        max_queued: int = 250,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> StreamSubscription:
        """
        Subscribe to messages as (stream id, text); needs the `websockets` package. `close` ends it.

        When the connection is cut it reconnects and continues after the last message it returned.
        """
        path = calls.streams_path(streams, max_queued)
        state = ResumeState(lambda _: path, None, last_event_id, reconnect=reconnect, on_gap=on_gap)
        return StreamSubscription(self._address, state, self._timeout, self._tls)

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
        return self._pool.request(method, path, body, headers)


class Filters:
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

    def events(
        self,
        *ids: str,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> Subscription:
        """Subscribe to the events that registered filters let through."""

        def path(start: Start | None) -> str:
            return calls.filter_events_path(ids, start)

        state = ResumeState(path, start, last_event_id, reconnect=reconnect, on_gap=on_gap)
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

    def _opened(self, cut: Callable[[], None]) -> None:
        """Make the connection known to `close`; if that was called before, end it now."""
        self._cut = cut
        if self._closed.is_set():
            cut()


class Subscription(ResumingIterator[Received]):
    """An iterator of `Received`; `close` ends it, also from another thread."""

    def __init__(self, pool: BlockingPool, state: ResumeState) -> None:
        super().__init__(state)
        self._pool = pool

    def _open(self) -> Generator[Received, None, None]:
        path, request_headers = self._state.request()
        connection, headers = self._pool.stream(
            path, request_headers, lambda made: self._opened(made.cut)
        )
        self._state.connected(headers.get("virta-position"))
        return self._read(connection)

    def _read(self, connection: BlockingConnection) -> Generator[Received, None, None]:
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
                    received = self._state.read_frame(frame)
                    if received is not None:
                        yield received


class LiveRows(ResumingIterator[LiveChange]):
    """An iterator of changes that keeps `rows` current; `close` ends it, also from another thread."""

    def __init__(self, pool: BlockingPool, state: LiveState) -> None:
        super().__init__(state)
        self._pool = pool
        self._live = state

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows by key, as of the last change that was read."""
        return self._live.rows

    @property
    def groups(self) -> dict[Any, dict[str, Any]]:
        """The aggregates by group."""
        return self._live.groups

    @property
    def is_live(self) -> bool:
        """Whether `rows` is complete: no snapshot is being read."""
        return self._live.is_live

    def _open(self) -> Generator[LiveChange, None, None]:
        path, headers = self._state.request()
        connection, _ = self._pool.stream(path, headers, lambda made: self._opened(made.cut))
        self._state.connected()
        return self._read(connection)

    def _read(self, connection: BlockingConnection) -> Generator[LiveChange, None, None]:
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
                    change = self._live.read_change(frame)
                    if change is not None:
                        yield change


class StreamSubscription(ResumingIterator[tuple[str, str]]):
    """An iterator of (stream id, text) over a WebSocket; `close` ends it, also from another thread."""

    def __init__(
        self, address: Address, state: ResumeState, timeout: float, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(state)
        self._address = address
        self._timeout = timeout
        self._tls = tls

    def _open(self) -> Generator[tuple[str, str], None, None]:
        from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415
        from websockets.sync.client import connect  # noqa: PLC0415

        path, headers = self._state.request()
        try:
            socket = connect(
                self._address.websocket(path),
                additional_headers=self._address.headers | headers,
                ssl=self._tls,
                open_timeout=self._timeout,
                max_size=None,
            )
        except InvalidStatus as error:
            calls.check(error.response.status_code, bytes(error.response.body or b""))
            raise
        except (OSError, InvalidHandshake) as error:
            raise calls.unreachable(self._address, error) from error
        self._opened(socket.close)
        self._state.connected()
        return self._read(socket)

    def _read(self, socket: Socket) -> Generator[tuple[str, str], None, None]:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        with socket, contextlib.suppress(ConnectionClosed):
            for text in socket:
                message = self._state.read_message(text)
                if message is not None:
                    yield message
