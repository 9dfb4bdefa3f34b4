"""
The daemon's connections, natively: one call reads all of them, one sends all replies.

`native/lines.c` has the sockets, the buffers and their limits; what it cannot decode at a glance comes here
and is fed to the same parser the plain connections use, so there is one place where waiting and faults are
defined. All requests of a turn are carried out and logged together.

Invariant: this is `daemon.Connection` for every client: same limits, same order, same ends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from time import perf_counter
from typing import TYPE_CHECKING, Any

from virta.journal.protocol import kernel
from virta.journal.protocol.codec import RequestParser, WireError, encode_reply
from virta.journal.protocol.messages import Function, Reply, Request
from virta.journal.sessions import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.serving.commit_loop import Node

log = logging.getLogger("virta.journal")

# Turns that follow each other at once; then everybody else in the event loop has one.
TURNS_S_MAX = 0.001
ACCEPTS_MAX = 64
BACKLOG = 1_024
# Without descriptors left nobody is accepted for this long, as the event loop does it.
ACCEPT_AGAIN_S = 1.0
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_QUIT = int(Function.QUIT)


class Line:
    """One connection: `wire` is its native half."""

    __slots__ = ("parser", "respond", "session", "wire")

    def __init__(self) -> None:
        self.parser = RequestParser()
        self.session = Session()
        self.wire: Any = None
        self.respond: Callable[[Reply], None]


class Lines:
    """Listening sockets and everybody who came; `start` and `stop` it in a running loop."""

    def __init__(
        self,
        node: Node,
        *,
        lines_max: int,
        unanswered_max: int,
        write_high_bytes: int,
        unread_bytes_max: int,
        look_s_max: float,
    ) -> None:
        assert kernel.Lines is not None
        self._node = node
        self._lines_max = lines_max
        look_ns = int(min(max(look_s_max, 0.0), TURNS_S_MAX) * 1e9)
        self.wires = kernel.Lines(
            encode_reply, unanswered_max, write_high_bytes, unread_bytes_max, look_ns
        )
        self._listeners: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen at every address of the host; the first one is returned."""
        self._loop = loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, kind, protocol, _, address in dict.fromkeys(infos):
                self._listeners.append(_listening(family, kind, protocol, address))
        except OSError:
            self.stop()
            raise
        for listener in self._listeners:
            loop.add_reader(listener, self._accept, listener)
        loop.add_reader(self.wires.fileno(), self._turns)
        self._node.on_batch.append(self.wires.flush)
        name = self._listeners[0].getsockname()
        return name[0], name[1]

    @property
    def count(self) -> int:
        """Return how many connections are open."""
        return int(self.wires.count)

    def refuse_more(self) -> None:
        """Listen no longer."""
        for listener in self._listeners:
            if self._loop is not None:
                self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def stop(self) -> None:
        """Send what was answered and end all lines."""
        self.refuse_more()
        if self._loop is not None and self.wires.fileno() >= 0:
            self._loop.remove_reader(self.wires.fileno())
        for line in self.wires.close():
            self._node.engine.close(line.session)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                peer, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                log.warning("journal_accept_failed: %s", error.strerror)
                assert self._loop is not None
                self._loop.remove_reader(listener)
                self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again, listener)
                return
            self._admit(peer)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners and self._loop is not None:
            self._loop.add_reader(listener, self._accept, listener)

    def _admit(self, peer: socket.socket) -> None:
        if self.wires.count >= self._lines_max:
            log.warning("journal_connection_refused: there are %d", self._lines_max)
            peer.close()
            return
        line = Line()
        line.wire = self.wires.add(peer.fileno(), line)
        peer.detach()
        line.respond = line.wire.respond
        line.session.notify = line.wire.notify

    def _turns(self) -> None:
        """What came, what comes while it is done, and what a lone quick client asks next."""
        end = perf_counter() + TURNS_S_MAX
        wires, node = self.wires, self._node
        while wires.fileno() >= 0:
            found = wires.turn(True)
            if not found:
                return
            node.hold()
            try:
                self._carry_out(found)
            finally:
                node.release()
            wires.flush()
            if perf_counter() > end:
                # Not asleep in between: who asked all the time is likely to ask again.
                assert self._loop is not None
                self._loop.call_soon(self._turns)
                return

    def _carry_out(self, found: list[tuple[Line, list[Request] | None, Any]]) -> None:
        handle = self._node.handle
        for line, requests, rest in found:
            if requests is None:
                self._ended(line, cut=rest)
                continue
            session, respond = line.session, line.respond
            try:
                for request in requests:
                    handle(request, session, respond)
                if rest is not None:
                    self._parse(line, rest)
            except Exception:  # the others' requests are here as well, and are read only once
                log.exception("journal_connection_failed")
                line.wire.abort()

    def _parse(self, line: Line, data: bytes) -> None:
        """Bytes that are no whole ordinary request, or follow some that were none."""
        parser, wire = line.parser, line.wire
        for request in parser.feed(data):
            wire.asked(1)
            self._node.handle(request, line.session, line.respond)
            if request.function == _QUIT:
                wire.quit()
                return
        if parser.error is not None:
            self._refuse(line, parser.error)
        wire.raw = parser.buffered > 0

    def _refuse(self, line: Line, error: WireError) -> None:
        if error.identifier is not None:
            now = self._node.engine.clock()
            text = f"{error.code}: {error.message}"
            line.wire.notify(Reply(error.identifier, 0, now, error=text))
        line.wire.quit()
        log.info("journal_bad_message %s", error.message)

    def _ended(self, line: Line, *, cut: bool) -> None:
        if cut:
            log.warning("journal_connection_cut: it does not read its replies")
        self._node.engine.close(line.session)


def _listening(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise OSError(
            error.errno, f"cannot listen on {address[0]}:{address[1]}: {reason}"
        ) from error
    return listener
