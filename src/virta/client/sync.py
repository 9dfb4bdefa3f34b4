"""
`Client`: the server from blocking code.

One client may be used by many threads; each request has a connection of its own, a publisher keeps
one per thread. A subscription is an iterator that reconnects by itself and continues behind the last
event it gave: without gap or duplicate as long as the log still has what was missed (else `on_gap` is
told).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any

from virta.client.frames import FrameReader, Received
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
    import ssl
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from websockets.sync.client import ClientConnection

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
        self._local = threading.local()
        self._open: set[HTTPConnection] = set()
        self._lock = threading.Lock()
        self.filters = Filters(self)

    def close(self) -> None:
        """Close every kept connection."""
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Channels.

    def publish(self, channel: str, *events: Event | Mapping[str, Any]) -> str:
        """
        Publish events, several as one batch; returns the durability that was met.

        Events are `virta.event.Event` or the JSON object of one. Repeating a publication is safe:
        the server knows events by source and id.

        Raises:
            ClientError: refused, or no answer.
        """
        path, kind, body = publication(channel, events)
        _, headers = self.request("POST", path, body, {"Content-Type": kind})
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
    ) -> Subscription:
        """
        Hear the events of a channel that satisfy a query.

        Args:
            query: terms as in a URL, e.g. `status=paid&/total=>100`.
            start: "earliest", "latest", an offset or a datetime; without it only new events.
            last_event_id: continue behind this event.
            reconnect: come back after a cut; without it iteration ends there.
            on_gap: called with what the server says when something could not be resumed.
        """
        cursor = Cursor(lambda s: channel_path(channel, s, query), start, last_event_id, on_gap)
        return Subscription(self, cursor, reconnect=reconnect)

    # Streams.

    def publish_streams(self, *messages: tuple[str, str]) -> None:
        """Send (stream id, text) messages."""
        self.request(
            "POST", "/publish", messages_body(messages), {"Content-Type": "application/json"}
        )

    def subscribe_streams(
        self, *streams: str, max_queued: int = 250, reconnect: bool = True
    ) -> Iterator[tuple[str, str]]:
        """
        Hear messages as (stream id, text); needs the `websockets` package. Close the iterator to end.

        After a cut it subscribes again; streams have no history, so what was sent meanwhile is missed.
        """
        import msgspec  # noqa: PLC0415
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        cursor = streams_cursor(streams, max_queued)
        while True:
            try:
                socket = self._open_socket(cursor.request()[0])
            except ClientError as error:
                if not reconnect or is_final(error):
                    raise
                cursor.unanswered(error)
                time.sleep(cursor.wait_s())
                continue
            cursor.connected(None)
            with socket:
                try:
                    for text in socket:
                        message = msgspec.json.decode(text)
                        yield message["publish_to"], message["payload"]
                except ConnectionClosed:
                    pass
            if not reconnect:
                return
            time.sleep(cursor.wait_s())

    def _open_socket(self, path: str) -> ClientConnection:
        from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415
        from websockets.sync.client import connect  # noqa: PLC0415

        try:
            return connect(
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
            raise _unreachable(self._address, error) from error

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
        One request on this thread's connection; one that was kept and that the server closed is made anew.

        A request on a new connection is not repeated: the server may have carried it out.
        """
        sent = self._address.headers | (headers or {})
        while True:
            connection, kept = self._connection()
            try:
                connection.request(method, self._address.prefix + path, body, sent)
                response = connection.getresponse()
                answer = response.read()
            except (OSError, HTTPException) as error:
                self._drop(connection)
                if not kept or isinstance(error, TimeoutError):
                    raise _unreachable(self._address, error) from error
                continue
            if response.will_close:
                self._drop(connection)
            received = {name.lower(): value for name, value in response.getheaders()}
            return check(response.status, answer), received

    def stream(
        self, path: str, headers: dict[str, str], opened: Callable[[socket.socket], None]
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """Open a stream on a connection of its own; `opened` hears of it before anything is asked."""
        connection = self._connect(SILENCE_S)
        try:
            connection.connect()
            opened(connection.sock)
            connection.request(
                "GET", self._address.prefix + path, None, self._address.headers | headers
            )
            response = connection.getresponse()
            if response.status != 200:
                check(response.status, response.read())
            check_stream(response.getheader("Content-Type"))
        except (OSError, HTTPException) as error:
            connection.close()
            raise _unreachable(self._address, error) from error
        except ClientError:
            connection.close()
            raise
        return connection, response

    def _connection(self) -> tuple[HTTPConnection, bool]:
        """This thread's, and whether it was kept from an earlier request."""
        found: HTTPConnection | None = getattr(self._local, "connection", None)
        if found is not None and found in self._open:
            return found, True
        made = self._local.connection = self._connect(self._timeout)
        with self._lock:
            self._open.add(made)
        return made, False

    def _drop(self, connection: HTTPConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)
        self._local.connection = None

    def _connect(self, timeout: float) -> HTTPConnection:
        address = self._address
        if address.tls:
            return HTTPSConnection(address.host, address.port, timeout=timeout, context=self._tls)
        return HTTPConnection(address.host, address.port, timeout=timeout)


class Subscription:
    """An iterator of `Received`; `close` ends it, also from another thread."""

    def __init__(self, client: Client, cursor: Cursor, *, reconnect: bool) -> None:
        self._client = client
        self._cursor = cursor
        self._reconnect = reconnect
        self._closed = threading.Event()
        # Of its own, as a response may have taken the connection's: `close` cuts it.
        self._line: socket.socket | None = None
        self._events = self._run()

    @property
    def last_event_id(self) -> str | None:
        """Where a later subscription would continue."""
        return self._cursor.last_event_id

    def __iter__(self) -> Iterator[Received]:
        return self._events

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
                connection, response = self._client.stream(*self._cursor.request(), self._opened)
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
                self._cursor.connected(response.getheader("Virta-Position"))
                yield from self._read(response)
            finally:
                self._line = None
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
                event = self._cursor.take(frame)
                if event is not None:
                    assert frame.id is not None
                    yield Received(event, frame.id)


class Filters:
    """Registered filters of a server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def register(
        self, index: str, collection: str, filter_: Any, *, dialect: str = "koncorde"
    ) -> dict[str, Any]:
        """Register a filter; gives `{id, diff}`."""
        answer: dict[str, Any] = self._post(
            collection_path(index, collection), {"filter": filter_, "dialect": dialect}
        )
        return answer

    def ids(self, index: str, collection: str) -> list[str]:
        answer, _ = self._client.request("GET", collection_path(index, collection))
        return list(answer["ids"])

    def exists(self, index: str, collection: str) -> bool:
        try:
            self._client.request("HEAD", collection_path(index, collection))
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
        self._client.request("DELETE", f"/filters/{id_}")

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
        return Subscription(self._client, cursor, reconnect=reconnect)

    def _post(self, path: str, body: Any) -> Any:
        import msgspec  # noqa: PLC0415

        kind = {"Content-Type": "application/json"}
        return self._client.request("POST", path, msgspec.json.encode(body), kind)[0]


def filter_path(ids: Iterable[str]) -> Callable[[Start | None], str]:
    """The path of filters' events, by where to start."""
    joined = ",".join(ids)

    def path(start: Start | None) -> str:
        tail = channel_path("x", start).removeprefix("/channels/x/from/")
        return f"/filters/{joined}/events" + ("" if start is None else f"?from={tail}")

    return path


def _cut(line: socket.socket) -> None:
    """Closing alone would not wake a thread that reads."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _unreachable(address: Address, error: Exception) -> ClientError:
    return ClientError(
        f"no answer from {address.host}:{address.port}: {error or type(error).__name__}",
        code="unreachable",
    )
