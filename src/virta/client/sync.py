"""
`Client`: the server from blocking code.

One client may be used by many threads, which share its kept connections. A subscription is an iterator that
reconnects by itself and continues after the last event it returned: without gap or
duplicate as long as the log still has what was missed (otherwise `on_gap` is called).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

import msgspec

from virta.client.connections import Connections
from virta.client.frames import FrameReader, Received
from virta.client.streams import StreamSubscription
from virta.client.wire import (
    JSON,
    TIMEOUT_S,
    URL_DEFAULT,
    Address,
    Cursor,
    Published,
    Start,
    channel_path,
    collection_path,
    filter_path,
    is_final,
    messages_body,
    publication,
    streams_cursor,
)
from virta.errors import ClientError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator, Iterator, Mapping

    from virta.event import Event

READ_BYTES = 65536


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
        self._connections = Connections(self._address, timeout, tls)
        self.filters = Filters(self._connections)

    def close(self) -> None:
        """Close every kept connection."""
        self._connections.close()

    def __enter__(self) -> Client:
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
        path, kind, body = publication(channel, events)
        _, headers = self.request("POST", path, body, {"Content-Type": kind})
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
    ) -> Subscription:
        """
        Hear the events of a channel that satisfy a query.

        Args:
            query: terms as in a URL, e.g. `status=paid&/total=>100`.
            start: "earliest", "latest", an offset, a position or a datetime; without it only new events.
            last_event_id: continue after this: the `id` of what was received.
            reconnect: come back after a cut; without it iteration ends there.
            on_gap: called with what the server says when something could not be resumed.
        """
        cursor = Cursor(lambda s: channel_path(channel, s, query), start, last_event_id, on_gap)
        return Subscription(self._connections, cursor, reconnect=reconnect)

    # Streams.

    def publish_streams(self, *messages: tuple[str, str]) -> None:
        """Send (stream id, text) messages."""
        self.request("POST", "/publish", messages_body(messages), JSON)

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
        return StreamSubscription(
            self._address,
            streams_cursor(streams, max_queued, last_event_id, on_gap),
            reconnect=reconnect,
            timeout=self._timeout,
            tls=self._tls,
        )

    # Requests.

    def ready(self) -> bool:
        """Tell whether the server serves requests right now."""
        try:
            self.request("GET", "/readyz")
        except ClientError:
            return False
        return True

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
        return self._connections.request(method, path, body, headers)


class Subscription:
    """An iterator of `Received`; `close` ends it, also from another thread."""

    def __init__(self, connections: Connections, cursor: Cursor, *, reconnect: bool) -> None:
        self._connections = connections
        self._cursor = cursor
        self._reconnect = reconnect
        self._closed = threading.Event()
        # Of its own, as a response may have taken the connection's: `close` cuts it.
        self._line: socket.socket | None = None
        self._connected = False
        self._events = self._run()

    @property
    def last_event_id(self) -> str | None:
        """Where a later subscription would continue."""
        return self._cursor.last_event_id

    @property
    def connected(self) -> bool:
        """Return whether the stream is open now."""
        return self._connected

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> Received:
        return next(self._events)

    def close(self) -> None:
        self._closed.set()
        line = self._line
        if line is not None:
            _cut(line)
        with contextlib.suppress(ValueError):  # a thread reads: it ends by itself, and closes
            self._events.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _opened(self, line: socket.socket) -> None:
        """From here on `close` finds it; one that came before is heard of here."""
        self._line = line
        if self._closed.is_set():
            _cut(line)

    def _run(self) -> Generator[Received, None, None]:
        while not self._closed.is_set():
            try:
                path, headers = self._cursor.request()
                connection, response = self._connections.stream(path, headers, self._opened)
            except ClientError as error:
                self._line = None
                if self._closed.is_set():
                    return
                if not self._reconnect or is_final(error):
                    raise
                self._cursor.unanswered(error)
                self._closed.wait(self._cursor.wait_s())
                continue
            try:
                self._connected = True
                self._cursor.connected(response.getheader("Virta-Position"))
                yield from self._read(response)
            finally:
                self._line = None
                self._connected = False
                response.close()
                connection.close()
            if not self._reconnect:
                return
            self._closed.wait(self._cursor.wait_s())

    def _read(self, response: HTTPResponse) -> Iterator[Received]:
        frames = FrameReader()
        while not self._closed.is_set():
            try:
                data = response.read1(READ_BYTES)
            except (OSError, HTTPException, ValueError):
                return
            if not data:
                return
            for frame in frames.feed(data):
                received = self._cursor.take(frame)
                if received is not None:
                    yield received


class Filters:
    """Registered filters of a server."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def register(
        self, index: str, collection: str, filter_: Any, *, dialect: str = "koncorde"
    ) -> dict[str, Any]:
        """Register a filter; gives `{id, diff}`."""
        answer: dict[str, Any] = self._post(
            collection_path(index, collection), {"filter": filter_, "dialect": dialect}
        )
        return answer

    def ids(self, index: str, collection: str) -> list[str]:
        answer, _ = self._connections.request("GET", collection_path(index, collection))
        return list(answer["ids"])

    def exists(self, index: str, collection: str) -> bool:
        try:
            self._connections.request("HEAD", collection_path(index, collection))
        except ClientError as error:
            if error.status == 404:
                return False
            raise
        return True

    def test(
        self, index: str, collection: str, document: Any, document_id: str | None = None
    ) -> list[str]:
        """Ids of the filters that a document satisfies."""
        body = {"document": document}
        if document_id is not None:
            body["documentId"] = document_id
        return list(self._post(f"{collection_path(index, collection)}/test", body)["ids"])

    def validate(self, filter_: Any, *, dialect: str = "koncorde") -> dict[str, Any]:
        answer: dict[str, Any] = self._post(
            "/filters/validate", {"filter": filter_, "dialect": dialect}
        )
        return answer

    def remove(self, id_: str) -> None:
        self._connections.request("DELETE", f"/filters/{id_}")

    def events(
        self,
        *ids: str,
        start: Start | None = None,
        last_event_id: str | None = None,
        reconnect: bool = True,
        on_gap: Callable[[dict[str, Any]], None] | None = None,
    ) -> Subscription:
        """Hear what registered filters let through."""
        cursor = Cursor(filter_path(ids), start, last_event_id, on_gap)
        return Subscription(self._connections, cursor, reconnect=reconnect)

    def _post(self, path: str, body: Any) -> Any:
        return self._connections.request("POST", path, msgspec.json.encode(body), JSON)[0]


def _cut(line: socket.socket) -> None:
    """Closing alone would not wake a thread that reads."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
