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
from typing import TYPE_CHECKING, TypeVar

from virta.client.calls import UNREADABLE, Address, ServerCall, stream_request, unreachable
from virta.client.exchange import Exchange, IdleConnections, RequestBytes
from virta.client.http import READ_BYTES, ResponseReader, is_readable
from virta.client.resume import SILENCE_S
from virta.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class BlockingConnection:
    """One connection: sends a request and reads its response, whole or piece by piece."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.exchange = Exchange("GET")

    def ask(self, request: RequestBytes) -> ResponseReader:
        """
        Send a request; return its response as far as the head. `read` returns the body.

        Raises:
            OSError: the connection was cut, or silent for too long.
            ValueError: the bytes are not HTTP.
        """
        self.exchange = exchange = Exchange(request.method)
        self.socket.sendall(request.data)
        exchange.sent = True
        while not exchange.reader.status:
            exchange.receive(self.socket.recv(READ_BYTES))
        return exchange.reader

    def read(self) -> bytes:
        """Return what has arrived of the body, at least one byte; empty at its end. Raises as `ask`."""
        while not self.exchange.has_piece:
            self.exchange.receive(self.socket.recv(READ_BYTES))
        return self.exchange.take()

    def read_all(self) -> None:
        """Read the rest of the response into `exchange`. Raises as `ask`."""
        while not self.exchange.reader.complete:
            self.exchange.receive(self.socket.recv(READ_BYTES))

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
        self._idle: IdleConnections[BlockingConnection] = IdleConnections()
        self._pid = os.getpid()

    def close(self) -> None:
        """Close every kept connection."""
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()
            self._idle.clear()

    def call(self, call: ServerCall[T]) -> T:
        """
        Send a call and return what its answer means.

        Raises:
            ClientError: refused, or no answer.
        """
        try:
            try:
                answer, headers = self._send(RequestBytes.of(self._address, call)).answer()
            except UNREADABLE as error:
                raise unreachable(self._address, error) from error
        except ClientError as error:
            return call.failed(error)
        return call.read(answer, headers)

    def _send(self, request: RequestBytes) -> Exchange:
        """Send a request and read its whole response."""
        while True:
            kept = self._pop_idle()
            connection = kept or self._connect()
            try:
                connection.ask(request)
                connection.read_all()
            except UNREADABLE as error:
                self._drop(connection)
                if not connection.exchange.may_repeat(request, error, kept=kept is not None):
                    raise
            else:
                self._give_back(connection)
                return connection.exchange

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
                response = connection.ask(
                    RequestBytes.of(self._address, stream_request(path, headers))
                )
                if response.status != 200:
                    connection.read_all()
                connection.exchange.check_stream()
            except BaseException:
                connection.close()
                raise
        except UNREADABLE as error:
            raise unreachable(self._address, error) from error
        return connection, response.headers

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

    def _pop_idle(self) -> BlockingConnection | None:
        if os.getpid() != self._pid:
            # Leave the connections to the parent: responses on them could reach either process.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            self._open, self._idle = set(), IdleConnections()
        self._drop_expired()
        while True:
            with self._lock:
                found = self._idle.pop()
            if found is None or found.quiet:
                return found
            self._drop(found)

    def _give_back(self, connection: BlockingConnection) -> None:
        if not connection.exchange.reusable:
            self._drop(connection)
            return
        with self._lock:
            if connection not in self._open:  # the client was closed meanwhile
                connection.close()
                return
            self._idle.add(connection, time.monotonic())
        self._drop_expired()

    def _drop_expired(self) -> None:
        with self._lock:
            expired = self._idle.pop_expired(time.monotonic())
        for connection in expired:
            self._drop(connection)

    def _drop(self, connection: BlockingConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)
