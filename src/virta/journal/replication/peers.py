"""
Copies on several daemons: a spool and a forwarder per peer, and a pull when a daemon starts.

Every change accepted from a client is written to each peer's spool with its final timestamp before it
is acknowledged, and forwarded from there; what arrives on a link is applied and not passed on (a full
mesh). What is sent is in `copies`: order and repetition do not matter and all daemons converge. A starting
daemon pulls everything its peers have, as soon as it reaches them, and stores each page as it arrives. So does
one that was away for so long that its spool elsewhere grew too large: a request to pull replaces that spool.

Only the primary hands out jobs: the first daemon of the configured order that can be reached. After a
switch a job may run twice; its key acknowledges on every daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import zlib
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.errors import JournalError
from virta.journal.clients.aio import AsyncClient
from virta.journal.clients.forwarder import UNANSWERED_MAX, Forwarder
from virta.journal.clients.spool import HEAD_BYTES, Spool, SpoolFile, encode_record
from virta.journal.protocol import commands
from virta.journal.protocol.codec import RequestParser, encode_request
from virta.journal.protocol.messages import PERSIST, Function, Request
from virta.journal.replication.apply import PEER_PREFIX, PULL_PREFIX
from virta.journal.replication.interface import PeerLinks, Ticket
from virta.journal.sessions import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.journal.engine import JournalEngine

log = logging.getLogger("virta.journal.peers")

PEERS_MAX = 16
WATCH_S = 0.2
CONNECT_S_MAX = 3.0
ANSWER_S_MAX = 10.0  # of a peer to pull from: a busy one is slow, a stopped one never replies
RETRY_S_MAX = 5.0  # shorter than a spool's: writes wait for their copies
PULL_PAGE_S_MAX = 60.0
PULL_AGAIN_S = 1.0
# A peer that does not reply must not delay a stop; what it has not acknowledged stays in its spool.
LEAVE_S_MAX = 2.0
# What is kept for a peer that is away; beyond that it has to pull everything.
AWAY_BYTES_MAX = 256 * 1024 * 1024
# The file of the request to pull; older than any other, and removed once acknowledged.
PULL_FILE = "2000010100.fjs"
# A reconnecting link must not make another daemon primary in between.
GRACE_S = 1.0
COPIES_TIMEOUT_S = 10.0
RECORD_OVERHEAD_BYTES = HEAD_BYTES + 1
NAME_RANGES = 1 << 23  # see `table.ID_RANGE_SHIFT`
# It is part of the name of a directory.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Peer(NamedTuple):
    name: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Return the peer of a text `name=host:port`."""
        name, _, address = text.partition("=")
        host, _, port = address.rpartition(":")
        if not name or not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise JournalError(f"peer {text!r} is not of the form name=host:port", code="bad-peer")
        return cls(name, host, int(port))


class Link:
    """The changes that one peer has yet to acknowledge."""

    def __init__(self, directory: Path, peer: Peer, own_name: str, *, tracked: bool) -> None:
        self.peer = peer
        self.seen = float("-inf")  # when it was last connected
        self._spool = Spool(directory)
        self._bytes = sum(path.stat().st_size for path in self.files())
        self._tracked = tracked  # replies wait for acknowledgements
        self._open: dict[tuple[str, int], Ticket] = {}
        self._missing: dict[Ticket, int] = {}
        self._pull = encode_request(Request(Function.NOP, key=PULL_PREFIX + own_name.encode()))
        hello = Request(Function.NOP, key=PEER_PREFIX + own_name.encode())
        self.forwarder = Forwarder(
            directory,
            peer.host,
            peer.port,
            hello=hello,
            acknowledged=self._acknowledged,
            retry_s_max=RETRY_S_MAX,
        )

    def files(self) -> list[Path]:
        return sorted(self._spool.directory.glob("[0-9]*.fjs"))

    def send(self, messages: list[bytes], ticket: Ticket, *, sync: bool) -> None:
        if self.forwarder.drained.is_set():
            self._bytes = 0
        if self._bytes > AWAY_BYTES_MAX and not self.forwarder.connected:
            self._give_up()
        name, ends = self._spool.append(*messages, sync=sync)
        self._bytes += sum(map(len, messages)) + len(messages) * RECORD_OVERHEAD_BYTES
        if self._tracked:
            self._missing[ticket] = len(ends)
            for end in ends:
                self._open[name, end] = ticket

    def _give_up(self) -> None:
        """Replace the spool of a peer that was away for too long by a request to pull."""
        log.warning("peer_away name=%s bytes=%d", self.peer.name, self._bytes)
        directory = self._spool.directory
        files.write_whole(directory / PULL_FILE, encode_record(self._pull))
        for path in self.files():
            if path.name != PULL_FILE:
                path.unlink()
        self.forwarder.forget_files()
        self._open.clear()
        self._missing.clear()
        self._bytes = 0

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


class Peers(PeerLinks):
    """
    Args:
        name: this daemon's, unique among all; the order of `peers` and `name` in `order` makes the primary.
        copies: daemons, this one included, that have a persist SET or PUSH before it is acknowledged.
        copies_timeout: seconds after which `no-copies` is the answer instead.
    """

    spools = True

    def __init__(
        self,
        engine: JournalEngine,
        directory: Path,
        name: str,
        peers: list[Peer],
        *,
        copies: int = 1,
        copies_timeout: float = COPIES_TIMEOUT_S,
        order: list[str] | None = None,
    ) -> None:
        if len(peers) > PEERS_MAX:
            raise JournalError(f"{len(peers)} peers, at most {PEERS_MAX}", code="bad-peer")
        if not 1 <= copies <= len(peers) + 1:
            raise JournalError(
                f"copies {copies}: with {len(peers)} peers it is 1 to {len(peers) + 1}",
                code="bad-peer",
            )
        if not 0 < copies_timeout <= 3600:
            raise JournalError(
                f"copies timeout {copies_timeout}: it is above 0 and at most 3600 seconds",
                code="bad-peer",
            )
        names = [name, *(peer.name for peer in peers)]
        if len(set(names)) <= len(peers):
            raise JournalError(f"the daemons {names} do not all differ in name", code="bad-peer")
        for odd in names:
            if not NAME.fullmatch(odd):
                raise JournalError(
                    f"the daemon's name {odd!r} is not of letters, digits, '.', '_' and '-'",
                    code="bad-peer",
                )
        super().__init__()
        self.copies = copies
        self.copies_timeout = copies_timeout
        # Before the journal is restored, so that its own ids are known from those of others.
        engine.jobs.use_range(zlib.crc32(name.encode()) % NAME_RANGES)
        engine.primary = False  # the primary does this; it must not happen twice
        engine.start_copying()  # also changes made by restoring, if the clock was set in between
        self._engine = engine
        self._name = name
        self._peers = peers
        self._order = order or sorted([name, *(peer.name for peer in peers)])
        self._directory = directory
        self.links: list[Link] = []
        self._applied: Callable[[], None] = lambda: None
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._helpers: list[asyncio.Task[None]] = []

    async def start(self, applied: Callable[[], None]) -> None:
        """Pull what the peers have, then send them what they miss, for as long as this runs."""
        self._applied = applied
        self._engine.peer_requests.pull = self._pull_again
        for peer in self._peers:
            directory = self._directory / f"peer-{peer.name}"
            link = Link(directory, peer, self._name, tracked=self.copies > 1)
            self.links.append(link)
            self._recall(link)
        pulled = await asyncio.gather(*(self._pull(peer) for peer in self._peers))
        for link, reached in zip(self.links, pulled, strict=True):
            if reached:
                link.seen = asyncio.get_running_loop().time()
            else:
                self._helpers.append(asyncio.create_task(self._pull_later(link.peer)))
            self._tasks.append(asyncio.create_task(link.forwarder.run(self._stop)))
            self._helpers.append(asyncio.create_task(self._drained(link)))
        self._choose_primary()
        self._tasks.append(asyncio.create_task(self._watch()))
        applied()

    async def _drained(self, link: Link) -> None:
        await link.forwarder.drained.wait()
        self.backlog.arrived()

    @property
    def stopping(self) -> bool:
        """Return whether `stop` was called."""
        return self._stop.is_set()

    async def stop(self) -> None:
        self._stop.set()
        for task in self._helpers:
            task.cancel()
        tasks = {*self._tasks, *self._helpers}
        while tasks:
            _, tasks = await asyncio.wait(tasks, timeout=LEAVE_S_MAX)
            for task in tasks:
                task.cancel()
        for link in self.links:
            link.close()

    def replicate(self, requests: list[Request]) -> Ticket:
        ticket = Ticket()
        messages = [encode_request(request) for request in requests]
        sync = any(r.flags & PERSIST or r.function == Function.DELETE for r in requests)
        for link in self.links:
            link.send(messages, ticket, sync=sync)
        return ticket

    async def _watch(self) -> None:
        while not self._stop.is_set():
            self._choose_primary()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), WATCH_S)

    def _choose_primary(self) -> None:
        """Become primary if no daemon before this one in the order can be reached."""
        now = asyncio.get_running_loop().time()
        for link in self.links:
            if link.forwarder.connected:
                link.seen = now
        before = self._order[: self._order.index(self._name)]
        self._engine.primary = not any(
            link.seen > now - GRACE_S for link in self.links if link.peer.name in before
        )

    # Catching up.

    def _recall(self, link: Link) -> None:
        """After a crash, apply the non-persistent changes that are still spooled for a peer."""
        session = Session()
        session.link_to("recall")
        for path in link.files():
            with contextlib.closing(SpoolFile(path)) as file:
                while records := file.read(UNANSWERED_MAX):
                    for record in records:
                        for request in RequestParser().feed(record.message):
                            self._engine.handle(request, session)

    def _pull_again(self, name: str) -> None:
        """Pull from a peer that no longer has the changes this daemon missed."""
        for peer in self._peers:
            if peer.name == name and not self._stop.is_set():
                task = asyncio.create_task(self._pull_until_done(peer))
                self._helpers.append(task)
                task.add_done_callback(self._helpers.remove)

    async def _pull_later(self, peer: Peer) -> None:
        """Pull from a peer that was away when this daemon started."""
        await asyncio.sleep(PULL_AGAIN_S)
        await self._pull_until_done(peer)

    async def _pull_until_done(self, peer: Peer) -> None:
        while not await self._pull(peer):  # noqa: ASYNC110  (waits for another process)
            await asyncio.sleep(PULL_AGAIN_S)

    async def _pull(self, peer: Peer) -> bool:
        try:
            async with contextlib.AsyncExitStack() as stack:
                # A host or process that does not reply must not delay the start.
                async with asyncio.timeout(CONNECT_S_MAX):
                    client = await AsyncClient.connect(peer.host, peer.port)
                    await stack.enter_async_context(client)
                async with asyncio.timeout(ANSWER_S_MAX):
                    await client.request(Request(Function.NOP))
                pulled = await self._pull_all(client)
        except (JournalError, TimeoutError) as error:
            log.info("peer_not_pulled name=%s %s", peer.name, error)
            return False
        log.info("peer_pulled name=%s requests=%d", peer.name, pulled)
        return True

    async def _pull_all(self, client: AsyncClient) -> int:
        """Apply all data of the peer, as the requests it would have sent; return how many."""
        session = Session()
        session.link_to("pull")
        pulled = 0
        while True:
            command = commands.admin("export", offset=pulled).request
            async with asyncio.timeout(PULL_PAGE_S_MAX):
                reply = await client.request(command)
            parts = [pair.value.data for pair in reply.all_pairs() if pair.value is not None]
            if reply.error or not parts:
                raise JournalError(f"the export was refused: {reply.error}", code="bad-peer")
            requests = RequestParser().feed(b"".join(parts))
            if not requests:
                return pulled
            for request in requests:
                error = self._engine.handle(request, session).error
                if error:
                    log.warning("peer_pull_refused key=%r %s", request.key[:60], error)
            pulled += len(requests)
            self._applied()
