"""
Copies on several daemons: a spool and a forwarder per peer, and a pull when a daemon starts.

Every change accepted from a client is written to each peer's spool with its final timestamp before it
is acknowledged, and forwarded from there; what arrives on a link is applied and not passed on (a full
mesh). The largest timestamp wins on every daemon, so order and repetition do not matter and the values
converge. A starting daemon first pulls what its peers have.

Only the primary hands out jobs: the first daemon of the configured order that can be reached. After a
switch a job may run twice. Who works on a job, failed attempts and kicks stay with the daemon they
happened on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from virta.errors import JournalError
from virta.journal import commands
from virta.journal.client import AsyncClient
from virta.journal.engine import PEER_PREFIX
from virta.journal.forwarder import Forwarder
from virta.journal.messages import (
    COMMAND_KEY,
    DATA,
    DETAILS,
    OVERWRITE,
    PERSIST,
    QUERY_CURSOR,
    QUERY_RANGE,
    Function,
    Pair,
    Request,
    Value,
)
from virta.journal.session import Session
from virta.journal.spool import Spool
from virta.journal.wire import encode_request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.journal.engine import Engine

log = logging.getLogger("virta.journal.peers")

PEERS_MAX = 16
WATCH_S = 0.2
CONNECT_S_MAX = 3.0
PULL_S_MAX = 60.0
CATCH_UP_PAIRS = 1_000


class Peer(NamedTuple):
    name: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Peer:
        """`name=host:port`."""
        name, _, address = text.partition("=")
        host, _, port = address.rpartition(":")
        if not name or not host or not port.isdigit():
            raise JournalError(f"peer {text!r} is not of the form name=host:port", code="bad-peer")
        return cls(name, host, int(port))


class Ticket:
    """A batch of changes on its way: who has all of it, and who waits for that."""

    def __init__(self) -> None:
        self._copies = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def arrived(self) -> None:
        """One more peer has everything."""
        self._copies += 1
        ready = [callback for copies, callback in self._waiting if copies <= self._copies]
        self._waiting = [item for item in self._waiting if item[0] > self._copies]
        for callback in ready:
            callback()

    def when(self, copies: int, callback: Callable[[], None]) -> None:
        if copies <= self._copies:
            callback()
        else:
            self._waiting.append((copies, callback))


class Link:
    """What one peer still has to hear."""

    def __init__(self, directory: Path, peer: Peer, own_name: str) -> None:
        self.peer = peer
        self._spool = Spool(directory)
        self._open: dict[tuple[str, int], Ticket] = {}
        self._missing: dict[Ticket, int] = {}
        hello = Request(Function.NOP, key=PEER_PREFIX + own_name.encode())
        self.forwarder = Forwarder(
            directory, peer.host, peer.port, hello=hello, acknowledged=self._acknowledged
        )

    def send(self, messages: list[bytes], ticket: Ticket, *, sync: bool) -> None:
        name, ends = self._spool.append(*messages, sync=sync)
        self._missing[ticket] = len(ends)
        for end in ends:
            self._open[name, end] = ticket

    def _acknowledged(self, name: str, end: int) -> None:
        ticket = self._open.pop((name, end), None)
        if ticket is None:
            return  # from before a restart
        self._missing[ticket] -= 1
        if not self._missing[ticket]:
            del self._missing[ticket]
            ticket.arrived()

    def close(self) -> None:
        self._spool.close()


class Peers:
    """
    Args:
        name: this daemon's, unique among all; the order of `peers` and `name` in `order` makes the primary.
        copies: daemons, this one included, that have a persist SET or PUSH before it is acknowledged.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        name: str,
        peers: list[Peer],
        *,
        copies: int = 1,
        order: list[str] | None = None,
    ) -> None:
        if len(peers) > PEERS_MAX:
            raise JournalError(f"{len(peers)} peers, at most {PEERS_MAX}", code="bad-peer")
        if not 1 <= copies <= len(peers) + 1:
            raise JournalError(
                f"copies {copies}: with {len(peers)} peers it is 1 to {len(peers) + 1}",
                code="bad-peer",
            )
        self.copies = copies
        self._engine = engine
        self._name = name
        self._peers = peers
        self._order = order or sorted([name, *(peer.name for peer in peers)])
        self._directory = directory
        self._links: list[Link] = []
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Pull what the peers have, then send them what they miss, for as long as this runs."""
        self._engine.replicate = True
        for peer in self._peers:
            await self._pull(peer)
            link = Link(self._directory / f"peer-{peer.name}", peer, self._name)
            self._links.append(link)
            self._tasks.append(asyncio.create_task(link.forwarder.run(self._stop)))
        self._tasks.append(asyncio.create_task(self._watch()))

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            link.close()

    def spool(self, requests: list[Request]) -> Ticket:
        """Keep changes for every peer; what must survive is on disk when this returns."""
        ticket = Ticket()
        messages = [encode_request(request) for request in requests]
        sync = any(r.flags & PERSIST or r.function == Function.DELETE for r in requests)
        for link in self._links:
            link.send(messages, ticket, sync=sync)
        return ticket

    async def _watch(self) -> None:
        """Who is primary: this daemon, if nobody before it in the order can be reached."""
        while not self._stop.is_set():
            before = self._order[: self._order.index(self._name)]
            self._engine.primary = not any(
                link.forwarder.connected for link in self._links if link.peer.name in before
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), WATCH_S)

    # Catching up.

    async def _pull(self, peer: Peer) -> None:
        try:
            # A host that does not answer at all must not hold up the start.
            async with asyncio.timeout(CONNECT_S_MAX):
                connected = await AsyncClient.connect(peer.host, peer.port)
            async with asyncio.timeout(PULL_S_MAX), connected as client:
                values = await self._pull_values(client)
                jobs = await self._pull_jobs(client)
        except (JournalError, TimeoutError) as error:
            log.info("peer_not_pulled name=%s %s", peer.name, error)
            return
        log.info("peer_pulled name=%s values=%d jobs=%d", peer.name, values, jobs)

    async def _pull_values(self, client: AsyncClient) -> int:
        session = Session()
        session.peer = "pull"
        request = Request(
            Function.GET, flags=DATA | DETAILS, count=CATCH_UP_PAIRS, query=QUERY_RANGE
        )
        pulled = 0
        while True:
            reply = await client.request(request)
            for pair in reply.all_pairs():
                self._engine.handle(_as_set(pair), session)
                pulled += 1
            if reply.cursor is None:
                return pulled
            request = Request(Function.GET, key=reply.cursor, query=QUERY_CURSOR)

    async def _pull_jobs(self, client: AsyncClient) -> int:
        pulled = last = 0
        while True:
            command = commands.admin("export", offset=last).request
            assert command.key == COMMAND_KEY
            reply = await client.request(command)
            if reply.error or reply.pair is None or reply.pair.value is None:
                return pulled
            jobs = msgspec.msgpack.decode(reply.pair.value.data)
            if not jobs:
                return pulled
            now = self._engine.clock()
            for last, uri, image in jobs:  # noqa: B007  (the last id is where the next page starts)
                domain, _, priority, start, timestamp, _, kind, payload = image[:8]
                self._engine.jobs.push(
                    uri,
                    domain,
                    timestamp,
                    now,
                    priority=priority,
                    start=start,
                    payload=None if kind < 0 else Value(kind, payload),
                    persist=True,
                )
            pulled += len(jobs)


def _as_set(pair: Pair) -> Request:
    """A value of another daemon as the SET that made it."""
    details = pair.details
    assert details is not None
    return Request(
        Function.SET,
        0,
        OVERWRITE | (PERSIST if details.bits & 1 else 0),
        details.modified,
        details.expires or None,
        details.ttl or None,
        key=pair.key,
        value=pair.value,
    )
