"""
The journal on TCP: connections in front of a commit loop.

Invariant: what one connection can make the daemon keep in memory is bounded: one incomplete request, requests that
wait for the disk (UNANSWERED_MAX), and replies that the client does not read (UNREAD_BYTES_MAX).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, cast

from virta.journal.protocol.codec import RequestParser, encode_replies
from virta.journal.protocol.messages import PORT, Function, Reply
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.guard import RequestGuard
from virta.journal.sessions import Session

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

    from virta.journal.serving.guard import JournalRights

log = logging.getLogger("virta.journal")

CONNECTIONS_MAX = 1_024
BACKLOG = 1_024
# Requests of one connection that wait for the disk; beyond that it is not read from.
UNANSWERED_MAX = 4_096
# Replies and notifications that a client does not read; beyond that its connection is closed.
UNREAD_BYTES_MAX = 64 * 1024 * 1024
# Above this the connection is not read from until the client reads.
WRITE_HIGH_BYTES = 1024 * 1024
# How long a stopping server waits for the last replies to leave.
CLOSE_S_MAX = 1.0
_QUIT = int(Function.QUIT)


class JournalConnection(asyncio.Protocol):
    """One client: decodes its requests, has them carried out, and sends the replies of a batch together."""

    def __init__(self, server: JournalServer) -> None:
        self._server = server
        self._node = server.node
        self._session = Session(self._notify)
        self._guard: RequestGuard | None = None
        if server.authenticate is not None:
            self._guard = RequestGuard(server.node.engine, server.authenticate)
            self._session.check = self._guard.check
        self._parser = RequestParser()
        self._transport: asyncio.Transport | None = None
        self._out: list[Reply] = []
        self._unanswered = 0
        self._quitting = False  # reads no more; closes when everything is answered
        self._congested = False  # the client does not read
        self._paused = False  # it is not read from

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        if not self._server.admit(self):
            stream.abort()
            return
        self._transport = stream
        stream.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._server.dismiss(self)
        self._node.engine.close(self._session)

    def data_received(self, data: bytes) -> None:
        if self._quitting:
            return
        requests = self._parser.feed(data)
        for request in requests:
            if request.function == _QUIT:
                self._quitting = True
                del requests[requests.index(request) + 1 :]
                break
        self._unanswered += len(requests)
        self._node.handle_all(requests, self._session, self._respond, alone=self._server.alone)
        if self._guard is not None and self._guard.failed:
            self._quitting = True
        if self._parser.error is not None and not self._quitting:
            self._refuse()
        if self._out or self._quitting:
            self.flush()
        if self._unanswered > UNANSWERED_MAX:
            self._regulate()

    def pause_writing(self) -> None:
        self._congested = True
        self._regulate()

    def resume_writing(self) -> None:
        self._congested = False
        self._regulate()

    # Replies.

    def flush(self) -> None:
        """Send the replies that have gathered; close after the last one of a connection that quits."""
        out, self._out = self._out, []
        transport = self._transport
        if transport is None:
            return
        if out:
            transport.write(encode_replies(out))
            if self._congested and transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
                log.warning("journal_connection_cut: it does not read its replies")
                transport.abort()
                return
        if self._quitting and not self._unanswered:
            transport.close()
        elif self._paused:
            self._regulate()

    def close(self) -> None:
        """Send what was answered, then end."""
        self._quitting = True
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once."""
        if self._transport is not None:
            self._transport.abort()

    def _respond(self, replies: list[Reply]) -> None:
        self._unanswered -= len(replies)
        if not self._out:
            self._node.after_batch.add(self.flush)
        self._out += replies

    def _notify(self, message: Reply) -> None:
        self._unanswered += 1  # it replies to no request
        self._respond([message])

    def _refuse(self) -> None:
        """Answer malformed bytes if they have an identifier; nothing after them is read."""
        error = self._parser.error
        assert error is not None
        self._quitting = True
        if error.identifier is not None:
            text = f"{error.code}: {error.message}"
            self._out.append(Reply(error.identifier, 0, self._node.engine.clock(), error=text))
        log.info("journal_bad_message %s", error.message)

    def _regulate(self) -> None:
        """Read only while the client reads and the disk keeps up."""
        stop = self._congested or self._unanswered > UNANSWERED_MAX
        transport = self._transport
        if stop == self._paused or transport is None or transport.is_closing():
            return
        self._paused = stop
        if stop:
            transport.pause_reading()
        else:
            transport.resume_reading()


class JournalServer:
    """
    Serves a journal on TCP: `await start()`, `await stop()`; `address` says where (port 0 picks one).

    A node may be given, so that others, such as the HTTP handler, can share it; it is started and stopped here.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        node: CommitLoop | None = None,
        connections_max: int = CONNECTIONS_MAX,
        authenticate: Callable[[str], JournalRights] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        # Returns the rights of a token, or raises; without it connections need none.
        self.authenticate = authenticate
        self._tls = tls
        self.node = node or CommitLoop(directory)
        self.address = (host, port)
        self._connections: set[JournalConnection] = set()
        self._connections_max = connections_max
        self._all_closed = asyncio.Event()
        self._stopping = False
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Restore the journal and listen."""
        await self.node.start()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: JournalConnection(self), *self.address, backlog=BACKLOG, ssl=self._tls
            )
        except OSError:
            await self.node.stop()
            raise
        self.address = self._server.sockets[0].getsockname()[:2]
        log.info("journal_listening host=%s port=%d", *self.address)

    async def stop(self) -> None:
        """Accept no more, answer what is waiting, write a snapshot."""
        self._stopping = True
        if self._server is not None:
            await _close_listener(self._server)
        await self.node.stop()
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S_MAX):
                    await self._all_closed.wait()
        for connection in list(self._connections):
            connection.abort()
        if self._server is not None:
            await self._server.wait_closed()

    async def serve(self, stopped: asyncio.Event) -> None:
        """Serve from now until `stopped` is set."""
        await self.start()
        try:
            await stopped.wait()
        finally:
            await self.stop()

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._connections)

    @property
    def alone(self) -> bool:
        """Return whether there is one connection, so no other can share its batch."""
        return len(self._connections) == 1

    def admit(self, connection: JournalConnection) -> bool:
        """Count a new connection; return False if it is one too many."""
        if self._stopping:
            return False
        if len(self._connections) >= self._connections_max:
            log.warning("journal_connection_refused: there are %d", self._connections_max)
            return False
        self._connections.add(connection)
        return True

    def dismiss(self, connection: JournalConnection) -> None:
        """Forget a connection that ended."""
        self._connections.discard(connection)
        self.node.after_batch.discard(connection.flush)
        if self._stopping and not self._connections:
            self._all_closed.set()


async def _close_listener(server: asyncio.Server) -> None:
    """Accept no more, and close: asyncio leaks a connection that was accepted but not made before the close."""
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    await asyncio.sleep(0)
    server.close()
