"""
Clients of the daemon: `Client` blocks, `AsyncClient` awaits; the commands are the same.

Invariant: an identifier is never reused while its reply is outstanding; 0 stays the server's.
Messages the server sends by itself are kept, up to a bound, until they are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from virta.errors import JournalError
from virta.journal.clients.awake import (
    AWAKE_S_MAX,
    RECEIVE_BYTES,
    REPLY_LOOK_S_MAX,
    Awake,
    possible,
)
from virta.journal.clients.sending import send_and_hear
from virta.journal.protocol import commands, kernel
from virta.journal.protocol.codec import ReplyParser, encode_request
from virta.journal.protocol.commands import Next
from virta.journal.protocol.messages import PORT, Reply
from virta.journal.protocol.methods import Calls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from types import TracebackType

    from virta.journal.protocol.commands import Command, Key, Plain
    from virta.journal.protocol.messages import Request

P = ParamSpec("P")
T = TypeVar("T")
# Notifications nobody asked for; the oldest are forgotten, as bursts may be merged.
NOTIFICATIONS_MAX = 10_000
IDENTIFIER_MAX = 65_535
# Commands of one pipeline that are unanswered at a time.
PIPELINE_MAX = 256
# What is written when a connection is closed may take so long to leave.
CLOSE_S_MAX = 1.0


def _lost(reason: object) -> JournalError:
    return JournalError(
        f"the connection to the journal is gone ({reason}); what was not answered is in doubt",
        code="disconnected",
    )


def _failed(error: OSError) -> JournalError:
    if isinstance(error, BlockingIOError | TimeoutError):
        return _lost("no reply in time")
    if error.errno == errno.EBADF:
        return JournalError("the client is closed: make another one", code="closed")
    return _lost(error)


def _async(
    build: Callable[P, Command[T]],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return self.call(build(*args, **kwargs))

    method.__doc__ = build.__doc__
    return method


class Client(Calls):
    """
    A blocking connection; not to be shared between threads without a lock.

    A client that asks again and again looks for its reply for up to `look` seconds (0: never) before it
    sleeps, as long as replies are usually there by then; with `awake` for up to 0.5 ms: see
    `virta.journal.clients.awake`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        timeout: float | None = 30.0,
        awake: bool = False,
        look: float = REPLY_LOOK_S_MAX,
    ) -> None:
        try:
            self._socket = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise _unreachable(host, port, error) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The system keeps the time: a socket with a timeout of Python's is polled before every call.
        if timeout is not None:
            limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket.settimeout(None)
        self._timeout = timeout
        self._descriptor = self._socket.fileno()
        self._awake = Awake(self._socket) if awake and possible() else None
        # Native where it was built: one call that sends, waits and decodes.
        self._asker = None
        if kernel.Asker is not None:
            seconds = max(look, AWAKE_S_MAX * awake, 0.0) if possible() else 0.0
            self._asker = kernel.Asker(int(seconds * 1e9))
        self._parser = ReplyParser()
        self._partial = False  # the parser has the beginning of a reply
        self._identifier = 0
        self._heard: deque[Reply] = deque()
        self.notifications: deque[Reply] = deque(maxlen=NOTIFICATIONS_MAX)

    def call(self, command: Command[T]) -> T:
        """Send one command and wait for its reply."""
        request = command.request
        request.identifier = identifier = self._identifier = self._identifier % IDENTIFIER_MAX + 1
        came = None
        if self._asker is not None and not (self._partial or self._heard):
            try:
                came = self._asker.ask(self._descriptor, request, command.told)
            except OSError as error:
                raise _failed(error) from error
        if came is None:
            self._write(encode_request(request))
        return self._read_on(command, identifier, came)

    def _read_on(self, command: Command[T], identifier: int, came: Any) -> T:
        """The result of a command that was sent, after what came so far."""
        kind = came.__class__
        if kind is Reply:
            return command.result(came)
        if kind is bytes:
            if not came:
                raise _lost("closed by the daemon")
            self._take(came)
        elif came is not None:
            told: T = came
            return told
        while True:
            reply = self._receive()
            if reply.identifier == identifier:
                return command.result(reply)

    # What producers and workers ask all the time, if it is ordinary, goes without structures in between.

    def push(
        self,
        uri: Key,
        *,
        domain: Key = b"",
        priority: int = 0,
        start: float | None = None,
        delay: float = 0,
        payload: Plain = None,
        persist: bool = True,
        timestamp: int = 0,
    ) -> int:
        """As `commands.push`."""
        came = None
        identifier = self._identifier % IDENTIFIER_MAX + 1
        if (
            start is None
            and not (delay or timestamp or self._partial or self._heard)
            and persist
            and self._asker is not None
        ):
            self._identifier = identifier
            try:
                came = self._asker.push(
                    self._descriptor, identifier, uri, domain, priority, payload
                )
            except OSError as error:
                raise _failed(error) from error
            if came.__class__ is int:
                return came
        command = commands.push(
            uri,
            domain=domain,
            priority=priority,
            start=start,
            delay=delay,
            payload=payload,
            persist=persist,
            timestamp=timestamp,
        )
        return self.call(command) if came is None else self._read_on(command, identifier, came)

    def next(
        self,
        domain: Key = b"",
        *,
        count: int = 1,
        work_for: float | None = None,
        listen: bool = False,
        remove: bool = False,
    ) -> Next:
        """As `commands.next_`."""
        came = None
        identifier = self._identifier % IDENTIFIER_MAX + 1
        if (
            work_for is None
            and not (listen or remove or self._partial or self._heard)
            and self._asker is not None
        ):
            self._identifier = identifier
            try:
                came = self._asker.next(self._descriptor, identifier, domain, count)
            except OSError as error:
                raise _failed(error) from error
            if came.__class__ is Next:
                return came
        command = commands.next_(
            domain, count=count, work_for=work_for, listen=listen, remove=remove
        )
        return self.call(command) if came is None else self._read_on(command, identifier, came)

    def done(self, key: Key) -> bool:
        """As `commands.done`."""
        came = None
        identifier = self._identifier % IDENTIFIER_MAX + 1
        if self._asker is not None and not (self._partial or self._heard):
            self._identifier = identifier
            try:
                came = self._asker.done(self._descriptor, identifier, key)
            except OSError as error:
                raise _failed(error) from error
            if came.__class__ is bool:
                return came
        command = commands.done(key)
        return self.call(command) if came is None else self._read_on(command, identifier, came)

    def pipeline(self, batch: Iterable[Command[Any]]) -> list[Any]:
        """
        Send many commands without waiting for each; their results in order.

        A refusal is returned in its place, not raised, as the others are carried out all the same.
        """
        todo = list(batch)
        results: list[Any] = [None] * len(todo)
        waiting: dict[int, int] = {}
        at = 0
        while at < len(todo) or waiting:
            room = PIPELINE_MAX - len(waiting)
            if at < len(todo) and room:
                out = []
                for index, command in enumerate(todo[at : at + room], at):
                    request = command.request
                    request.identifier = self._next_identifier()
                    waiting[request.identifier] = index
                    out.append(encode_request(request))
                at += len(out)
                self._write(b"".join(out), hear=True)
            heard = [self._receive(), *self._heard]
            self._heard.clear()
            for reply in heard:
                index = waiting.pop(reply.identifier, -1)
                if index >= 0:
                    try:
                        results[index] = todo[index].result(reply)
                    except JournalError as error:
                        results[index] = error
        return results

    def wait(self, timeout: float | None = None) -> Reply | None:
        """The next message the server sends by itself, None after `timeout` seconds without."""
        self._socket.settimeout(timeout)
        try:
            while not self.notifications:
                try:
                    self._take(self._read())
                except TimeoutError:
                    if timeout is not None:
                        return None
        finally:
            self._socket.settimeout(None)
        return self.notifications.popleft()

    def close(self) -> None:
        self._descriptor = -1  # the number may soon be somebody else's
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _next_identifier(self) -> int:
        self._identifier = self._identifier % IDENTIFIER_MAX + 1
        return self._identifier

    def _write(self, data: bytes, *, hear: bool = False) -> None:
        try:
            if hear:
                send_and_hear(self._socket, data, self._timeout, lambda: self._take(self._read()))
            else:
                self._socket.sendall(data)
        except BaseException as error:
            # Perhaps half a request is sent: the next one would be taken for its other half.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if isinstance(error, OSError):
                raise _failed(error) from error
            raise

    def _receive(self) -> Reply:
        while not self._heard:
            began = perf_counter()
            try:
                self._take(self._read(self._awake))
            except TimeoutError as error:
                raise _lost("no reply in time") from error
            if self._awake is not None:
                self._awake.learn(perf_counter() - began)
        return self._heard.popleft()

    def _read(self, awake: Awake | None = None) -> bytes:
        try:
            data = awake.receive() if awake is not None and awake.worthwhile() else None
            if data is None:
                data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            raise
        except BlockingIOError as error:
            raise TimeoutError from error
        except OSError as error:
            raise _lost(error) from error
        if not data:
            raise _lost("closed by the daemon")
        return data

    def _take(self, data: bytes) -> None:
        for reply in self._parser.feed(data):
            (self._heard if reply.identifier else self.notifications).append(reply)
        self._partial = self._parser.buffered > 0
        if self._parser.error is not None:
            raise self._parser.error


class AsyncClient(asyncio.Protocol):
    """Any number of commands at a time; make it with `await AsyncClient.connect(...)`."""

    def __init__(self) -> None:
        self._parser = ReplyParser()
        self._transport: asyncio.Transport | None = None
        self._identifier = 0
        self._outstanding: dict[int, asyncio.Future[Reply]] = {}
        self._out: list[bytes] = []
        self._lost: JournalError | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self._writable = asyncio.Event()
        self._writable.set()
        self.notifications: asyncio.Queue[Reply] = asyncio.Queue(NOTIFICATIONS_MAX)

    @classmethod
    async def connect(cls, host: str = "127.0.0.1", port: int = PORT) -> AsyncClient:
        loop = asyncio.get_running_loop()
        try:
            _, client = await loop.create_connection(cls, host, port)
        except OSError as error:
            raise _unreachable(host, port, error) from error
        return client

    async def call(self, command: Command[T]) -> T:
        """Send one command and wait for its reply."""
        return command.result(await self.request(command.request))

    async def request(self, request: Request) -> Reply:
        """The bare exchange; the identifier is chosen here."""
        await self._writable.wait()
        if self._lost is not None or self._transport is None:
            raise self._lost or _lost("not connected")
        if len(self._outstanding) >= IDENTIFIER_MAX:
            raise JournalError(f"{IDENTIFIER_MAX} commands are unanswered", code="too-large")
        while True:
            self._identifier = self._identifier % IDENTIFIER_MAX + 1
            if self._identifier not in self._outstanding:
                break
        request.identifier = self._identifier
        encoded = encode_request(request)  # refused here, it leaves nothing outstanding
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._outstanding[self._identifier] = future
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(encoded)
        return await future

    def _flush(self) -> None:
        """What was asked in one turn of the loop goes out in one write."""
        out, self._out = self._out, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    async def close(self) -> None:
        """A daemon that takes nothing any more is not waited for: what it did not answer is in doubt anyway."""
        transport = self._transport
        if transport is None:
            return
        transport.close()
        try:
            # Whoever waits here may be cancelled; what is waited for must not be.
            await asyncio.wait([self._closed], timeout=CLOSE_S_MAX)
        finally:
            if not self._closed.done():
                transport.abort()
        await asyncio.wait([self._closed])

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        return self._lost is None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not instances of it

    def data_received(self, data: bytes) -> None:
        for reply in self._parser.feed(data):
            if reply.identifier == 0:
                if self.notifications.full():
                    self.notifications.get_nowait()
                self.notifications.put_nowait(reply)
                continue
            future = self._outstanding.pop(reply.identifier, None)
            if future is not None and not future.done():
                future.set_result(reply)
        if self._parser.error is not None and self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = _lost(self._parser.error or exc or "closed")
        self._transport = None
        self._writable.set()
        for future in self._outstanding.values():
            if not future.done():
                future.set_exception(self._lost)
        self._outstanding.clear()
        self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    set = _async(commands.set_)
    get = _async(commands.get)
    details = _async(commands.details)
    scan = _async(commands.scan)
    search = _async(commands.search)
    more = _async(commands.more)
    delete = _async(commands.delete)
    add = _async(commands.add)
    invert = _async(commands.invert)
    truncate = _async(commands.truncate)
    lock = _async(commands.lock)
    unlock = _async(commands.unlock)
    rename = _async(commands.rename)
    link = _async(commands.link)
    unlink = _async(commands.unlink)
    ping = _async(commands.ping)
    push = _async(commands.push)
    next = _async(commands.next_)
    done = _async(commands.done)
    extend = _async(commands.extend)
    give_back = _async(commands.give_back)
    fail = _async(commands.fail)
    admin = _async(commands.admin)


def _unreachable(host: str, port: int, error: OSError) -> JournalError:
    return JournalError(
        f"no journal at {host}:{port} ({error.strerror or error}); is `virta serve` or `virta journal serve` running?",
        code="disconnected",
    )
