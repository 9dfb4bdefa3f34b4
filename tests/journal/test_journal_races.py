"""Races: a commit in its thread against requests, a stop, a rotation, and a peer that stands still."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from contextlib import asynccontextmanager

import pytest
from journal_support import until

from virta.errors import LogSyncError
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.replication import peers
from virta.journal.replication.peers import Peer, Peers
from virta.journal.serving import commit_loop
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.embedded import Journal
from virta.journal.serving.http import Handler
from virta.journal.sessions import Session
from virta.journal.storage import directory as persistence
from virta.journal.storage.directory import Persistence
from virta.log.group_commit import INLINE_S_MAX

GATE_S_MAX = 30
TURNS = 50  # of the event loop: enough for everything that does not wait


def set_(key, persist=m.PERSIST):
    return Request(
        Function.SET, flags=m.OVERWRITE | persist, key=key, value=Value(Type.STRING, b"v")
    )


class Gate:
    """Calls in a thread other than the test's wait until the gate is opened; then `error` is raised, if any."""

    def __init__(self, call, error=None):
        self.reached = threading.Event()
        self.open = threading.Event()
        self.error = error
        self._call = call

    def __call__(self, *args):
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.open.wait(GATE_S_MAX)
            if self.error is not None:
                raise self.error
        return self._call(*args)


async def turns():
    for _ in range(TURNS):
        await asyncio.sleep(0)


@asynccontextmanager
async def slow_node(directory, error=None):
    """A journal whose commits are made in a thread, and the gate they pass."""
    running = CommitLoop(directory, inline_s_max=-1)
    await running.start()
    gate = running._persistence.commit = Gate(running._persistence.commit, error)
    try:
        yield running, gate
    finally:
        gate.open.set()
        await running.stop()


def test_what_came_during_a_failing_fsync_is_not_acknowledged(tmp_path):
    """Requests that arrive while an fsync is failing get its error, and so does all that is lasting later."""

    async def run():
        async with slow_node(tmp_path, LogSyncError("EIO")) as (running, gate):
            first = asyncio.create_task(running.submit(set_(b"first")))
            await until(gate.reached.is_set)
            second = asyncio.create_task(running.submit(set_(b"second")))
            await turns()
            gate.open.set()
            during = [(await each).error for each in (first, second)]
            settings = commands.admin("configure", domain="h", settings={"paused": True})
            later = await running.submit(settings.request)
            memory = await running.submit(set_(b"memory", persist=0))
            return during, later.error, memory.error

    assert asyncio.run(run()) == (["disk: EIO"] * 2, "disk: EIO", "")
    with Journal(tmp_path) as journal:
        assert journal.get("second") is None


def test_a_failed_fsync_frees_no_lease(tmp_path):
    """An acknowledgement that was refused did not happen: after a restart the job is still worked on."""

    async def run():
        async with slow_node(tmp_path) as (running, gate):
            gate.open.set()
            await running.submit(commands.push("http://h/1").request)
            (job,) = (await running.submit(Request(Function.NEXT))).pairs
            gate.error = LogSyncError("EIO")
            refused = await running.submit(Request(Function.DELETE, key=job.key))
            await running.submit(set_(b"memory", persist=0))
            await turns()
            return refused.error

    assert asyncio.run(run()) == "disk: EIO"
    with Journal(tmp_path) as journal:
        assert journal.admin("show", uri="http://h/1")["state"] == "working"


def test_work_that_comes_during_a_commit_wakes_who_waits(tmp_path, monkeypatch):
    """A job pushed while a commit is under way is announced after it, not by the next tick."""
    monkeypatch.setattr(commit_loop, "TICK_S_MAX", 3600)

    async def run():
        async with slow_node(tmp_path) as (running, gate):
            told = []
            worker = Session(told.append)
            await running.submit(Request(Function.NEXT, flags=m.LISTEN, key=b"h"), worker)
            await turns()
            writing = asyncio.create_task(running.submit(set_(b"k")))
            await until(gate.reached.is_set)
            await running.submit(commands.push("http://h/1", persist=False).request)
            await turns()
            gate.open.set()
            await writing
            await until(lambda: told)
            return told[0].pair.key

    assert asyncio.run(run()) == b"h"


def test_a_stop_while_a_rotation_is_being_finished(tmp_path, monkeypatch):
    """A stop lets the thread that publishes a snapshot finish: a crash at its own loses nothing."""
    monkeypatch.setattr(persistence, "ROTATE_RECORDS_MIN", 3)
    published, finish = persistence.publish, Persistence.finish_rotation
    first, go, over = threading.Event(), threading.Event(), threading.Event()

    def publish(temporary, final):
        if not first.is_set():
            published(temporary, final)
            first.set()
            assert go.wait(GATE_S_MAX)
            return
        go.set()
        assert over.wait(GATE_S_MAX)
        shutil.copytree(tmp_path / "journal", tmp_path / "crashed")
        published(temporary, final)

    def finish_rotation(self):
        try:
            finish(self)
        finally:
            over.set()

    monkeypatch.setattr(persistence, "publish", publish)
    monkeypatch.setattr(Persistence, "finish_rotation", finish_rotation)

    async def run():
        running = CommitLoop(tmp_path / "journal")
        await running.start()
        for i in range(6):
            await running.submit(set_(b"%d" % i))
        await until(first.is_set)
        stopping = asyncio.create_task(running.stop())
        await turns()
        go.set()
        await stopping

    asyncio.run(run())
    monkeypatch.undo()
    for directory in ("journal", "crashed"):
        with Journal(tmp_path / directory) as journal:
            assert [journal.get(str(i)) for i in range(6)] == ["v"] * 6


@asynccontextmanager
async def standing_still():
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


def beside(directory, port, *, inline_s_max=INLINE_S_MAX, **options):
    """A journal whose only peer is at that port."""
    running = CommitLoop(directory / "journal", inline_s_max=inline_s_max)
    peer = Peer("b", "127.0.0.1", port)
    running.peers = Peers(running.engine, directory, "a", [peer], **options)
    return running


@pytest.fixture
def impatient(monkeypatch):
    """Peers that stand still are left alone soon."""
    monkeypatch.setattr(peers, "ANSWER_S_MAX", 0.05)
    monkeypatch.setattr(peers, "LEAVE_S_MAX", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_peer_that_stands_still_holds_up_neither_start_nor_stop(tmp_path):
    """It is pulled later, and what it did not acknowledge stays in its spool."""

    async def run():
        async with standing_still() as port, asyncio.timeout(GATE_S_MAX / 2):
            running = beside(tmp_path, port)
            await running.start()
            reply = await running.submit(set_(b"k"))
            await running.stop()
            return reply.error, len(running.peers._links[0].files())

    assert asyncio.run(run()) == ("", 1)


@pytest.mark.usefixtures("impatient")
def test_a_pull_does_not_wait_for_copies_of_what_others_change(tmp_path):
    """A peer that starts is told everything although a change waits for it; else both would wait."""

    async def run():
        async with standing_still() as port:
            running = beside(tmp_path, port, copies=2, copies_timeout=3600)
            await running.start()
            looking = ("export", "stats", "list", "configure")
            asked = [commands.admin(do, domain="h" * (do == "configure")) for do in looking]
            changing = asyncio.create_task(running.submit(set_(b"k")))
            told = [asyncio.create_task(running.submit(command.request)) for command in asked]
            found = await asyncio.wait_for(asyncio.gather(*told), GATE_S_MAX)
            waits = not changing.done()
            changing.cancel()
            await running.stop()
            return waits, [reply.error for reply in found]

    assert asyncio.run(run()) == (True, [""] * 4)


@pytest.mark.usefixtures("impatient")
def test_what_comes_while_the_peers_stop_is_answered(tmp_path):
    """A job taken for good while a node stops is on disk before its directory is released."""

    async def run():
        async with standing_still() as port:
            running = beside(tmp_path, port, inline_s_max=-1)
            await running.start()
            await running.submit(commands.push("http://h/1").request)
            gate = running._persistence.commit = Gate(running._persistence.commit)
            stop, asked = running.peers.stop, []

            async def stopped():
                await stop()
                taking = Request(Function.NEXT, flags=m.OVERWRITE)
                asked.append(asyncio.create_task(running.submit(taking)))
                await turns()

            running.peers.stop = stopped
            stopping = asyncio.create_task(running.stop())
            await until(gate.reached.is_set)
            await turns()
            gate.open.set()
            await stopping
            taken = await asyncio.wait_for(asked[0], GATE_S_MAX)
            refused = await running.submit(Request(Function.NEXT))
            return [pair.value.data for pair in taken.pairs], taken.error, refused.error

    assert asyncio.run(run()) == ([b"http://h/1"], "", "shutting-down")
    with Journal(tmp_path / "journal") as journal:
        assert not journal.next().jobs


@pytest.mark.usefixtures("impatient")
def test_a_pull_asked_for_during_a_stop_is_not_begun(tmp_path):
    """The word to pull that comes on a line while the peers stop leaves no task behind."""

    async def run():
        async with standing_still() as port:
            running = beside(tmp_path, port)
            await running.start()
            stopping = asyncio.create_task(running.stop())
            await until(running.peers._stop.is_set)
            running.engine.pull("b")
            await stopping
            return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_an_add_by_http_is_one_step(tmp_path):
    """A DELETE that comes before the sum is on disk is after it, and leaves no number that is not kept."""

    async def run():
        async with slow_node(tmp_path) as (running, gate):
            handler = Handler(running)
            path = "/journal/keys/n"
            adding = asyncio.create_task(
                handler.handle("POST", f"{path}/add", "", b'{"amount": 5}')
            )
            await until(gate.reached.is_set)
            deleting = asyncio.create_task(handler.handle("DELETE", path))
            await turns()
            gate.open.set()
            sums = json.loads((await adding).body)["result"]
            deleted = json.loads((await deleting).body)["deleted"]
            return sums, deleted, running.engine.store.live(b"n", 0)

    assert asyncio.run(run()) == (5, True, None)
