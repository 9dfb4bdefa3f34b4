"""A daemon that is new, lost its disk or was away for long catches up by itself."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time

import pytest
from journal_faulty import copies_of
from journal_support import Daemon, Port, connected, eventually, mesh

from virta.journal import Client
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import RequestParser
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.replication import peers
from virta.journal.replication.peers import PULL_FILE
from virta.journal.serving.embedded import Journal

COUNT = 5_000
BATCH = 500
CAUGHT_UP_S_MAX = 60
CHECK_S = 0.02


def set_(key, data=b"v", persist=m.PERSIST):
    return Request(
        Function.SET, flags=m.OVERWRITE | persist, key=key, value=Value(Type.STRING, data)
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(peers, "RETRY_S_MAX", 0.2)


class Gate:
    """A TCP proxy that lets so many bytes of answers through, and the rest once it is open."""

    def __init__(self, target, limit):
        self.target = target
        self.limit = limit
        self.full = threading.Event()
        self.stopped = False
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.1)
        self.port = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while not self.stopped:
            with contextlib.suppress(TimeoutError):
                near, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._carry, args=(near,)))
                self._threads[-1].start()

    def _carry(self, near):
        with (
            near,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target), timeout=5) as far,
        ):
            while not self.stopped:
                # What it may not pass on is not read, so that the other side waits.
                sides = [near] if self.limit <= 0 else [near, far]
                for ready in select.select(sides, [], [], 0.1)[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    (far if ready is near else near).sendall(data)
                    self.limit -= len(data) if ready is far else 0
                    if self.limit <= 0:
                        self.full.set()

    def close(self):
        self.stopped = True
        for thread in self._threads:
            thread.join(10)
        self._server.close()


def fill(port):
    """Values, links, tombstones; jobs that wait, are worked on, done and dead."""
    with Client(port=port) as client:
        for start in range(0, COUNT, BATCH):
            numbers = range(start, start + BATCH)
            client.pipeline([commands.set_(f"k{i}", f"{i}" * 200) for i in numbers])
            payload = "p" * 900
            client.pipeline([commands.push(f"http://h/{i}", payload=payload) for i in numbers])
        client.link("k1", "other")
        client.delete("k2")
        client.admin("configure", domain="h", settings={"max_attempts": 1})
        taken = client.next(count=4, work_for=3600).jobs
        client.done(taken[0].key)
        client.fail(taken[1].key, "no good")


def everything(port):
    """All keys with their values, and all jobs."""
    with Client(port=port) as client:
        page = client.call(commands.scan("k", "p"))
        values = page.items
        while page.cursor is not None:
            page = client.more(page.cursor)
            values += page.items
        jobs = []
        while more := client.admin("list", limit=1000, offset=len(jobs))["jobs"]:
            jobs += more
    return values, sorted((job["uri"], sorted(job.items())) for job in jobs)


@pytest.mark.slow
def test_an_empty_peer_catches_up_although_it_is_killed(tmp_path):
    """Beside 5,000 keys and jobs: killed half way it keeps what it had, and ends up equal."""
    with Daemon(tmp_path / "a") as alone:
        fill(alone.port)
        port = alone.port
    gate = Gate(port, limit=3 * 1024 * 1024)
    known_as = ("--name", "b", "--peer", f"a=127.0.0.1:{gate.port}")
    daemons, reserved = [], Port()
    other = reserved.number
    try:
        a = Daemon(tmp_path / "a", "--name", "a", "--peer", f"b=127.0.0.1:{other}", port=port)
        daemons.append(a)
        b = Daemon(tmp_path / "b", *known_as, port=other, ready=False)
        daemons.append(b)
        assert gate.full.wait(CAUGHT_UP_S_MAX)
        log = tmp_path / "b" / "journal"
        deadline = time.monotonic() + CAUGHT_UP_S_MAX
        while sum(path.stat().st_size for path in log.rglob("*.puro")) < 1024 * 1024:
            assert time.monotonic() < deadline
            threading.Event().wait(CHECK_S)
        b.kill()
        with Journal(log) as half:
            kept = len(half.engine.store)
        gate.limit = 1 << 40
        b = Daemon(tmp_path / "b", *known_as, port=other)
        daemons.append(b)
        ours, theirs = everything(a.port), everything(b.port)
    finally:
        for daemon in daemons:
            daemon.kill()
        gate.close()
        reserved.close()

    assert 0 < kept < COUNT
    assert ours == theirs
    assert len(ours[0]) == COUNT
    assert len(ours[1]) == COUNT - 1


def test_the_largest_values_are_pulled(tmp_path):
    """A value of 8 MiB under a key of 65,535 bytes fits no message with anything else, and arrives."""
    key = b"k" * m.KEY_BYTES_MAX

    async def run():
        async with mesh(tmp_path) as both:
            a = await both.start("a")
            async with connected(a) as wire:
                await wire.ask(set_(b"small"))
                await wire.ask(set_(key, b"x" * m.VALUE_DATA_BYTES_MAX))
                await wire.ask(set_(b"more"))
            b = await both.start("b")
            store = b.node.engine.store
            return [store.live(each, 0).size for each in (b"small", key, b"more")]

    assert asyncio.run(run()) == [1, m.VALUE_DATA_BYTES_MAX, 1]


def test_what_is_kept_for_an_absent_peer_is_bounded(tmp_path, monkeypatch):
    """Beyond a limit the spool of a peer that is away is one request to pull. The peer does, and has everything."""
    monkeypatch.setattr(peers, "AWAY_BYTES_MAX", 20_000)

    async def run():
        async with mesh(tmp_path) as both:
            a = await both.start("a")
            spool = tmp_path / "a" / "peer-b"
            sizes = []
            async with connected(a) as wire:
                for i in range(100):
                    await wire.ask(set_(b"k%d" % i, b"v" * 1000))
                    sizes.append(sum(path.stat().st_size for path in spool.glob("[0-9]*.fjs")))
                (request,) = RequestParser().feed((spool / PULL_FILE).read_bytes()[18:-1])
                b = await both.start("b")
                await eventually(lambda: not (spool / PULL_FILE).exists() or not pending(spool))
                await eventually(lambda: copies_of(a.node.engine) == copies_of(b.node.engine))
                return max(sizes), request.key, len(b.node.engine.store)

    largest, key, keys = asyncio.run(run())
    assert largest < 25_000
    assert key == b"pull:a"
    assert keys == 100


def pending(spool):
    return (spool / PULL_FILE).read_bytes().startswith(b"+")


def test_a_daemon_pulls_when_a_peer_requests_it(tmp_path):
    """Without a restart: a peer that could not keep what was missed says so, and is asked for everything."""

    async def run():
        async with mesh(tmp_path) as both:
            a, b = await both.start("a"), await both.start("b")
            now = a.node.engine.clock()
            # As if b had been cut off: no copy is sent.
            a.node.engine.store.set(b"k", Value(Type.STRING, b"v"), now, now, persist=True)
            async with connected(b) as wire:
                await wire.ask(Request(Function.NOP, key=b"pull:a"))  # not from a peer
                await wire.ask(Request(Function.NOP, key=b"peer:a"))
                early = b.node.engine.store.live(b"k", 0)
                await wire.ask(Request(Function.NOP, key=b"pull:unknown"))
                await wire.ask(Request(Function.NOP, key=b"pull:a"))
                await eventually(lambda: b.node.engine.store.live(b"k", 0))
            return early

    assert asyncio.run(run()) is None
