"""
Connections of the blocking `Client`: kept open between requests, and shared by all threads.

A request uses the connection that was used last, or opens one: there are never more than concurrent requests.
A connection that was idle for long, was closed by the server, or belongs to a parent process is not used.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

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
    READ_BYTES,
    CompleteResponse,
    ResponseReader,
    check_size,
    is_readable,
    request_bytes,
)
from virta.client.resume import SILENCE_S
from virta.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class BlockingConnection:
    """One connection: sends a request and reads its response, whole or piece by piece."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        # Whether the present request left whole, and whether any byte of its response has arrived.
        self.sent = self.answered = False
        self._reader = ResponseReader("GET")
        self._early = b""  # bytes of the body that came with the head

    def ask(self, method: str, data: bytes) -> ResponseReader:
        """
        Send a request; return its response as far as the head. `read` returns the body.

        Raises:
            OSError: the connection was cut, or silent for too long.
            ValueError: the bytes are not HTTP.
        """
        self._reader = reader = ResponseReader(method)
        self._early = b""
        self.sent = self.answered = False
        self.socket.sendall(data)
        self.sent = True
        while not reader.status:
            self._early += self._receive()
        return reader

    def read(self) -> bytes:
        """Return what has arrived of the body, at least one byte; empty at its end. Raises as `ask`."""
        piece, self._early = self._early, b""
        while not piece and not self._reader.complete:
            piece = self._receive()
        return piece

    def read_all(self) -> bytes:
        """Return the rest of the body. Raises as `ask`."""
        body, self._early = self._early, b""
        while not self._reader.complete:
            body += self._receive()
            check_size(len(body))
        return body

    def _receive(self) -> bytes:
        data = self.socket.recv(READ_BYTES)
        if not data:
            self._reader.end()
            return b""
        self.answered = True
        return self._reader.feed(data)

    @property
    def reusable(self) -> bool:
        """Return whether the response ended in a way that allows another request."""
        return self._reader.complete and self._reader.keep

    @property
    def quiet(self) -> bool:
        """Return whether it is open and nothing arrived since: that would be its end, or a stray response."""
        return self.socket.fileno() >= 0 and not is_readable(self.socket.fileno())

    def cut(self) -> None:
        """End the connection; wakes a thread that reads from it, which closing alone would not."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


class BlockingPool:
    """The connections of one client to one server; safe to use from many threads."""

    def __init__(self, address: Address, timeout: float, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._timeout = timeout
        self._tls = tls
        self._lock = threading.Lock()
        self._open: set[BlockingConnection] = set()
        self._idle: list[tuple[float, BlockingConnection]] = []
        self._pid = os.getpid()

    def close(self) -> None:
        """Close every kept connection."""
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()
            self._idle.clear()

    def call(self, call: ServerCall[T]) -> T:
        """Send a call and return what its answer means."""
        try:
            answer, headers = self.request(call.method, call.path, call.body, call.headers)
        except ClientError as error:
            if call.refused is None:
                raise
            return call.refused(error)
        return call.read(answer, headers)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[Any, dict[str, str]]:
        """
        Send one request; return the JSON of its answer and its headers, in lower case.

        A kept connection that the server closes without an answer is replaced, and the request sent
        again, if it did not leave whole or may arrive twice (`is_repeatable`).

        Raises:
            ClientError: refused, or no answer.
        """
        try:
            data = request_bytes(self._address, method, path, headers, body)
            response = self._exchange(method, data, repeat=is_repeatable(method, path))
        except UNREADABLE as error:
            raise unreachable(self._address, error) from error
        return check(response.status, response.body), response.headers

    def _exchange(self, method: str, data: bytes, *, repeat: bool) -> CompleteResponse:
        while True:
            kept = self._kept()
            connection = kept or self._connect()
            try:
                reader = connection.ask(method, data)
                body = connection.read_all()
            except UNREADABLE as error:
                self._drop(connection)
                certain = not connection.answered and (not connection.sent or repeat)
                if kept is None or not certain or isinstance(error, TimeoutError):
                    raise
            else:
                self._give_back(connection)
                return CompleteResponse(reader.status, reader.headers, body)

    def stream(
        self, path: str, headers: dict[str, str], opened: Callable[[BlockingConnection], None]
    ) -> tuple[BlockingConnection, dict[str, str]]:
        """
        Open a stream on its own connection; `opened` is called with it before anything is sent.

        Raises:
            ClientError: refused, or no answer.
        """
        try:
            connection = self.connect(SILENCE_S)
            try:
                opened(connection)
                data = request_bytes(self._address, "GET", path, headers, None)
                reader = connection.ask("GET", data)
                body = b"" if reader.status == 200 else connection.read_all()
                check_stream(reader.status, reader.headers, body)
            except BaseException:
                connection.close()
                raise
        except UNREADABLE as error:
            raise unreachable(self._address, error) from error
        return connection, reader.headers

    def connect(self, timeout: float) -> BlockingConnection:
        """Return a new connection whose reads and writes wait for `timeout` seconds at most."""
        address = self._address
        sock = socket.create_connection((address.host, address.port), timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls:
                trust = self._tls or ssl.create_default_context()
                sock = trust.wrap_socket(sock, server_hostname=address.host)
        except BaseException:
            sock.close()
            raise
        return BlockingConnection(sock)

    def _connect(self) -> BlockingConnection:
        made = self.connect(self._timeout)
        with self._lock:
            self._open.add(made)
        return made

    def _kept(self) -> BlockingConnection | None:
        if os.getpid() != self._pid:
            # Leave the connections to the parent: responses on them could reach either process.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            self._open, self._idle = set(), []
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since, found = self._idle.pop()
            if time.monotonic() - since < IDLE_S and found.quiet:
                return found
            self._drop(found)

    def _give_back(self, connection: BlockingConnection) -> None:
        if not connection.reusable:
            self._drop(connection)
            return
        now = time.monotonic()
        with self._lock:
            if connection not in self._open:  # the client was closed meanwhile
                connection.close()
                return
            self._idle.append((now, connection))
            old = [one for since, one in self._idle if now - since >= IDLE_S]
            self._idle = self._idle[len(old) :]
        for one in old:
            self._drop(one)

    def _drop(self, connection: BlockingConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)
