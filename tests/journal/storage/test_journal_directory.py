"""What was committed is there after any restart, with snapshots taken at any time."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys

import pytest
from journal_support import Clock, Daemon, committed, connected, daemon, state

from virta.errors import JournalError
from virta.journal.clients.client import Client
from virta.journal.engine import JournalEngine
from virta.journal.jobs.job import STATE_NAMES
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.serving.embedded import Journal
from virta.journal.sessions import Session
from virta.journal.storage import directory as persistence
from virta.journal.storage import records as images
from virta.journal.storage.directory import Persistence
from virta.journal.values.store import Store

KEYS = [b"k%d" % i for i in range(6)]
T0 = 1_700_000_000_000_000
URIS = [b"http://h%d/x" % i for i in range(6)]


def random_request(rng, now):
    key, other = rng.choice(KEYS), rng.choice(KEYS)
    value = Value(Type.STRING, rng.randbytes(rng.choice([0, 3, 400])))
    uri = rng.choice(URIS)
    two = {"query": m.QUERY_RANGE, "count": 0}
    return rng.choice(
        [
            Request(Function.SET, 1, m.OVERWRITE | m.PERSIST, key=key, value=value),
            Request(
                Function.SET, 1, m.OVERWRITE | m.PERSIST, key=key, value=value, timeout=now + 9
            ),
            Request(Function.SET, 1, m.OVERWRITE, key=key, value=value),
            Request(Function.GET, 1, m.TOUCH, key=key, ttl=30),
            Request(Function.GET, 1, 0, key=key, timeout=now + rng.randrange(-5, 50)),
            Request(Function.DELETE, 1, rng.choice([0, m.OVERWRITE]), key=rng.choice([key, uri])),
            Request(Function.RENAME, 1, m.OVERWRITE, key=key, key2=other, **two),
            Request(Function.LINK, 1, key=key, key2=other, **two),
            Request(Function.UNLINK, 1, key=key),
            *[
                Request(
                    Function.PUSH,
                    1,
                    m.PERSIST,
                    key=uri,
                    key2=b"",
                    query=m.QUERY_RANGE,
                    count=rng.randrange(5),
                    timeout=now + rng.randrange(-9, 9),
                    value=rng.choice([None, value]),
                )
            ]
            * 3,
            Request(Function.NEXT, 1, rng.choice([0, 0, m.OVERWRITE]), timeout=now + 5),
            Request(Function.NEXT, 1, 0, timeout=now + 5),
            Request(
                Function.SET,
                1,
                key=b"virta:domain:h1",
                value=Value(Type.STRING, b'{"max_attempts": %d}' % rng.randrange(3)),
            ),
        ]
    )


@pytest.mark.parametrize("seed", range(25))
def test_restart_equals_the_state_that_was_committed(seed, tmp_path):
    """Random commands, rotations that are interrupted or finished, and restarts: nothing differs."""
    rng = random.Random(seed)
    clock = Clock(1_000_000)
    session = Session()
    taken = []

    def opened():
        disk = Persistence(tmp_path, durability="none")
        engine = JournalEngine(clock, Store(disk.spill, memory_bytes_max=8_000))
        disk.restore(engine)
        return disk, engine

    disk, engine = opened()
    for _ in range(300):
        clock.now += rng.randrange(4)
        request = random_request(rng, clock.now)
        if request.function == Function.DELETE and taken and rng.random() < 0.7:
            request.key = taken.pop()
        reply = engine.handle(request, session)
        if request.function == Function.NEXT and reply.pairs:
            taken.append(reply.pairs[0].key)
        engine.tick()
        if rng.random() < 0.5:
            committed(disk, engine)
        if disk.rotating:
            if disk.rotation_step():
                disk.finish_rotation()
        elif rng.random() < 0.05:
            disk.rotate(engine)
        if rng.random() < 0.04:
            committed(disk, engine)
            before = state(engine)
            next_id = engine.jobs.next_id
            disk.close()
            disk, engine = opened()
            assert before == state(engine)
            assert engine.jobs.next_id >= next_id
    disk.close()


def test_an_entry_only_a_snapshot_knows_is_forgotten(tmp_path):
    """What a snapshot wrote before the log did is taken back when it becomes a matter of memory."""
    clock = Clock(100)
    disk = Persistence(tmp_path, durability="none")
    engine = JournalEngine(clock)
    disk.restore(engine)
    disk.rotate(engine)
    engine.store.set(b"k", Value(Type.STRING, b"kept"), 1, 100, persist=True)
    engine.jobs.push(b"x", b"d", 1, 100, persist=True)
    while not disk.rotation_step():
        pass
    disk.finish_rotation()
    engine.store.set(b"k", Value(Type.STRING, b"memory"), 2, 100)
    engine.jobs.push(b"x", b"d", 2, 100)
    disk.commit(images.drain(engine, 100))
    disk.close()
    disk = Persistence(tmp_path, durability="none")
    engine = JournalEngine(clock)
    disk.restore(engine)
    disk.close()

    assert (len(engine.store), len(engine.jobs)) == (0, 0)


def test_graceful_stop_keeps_marks(tmp_path):
    """After an orderly stop a worked-on job is still worked on, and its key still acknowledges."""

    async def run():
        async with daemon(tmp_path) as server, connected(server) as wire:
            await wire.ask(
                Request(
                    Function.PUSH, flags=m.PERSIST, key=b"http://a/", count=0, query=m.QUERY_RANGE
                )
            )
            taken = await wire.ask(Request(Function.NEXT))
        async with daemon(tmp_path) as server, connected(server) as wire:
            nothing = await wire.ask(Request(Function.NEXT))
            done = await wire.ask(Request(Function.DELETE, key=taken.pairs[0].key))
        return taken, nothing, done

    taken, nothing, done = asyncio.run(run())
    assert (nothing.pairs, nothing.timeout) == ([], taken.timeout)
    assert done.flags & m.DELETED


def test_an_attempt_that_was_forgotten_acknowledges_nothing(tmp_path):
    """Without the table of leases the job is due again, under a key never given before."""
    clock = Clock(1_000)
    keys = []
    for _ in range(3):
        (tmp_path / "leases").unlink(missing_ok=True)
        disk = Persistence(tmp_path, durability="none")
        engine = JournalEngine(clock)
        disk.restore(engine)
        engine.jobs.push(b"x", b"d", 1, clock.now, persist=True)
        committed(disk, engine)
        assert all(engine.jobs.find(key) is None for key in keys)
        (job,) = engine.jobs.reserve(b"d", clock.now)
        keys.append(job.key())
        disk.close()

    assert len(set(keys)) == 3


def crashed(directory, clock):
    """What a process that was killed leaves behind, opened by the next one."""
    disk = Persistence(directory, durability="none")
    engine = JournalEngine(clock)
    disk.restore(engine)
    return disk, engine


def test_marks_survive_a_crash(tmp_path):
    """Reserved, extended, claimed and waiting jobs are as they were, and their keys acknowledge."""
    clock = Clock(1_000)
    disk, engine = crashed(tmp_path, clock)
    jobs = engine.jobs
    for number in range(5):
        jobs.push(b"u%d" % number, b"d", 1, clock.now, persist=True)
    jobs.push(b"ram", b"r", 1, clock.now)
    committed(disk, engine)
    keys = {job.uri: job.key() for job in jobs.reserve(b"d", clock.now, until=5_000, count=4)}
    jobs.reserve(b"r", clock.now)
    jobs.mark(jobs.find(b"u1"), 9_000, clock.now)
    jobs.mark(jobs.find(b"u2"), 0, clock.now)
    jobs.push(b"u3", b"d", 2, clock.now, persist=True)
    jobs.done(jobs.find(b"u0"), clock.now)
    committed(disk, engine)
    disk.close()

    disk, engine = crashed(tmp_path, clock)
    views = {
        (j.uri, j.timestamp): (STATE_NAMES[j.state], j.worked_until) for j in engine.jobs.all()
    }
    found = [engine.jobs.find(keys[b"u%d" % number]) is not None for number in range(4)]
    clock.now = 6_000
    engine.jobs.tick(clock.now)
    lapsed = [(job.uri, job.timestamp) for job in engine.jobs.listed(state="ready")]
    disk.close()

    assert views == {
        (b"u1", 1): ("working", 9_000),
        (b"u2", 1): ("ready", 0),
        (b"u3", 1): ("working", 5_000),
        (b"u3", 2): ("held", 0),
        (b"u4", 1): ("ready", 0),
    }
    assert found == [False, True, True, True]  # the one given back keeps its key
    assert sorted(lapsed) == [(b"u2", 1), (b"u3", 2), (b"u4", 1)]


def test_a_killed_daemon_leaves_its_marks(tmp_path):
    """NEXT, then SIGKILL at once: the next daemon does not hand the job out, and its key acknowledges."""
    with Daemon(tmp_path) as killed, Client(port=killed.port) as client:
        client.push("http://a/1")
        (job,) = client.next(work_for=600).jobs
        killed.kill()
    with Daemon(tmp_path) as second, Client(port=second.port) as client:
        nothing = client.next()
        done = client.done(job.key)

    assert (nothing.jobs, round(nothing.wake_up)) == ([], round(job.deadline))
    assert done


def test_disk_use_follows_live_data(tmp_path, monkeypatch):
    """A hundred times the live data goes through; the directory stays within a small multiple of it."""
    monkeypatch.setattr(persistence, "ROTATE_BYTES_MIN", 64 * 1024)

    async def run():
        async with daemon(tmp_path, durability="none") as server, connected(server) as wire:
            for round_ in range(100):
                for i in range(20):
                    value = Value(Type.BUFFER, bytes([round_]) * 2_000)
                    wire.send(
                        Request(
                            Function.SET, flags=m.OVERWRITE | m.PERSIST, key=b"%d" % i, value=value
                        )
                    )
                for _ in range(20):
                    await wire.receive()
                if server.node.rotation is not None:
                    await server.node.rotation
            return sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())

    assert asyncio.run(run()) < 10 * 20 * 2_000


def test_one_owner(tmp_path):
    """A second process gets the error that the journal is in use."""
    first = Persistence(tmp_path)
    code = (
        "import sys, pathlib; from virta.journal.storage.directory import Persistence\n"
        "from virta.errors import JournalError\n"
        "try: Persistence(pathlib.Path(sys.argv[1]))\n"
        "except JournalError as e: print(e.code)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    first.close()

    assert out.stdout.strip() == "journal-in-use"


def test_missing_generation_is_refused(tmp_path):
    """A log that is missing in between stops the start."""
    disk = Persistence(tmp_path)
    disk.restore(JournalEngine(Clock(5)))
    disk.close()
    (path,) = tmp_path.glob("*.log")
    path.rename(tmp_path / f"{3:020d}.log")

    disk = Persistence(tmp_path)
    with pytest.raises(JournalError, match="missing"):
        disk.restore(JournalEngine(Clock(5)))
    disk.close()


def test_a_full_disk_at_the_start_is_said(tmp_path, monkeypatch):
    """The error names the journal and what is wrong, and all is there once there is space."""
    with Journal(tmp_path) as journal:
        journal.set("k", "v")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(JournalError, match="No space left") as raised:
            Journal(tmp_path)
    assert str(tmp_path) in raised.value.message
    with Journal(tmp_path) as journal:
        assert journal.get("k") == "v"


@pytest.mark.parametrize("kept", ["jobs", "finished"])
def test_a_large_journal_rotates_after_a_part_of_it(tmp_path, monkeypatch, kept):
    """The same finished commands and jobs are not written again after every few records."""
    monkeypatch.setattr(persistence, "ROTATE_RECORDS_MIN", 5)
    engine, disk = JournalEngine(Clock(T0)), Persistence(tmp_path, durability="none")
    disk.restore(engine)
    for number in range(100):
        uri = b"http://h/%d" % number
        if kept == "jobs":
            engine.jobs.push(uri, b"", T0, T0)
        else:
            engine.jobs.finished.remember(uri, T0, T0)
    part = {"jobs": persistence.ENTRIES_PER_RECORD, "finished": persistence.FINISHED_PER_RECORD}
    wanted = []
    for number in range(100 // part[kept]):
        wanted.append(disk.wants_rotation(engine))
        disk.commit([images.ids_record(number + 1000)])

    assert not any(wanted)
    assert disk.wants_rotation(engine)
    disk.close()
