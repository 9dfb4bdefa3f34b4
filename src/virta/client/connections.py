"""
Connections of the blocking `Client`: kept open between requests, and shared by all threads.

A request uses the connection that was used last, or opens one: there are never more than concurrent
requests. A connection that was idle for long, was closed by the server, or belongs to a parent process is not used.
"""

from __future__ import annotations

import os
import select
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any

from virta.client.http import ANSWER_BYTES_MAX
from virta.client.wire import (
    IDLE_S,
    SILENCE_S,
    Address,
    check,
    check_stream,
    is_repeatable,
    unreachable,
)
from virta.errors import ClientError

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable


class Connections:
    """The connections of one client to one server; safe to use from many threads."""

    def __init__(self, address: Address, timeout: float, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._timeout = timeout
        self._tls = tls
        self._lock = threading.Lock()
        self._open: set[HTTPConnection] = set()
        self._idle: list[tuple[float, HTTPConnection]] = []
        self._pid = os.getpid()

    def close(self) -> None:
        """Close every kept connection."""
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()
            self._idle.clear()

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
        whole = self._address.headers | (headers or {})
        while True:
            connection, kept = self._take()
            sent = answered = False
            try:
                connection.request(method, self._address.prefix + path, body, whole)
                sent = True
                response = connection.getresponse()
                answered = True
                answer = response.read(ANSWER_BYTES_MAX + 1)
                if len(answer) > ANSWER_BYTES_MAX:
                    raise HTTPException(f"the response has over {ANSWER_BYTES_MAX} bytes")  # noqa: TRY301
            except (OSError, HTTPException, ValueError) as error:
                self._drop(connection)
                again = kept and not answered and (not sent or is_repeatable(method, path))
                if not again or isinstance(error, TimeoutError):
                    raise unreachable(self._address, error) from error
                continue
            if response.will_close:
                self._drop(connection)
            else:
                self._give_back(connection)
            received = {name.lower(): value for name, value in response.getheaders()}
            return check(response.status, answer), received

    def stream(
        self, path: str, headers: dict[str, str], opened: Callable[[socket.socket], None]
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """
        Open a stream on its own connection; `opened` is called with its socket before anything is sent.

        Raises:
            ClientError: refused, or no answer.
        """
        connection = self.connect(SILENCE_S)
        try:
            connection.connect()
            opened(connection.sock)
            connection.request(
                "GET", self._address.prefix + path, None, self._address.headers | headers
            )
            response = connection.getresponse()
            if response.status != 200:
                check(response.status, response.read(ANSWER_BYTES_MAX))
            check_stream(response.getheader("Content-Type"))
        except (OSError, HTTPException, ValueError) as error:
            connection.close()
            raise unreachable(self._address, error) from error
        except ClientError:
            connection.close()
            raise
        return connection, response

    def connect(self, timeout: float) -> HTTPConnection:
        """Return a connection that connects at its first request."""
        address = self._address
        if address.tls:
            return HTTPSConnection(address.host, address.port, timeout=timeout, context=self._tls)
        return HTTPConnection(address.host, address.port, timeout=timeout)

    def _take(self) -> tuple[HTTPConnection, bool]:
        """Return a connection, and whether it was kept from an earlier request."""
        if os.getpid() != self._pid:
            self._forget()
        while True:
            with self._lock:
                if not self._idle:
                    break
                since, found = self._idle.pop()
            if time.monotonic() - since < IDLE_S and not _closed_by_peer(found):
                return found, True
            self._drop(found)
        made = self.connect(self._timeout)
        with self._lock:
            self._open.add(made)
        return made, False

    def _give_back(self, connection: HTTPConnection) -> None:
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

    def _drop(self, connection: HTTPConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)

    def _forget(self) -> None:
        """Leave the connections to the parent: responses on them could reach either process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open, self._idle = set(), []


def _closed_by_peer(connection: HTTPConnection) -> bool:
    """
    Return whether a kept connection has ended.

    Nothing may arrive between requests: readable bytes are its end, or a response to no request.
    """
    sock = connection.sock
    return sock is None or sock.fileno() < 0 or is_readable(sock.fileno())


def is_readable(descriptor: int) -> bool:
    """Return whether a read would not block."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
