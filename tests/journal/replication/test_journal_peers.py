"""Copies: daemons that receive changes in any order, twice or late, end up equal."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from journal_faulty import URIS, admin, copies_of
from journal_support import (
    GATE_S_MAX,
    Clock,
    Disks,
    Gate,
    Wire,
    connected,
    eventually,
    mesh,
    turns,
)

from virta.errors import JournalError
from virta.journal.engine import JournalEngine
from virta.journal.jobs.job import STATE_NAMES
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.replication import peers as links
from virta.journal.replication.peers import Peer, Peers
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.embedded import Journal
from virta.journal.serving.tcp import JournalServer
from virta.journal.storage.directory import Persistence
from virta.log.group_commit import INLINE_S_MAX


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(links, "RETRY_S_MAX", 0.2)


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
                await eventually(lambda: len(jobs_b) == 2 and b.node.engine.store.live(b"one", 0))
                taken = await wire.ask(Request(Function.NEXT))
                await wire.ask(Request(Function.DELETE, key=taken.pairs[0].key))
                await eventually(lambda: len(jobs_b) == 1)
                await both.stop("b")
                await wire.ask(set_(b"two"))
                await wire.ask(Request(Function.DELETE, key=b"one"))
                b = await both.start("b")
                store = b.node.engine.store
                await eventually(lambda: store.live(b"two", 0) and not store.live(b"one", 0))
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
            await eventually(lambda: b.node.engine.primary)
            async with connected(b) as wire:
                done = await wire.ask(Request(Function.DELETE, key=taken[2].key))
            return same, states, buried, bool(done.flags & m.DELETED)

    assert asyncio.run(run()) == (True, ["dead", "working"], True, True)


def test_a_peer_that_was_away_is_pulled_later(tmp_path):
    """What a peer knew before this daemon was configured arrives once it can be reached."""

    async def run():
        async with mesh(tmp_path) as both:
            b = await both.start("b")
            a = JournalServer(port=both.ports["a"], node=CommitLoop(tmp_path / "a" / "journal"))
            await a.start()
            async with connected(a) as wire:
                await wire.ask(set_(b"old"))
            await eventually(lambda: b.node.engine.store.live(b"old", 0))
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
                await eventually(lambda: b.node.engine.store.live(b"k", 0))
                await eventually(a.node.peers.links[0].forwarder.drained.is_set)
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
            early = list(wire.received)
            b = await both.start("b")
            reply = await wire.receive()
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
            link = b.node.peers.links[0].forwarder
            await eventually(lambda: link.connected and not b.node.engine.primary)
            async with connected(b) as wire:
                await wire.ask(push(b"http://h/1"))
                refused = await wire.ask(Request(Function.NEXT))
                await both.stop("a")
                await eventually(lambda: b.node.engine.primary)
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
    """Copies that can never be made, and daemons of the same name, are refused at once."""
    others = [Peer(name, "h", 1) for name in peers]
    with pytest.raises(JournalError, match=problem):
        Peers(JournalEngine(Clock()), tmp_path, "a", others, **options)


@asynccontextmanager
async def silent_peer():
    """A port that takes connections and answers nothing."""
    lines = []
    server = await asyncio.start_server(lambda *line: lines.append(line), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for _, writer in lines:
            writer.transport.abort()
        server.close()
        await server.wait_closed()


def beside(directory, port, *, inline_s_max=INLINE_S_MAX, open_disk=Persistence, **options):
    """A journal whose only peer is at that port."""
    running = CommitLoop(directory / "journal", inline_s_max=inline_s_max, open_disk=open_disk)
    peer = Peer("b", "127.0.0.1", port)
    running.peers = Peers(running.engine, directory, "a", [peer], **options)
    return running


@pytest.fixture
def short_waits(monkeypatch):
    """Wait for a peer that does not answer only briefly."""
    monkeypatch.setattr(links, "ANSWER_S_MAX", 0.05)
    monkeypatch.setattr(links, "LEAVE_S_MAX", 0.05)


@pytest.mark.usefixtures("short_waits")
def test_a_peer_that_does_not_reply_delays_neither_start_nor_stop(tmp_path):
    """It is pulled later, and what it did not acknowledge stays in its spool."""

    async def run():
        async with silent_peer() as port, asyncio.timeout(GATE_S_MAX / 2):
            running = beside(tmp_path, port)
            await running.start()
            reply = await running.submit(set_(b"k"))
            await running.stop()
            return reply.error, len(running.peers.links[0].files())

    assert asyncio.run(run()) == ("", 1)


@pytest.mark.usefixtures("short_waits")
def test_a_pull_does_not_wait_for_copies_of_what_others_change(tmp_path):
    """A peer that starts gets everything although a change waits for it; else both would wait."""

    async def run():
        async with silent_peer() as port:
            running = beside(tmp_path, port, copies=2, copies_timeout=3600)
            await running.start()
            reading = ("export", "stats", "list", "configure")
            asked = [commands.admin(do, domain="h" * (do == "configure")) for do in reading]
            changing = asyncio.create_task(running.submit(set_(b"k")))
            replies = [asyncio.create_task(running.submit(command.request)) for command in asked]
            found = await asyncio.wait_for(asyncio.gather(*replies), GATE_S_MAX)
            waits = not changing.done()
            changing.cancel()
            await running.stop()
            return waits, [reply.error for reply in found]

    assert asyncio.run(run()) == (True, [""] * 4)


@pytest.mark.usefixtures("short_waits")
def test_what_comes_while_the_peers_stop_is_answered(tmp_path):
    """A job taken for good while a node stops is on disk before its directory is released."""

    async def run():
        async with silent_peer() as port:
            disks = Disks()
            running = beside(tmp_path, port, inline_s_max=-1, open_disk=disks)
            await running.start()
            await running.submit(commands.push("http://h/1").request)
            gate = disks.on_commit = Gate()
            stop, asked = running.peers.stop, []

            async def stopped():
                await stop()
                taking = Request(Function.NEXT, flags=m.OVERWRITE)
                asked.append(asyncio.create_task(running.submit(taking)))
                await turns()

            running.peers.stop = stopped
            stopping = asyncio.create_task(running.stop())
            await eventually(gate.reached.is_set)
            await turns()
            gate.open.set()
            await stopping
            taken = await asyncio.wait_for(asked[0], GATE_S_MAX)
            refused = await running.submit(Request(Function.NEXT))
            return [pair.value.data for pair in taken.pairs], taken.error, refused.error

    assert asyncio.run(run()) == ([b"http://h/1"], "", "shutting-down")
    with Journal(tmp_path / "journal") as journal:
        assert not journal.next().jobs


@pytest.mark.usefixtures("short_waits")
def test_a_pull_asked_for_during_a_stop_is_not_begun(tmp_path):
    """A request to pull that arrives while the peers stop leaves no task behind."""

    async def run():
        async with silent_peer() as port:
            running = beside(tmp_path, port)
            await running.start()
            stopping = asyncio.create_task(running.stop())
            await eventually(lambda: running.peers.stopping)
            running.engine.peer_requests.pull("b")
            await stopping
            return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
