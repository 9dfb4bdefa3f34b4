"""Races: a commit in its thread against requests, a stop, a rotation, and a peer that stands still."""

from __future__ import annotations

import asyncio
import shutil
import threading

from journal_support import (
    GATE_S_MAX,
    Clock,
    Disks,
    connected,
    daemon,
    eventually,
    nop,
    raising,
    slow_node,
    turns,
)

from virta.errors import LogSyncError, LogWriteError
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.serving import commit_loop
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.embedded import Journal
from virta.journal.sessions import Session
from virta.journal.storage import directory as persistence
from virta.journal.storage.directory import Persistence


def set_(key, persist=m.PERSIST):
    return Request(
        Function.SET, flags=m.OVERWRITE | persist, key=key, value=Value(Type.STRING, b"v")
    )


def test_what_came_during_a_failing_fsync_is_not_acknowledged(tmp_path):
    """Requests that arrive while an fsync is failing get its error, and so does all that is lasting later."""

    async def run():
        async with slow_node(tmp_path, LogSyncError("EIO")) as (running, gate):
            first = asyncio.create_task(running.submit(set_(b"first")))
            await eventually(gate.reached.is_set)
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
            notified = []
            worker = Session(notified.append)
            await running.submit(Request(Function.NEXT, flags=m.LISTEN, key=b"h"), worker)
            await turns()
            writing = asyncio.create_task(running.submit(set_(b"k")))
            await eventually(gate.reached.is_set)
            await running.submit(commands.push("http://h/1", persist=False).request)
            await turns()
            gate.open.set()
            await writing
            await eventually(lambda: notified)
            return notified[0].pair.key

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
        await eventually(first.is_set)
        stopping = asyncio.create_task(running.stop())
        await turns()
        go.set()
        await stopping

    asyncio.run(run())
    monkeypatch.undo()
    for directory in ("journal", "crashed"):
        with Journal(tmp_path / directory) as journal:
            assert [journal.get(str(i)) for i in range(6)] == ["v"] * 6


def test_full_disk_is_refused_and_then_retried(tmp_path, monkeypatch):
    """While the disk is full persist commands get `disk`; when there is space again all is as it was."""
    monkeypatch.setattr("virta.journal.serving.commit_loop.RETRY_AFTER_WRITE_ERROR_S", 3600)
    steady = Clock()  # in seconds

    def set_(key):
        return Request(
            Function.SET, flags=m.OVERWRITE | m.PERSIST, key=key, value=Value(Type.STRING, b"")
        )

    async def run():
        errors = []
        async with (
            daemon(tmp_path, open_disk=Disks(raising(errors)), steady=steady) as server,
            connected(server) as wire,
        ):
            errors.append(LogWriteError("no space left"))
            first = await wire.ask(set_(b"a"))
            second = await wire.ask(set_(b"b"))
            memory = await wire.ask(
                Request(Function.SET, key=b"ram", value=Value(Type.STRING, b""))
            )
            steady.now += 3600  # the hour is over
            third = await wire.ask(set_(b"c"))
        async with daemon(tmp_path) as server, connected(server) as wire:
            kept = await wire.ask(Request(Function.GET, key=b"c"))
        return [reply.error for reply in (first, second, memory, third, kept)]

    assert asyncio.run(run()) == ["disk: no space left"] * 2 + [""] * 3


def test_failed_fsync_is_final(tmp_path):
    """After a failed fsync nothing that must survive is accepted; reading and memory go on."""

    async def run():
        errors = []
        async with (
            daemon(tmp_path, open_disk=Disks(raising(errors))) as server,
            connected(server) as wire,
        ):
            errors.append(LogSyncError("EIO"))
            request = Request(
                Function.SET, flags=m.PERSIST, key=b"a", value=Value(Type.STRING, b"")
            )
            errors = [(await wire.ask(request)).error for _ in range(3)]
            return errors, (await wire.ask(nop())).error

    assert asyncio.run(run()) == (["disk: EIO"] * 3, "")


def test_slow_disk_does_not_block_reading(tmp_path):
    """Once the disk is slow, commits go to a thread: a GET overtakes a SET that waits for it."""

    async def run():
        async with (
            daemon(tmp_path, inline_s_max=-1) as server,
            connected(server) as wire,
            connected(server) as other,
        ):
            for i in range(20):
                wire.send(
                    Request(
                        Function.SET, flags=m.PERSIST, key=b"%d" % i, value=Value(Type.STRING, b"")
                    )
                )
            first = await other.ask(Request(Function.GET, key=b"none"))
            replies = [await wire.receive() for _ in range(20)]
            return first, replies

    first, replies = asyncio.run(run())
    assert first.error == "does-not-exist"
    assert {("", m.PERSIST)} == {(r.error, r.flags) for r in replies}
