"""Connections of the daemon: every limit, every end, and the same bytes with both codecs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from journal_support import Clock, Daemon, Wire, connected, daemon, eventually, nop

from virta.journal import Client
from virta.journal.protocol import codec
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import RequestParser, encode_reply, encode_request
from virta.journal.protocol.messages import Function, Reply, Request, Type, Value
from virta.journal.serving import tcp
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.tcp import JournalConnection, JournalServer

NOP = encode_request(nop())
QUIT = encode_request(Request(Function.QUIT))
LARGE = Value(Type.BUFFER, bytes(100_000))


def test_the_native_module_that_was_built_can_be_loaded():
    """A native module that is there but does not load would go unnoticed: everything works, slowly."""
    built = list((Path(codec.__file__).parent.parent).glob("_native*.so"))
    if not built or os.environ.get("VIRTA_PLAIN") == "1":
        pytest.skip("the native module was not built, or is not wanted")

    assert codec.native_codec is not None


# One connection on a transport that records its calls.


class Transport:
    """What a connection wrote, and whether it is read from."""

    def __init__(self):
        self.written = b""
        self.unread = 0
        self.reading = True
        self.closed = self.aborted = False

    def set_write_buffer_limits(self, high):
        self.high = high

    def write(self, data):
        self.written += data

    def get_write_buffer_size(self):
        return self.unread

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def is_closing(self):
        return self.closed or self.aborted

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True


class Commands:
    """A commit loop that answers when the test says so."""

    def __init__(self):
        self.requests = []
        self.engine = self
        self.closed = []
        self.after_batch = set()
        self.respond = None

    def handle_all(self, requests, session, respond, *, alone):
        self.requests += requests
        self.respond = respond

    def clock(self):
        return 5

    def close(self, session):
        self.closed.append(session)


@pytest.fixture
def connection():
    """A connection of a server that is not started, its transport, and what carries out its requests."""
    commands = Commands()
    server = JournalServer(port=0, node=commands)
    made = JournalConnection(server)
    transport = Transport()
    made.connection_made(transport)
    return made, transport, commands


def reply(number=1, **fields):
    return Reply(number, 0, 5, **fields)


def large(number=1):
    return reply(number, pair=m.Pair(b"", LARGE))


def test_nothing_after_quit_is_read(connection):
    """QUIT is the last request; the connection closes once everything is answered and sent."""
    made, transport, commands = connection
    made.data_received(NOP + QUIT + NOP + b"nonsense")
    made.data_received(NOP)

    assert [request.function for request in commands.requests] == [Function.NOP, Function.QUIT]
    commands.respond([reply()])
    made.flush()
    assert not transport.closed
    commands.respond([reply(2)])
    made.flush()
    assert transport.closed
    assert transport.written == encode_reply(reply()) + encode_reply(reply(2))


def test_unanswered_requests_are_bounded(connection, monkeypatch):
    """A connection with too many unanswered requests is not read from until some are answered."""
    monkeypatch.setattr(tcp, "UNANSWERED_MAX", 3)
    made, transport, commands = connection
    made.data_received(NOP * 3)
    assert transport.reading
    made.data_received(NOP)
    assert not transport.reading
    commands.respond([reply()])
    made.flush()
    assert transport.reading


def test_unread_replies_are_bounded(connection, monkeypatch):
    """Over the high mark it is not read from; over the limit it is cut."""
    monkeypatch.setattr(tcp, "UNREAD_BYTES_MAX", 1_000_000)
    made, transport, commands = connection
    assert transport.high == tcp.WRITE_HIGH_BYTES
    made.pause_writing()
    assert not transport.reading
    made.resume_writing()
    assert transport.reading
    made.pause_writing()
    transport.unread = 1_000_000
    made.data_received(NOP)
    commands.respond([large()])
    made.flush()
    assert not transport.aborted
    transport.unread += 1
    commands.respond([large()])
    made.flush()
    assert transport.aborted


def test_a_request_in_pieces_of_any_size_is_one_request(connection):
    """Twenty streams that are split anywhere give, each, what a parser gives of the whole."""
    _, _, commands = connection
    rng = random.Random(11)
    for _ in range(20):
        made = JournalConnection(JournalServer(port=0, node=commands))
        made.connection_made(Transport())
        commands.requests.clear()
        stream = random_stream(rng).partition(QUIT)[0]
        at = 0
        while at < len(stream):
            piece = stream[at : at + rng.choice([1, 9, 80, 700])]
            made.data_received(piece)
            at += len(piece)

        assert commands.requests == RequestParser().feed(stream)


def test_what_comes_after_the_end_is_dropped(connection):
    """Replies to a client that left go nowhere, and its session is closed."""
    made, transport, commands = connection
    made.data_received(NOP)
    made.connection_lost(None)
    commands.respond([reply()])
    made.flush()
    made.abort()
    made.close()

    assert transport.written == b""
    assert len(commands.closed) == 1


# A daemon.


def random_stream(rng):
    """Requests of all kinds, some damaged, the last perhaps cut off."""
    out = b""
    for number in range(1, rng.randrange(2, 40)):
        key = rng.randbytes(rng.choice([0, 1, 20, 300]))
        request = rng.choice(
            [
                Request(Function.NOP, number),
                Request(Function.SET, number, m.OVERWRITE, key=key, value=Value(1, key)),
                Request(Function.GET, number, m.DATA, key=key),
                Request(Function.GET, number, m.DATA, key=b"", key2=b"", count=9, query=1),
                Request(Function.PUSH, number, key=b"u", key2=b"d", count=0, query=1),
                Request(Function.NEXT, number, m.DATA, key=b"d"),
                Request(15, number),
            ]
        )
        raw = bytearray(encode_request(request))
        if rng.random() < 0.02:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        out += raw
    return out + (QUIT if rng.random() < 0.8 else b"") + NOP[: rng.randrange(len(NOP))]


async def answers(stream):
    """Return what a daemon sends back until it closes."""
    async with daemon(clock=Clock(1_700_000_000_000_000)) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(stream)
        with contextlib.suppress(OSError):  # it may have closed already
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()


@pytest.mark.skipif(codec.native_codec is None, reason="the native module is not built")
@pytest.mark.parametrize("seed", range(4))
def test_both_codecs_answer_alike(seed, monkeypatch):
    """Whatever comes, the daemon sends the same bytes with both codecs, and then the end."""
    for turn in range(20):
        stream = random_stream(random.Random(f"{seed} {turn}"))
        by_native = asyncio.run(answers(stream))
        with monkeypatch.context() as patch:
            patch.setattr(codec, "native_codec", None)
            by_plain = asyncio.run(answers(stream))

        assert by_native == by_plain, f"seed {seed}, turn {turn}"


def test_partial_sends_keep_the_order():
    """Whatever the socket accepts at a time, all bytes arrive once and in order."""
    rng = random.Random(5)
    values = [rng.randbytes(rng.randrange(20_000)) for _ in range(300)]

    async def run():
        async with daemon() as server, connected(server) as other:
            for number, data in enumerate(values):
                await other.ask(
                    Request(Function.SET, key=b"%d" % number, value=Value(Type.BUFFER, data))
                )
            wire = await Wire.open(server.address)
            for number in range(len(values)):
                wire.send(Request(Function.GET, flags=m.DATA, key=b"%d" % number))
            received = [(await wire.receive()).pair.value.data for _ in values]
            await wire.close()
            return received

    assert asyncio.run(run()) == values


def test_connections_are_bounded():
    """One more than there may be is closed at once; when one leaves there is space again."""

    async def run():
        server = JournalServer(port=0, node=CommitLoop(), connections_max=2)
        await server.start()
        try:
            async with connected(server) as first, connected(server) as second:
                assert (await first.ask(nop())).error == (await second.ask(nop())).error == ""
                reader, writer = await asyncio.open_connection(*server.address)
                refused = await asyncio.wait_for(reader.read(), 10)
                writer.close()
            while True:
                async with connected(server) as third:
                    try:
                        return refused, (await third.ask(nop())).error
                    except (EOFError, ConnectionError):
                        continue  # the daemon has not seen the others leave yet
        finally:
            await server.stop()

    assert asyncio.run(run()) == (b"", "")


def drained(far):
    """Return everything that has arrived."""
    got = b""
    far.setblocking(False)
    try:
        while data := far.recv(1 << 20):
            got += data
    except BlockingIOError:
        pass
    return got


def test_a_client_that_does_not_read_is_not_read_from_and_then_cut(monkeypatch, caplog):
    """Unread replies stop the reading, then end the connection; others are served."""
    monkeypatch.setattr(tcp, "WRITE_HIGH_BYTES", 100_000)
    monkeypatch.setattr(tcp, "UNREAD_BYTES_MAX", 8_000_000)
    get = Request(Function.GET, 7, m.DATA, key=b"k")

    async def run():
        async with daemon() as server, connected(server) as other:
            await other.ask(Request(Function.SET, flags=m.OVERWRITE, key=b"k", value=LARGE))
            engine = server.node.engine
            with socket.create_connection(server.address) as lazy:
                lazy.setblocking(False)
                lazy.send(encode_request(get))
                await eventually(lambda: engine.handled >= 2)
                asked, before = 1, 0
                while engine.handled != before + 1:  # until only the other is read from
                    before = engine.handled
                    lazy.send(encode_request(get))
                    asked += 1
                    assert asked < 200
                    assert (await other.ask(nop())).error == ""
                received = bytearray()
                size = asked * len(encode_reply(large(7)))

                def all_received():
                    received.extend(drained(lazy))
                    return len(received) >= size

                await eventually(all_received, 60)  # it reads, and everything arrives
            with socket.create_connection(server.address) as greedy:
                greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                greedy.sendall(encode_request(get) * 2_000)
                await eventually(lambda: "does not read its replies" in caplog.text)
            assert (await other.ask(nop())).error == ""

    asyncio.run(run())


def test_an_unexpected_error_ends_one_connection(monkeypatch, caplog):
    """A request that raises costs its own connection; others that came with it are answered."""

    async def run():
        async with daemon() as server, connected(server) as other, connected(server) as wire:
            await other.ask(nop())
            await wire.ask(nop())
            engine = server.node.engine
            carry_out = engine.carry_out
            monkeypatch.setattr(
                engine,
                "carry_out",
                lambda r, *rest: 1 // 0 if r.key == b"bad" else carry_out(r, *rest),
            )
            wire.send(Request(Function.GET, key=b"bad"))
            for _ in range(20):
                other.send(nop())
            received = [await other.receive() for _ in range(20)]
            with pytest.raises((EOFError, ConnectionError)):
                await wire.receive()
            return {reply.error for reply in received}, (await other.ask(nop())).error

    assert asyncio.run(run()) == ({""}, "")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_stopping_ends_every_connection(tmp_path, loop):
    """A stopped daemon has sent the replies to what it accepted, and no client is left waiting."""
    run_in = asyncio.run if loop == "asyncio" else pytest.importorskip("uvloop").run

    async def run():
        async with daemon(tmp_path) as server:
            wires = [await Wire.open(server.address) for _ in range(5)]
            for wire in wires:
                await wire.ask(nop())
                wire.send(Request(Function.SET, 9, m.PERSIST, key=b"k", value=LARGE))
            await eventually(lambda: server.node.engine.handled >= 10)
        for wire in wires:
            answered = await wire.receive()
            assert (answered.identifier, answered.error) in [(9, ""), (9, "already-exists")]
            with pytest.raises((EOFError, ConnectionError)):
                await wire.receive()
            wire.writer.close()

    run_in(run())


def test_a_client_that_stands_still_does_not_hold_up_a_stop(monkeypatch):
    """What it does not read is given up after CLOSE_S_MAX."""
    monkeypatch.setattr(tcp, "CLOSE_S_MAX", 0.05)
    get = Request(Function.GET, 7, m.DATA, key=b"k")

    async def run():
        async with asyncio.timeout(10), daemon() as server, connected(server) as other:
            await other.ask(Request(Function.SET, flags=m.OVERWRITE, key=b"k", value=LARGE))
            lazy = socket.create_connection(server.address)
            lazy.sendall(encode_request(get) * 100)
            await eventually(lambda: server.node.engine.handled >= 20)
        lazy.close()

    asyncio.run(run())


def test_no_descriptors_left_is_waited_out(tmp_path):
    """A daemon without free descriptors serves the clients it has, and new ones once there are some."""
    limit = 48
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}));"
        "sys.argv = ['virta', 'journal', 'serve', '--port', '0', '--data-dir', sys.argv[1]];"
        "from virta.cli import main; main()"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * limit
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        port = int(process.stdout.readline().rpartition(b":")[2])
        with Client(port=port) as first:
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(limit)]
            assert first.ping()
            for each in crowd:
                each.close()
            assert first.ping()
            with Client(port=port) as second:
                assert second.ping()
    finally:
        process.kill()
        process.communicate()


def cpu_seconds(pid):
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def test_an_idle_daemon_uses_no_cpu(tmp_path):
    """Between requests, and with a client that is connected and silent, it sleeps."""
    with Daemon(tmp_path) as process, Client(port=process.port) as client:
        client.push("http://h/1")
        began = cpu_seconds(process.process.pid)
        client.wait(2.0)
        spent = cpu_seconds(process.process.pid) - began

    assert spent < 0.02
