"""
The journal on TCP: connections in, a Node behind.

Invariant: what one connection can make the daemon hold is bounded: one unfinished request, so many
requests that wait for the disk, so many bytes of replies it does not read.

Where the native half was built `lines` has the connections, all of them in one call; `Connection` is its
plain twin on asyncio's transports.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from time import perf_counter
from typing import TYPE_CHECKING, cast

from virta.journal.clients.awake import AWAKE_S_MAX, Awake, possible
from virta.journal.protocol import kernel
from virta.journal.protocol.codec import RequestParser, encode_reply
from virta.journal.protocol.messages import PORT, Function, Reply, Request
from virta.journal.serving.commit_loop import Node
from virta.journal.serving.connections import BACKLOG, Lines
from virta.journal.sessions import Session

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("virta.journal")

CONNECTIONS_MAX = 1_024
# A client that is answered awake gives others a turn after this long.
LINGER_S_MAX = 0.002
# Requests of one connection that wait for the disk; beyond that it is not read from.
UNANSWERED_MAX = 4_096
# Replies and notifications a connection does not take; beyond that it is cut.
UNREAD_BYTES_MAX = 64 * 1024 * 1024
# Above this the connection is not read from until it reads.
WRITE_HIGH_BYTES = 1024 * 1024


class Connection(asyncio.Protocol):
    def __init__(self, server: JournalServer) -> None:
        self._server = server
        self._node = server.node
        self._session = Session(self._notify)
        self._parser = RequestParser()
        self._transport: asyncio.Transport | None = None
        self._out: list[Reply] = []
        self._unanswered = 0
        self._quitting = False
        self._full = False  # the other side does not read
        self._paused = False  # it is not read from
        self._awake: Awake | None = None
        self._socket: socket.socket | None = None  # the transport's, to look at without sleeping
        self._idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        if not self._server.admit(self):
            stream.abort()
            return
        self._transport = stream
        stream.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        if self._server.awake:
            self._socket = socket.socket(fileno=os.dup(stream.get_extra_info("socket").fileno()))
            self._awake = Awake(self._socket)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._socket is not None:
            self._socket.close()
            self._awake = self._socket = None
        self._server.dismiss(self)
        self._node.engine.close(self._session)

    def data_received(self, data: bytes) -> None:
        if self._awake is None:
            self._take(data)
            return
        now = perf_counter()
        self._awake.learn(now - self._idle_since)
        self._take(data)
        self._linger(self._awake, now + LINGER_S_MAX)
        self._idle_since = perf_counter()

    def _linger(self, awake: Awake, end: float) -> None:
        """A lone client that asks again at once is answered at once, until others may have a turn."""
        while (
            self._server.alone
            and awake.worthwhile()
            and not (self._unanswered or self._paused or self._quitting)
            and (began := perf_counter()) < end
        ):
            try:
                data = awake.receive()
            except OSError:
                return  # the transport will be told as well
            awake.learn(perf_counter() - began)
            if not data:
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        if self._quitting:
            return
        requests = self._parser.feed(data)
        if self._server.alone:
            self._node.hold()
            try:
                self._handle(requests)
            finally:
                self._node.release()
        else:
            self._handle(requests)
        error = self._parser.error
        if error is not None and not self._quitting:
            self._quitting = True
            if error.identifier is not None:
                now = self._node.engine.clock()
                text = f"{error.code}: {error.message}"
                self._out.append(Reply(error.identifier, 0, now, error=text))
            log.info("journal_bad_message %s", error.message)
        if self._out or self._quitting:
            self.flush()
        self._regulate()

    def _handle(self, requests: list[Request]) -> None:
        for request in requests:
            self._unanswered += 1
            self._node.handle(request, self._session, self._respond)
            if request.function == Function.QUIT:
                self._quitting = True
                break

    def _respond(self, reply: Reply) -> None:
        self._unanswered -= 1
        self._notify(reply)

    def _notify(self, reply: Reply) -> None:
        if not self._out:
            self._server.touched.add(self)
        self._out.append(reply)

    def flush(self) -> None:
        """Send what has gathered; the last thing a quitting connection does is close."""
        out, self._out = self._out, []
        transport = self._transport
        if transport is None:
            return
        if out:
            transport.write(
                encode_reply(out[0]) if len(out) == 1 else b"".join(map(encode_reply, out))
            )
            if self._full and transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
                log.warning("journal_connection_cut: it does not read its replies")
                transport.abort()
                return
        if self._quitting and not self._unanswered:
            transport.close()

    def pause_writing(self) -> None:
        self._full = True
        self._regulate()

    def resume_writing(self) -> None:
        self._full = False
        self._regulate()

    def _regulate(self) -> None:
        """Read only as long as the other side reads and the disk keeps up."""
        stop = self._full or self._unanswered > UNANSWERED_MAX
        if stop == self._paused:
            return
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._paused = stop
        if stop:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def after_batch(self) -> None:
        self.flush()
        self._regulate()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class JournalServer:
    """
    `await start()`, `await stop()`; `address` says where it listens (port 0 picks one).

    A lone client that asks again and again is looked for, for up to `look` seconds, before the loop sleeps;
    with `awake` for up to 0.5 ms: for a loop that has little else to do, so never unless asked for. The node
    may be given (it is then started and stopped here all the same), so that other doors, such as the HTTP
    handler, can share it.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        node: Node | None = None,
        connections_max: int = CONNECTIONS_MAX,
        awake: bool = False,
        look: float = 0.0,
    ) -> None:
        self.awake = awake and possible()
        self.node = node or Node(directory)
        self.touched: set[Connection] = set()
        self.address = (host, port)
        self._look = (AWAKE_S_MAX if awake else look) if possible() else 0.0
        self._connections: set[Connection] = set()
        self._connections_max = connections_max
        self._stopping = False  # a connection accepted meanwhile is not taken
        self._server: asyncio.Server | None = None
        self._lines: Lines | None = None

    async def start(self) -> None:
        await self.node.start()
        try:
            self.address = await (
                self._listen() if kernel.Lines is None else self._listen_natively()
            )
        except OSError:
            await self.node.stop()
            raise
        log.info("journal_listening host=%s port=%d", *self.address)

    async def _listen_natively(self) -> tuple[str, int]:
        self._lines = Lines(
            self.node,
            lines_max=self._connections_max,
            unanswered_max=UNANSWERED_MAX,
            write_high_bytes=WRITE_HIGH_BYTES,
            unread_bytes_max=UNREAD_BYTES_MAX,
            look_s_max=self._look,
        )
        return await self._lines.start(*self.address)

    async def _listen(self) -> tuple[str, int]:
        self.node.on_batch.append(self._after_batch)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), *self.address, backlog=BACKLOG
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def stop(self) -> None:
        """Take no more, answer what is waiting, keep a snapshot."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
        if self._lines is not None:
            self._lines.refuse_more()
        await self.node.stop()
        if self._lines is not None:
            self._lines.stop()
        for connection in list(self._connections):
            connection.flush()
            connection.abort()
        if self._server is not None:
            await self._server.wait_closed()

    async def serve(self, stopped: asyncio.Event) -> None:
        """From start to stop."""
        await self.start()
        try:
            await stopped.wait()
        finally:
            await self.stop()

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._connections) if self._lines is None else self._lines.count

    @property
    def alone(self) -> bool:
        """Whether nobody else could have anything to share a batch with."""
        return len(self._connections) == 1

    def admit(self, connection: Connection) -> bool:
        if self._stopping:
            return False
        if len(self._connections) >= self._connections_max:
            log.warning("journal_connection_refused: there are %d", self._connections_max)
            return False
        self._connections.add(connection)
        return True

    def dismiss(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.touched.discard(connection)

    def _after_batch(self) -> None:
        touched, self.touched = self.touched, set()
        for connection in touched:
            connection.after_batch()
