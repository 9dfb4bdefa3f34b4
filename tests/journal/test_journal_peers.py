"""Copies: daemons that hear of each other's changes in any order, twice or late, end up equal."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from journal_support import Clock, Wire, connected, until

from virta.errors import JournalError
from virta.journal import commands, forwarder
from virta.journal import messages as m
from virta.journal.daemon import JournalServer
from virta.journal.domain import STATE_NAMES
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
    store, jobs = engine.store, engine.jobs
    values = {}
    for key in KEYS:
        entry = store.live(key, engine.clock())
        if entry is not None:
            values[key] = (
                sorted(entry.keys),
                store.value(entry),
                entry.timestamp,
                entry.persist,
                entry.expires,
                entry.worked_until,
            )
    known = {
        (job.uri, job.timestamp): (
            job.domain.name,
            STATE_NAMES[job.state],
            job.priority,
            job.start,
            job.payload,
            job.attempts,
            job.reason,
            job.worked_until,
            job.revision,
        )
        for job in jobs.all()
    }
    return values, known, jobs.finished.commands


def value_request(rng, now):
    key, other = rng.choice(KEYS), rng.choice(KEYS)
    value = Value(Type.STRING, b"%d" % rng.randrange(100))
    two = {"key": key, "key2": other, "count": 0, "query": 1}
    persist = rng.choice([0, m.PERSIST])
    return rng.choice(
        [
            Request(Function.SET, 1, m.OVERWRITE | persist, key=key, value=value),
            Request(Function.SET, 1, persist, key=key, value=value),
            Request(Function.SET, 1, m.OVERWRITE, 0, now + 9, 5, key=key, value=value),
            Request(Function.GET, 1, m.TOUCH, ttl=20, key=key),
            Request(Function.GET, 1, timeout=now + rng.randrange(-3, 30), key=key),
            Request(Function.DELETE, 1, rng.choice([0, m.OVERWRITE]), key=key),
            Request(Function.ADD, 1, key=key, value=Value(Type.INTEGER, (1).to_bytes(8))),
            Request(Function.RENAME, 1, m.OVERWRITE, **two),
            Request(Function.LINK, 1, **two),
            Request(Function.LINK, 1, **two),
            Request(Function.UNLINK, 1, key=key),
        ]
    )


def admin(do, **fields):
    return commands.admin(do, **fields).request


def job_request(rng, now, keys):
    uri, key = rng.choice(URIS), rng.choice(keys)
    start = rng.choice([None, now + rng.randrange(-3, 9)])
    return rng.choice(
        [
            *3
            * [
                Request(
                    Function.PUSH, 1, m.PERSIST, 0, start, key=uri, count=rng.randrange(3), query=1
                )
            ],
            Request(Function.NEXT, 1, timeout=now + rng.randrange(1, 9)),
            Request(Function.NEXT, 1, rng.choice([0, m.OVERWRITE])),
            Request(Function.DELETE, 1, m.OVERWRITE, key=key),
            Request(Function.DELETE, 1, key=uri),
            Request(Function.GET, 1, timeout=now + rng.randrange(-3, 9), key=key),
            admin("fail", key=key.decode(), reason="why", delay=rng.choice([None, 0])),
            admin("kick", uri=uri.decode()),
            admin("requeue", uri=uri.decode()),
            admin("drop", uri=uri.decode()),
            admin("configure", domain="h", settings={"max_attempts": rng.randrange(3)}),
        ]
    )


class Faulty:
    """Engines whose messages to each other are dropped and sent again, doubled and reordered."""

    def __init__(self, rng, count):
        self.rng = rng
        self.clock = Clock(1_000_000)
        self.engines = [Engine(self.clock) for _ in range(count)]
        for number, engine in enumerate(self.engines):
            engine.start_copying()
            engine.jobs.use_range(number + 1)
        self.client = Session()
        self.link = Session()
        self.link.peer = "other"
        self.spools = [[] for _ in self.engines]
        self.keys = [b"h:000:00000000000000000000:0000000000000000"]

    def step(self):
        rng = self.rng
        self.clock.now += rng.randrange(3)
        engine = rng.choice(self.engines)
        if rng.random() < 0.5:
            request = value_request(rng, self.clock.now)
        else:
            request = job_request(rng, self.clock.now, self.keys)
        reply = engine.handle(request, self.client)
        if request.function == Function.NEXT and reply.pairs:
            self.keys.append(reply.pairs[0].key)
        self.gather()
        for side, spool in enumerate(self.spools):
            rng.shuffle(spool)
            while spool and rng.random() < 0.5:
                fate = rng.random()
                if fate < 0.3:
                    break  # dropped: it stays in the spool
                if self.deliver(side, spool[-1]) and fate < 0.8:
                    spool.pop()  # else doubled: sent, and kept, too

    def gather(self):
        for side, engine in enumerate(self.engines):
            engine.tick()
            messages = [encode_request(request) for request in engine.gather()]
            for other, spool in enumerate(self.spools):
                if other != side:
                    spool.extend(messages)

    def deliver(self, side, raw):
        (message,) = RequestParser().feed(raw)
        error = self.engines[side].handle(message, self.link).error
        assert error.partition(":")[0] in ("", "not-yet", "already-exists"), error
        return not error

    def heal(self):
        for _ in range(50):
            for side, spool in enumerate(self.spools):
                self.rng.shuffle(spool)
                self.spools[side] = [raw for raw in spool if not self.deliver(side, raw)]
            self.gather()
            if not any(self.spools):
                return
        raise AssertionError(RequestParser().feed(next(filter(None, self.spools))[0]))


@pytest.mark.parametrize("seed", range(60))
def test_daemons_converge(seed):
    """Whatever messages go through, two or three daemons end with the same values, jobs and marks."""
    rng = random.Random(seed)
    faulty = Faulty(rng, rng.choice([2, 3]))
    for _ in range(rng.randrange(5, 120)):
        faulty.step()
    faulty.heal()

    first, *others = [copies_of(engine) for engine in faulty.engines]
    for other in others:
        assert first == other


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(forwarder, "RETRY_S_MAX", 0.2)


class Mesh:
    """Two daemons that know each other, on fixed ports, to be started and stopped."""

    def __init__(self, directory, **options):
        self.directory = directory
        self.options = options
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
        node.peers = Peers(node.engine, directory, name, [peer], **self.options)
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


def test_a_new_peer_has_everything_else_too(tmp_path):
    """Links, marks, tombstones, dead letters, settings and finished commands come with the pull."""

    async def run():
        async with mesh(tmp_path) as both:
            a = await both.start("a")
            async with connected(a) as wire:
                for request in (
                    set_(b"a"),
                    Request(Function.LINK, key=b"a", key2=b"b", count=0, query=1),
                    Request(Function.GET, key=b"a", timeout=1 << 60),
                    set_(b"c"),
                    Request(Function.DELETE, key=b"c"),
                    admin("configure", domain="h", settings={"max_attempts": 1}),
                    *map(push, URIS),
                ):
                    assert (await wire.ask(request)).error == ""
                taken = (await wire.ask(Request(Function.NEXT, count=3))).pairs
                await wire.ask(admin("fail", key=taken[0].key.decode(), reason="why"))
                await wire.ask(Request(Function.DELETE, key=taken[1].key))
            b = await both.start("b")
            same = copies_of(a.node.engine) == copies_of(b.node.engine)
            states = sorted(STATE_NAMES[job.state] for job in b.node.engine.jobs.all())
            buried = b.node.engine.store.stored(b"c").tombstone
            await both.stop("a")
            await until(lambda: b.node.engine.primary)
            async with connected(b) as wire:
                done = await wire.ask(Request(Function.DELETE, key=taken[2].key))
            return same, states, buried, bool(done.flags & m.DELETED)

    assert asyncio.run(run()) == (True, ["dead", "working"], True, True)


def test_a_peer_that_was_away_is_pulled_later(tmp_path):
    """What a peer knew before this daemon was configured arrives once it can be reached."""

    async def run():
        async with mesh(tmp_path) as both:
            b = await both.start("b")
            a = JournalServer(port=both.ports["a"], node=Node(tmp_path / "a" / "journal"))
            await a.start()
            async with connected(a) as wire:
                await wire.ask(set_(b"old"))
            await until(lambda: b.node.engine.store.live(b"old", 0))
            await a.stop()

    asyncio.run(run())


def test_copies_that_are_not_made_are_an_error(tmp_path):
    """Too few daemons in time: no-copies, with numbers; the change stands and arrives later."""

    async def run():
        async with mesh(tmp_path, copies=2, copies_timeout=0.1) as both:
            a = await both.start("a")
            async with connected(a) as wire:
                request = set_(b"k")
                request.timestamp = a.node.engine.clock()
                refused = await wire.ask(request)
                again = await wire.ask(request)  # the same change, still on one daemon only
                b = await both.start("b")
                await until(lambda: b.node.engine.store.live(b"k", 0))
                await until(a.node.peers._links[0].forwarder.drained.is_set)
                accepted = await wire.ask(request)
            return refused.error, again.error, accepted.error

    refused, again, accepted = asyncio.run(run())
    assert refused == "no-copies: 1 of 2 daemons have it after 0.1 s; the others will get it"
    assert (again, accepted) == (refused, "")


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


@pytest.mark.parametrize(
    ("peers", "options", "problem"),
    [
        ("b", {"copies": 3}, "copies 3"),
        ("b", {"copies": 0}, "copies 0"),
        ("b", {"copies_timeout": 0}, "copies timeout 0"),
        ("a", {}, "differ in name"),
        ("bcb", {}, "differ in name"),
        ("bcdefghijklmnopqr", {}, "at most 16"),
    ],
)
def test_wrong_copies(peers, options, problem, tmp_path):
    """Copies that can never be made, and daemons that cannot be told apart, are refused at once."""
    others = [Peer(name, "h", 1) for name in peers]
    with pytest.raises(JournalError, match=problem):
        Peers(Engine(Clock()), tmp_path, "a", others, **options)
