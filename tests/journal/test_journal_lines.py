"""Connections in native hands: every limit, every way to end, and the same bytes as the plain twin."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from journal_support import Clock, Daemon, Wire, connected, daemon, daemon_thread, nop, until

from virta.errors import JournalError
from virta.journal import Client
from virta.journal.protocol import kernel
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import RequestParser, encode_reply, encode_request
from virta.journal.protocol.messages import Function, Reply, Request, Type, Value
from virta.journal.serving import tcp as daemon_module
from virta.journal.serving.commit_loop import Node
from virta.journal.serving.tcp import JournalServer

native = pytest.mark.skipif(kernel.Lines is None, reason="the native half was not built")
NOP = encode_request(nop())
QUIT = encode_request(Request(Function.QUIT))
LARGE = Value(Type.BUFFER, bytes(100_000))


class Pair:
    """Native lines on a socket pair, with the other end of it."""

    def __init__(self, encode=encode_reply, unanswered=1_000, high=65_536, unread=1 << 20, look=0):
        self.lines = kernel.Lines(encode, unanswered, high, unread, look)
        self.line, self.far = self.more("owner")

    def more(self, owner):
        near, far = socket.socketpair()
        far.settimeout(10)
        return self.lines.add(near.detach(), owner), far

    def turn(self):
        return self.lines.turn(False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lines.close()
        self.far.close()


def reply(number=1, **fields):
    return Reply(number, 0, 5, **fields)


def large(number=1):
    return reply(number, pair=m.Pair(b"", LARGE))


def drained(far):
    """Everything that is there."""
    got = b""
    far.setblocking(False)
    try:
        while data := far.recv(1 << 20):
            got += data
    except BlockingIOError:
        pass
    far.settimeout(10)
    return got


def test_what_was_built_can_be_loaded():
    """A native half that is there but does not load would go unnoticed: everything works, slowly."""
    built = list(Path(kernel.__file__).parent.glob("_native*.so"))
    if not built or os.environ.get("VIRTA_PLAIN") == "1":
        pytest.skip("the native half was not built, or is not wanted")

    assert kernel.NATIVE
    assert kernel.Lines is not None
    assert kernel.Asker is not None


@native
def test_whole_requests_come_decoded_and_the_rest_raw():
    """A cut request is handed out as bytes, and so is what follows, until the line is not raw any more."""
    with Pair() as pair:
        assert pair.turn() == []
        pair.far.sendall(NOP * 3 + NOP[:7])
        [(owner, requests, rest)] = pair.turn()
        assert (owner, requests, rest) == ("owner", [nop()] * 3, NOP[:7])
        assert pair.line.raw
        assert pair.line.unanswered == 3
        pair.far.sendall(NOP[7:] + NOP)
        assert pair.turn() == [("owner", [], NOP[7:] + NOP)]
        pair.line.raw = False
        pair.far.sendall(NOP)
        assert pair.turn() == [("owner", [nop()], None)]


@native
def test_nothing_after_quit_is_read():
    """QUIT is the last request of a line; it ends once everything is answered and sent."""
    with Pair() as pair:
        pair.far.sendall(NOP + QUIT + NOP + b"nonsense")
        [(_, requests, rest)] = pair.turn()
        assert [request.function for request in requests] == [Function.NOP, Function.QUIT]
        assert rest is None
        pair.far.sendall(NOP)
        assert pair.turn() == []
        pair.line.respond(reply())
        pair.lines.flush()
        assert pair.turn() == []
        pair.line.respond(reply(2))
        pair.lines.flush()
        assert pair.turn() == [("owner", None, False)]
        assert pair.lines.count == 0
        assert pair.far.recv(1 << 16) == encode_reply(reply()) + encode_reply(reply(2))


@native
def test_unanswered_requests_are_bounded():
    """A line with too many unanswered requests is not read from until some are answered."""
    with Pair(unanswered=3) as pair:
        pair.far.sendall(NOP * 4)
        assert len(pair.turn()[0][1]) == 4
        pair.far.sendall(NOP)
        assert pair.turn() == []
        pair.line.respond(reply())
        pair.lines.flush()
        assert len(pair.turn()[0][1]) == 1
        pair.line.asked(10)
        pair.far.sendall(NOP)
        assert pair.turn() == []


@native
def test_unread_replies_are_bounded():
    """Over the high mark a line is not read from; over the limit it is cut, and the buffer is gone."""
    with Pair(high=200_000, unread=1_000_000) as pair:
        while pair.line.unread <= 200_000:
            pair.line.notify(large())
            pair.lines.flush()
        pair.far.sendall(NOP)
        assert pair.turn() == []
        received = drained(pair.far)
        came = []
        while pair.line.unread or not came:
            came += pair.turn()
            received += drained(pair.far)
        assert came == [("owner", [nop()], None)]
        assert len(received) % len(encode_reply(large())) == 0
        for _ in range(100):
            pair.line.notify(large())
            assert pair.line.unread <= 1_000_000 + 200_000
        assert pair.line.unread == 0
        pair.lines.flush()
        assert pair.turn() == [("owner", None, True)]
        pair.line.respond(reply())
        pair.line.notify(large())
        pair.line.quit()
        pair.line.asked(10_000)
        pair.lines.flush()


@native
def test_partial_sends_keep_the_order():
    """Whatever the socket takes at a time, the bytes arrive once and in order."""
    with Pair(high=100_000, unread=1 << 30) as pair:
        expected = b""
        received = b""
        rng = random.Random(5)
        for number in range(300):
            made = reply(number, pair=m.Pair(b"", Value(1, rng.randbytes(rng.randrange(20_000)))))
            expected += encode_reply(made)
            pair.line.notify(made)
            if rng.random() < 0.3:
                pair.lines.flush()
            if rng.random() < 0.2:
                received += drained(pair.far)
        pair.lines.flush()
        while len(received) < len(expected):
            received += drained(pair.far)
            pair.turn()

    assert received == expected


@native
def test_the_end_of_a_line_comes_after_its_replies():
    """Who stops sending still gets what was answered; then the line ends, once."""
    with Pair(high=1 << 20, unread=1 << 30) as pair:
        for _ in range(30):
            pair.line.notify(large())
        pair.lines.flush()
        pair.far.shutdown(socket.SHUT_WR)
        assert pair.turn() == []
        size = len(drained(pair.far))
        while not (ended := pair.turn()):
            size += len(drained(pair.far))
        assert ended == [("owner", None, False)]
        size += len(drained(pair.far))
        assert size == 30 * len(encode_reply(large()))
        assert pair.turn() == []


@native
@pytest.mark.parametrize("paused", [False, True])
def test_a_broken_line_ends(paused):
    """A partner that is gone is noticed, also while it is not read from, and by whoever sends."""
    with Pair(unanswered=0) as pair, socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
        line = pair.lines.add(near.detach(), "other")
        if paused:
            far.sendall(NOP)
            assert pair.turn()[0][0] == "other"
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        assert select.select([pair.lines], [], [], 10)[0]  # the reset has arrived
        line.notify(reply())
        pair.lines.flush()
        assert pair.turn() == [("other", None, False)]
        assert pair.lines.count == 1


@native
def test_replies_out_of_the_ordinary_are_encoded_in_python():
    """What the native half declines goes through `encode`, whose faults are the caller's to see."""
    wrong = reply(error="disk")
    with Pair() as pair:
        pair.line.notify(wrong)
        pair.lines.flush()
        assert drained(pair.far) == encode_reply(wrong)
    with Pair(encode=lambda _: "text") as pair, pytest.raises(TypeError, match="bytes"):
        pair.line.notify(wrong)
    with Pair(encode=lambda _: 1 // 0) as pair:
        with pytest.raises(ZeroDivisionError):
            pair.line.notify(wrong)
        pair.line.notify(reply())
        pair.lines.flush()
        assert drained(pair.far) == encode_reply(reply())


@native
def test_misuse_is_an_error():
    """Closed lines, descriptors that are none and wrong arguments are exceptions, not crashes."""
    pair = Pair()
    with pytest.raises(OSError, match="Bad file"):
        pair.lines.add(999_999, None)
    with pytest.raises(TypeError):
        pair.line.asked("x")
    with pytest.raises(TypeError):
        type(pair.line)()
    with pytest.raises(TypeError):
        kernel.Lines(1)
    asker = kernel.Asker(0)
    with pytest.raises(TypeError):
        asker.ask(1, nop())
    with pytest.raises(OSError, match="Bad file"):
        asker.ask(-1, nop(), 0)
    assert asker.ask(-1, object(), 0) is None
    assert pair.lines.close() == ["owner"]
    assert pair.lines.close() == []
    with pytest.raises(RuntimeError, match="closed"):
        pair.turn()
    pair.line.respond(reply())
    pair.far.close()


@native
def test_lines_that_are_forgotten_are_collected():
    """Owners hold their lines and are held by them: nothing of it stays, and descriptors are closed."""

    class Owner:
        pass

    owner = Owner()
    pair = Pair()
    owner.line, far = pair.more(owner)
    owner.lines = pair.lines
    seen = weakref.ref(owner)
    before = len(os.listdir("/proc/self/fd"))
    pair.far.close()
    far.close()
    del owner, pair
    gc.collect()

    assert seen() is None
    assert len(os.listdir("/proc/self/fd")) == before - 5


def random_stream(rng):
    """Requests of all kinds, some damaged, the last perhaps cut."""
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
    """What a daemon sends back until it closes."""
    async with daemon(clock=Clock(1_700_000_000_000_000)) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(stream)
        with contextlib.suppress(OSError):  # it may have closed already
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()


@native
@pytest.mark.parametrize("seed", range(4))
def test_native_and_plain_lines_answer_alike(seed, monkeypatch):
    """Whatever comes, both halves send the same bytes and then the end."""
    for turn in range(20):
        stream = random_stream(random.Random(f"{seed} {turn}"))
        by_native = asyncio.run(answers(stream))
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "Lines", None)
            by_plain = asyncio.run(answers(stream))

        assert by_native == by_plain, f"seed {seed}, turn {turn}"


@native
def test_pieces_of_any_size_are_the_same_requests():
    """Twenty lines that are cut anywhere give, each, what a parser gives of its whole stream."""
    rng = random.Random(11)
    with Pair(unanswered=1 << 30) as pair:
        streams = [random_stream(rng).partition(QUIT)[0] for _ in range(20)]
        far, parsers = [], [RequestParser() for _ in streams]
        got = [[] for _ in streams]
        lines = []
        for number in range(20):
            line, other = pair.more(number)
            lines.append(line)
            far.append(other)
        sent = [0] * 20
        while any(at < len(stream) for at, stream in zip(sent, streams, strict=True)):
            for number in rng.sample(range(20), 7):
                piece = streams[number][sent[number] :][: rng.choice([1, 9, 80, 700])]
                sent[number] += len(piece)
                far[number].sendall(piece)
            for number, requests, rest in pair.turn():
                got[number] += requests
                if rest is not None:
                    got[number] += parsers[number].feed(rest)
                    lines[number].raw = parsers[number].buffered > 0 or bool(parsers[number].error)
        for other in far:
            other.close()

    assert got == [RequestParser().feed(stream) for stream in streams]


@pytest.fixture(params=["native", "plain"])
def half(request, monkeypatch):
    """Both kinds of connections."""
    if request.param == "plain":
        monkeypatch.setattr(kernel, "Lines", None)
    elif kernel.Lines is None:
        pytest.skip("the native half was not built")
    return request.param


@pytest.mark.usefixtures("half")
def test_connections_are_bounded():
    """One more than there may be is closed at once; when one leaves there is room again."""

    async def run():
        server = JournalServer(port=0, node=Node(), connections_max=2)
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
                        continue  # those that left are not gone yet
        finally:
            await server.stop()

    assert asyncio.run(run()) == (b"", "")


@pytest.mark.usefixtures("half")
def test_who_does_not_read_is_not_read_from_and_then_cut(monkeypatch, caplog):
    """Replies that nobody takes stop the reading, then end the connection; others are served."""
    monkeypatch.setattr(daemon_module, "WRITE_HIGH_BYTES", 100_000)
    monkeypatch.setattr(daemon_module, "UNREAD_BYTES_MAX", 8_000_000)
    get = Request(Function.GET, 7, m.DATA, key=b"k")

    async def run():
        async with daemon() as server, connected(server) as other:
            await other.ask(Request(Function.SET, flags=m.OVERWRITE, key=b"k", value=LARGE))
            engine = server.node.engine
            with socket.create_connection(server.address) as lazy:
                lazy.setblocking(False)
                lazy.send(encode_request(get))
                await until(lambda: engine.handled >= 2)
                asked, before = 1, 0
                while engine.handled != before + 1:  # until only the other is read any more
                    before = engine.handled
                    lazy.send(encode_request(get))
                    asked += 1
                    assert asked < 200
                    assert (await other.ask(nop())).error == ""
                lazy.settimeout(0)
                left = asked * len(encode_reply(large(7)))
                while left > 0:  # it reads, and everything comes
                    left -= len(drained(lazy))
                    await asyncio.sleep(0.001)
            with socket.create_connection(server.address) as greedy:
                greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                greedy.sendall(encode_request(get) * 2_000)
                await until(lambda: "does not read its replies" in caplog.text)
            assert (await other.ask(nop())).error == ""

    asyncio.run(run())


@pytest.mark.usefixtures("half")
def test_a_fault_of_ours_ends_one_connection(monkeypatch, caplog):
    """A request that must not happen but does costs its own connection; who came with it is answered."""

    async def run():
        async with daemon() as server, connected(server) as other, connected(server) as wire:
            await other.ask(nop())
            await wire.ask(nop())
            engine = server.node.engine
            handle = engine.handle
            monkeypatch.setattr(
                engine, "handle", lambda r, s: 1 // 0 if r.key == b"bad" else handle(r, s)
            )
            wire.send(Request(Function.GET, key=b"bad"))
            for _ in range(20):
                other.send(nop())
            heard = [await other.hear() for _ in range(20)]
            with pytest.raises((EOFError, ConnectionError)):
                await wire.hear()
            return {reply.error for reply in heard}, (await other.ask(nop())).error

    assert asyncio.run(run()) == ({""}, "")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.usefixtures("half")
def test_stopping_ends_every_connection(tmp_path):
    """A stopped daemon has answered what it took, and nobody is left waiting."""

    async def run():
        async with daemon(tmp_path) as server:
            wires = [await Wire.open(server.address) for _ in range(5)]
            for wire in wires:
                await wire.ask(nop())
        for wire in wires:
            with pytest.raises((EOFError, ConnectionError)):
                await wire.hear()
            wire.writer.close()

    asyncio.run(run())


@native
def test_no_descriptors_left_is_waited_out(monkeypatch, caplog):
    """A daemon without descriptors accepts again later, and goes on serving meanwhile."""
    from virta.journal.serving import connections as lines_module

    monkeypatch.setattr(lines_module, "ACCEPT_AGAIN_S", 0.01)
    failures = iter([OSError(24, "Too many open files")] * 3)

    class Listener(socket.socket):
        def accept(self):
            for error in failures:
                raise error
            return super().accept()

    monkeypatch.setattr(lines_module.socket, "socket", Listener)

    async def run():
        async with daemon() as server, connected(server) as wire:
            return (await wire.ask(nop())).error

    assert asyncio.run(run()) == ""
    assert caplog.text.count("Too many open files") == 3


# Looking.


def cpu_seconds(pid):
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@native
def test_nobody_looks_for_what_comes_rarely(tmp_path):
    """Requests now and then, and none at all: neither end burns a core for them."""
    pause = threading.Event()
    with Daemon(tmp_path, "--durability", "none") as process, Client(port=process.port) as client:
        client.ping()
        began = cpu_seconds(process.process.pid)
        own = cpu_seconds(os.getpid())
        for _ in range(30):
            pause.wait(0.02)
            client.ping()
        spent = cpu_seconds(process.process.pid) - began
        own = cpu_seconds(os.getpid()) - own

        assert client._asker.looked == 0
    # Less than a tenth of the 0.6 s that passed, on a machine that may be busy; looking would be half.
    assert spent < 0.06
    assert own < 0.06


@native
def test_a_lone_quick_line_is_looked_for():
    """What comes a moment later on the one line in use is found without sleep."""
    for _ in range(100):  # a core that is shared ends it for a while
        with Pair(look=200_000_000) as pair:
            for _ in range(20):
                pair.far.sendall(NOP)
                assert pair.turn()
            begun = threading.Event()
            far = pair.far
            later = threading.Thread(target=lambda b=begun, f=far: b.wait() and f.sendall(NOP))
            later.start()
            begun.set()
            found = pair.lines.turn(True)
            later.join()
            assert (found or pair.turn()) == [("owner", [nop()], None)]
            if pair.lines.looked:
                break
    assert pair.lines.looked


@native
def test_nobody_looks_for_one_of_several_lines():
    """With two lines in use, one after the other or both at once, the loop sleeps as ever."""
    with Pair(look=10_000_000_000) as pair:
        _, far = pair.more("other")
        for _ in range(20):
            for each in (pair.far, far):
                each.sendall(NOP)
                assert pair.lines.turn(True)
        assert pair.lines.turn(True) == []
        for _ in range(20):
            pair.far.sendall(NOP)
            far.sendall(NOP)
            assert len(pair.lines.turn(True)) == 2
        assert pair.lines.turn(True) == []
        assert pair.lines.looked == 0
        far.close()


@native
def test_a_quick_client_looks_for_its_replies(monkeypatch):
    """One that asks at once finds them without sleep, and never if told so."""
    monkeypatch.setattr("virta.journal.clients.client.possible", lambda: True)
    with daemon_thread() as server:
        with Client(*server.address, look=0) as never:
            for _ in range(20):
                never.ping()
            assert never._asker.looked == 0
        for _ in range(100):  # a core that is shared ends it for a while
            with Client(*server.address, look=0.05) as client:
                for _ in range(50):
                    client.ping()
                if client._asker.looked:
                    break
        assert client._asker.looked


@native
def test_nobody_looks_in_a_crowd():
    """A core that looks is busy to the scheduler: with more to run than cores, others need it."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 < os.cpu_count() <= 16:
        pytest.skip("one core never looks, and very many take a crowd of processes")
    busy = (
        f"import os; os.sched_setaffinity(0, {{{cores[0]}}}); print(1, flush=True)\nwhile 1: pass"
    )
    crowd = [
        subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
        for _ in range(os.cpu_count() + 2)
    ]
    try:
        for process in crowd:
            process.stdout.readline()
        with daemon_thread() as server, Client(*server.address, look=0.05) as client:
            for _ in range(400):
                client.ping()
            assert client._asker.looked < 16, "as many as before the first question"
    finally:
        for process in crowd:
            process.kill()
            process.communicate()


@native
def test_an_answer_that_is_none_ends_the_call():
    """Silence, nonsense, an end and a foreign reply, heard by the native half: coded errors or patience."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def partner(**options):
            client = Client(*listener.getsockname(), **options)
            far, _ = listener.accept()
            return client, far

        client, far = partner(timeout=0.05)
        with pytest.raises(JournalError, match="no reply in time"):
            client.ping()
        far.sendall(encode_reply(reply(1)) + encode_reply(reply(2))[:9])
        far.sendall(encode_reply(reply(2))[9:])
        assert client.ping() == 5
        far.close()
        with pytest.raises(JournalError, match="gone"):
            client.ping()
        client.close()
        with pytest.raises(JournalError, match="closed"):
            client.ping()
        client, far = partner()
        far.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with pytest.raises(JournalError, match="starts with"):
            client.ping()
        client.close()
        far.close()
