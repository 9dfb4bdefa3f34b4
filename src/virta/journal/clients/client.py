"""
The blocking client of the daemon.

Where the native extension is built, a command is one native call that sends it, waits and decodes the reply;
anything but exactly that reply continues in the parser. Notifications are kept, up to a limit, until `wait`.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from virta import native
from virta.errors import JournalError
from virta.journal.clients.client_protocol import (
    NOTIFICATIONS_MAX,
    ClientProtocol,
    connection_lost,
    unreachable,
)
from virta.journal.protocol import commands
from virta.journal.protocol.messages import PORT, Reply
from virta.journal.protocol.methods import BlockingMethods

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable

    from virta.journal.protocol.commands import Command

T = TypeVar("T")
RECEIVE_BYTES = 65_536
# Commands of one pipeline that are unanswered at a time.
PIPELINE_MAX = 256

_native = native.load("virta.journal._native")
exchange = None if _native is None else _native.exchange


class Client(BlockingMethods):
    """A blocking connection, opened by `connect`; threads that share it need a lock."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        timeout: float | None = 30.0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        connect: Callable[
            [tuple[str, int], float | None], socket.socket
        ] = socket.create_connection,
    ) -> None:
        self._tls = tls is not None
        self._timeout = timeout
        try:
            self._socket = connect((host, port), timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        except OSError as error:
            raise unreachable(host, port, error) from error  # wrap_socket closes what it refuses
        # The system keeps the time: with a timeout of Python's own, every call would poll first.
        if timeout is not None and not self._tls:
            limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._limit_calls()
        self._descriptor = self._socket.fileno()
        self.notifications: deque[Reply] = deque(maxlen=NOTIFICATIONS_MAX)
        self._protocol: ClientProtocol[int] = ClientProtocol(self.notifications.append)
        if token is not None:
            try:
                self.call(commands.authenticate(token))
            except BaseException:
                self.close()
                raise

    def call(self, command: Command[T]) -> T:
        """Send one command and wait for its reply."""
        protocol, request = self._protocol, command.request
        protocol.outstanding.clear()  # calls that failed before: nothing waits for them any more
        received: Any = None
        if exchange is not None and not self._tls and not protocol.partial:
            identifier = protocol.number(request)
            try:
                received = exchange(self._descriptor, request)
            except OSError as error:
                raise _connection_error(error) from error
            if received.__class__ is Reply:
                return command.result(received)
        if received is None:
            self._send(protocol.send(request, 0))
            received = self._receive()
        else:
            protocol.outstanding[identifier] = 0
        while True:
            for _, reply in self._answered(received):
                return command.result(reply)
            received = self._receive()

    def pipeline(self, batch: Iterable[Command[Any]]) -> list[Any]:
        """
        Send many commands without waiting for each; return their results in order.

        A refusal is returned in its place, not raised, as the others are carried out all the same.
        """
        todo = list(batch)
        results: list[Any] = [None] * len(todo)
        protocol = self._protocol
        protocol.outstanding.clear()

        def receive() -> None:
            for index, reply in self._answered(self._receive()):
                try:
                    results[index] = todo[index].result(reply)
                except JournalError as error:
                    results[index] = error

        sent = 0
        while sent < len(todo) or protocol.outstanding:
            free = PIPELINE_MAX - len(protocol.outstanding)
            out = []
            for index, command in enumerate(todo[sent : sent + free], sent):
                out.append(protocol.send(command.request, index))
            sent += len(out)
            if out:
                self._send(b"".join(out), receive)
            if protocol.outstanding:
                receive()
        return results

    def wait(self, timeout: float | None = None) -> Reply | None:
        """Return the next message the daemon sends unasked, None after `timeout` seconds without one."""
        self._socket.settimeout(timeout)
        try:
            while not self.notifications:
                try:
                    self._answered(self._read())
                except TimeoutError:
                    if timeout is not None:
                        return None
        finally:
            self._limit_calls()
        return self.notifications.popleft()

    def close(self) -> None:
        """Close the connection; what was not answered is in doubt."""
        self._descriptor = -1  # the number may soon belong to another file
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _limit_calls(self) -> None:
        """Limit calls to the timeout: TLS by Python, as it reads and writes by turns; else the system does."""
        self._socket.settimeout(self._timeout if self._tls else None)

    def _send(self, data: bytes, receive: Callable[[], None] | None = None) -> None:
        """Send everything; with `receive`, read what arrives meanwhile."""
        try:
            if receive is None:
                self._socket.sendall(data)
            else:
                self._send_reading(memoryview(data), receive)
        except BaseException as error:
            # Part of a request may be sent: the daemon would read the next one as the rest of it.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if isinstance(error, OSError):
                raise _connection_error(error) from error
            raise

    def _send_reading(self, rest: memoryview, receive: Callable[[], None]) -> None:
        """Send while reading: a daemon whose replies are not read stops reading, and both would wait for ever."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN | select.POLLOUT)
        while True:
            rest = rest[self._send_some(rest) :]
            if not rest:
                return
            found = ready.poll(None if self._timeout is None else self._timeout * 1000)
            if not found:
                raise TimeoutError
            if found[0][1] & ~select.POLLOUT:
                receive()

    def _send_some(self, rest: memoryview) -> int:
        """Send what fits now; return how many bytes."""
        if not self._tls:
            try:
                return self._socket.send(rest, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0
        import ssl  # noqa: PLC0415 - loaded already, and slow to load for those without TLS

        self._socket.settimeout(0)
        try:
            return self._socket.send(rest)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        finally:
            self._limit_calls()

    def _receive(self) -> bytes:
        try:
            return self._read()
        except TimeoutError as error:
            raise connection_lost("no reply in time") from error

    def _read(self) -> bytes:
        try:
            return self._socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            raise
        except BlockingIOError as error:
            raise TimeoutError from error
        except OSError as error:
            raise _connection_error(error) from error

    def _answered(self, data: bytes) -> list[tuple[int, Reply]]:
        """Return the replies that some bytes complete, with the tokens of their requests."""
        if not data:
            raise connection_lost("closed by the daemon")
        answered = self._protocol.receive(data)
        if self._protocol.error is not None:
            raise self._protocol.error
        return answered


def _connection_error(error: OSError) -> JournalError:
    if isinstance(error, BlockingIOError | TimeoutError):
        return connection_lost("no reply in time")
    if error.errno == errno.EBADF:
        return JournalError("the client is closed: make another one", code="closed")
    return connection_lost(error)
