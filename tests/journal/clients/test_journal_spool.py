"""Spool and forwarder: every record arrives, whatever dies, and one bad record blocks nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_support import connected, daemon, eventually
from journal_vectors import VECTORS

from virta.errors import JournalError
from virta.journal import AsyncClient
from virta.journal.clients import aio, forwarder
from virta.journal.clients import spool as spool_module
from virta.journal.clients.forwarder import Forwarder
from virta.journal.clients.spool import PING_SOCKET, REJECTED, Spool, SpoolFile, encode_record, scan
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, RefusedError, Request, Type, Value
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.tcp import JournalServer


def request(key=b"k", data=b"v"):
    return commands.set_(key, Value(Type.STRING, data)).request


def test_worked_record():
    """The PUSH of the worked messages, as a spool record."""
    raw = next(bytes.fromhex(v["request_hex"]) for v in VECTORS if v["name"].startswith("PUSH"))

    record = encode_record(raw)

    assert (
        record
        == bytes.fromhex("2b303030303030333532663133343264662 0".replace(" ", "")) + raw + b"\n"
    )
    assert [r.message for r in scan(record)] == [raw]


@given(
    st.lists(st.binary(max_size=60), max_size=8),
    st.lists(st.tuples(st.integers(0, 8), st.binary(max_size=30)), max_size=4),
)
def test_damage_between_records_is_skipped(messages, damage):
    """Whatever a dead writer left between records, the others are found, and only they."""
    parts = [encode_record(message) for message in messages]
    for at, junk in sorted(damage, reverse=True):
        parts.insert(min(at, len(parts)), encode_record(junk)[:-2] if len(junk) % 2 else junk)
    whole = b"".join(parts)

    found = [record.message for record in scan(whole)]

    remaining = iter(found)
    assert all(message in remaining for message in messages)


@given(st.binary(max_size=300))
def test_any_bytes_are_scanned(data):
    """Scanning never fails and never finds a record whose checksum does not fit."""
    for record in scan(data):
        assert encode_record(record.message)[1:] == data[record.at + 1 : record.end]


def test_incomplete_tail_is_waited_for(tmp_path):
    """Half a record is not handed out; once the rest is there, it is."""
    path = tmp_path / "2026010100.fjs"
    whole = encode_record(b"one") + encode_record(b"two")
    path.write_bytes(whole[:-4])
    file = SpoolFile(path)

    assert [r.message for r in file.read(10)] == [b"one"]
    with path.open("ab") as more:
        more.write(whole[-4:])
    assert [r.message for r in file.read(10)] == [b"two"]
    file.close()


def test_an_apparent_record_inside_of_a_large_one(tmp_path):
    """A record that is larger than what is read at once is read whole; its content is no record."""
    path = tmp_path / "2026010100.fjs"
    large = encode_record(b"inside") + bytes(spool_module.READ_BYTES)
    path.write_bytes(encode_record(b"one") + encode_record(large) + encode_record(b"two"))
    file = SpoolFile(path)

    assert [r.message for r in file.read(10)] == [b"one", large, b"two"]
    file.close()


def test_an_apparent_record_inside_of_one_that_is_being_written(tmp_path):
    """As long as its writer is at it the rest is waited for; what a dead one left is skipped."""
    path = tmp_path / "2026010100.fjs"
    whole = encode_record(encode_record(b"inside") + b"the rest")
    path.write_bytes(whole[:-4])
    file = SpoolFile(path)
    with path.open("ab", buffering=0) as writer:
        fcntl.flock(writer, fcntl.LOCK_SH)
        assert file.read(10) == []
        writer.write(whole[-4:])

    assert [r.message for r in file.read(10)] == [encode_record(b"inside") + b"the rest"]
    path.write_bytes(whole[:-4] + encode_record(b"two"))
    file.rewind()
    assert [r.message for r in file.read(10)] == [b"inside", b"two"]
    file.close()


def test_only_harmless_commands(tmp_path):
    """What must not be repeated is refused by the spool."""
    spool = Spool(tmp_path)
    for bad in (
        commands.add("n", 1),
        commands.rename("a", "b"),
        commands.admin("stats"),
        commands.next_(),
    ):
        with pytest.raises(RefusedError, match="SET, DELETE and PUSH"):
            spool.put(bad.request)
    spool.close()


def test_what_any_daemon_would_refuse(tmp_path):
    """A key that is missing and a uri without host are known before they are spooled."""
    with Spool(tmp_path) as spool:
        with pytest.raises(RefusedError, match="key-missing"):
            spool.put(request(b""))
        with pytest.raises(RefusedError, match="bad-uri: 'nowhere'"):
            spool.put(commands.push("nowhere").request)
        spool.put(commands.push("nowhere", domain="d").request)


def test_erase_and_delete(tmp_path):
    """An erased record stays erased; a file goes when its hour is over and nothing in it is pending."""
    path = tmp_path / "2026010100.fjs"
    path.write_bytes(encode_record(b"one") + encode_record(b"two"))
    file = SpoolFile(path)
    one, two = file.read(10)
    later = time.time() + 10**9
    file.erase(one)
    file.rewind()

    assert [r.message for r in file.read(10)] == [b"two"]
    file.rewind()
    assert file.remove_if_done(later) is False
    file.erase(two)
    assert file.remove_if_done(0) is False
    assert file.remove_if_done(later) is True
    assert not path.exists()
    file.close()


def test_writer_notices_a_deleted_file(tmp_path, monkeypatch):
    """A record never lands in a file that was deleted between open and lock."""
    spool = Spool(tmp_path)
    real = os.open
    deleted = []

    def open_and_delete(path, *args, **kwargs):
        descriptor = real(path, *args, **kwargs)
        if not deleted and str(path).endswith(".fjs"):
            deleted.append(path)
            os.unlink(path)
        return descriptor

    monkeypatch.setattr(os, "open", open_and_delete)
    spool.put(request())
    spool.close()
    (path,) = tmp_path.glob("*.fjs")

    assert deleted
    assert len(list(scan(path.read_bytes()))) == 1


def test_a_file_that_another_one_took_the_place_of(tmp_path):
    """Only the file that was read is deleted, not what has its name by then."""
    path = tmp_path / "2026010100.fjs"
    later = time.time() + 10**9
    for after in (None, encode_record(b"new")):
        path.write_bytes(encode_record(b"old"))
        file = SpoolFile(path)
        file.erase(file.read(1)[0])
        path.unlink()
        if after is not None:
            path.write_bytes(after)

        assert file.remove_if_done(later) is True
        file.close()
        assert path.exists() == (after is not None)


def test_the_name_of_a_file_is_on_disk_with_the_first_record_that_must_be(tmp_path, monkeypatch):
    """The writer that began the file may not have synced the directory: others do not rely on it."""
    synced = []
    monkeypatch.setattr(spool_module.files, "sync_directory", synced.append)
    monkeypatch.setattr(spool_module.time, "gmtime", lambda: time.struct_time((2026, *[1] * 8)))
    with Spool(tmp_path) as spool:
        spool.put(commands.set_("k", 1, persist=False).request)
        assert synced == []
        spool.put(request(b"a"))
        spool.put(request(b"b"))

    assert synced == [tmp_path]


@asynccontextmanager
async def forwarding(directory, address):
    stop = asyncio.Event()
    sender = Forwarder(directory, *address)
    task = asyncio.create_task(sender.run(stop))
    try:
        yield sender
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


def test_forwarder_delivers_and_erases(tmp_path, monkeypatch):
    """Records written before and after its start arrive once, PING wakes it, rejected ones are kept."""
    monkeypatch.setattr(forwarder, "CHECK_S", 600)  # what arrives late was announced, not found

    async def run():
        spool = Spool(tmp_path / "spool")
        for i in range(600):
            spool.put(commands.set_(b"early%d" % i, "v", persist=False).request)
        spool.put(request(b"virta:nonsense"))
        async with (
            daemon(tmp_path / "journal") as server,
            forwarding(tmp_path / "spool", server.address) as sender,
        ):
            await asyncio.wait_for(sender.drained.wait(), 10)
            assert (tmp_path / "spool" / PING_SOCKET).exists()
            spool.put(request(b"late"))
            store = server.node.engine.store
            await eventually(lambda: store.live(b"late", 0) is not None)
            await asyncio.wait_for(sender.drained.wait(), 10)
            return len(store), sender.rejected, spool

    keys, rejected, spool = asyncio.run(run())
    spool.close()
    assert (keys, rejected) == (601, 1)
    for hour in (tmp_path / "spool").glob("[0-9]*.fjs"):
        assert not any(record.pending for record in scan(hour.read_bytes()))
    (kept,) = scan((tmp_path / "spool" / REJECTED).read_bytes())
    assert b"virta:nonsense" in kept.message


def test_forwarder_survives_the_daemon(tmp_path, monkeypatch):
    """A daemon that comes and goes gets everything, in the end."""
    monkeypatch.setattr(forwarder, "RETRY_S_MAX", 0.2)

    async def run():
        spool = Spool(tmp_path / "spool")
        async with daemon(tmp_path / "journal") as server:
            address = server.address
        stop = asyncio.Event()
        sender = Forwarder(tmp_path / "spool", *address)
        task = asyncio.create_task(sender.run(stop))
        for round_ in range(3):
            for i in range(50):
                spool.put(request(b"%d-%d" % (round_, i)))
            server = JournalServer(port=address[1], node=CommitLoop(tmp_path / "journal"))
            await server.start()
            if round_ == 2:
                store = server.node.engine.store
                await eventually(lambda: len(store) == 150)  # noqa: B023
            await server.stop()
        stop.set()
        await asyncio.wait_for(task, 10)
        spool.close()
        return len(server.node.engine.store)

    assert asyncio.run(run()) == 150


async def stops(directory, address, condition):
    """Whether a forwarder stops in such a situation."""
    stop = asyncio.Event()
    sender = Forwarder(directory, *address)
    task = asyncio.create_task(sender.run(stop))
    await eventually(lambda: condition(sender))
    stop.set()
    await asyncio.wait_for(task, 10)
    return True


def test_a_daemon_that_reads_nothing_does_not_keep_a_forwarder(tmp_path, monkeypatch):
    """A daemon that is stuck is asked again on another connection, and not waited for at the end."""
    monkeypatch.setattr(forwarder, "ANSWER_S_MAX", 0.05)
    monkeypatch.setattr(aio, "CLOSE_S_MAX", 0.05)
    with Spool(tmp_path) as spool:
        spool.put(request(b"large", bytes(8_000_000)))
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.bind(("127.0.0.1", 0))
        stuck.listen()

        assert asyncio.run(stops(tmp_path, stuck.getsockname(), lambda it: it.waits.attempt > 2))


def test_a_stop_while_a_daemon_does_not_reply(tmp_path, monkeypatch):
    """Replies on their way are waited for, but not as long as a daemon may take."""
    monkeypatch.setattr(forwarder, "STOP_S_MAX", 0.05)
    with Spool(tmp_path) as spool:
        spool.put(request())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert asyncio.run(stops(tmp_path, silent.getsockname(), lambda it: it.connected))


def test_a_stop_while_connecting(tmp_path, monkeypatch):
    """A host that does not answer at all is not waited for."""
    connecting = []

    async def connect(*_, **__):
        connecting.append(True)
        await asyncio.Event().wait()

    monkeypatch.setattr(AsyncClient, "connect", connect)
    assert asyncio.run(stops(tmp_path, ("127.0.0.1", 1), lambda _: connecting))


def test_a_forwarder_that_is_cancelled_as_it_is_woken(tmp_path):
    """It ends, though the two come at the same time."""

    async def run():
        async with daemon() as server:
            sender = Forwarder(tmp_path, *server.address)
            task = asyncio.create_task(sender.run(asyncio.Event()))
            await asyncio.wait_for(sender.drained.wait(), 10)
            await asyncio.sleep(0)
            sender.wake()
            await asyncio.sleep(0)  # it is woken, but did not have its turn
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=10)
            return task in done

    assert asyncio.run(run())


def test_a_disk_that_takes_nothing(tmp_path, monkeypatch):
    """A record that can be neither delivered nor put aside stays pending, and the forwarder alive."""
    monkeypatch.setattr(forwarder, "RETRY_S_MIN", 0.01)
    directory = tmp_path / "spool"

    async def run():
        with Spool(directory) as spool:
            spool.put(request(b"virta:nonsense"))
        (directory / REJECTED).symlink_to("/dev/full")
        async with (
            daemon(tmp_path / "journal") as server,
            forwarding(directory, server.address) as sender,
        ):
            await eventually(lambda: sender.waits.attempt > 2)  # it tried again
            (hour,) = directory.glob("[0-9]*.fjs")
            assert [record.pending for record in scan(hour.read_bytes())] == [True]
            (directory / REJECTED).unlink()
            await asyncio.wait_for(sender.drained.wait(), 10)
            return sender.rejected

    assert asyncio.run(run()) == 1
    assert len(list(scan((directory / REJECTED).read_bytes()))) == 1


def test_files_that_somebody_took_away(tmp_path, monkeypatch):
    """A file of the same hour that takes the place of one that was removed is read from its start."""
    monkeypatch.setattr(forwarder, "CHECK_S", 0.05)
    directory = tmp_path / "spool"

    async def run():
        async with (
            daemon(tmp_path / "journal") as server,
            forwarding(directory, server.address) as sender,
        ):
            store = server.node.engine.store
            with Spool(directory) as spool:
                spool.put(request(b"before"))
                await eventually(lambda: store.live(b"before", 0) is not None)
                await asyncio.wait_for(sender.drained.wait(), 10)
                for hour in directory.glob("[0-9]*.fjs"):
                    hour.unlink()
                spool.put(request(b"after"))
                await eventually(lambda: store.live(b"after", 0) is not None)

    asyncio.run(run())


def test_one_forwarder_per_spool(tmp_path):
    """A second forwarder gets the error that there is one."""

    async def run():
        async with daemon() as server, forwarding(tmp_path, server.address) as sender:
            await sender.drained.wait()
            with pytest.raises(JournalError) as refused:
                await Forwarder(tmp_path, *server.address).run(asyncio.Event())
            return refused.value.code

    assert asyncio.run(run()) == "spool-in-use"


def test_refused_for_now_is_sent_again(tmp_path):
    """A value locked by another client is kept and arrives when the lock is released."""

    async def run():
        spool = Spool(tmp_path)
        async with daemon() as server, connected(server) as wire:
            await wire.ask(request(b"k", b"old"))
            await wire.ask(Request(Function.LOCK, key=b"k"))
            spool.put(request(b"k", b"new"))
            spool.put(request(b"other"))
            async with forwarding(tmp_path, server.address) as sender:
                await eventually(lambda: sender.forwarded == 1)
                locked = await wire.ask(Request(Function.GET, flags=m.DATA, key=b"k"))
                await wire.ask(Request(Function.UNLOCK, key=b"k"))
                await eventually(lambda: sender.forwarded == 2)
                now = await wire.ask(Request(Function.GET, flags=m.DATA, key=b"k"))
        spool.close()
        return locked.pair.value.data, now.pair.value.data

    assert asyncio.run(run()) == (b"old", b"new")


WRITER = """
import sys, pathlib
from virta.journal import Spool
from virta.journal.protocol import commands
spool = Spool(pathlib.Path(sys.argv[1]))
for i in range(10**9):
    spool.put(commands.set_(f"{sys.argv[2]}-{i}", i).request)
    print(i, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_killed_writers_lose_nothing_acknowledged(seed, tmp_path):
    """Writers killed at any point: every record whose put() returned is found, whole."""
    rng = random.Random(seed)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path, str(n)], stdout=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    acknowledged = {}
    for n, writer in enumerate(writers):
        for _ in range(rng.randrange(1, 60)):
            acknowledged[n] = int(writer.stdout.readline())
        writer.kill()
        rest = writer.stdout.read().splitlines()
        whole = [line for line in rest if line]
        acknowledged[n] = int(whole[-1]) if whole else acknowledged[n]
        writer.wait()
        writer.stdout.close()

    found = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*.fjs")))
    keys = {m_.message for m_ in scan(found)}
    for n, last in acknowledged.items():
        for i in range(last):
            assert any(b"%d-%d" % (n, i) in message for message in keys)
