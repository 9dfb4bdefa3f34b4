"""Copies: daemons that hear of each other's changes in any order, twice or late, end up equal."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from journal_support import Clock, Wire, connected, until

from virta.errors import JournalError
from virta.journal import forwarder
from virta.journal import messages as m
from virta.journal.daemon import JournalServer
from virta.journal.engine import Engine
from virta.journal.messages import Function, Request, Type, Value
from virta.journal.node import Node
from virta.journal.peers import Peer, Peers
from virta.journal.session import Session
from virta.journal.wire import RequestParser, encode_request

KEYS = [b"a", b"b", b"c"]
URIS = [b"http://h/%d" % i for i in range(3)]


def copies_of(engine):
    """What all daemons must agree on."""
    now = engine.clock()
    values = {}
    for key in KEYS:
        entry = engine.store.live(key, now)
        if entry is not None:
            values[key] = (engine.store.value(entry), entry.timestamp, entry.persist)
    jobs = {
        job.uri: (job.domain.name, job.priority, job.start, job.timestamp)
        for job in engine.jobs.listed(limit=100)
    }
    return values, jobs


def random_request(rng, engine, session):
    key, uri = rng.choice(KEYS), rng.choice(URIS)
    value = Value(Type.STRING, b"%d" % rng.randrange(100))
    kind = rng.randrange(8)
    if kind < 2:
        return Request(
            Function.SET, 1, m.OVERWRITE | rng.choice([0, m.PERSIST]), key=key, value=value
        )
    if kind == 2:
        return Request(Function.DELETE, 1, key=key)
    if kind == 3:
        number = Value(Type.INTEGER, (1).to_bytes(8))
        return Request(Function.ADD, 1, key=key, value=number)
    if kind == 4:
        return Request(
            Function.RENAME, 1, m.OVERWRITE, key=key, key2=rng.choice(KEYS), count=0, query=1
        )
    if kind < 7:
        return Request(
            Function.PUSH, 1, m.PERSIST, key=uri, key2=b"", count=rng.randrange(9), query=1
        )
    taken = engine.handle(Request(Function.NEXT, 1), session)
    if not taken.pairs:
        return Request(Function.NOP, 1)
    return Request(Function.DELETE, 1, m.OVERWRITE, key=taken.pairs[0].key)


@pytest.mark.parametrize("seed", range(40))
def test_two_daemons_converge(seed):
    """Messages dropped and sent again, doubled and reordered: both daemons end with the same."""
    rng = random.Random(seed)
    clock = Clock(1_000_000)
    engines = [Engine(clock), Engine(clock)]
    for engine in engines:
        engine.replicate = True
    links = [Session(), Session()]
    for link in links:
        link.peer = "other"
    clients = [Session(), Session()]
    spools = [[], []]
    for _ in range(rng.randrange(5, 120)):
        clock.now += rng.randrange(3)
        one = rng.randrange(2)
        # Only one of them is primary and hands out jobs.
        engine = engines[one]
        request = random_request(rng, engines[0] if one == 0 else engine, clients[one])
        engine.handle(request, clients[one])
        for side in range(2):
            spools[1 - side] += [encode_request(r) for r in engines[side].outgoing]
            engines[side].outgoing.clear()
            rng.shuffle(spools[side])
            while spools[side] and rng.random() < 0.5:
                # Dropped: it stays in the spool. Acknowledged: gone. Doubled: sent, and kept too.
                fate = rng.random()
                if fate < 0.3:
                    break
                (message,) = RequestParser().feed(spools[side][-1])
                engines[side].handle(message, links[side])
                if fate < 0.8:
                    spools[side].pop()
    for side in range(2):
        rng.shuffle(spools[side])
        for raw in spools[side]:
            (message,) = RequestParser().feed(raw)
            assert engines[side].handle(message, links[side]).error == ""
        assert engines[side].outgoing == []

    assert copies_of(engines[0]) == copies_of(engines[1])


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(forwarder, "RETRY_S_MAX", 0.2)


class Mesh:
    """Two daemons that know each other, on fixed ports, to be started and stopped."""

    def __init__(self, directory, copies=1):
        self.directory = directory
        self.copies = copies
        self.ports = {}
        self.servers = {}

    async def prepare(self):
        for name in ("a", "b"):
            probe = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
            self.ports[name] = probe.sockets[0].getsockname()[1]
            probe.close()
            await probe.wait_closed()

    async def start(self, name):
        other = "b" if name == "a" else "a"
        directory = self.directory / name
        node = Node(directory / "journal")
        peer = Peer(other, "127.0.0.1", self.ports[other])
        node.peers = Peers(node.engine, directory, name, [peer], copies=self.copies)
        server = JournalServer(port=self.ports[name], node=node)
        await server.start()
        self.servers[name] = server
        return server

    async def stop(self, name):
        await self.servers.pop(name).stop()


@asynccontextmanager
async def mesh(directory, **options):
    both = Mesh(directory, **options)
    await both.prepare()
    try:
        yield both
    finally:
        for name in list(both.servers):
            await both.stop(name)


def set_(key, data=b"v"):
    return Request(
        Function.SET, flags=m.OVERWRITE | m.PERSIST, key=key, value=Value(Type.STRING, data)
    )


def push(uri):
    return Request(Function.PUSH, flags=m.PERSIST, key=uri, count=0, query=1)


def test_changes_reach_the_peer_and_survive_its_absence(tmp_path):
    """Changes while the peer is away arrive when it is back; done jobs are done there, too."""

    async def run():
        async with mesh(tmp_path) as both:
            a = await both.start("a")
            async with connected(a) as wire:
                await wire.ask(set_(b"one"))
                await wire.ask(push(b"http://h/1"))
                await wire.ask(push(b"http://h/2"))
                b = await both.start("b")
                jobs_b = b.node.engine.jobs
                await until(lambda: len(jobs_b) == 2 and b.node.engine.store.live(b"one", 0))
                taken = await wire.ask(Request(Function.NEXT))
                await wire.ask(Request(Function.DELETE, key=taken.pairs[0].key))
                await until(lambda: len(jobs_b) == 1)
                await both.stop("b")
                await wire.ask(set_(b"two"))
                await wire.ask(Request(Function.DELETE, key=b"one"))
                b = await both.start("b")
                store = b.node.engine.store
                await until(lambda: store.live(b"two", 0) and not store.live(b"one", 0))
                return copies_of(a.node.engine) == copies_of(b.node.engine)

    assert asyncio.run(run())


def test_a_new_peer_is_filled(tmp_path):
    """A daemon that starts empty pulls all values and jobs, however many pages they take."""

    async def run():
        async with mesh(tmp_path) as both:
            a = await both.start("a")
            engine = a.node.engine
            now = engine.clock()
            for i in range(2_500):
                engine.store.set(b"k%d" % i, Value(Type.STRING, b"v"), now, now, persist=True)
                engine.jobs.push(
                    b"http://h/%d" % i, b"", now, now, payload=Value(1, b"p"), persist=True
                )
            b = await both.start("b")
            return len(b.node.engine.store), len(b.node.engine.jobs)

    assert asyncio.run(run()) == (2_500, 2_500)


def test_copies_are_waited_for(tmp_path):
    """With two copies a persist SET is answered only when both daemons have it."""

    async def run():
        async with mesh(tmp_path, copies=2) as both:
            a = await both.start("a")
            wire = await Wire.open(a.address)
            wire.send(set_(b"k"))
            plain = await wire.ask(
                Request(Function.SET, flags=m.OVERWRITE, key=b"ram", value=Value(0, b""))
            )
            early = list(wire.heard)
            b = await both.start("b")
            reply = await wire.hear()
            there = b.node.engine.store.live(b"k", 0) is not None
            await wire.close()
            return plain.error, early, reply.error, bool(reply.flags & m.PERSIST), there

    assert asyncio.run(run()) == ("", [], "", True, True)


def test_only_the_primary_hands_out_jobs(tmp_path):
    """The second daemon says not-primary while the first can be reached, and takes over when not."""

    async def run():
        async with mesh(tmp_path) as both:
            await both.start("a")
            b = await both.start("b")
            await until(lambda: not b.node.engine.primary)
            async with connected(b) as wire:
                await wire.ask(push(b"http://h/1"))
                refused = await wire.ask(Request(Function.NEXT))
                await both.stop("a")
                await until(lambda: b.node.engine.primary)
                taken = await wire.ask(Request(Function.NEXT))
            return refused.error, len(taken.pairs)

    assert asyncio.run(run()) == ("not-primary", 1)


@pytest.mark.parametrize("text", ["", "b", "b=host", "b=host:port", "=h:1", "b=:1"])
def test_bad_peer(text):
    """A peer that cannot be understood is an error that says how to write it."""
    with pytest.raises(JournalError, match="name=host:port"):
        Peer.parse(text)


def test_more_copies_than_daemons(tmp_path):
    """Copies that can never be made are refused at once."""
    with pytest.raises(JournalError, match="copies 3"):
        Peers(Engine(Clock()), tmp_path, "a", [Peer("b", "h", 1)], copies=3)
