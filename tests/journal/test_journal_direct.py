"""Requests of jobs that a daemon's lines carry out without Python, and replies a client reads without structures."""

from __future__ import annotations

import array
import asyncio
import contextlib
import copy
import fcntl
import inspect
import random
import socket
import termios
import threading

import pytest
from journal_sides import Side, random_request
from journal_support import connected, daemon, daemon_thread, nop

from virta.errors import LogWriteError
from virta.journal import Client
from virta.journal.jobs import shortcut
from virta.journal.jobs.domain import Settings
from virta.journal.protocol import commands, kernel
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import ReplyParser, RequestParser, encode_reply, encode_request
from virta.journal.protocol.messages import Function, Reply, Request
from virta.journal.serving.commit_loop import Node

pytestmark = pytest.mark.skipif(kernel.Lines is None, reason="the native half was not built")


class WireSide(Side):
    """The same engine, behind a line that carries out what it can."""

    def __init__(self, path, *, lasting):
        super().__init__(path, shortcut.SHORTCUTS)
        self.lines = kernel.Lines(encode_reply, 4_096, 1 << 20, 1 << 26, 0)
        self.lines.serve(self.engine.tables, lambda: self.now, lasting)
        self.lines.direct = True
        near, self.far = socket.socketpair()
        self.line = self.lines.add(near.detach(), "owner")
        self.far.setblocking(False)
        self.requests, self.replies = RequestParser(), ReplyParser()
        self.by_python = self.direct = 0

    def handle(self, request):
        replies, left = [], encode_request(request)
        while not replies:
            left = left[self.far.send(left) :]
            for _, requests, rest in self.lines.turn(False):
                self.carry_out([*requests, *self.parsed(rest)])
            carried = self.lines.carried()
            if carried is not None:
                count, held, _ = carried
                self.direct += count
                if held is not None:
                    held.respond(Reply(0))
            self.lines.flush()
            with contextlib.suppress(BlockingIOError):
                replies = self.replies.feed(self.far.recv(1 << 20))
        [reply] = replies
        assert self.line.unanswered == 0
        return reply

    def parsed(self, rest):
        requests = [] if rest is None else self.requests.feed(rest)
        self.line.asked(len(requests))
        self.line.raw = self.requests.buffered > 0
        return requests

    def carry_out(self, requests):
        for request in requests:
            self.by_python += 1
            self.line.respond(self.engine.handle(request, self.session))

    def close(self):
        self.leases.close()
        self.lines.close()
        self.far.close()


def as_sent(request):
    """What a daemon makes of it: not every structure can be sent as it is."""
    [request], _ = kernel.decode_requests(encode_request(request))
    return request


@pytest.mark.parametrize("seed", range(40))
def test_lines_do_what_python_does(seed, tmp_path):
    """Whatever is asked for over a line, replies, images, jobs, ids and leases are those of the long way."""
    rng = random.Random(seed)
    quick, long = WireSide(tmp_path / "quick", lasting=seed % 2), Side(tmp_path / "long", {})
    keys = [b"none"]
    for _ in range(400):
        request = as_sent(random_request(rng, long.now, keys))
        if request.query == m.QUERY_RANGE and request.function == Function.GET and seed % 5:
            continue  # somebody who watches makes the long way the only one
        expected = long.engine.handle(copy.copy(request), long.session)
        assert quick.handle(request) == expected, request
        keys += [pair.key for pair in expected.pairs or () if pair.key]
        if rng.random() < 0.05:
            settings = Settings(paused=rng.random() < 0.3, deadline=rng.choice([0, 0.5]))
            for side in (quick, long):
                side.engine.jobs.configure(b"a.example", settings)
        if rng.random() < 0.3:
            pause = rng.choice([0, 1, 10, 50, 100_000_000_000])
            for side in (quick, long):
                side.now += pause
                side.engine.tick()
        if rng.random() < 0.3:
            assert quick.commit() == long.commit()
        assert quick.state() == long.state()
    assert quick.by_python
    assert quick.direct or not seed % 5
    quick.close()
    long.leases.close()


@pytest.mark.parametrize("size", [0, 1, 253, 254, 255, 256, 65_533, 65_534, 65_535, 70_000])
@pytest.mark.parametrize("flags", [0, m.DATA, m.DETAILS, m.DATA | m.DETAILS])
def test_jobs_of_all_sizes_are_written_alike(size, flags, tmp_path):
    """Keys, uris and payloads at the edges of their widths, and many jobs in one reply."""
    domain, uri = b"d" * min(size, 300), b"u" * min(max(size - 1, 1), 65_535)
    requests = [
        Request(12, 1, 0, 0, None, None, 3, uri, domain, None, 1),
        Request(12, 2, m.PERSIST, 0, None, None, 3, b"s", domain, m.Value(1, b"x" * size), 1),
        Request(12, 3, m.PERSIST, 0, None, None, 4, b"v", b"other", m.Value(2, b"text"), 1),
        Request(11, 4, flags, 0, None, None, 9, b""),
        Request(11, 5, flags, 0, None, None, 9, b""),
    ]
    quick, long = WireSide(tmp_path / "quick", lasting=True), Side(tmp_path / "long", {})
    for request in requests:
        assert quick.handle(request) == long.engine.handle(copy.copy(request), long.session)
    assert quick.direct > 1
    quick.close()
    long.leases.close()


def push(uri=b"http://h/1", flags=m.PERSIST, **fields):
    return Request(Function.PUSH, flags=flags, key=uri, count=0, query=m.QUERY_RANGE, **fields)


def spied(node):
    """How many requests were carried out without Python."""
    seen = []
    carried = node.carried
    node.carried = lambda count, held, due: (seen.append(count), carried(count, held, due))
    return seen


def test_a_daemon_does_jobs_without_python(tmp_path):
    """The ordinary life of a job, and figures that count it; all of it is there after a restart."""

    async def run():
        async with daemon(tmp_path) as server, connected(server) as wire:
            seen, before = spied(server.node), server.node.engine.handled
            await wire.ask(push())
            await wire.ask(push(b"http://h/2"))
            taken = await wire.ask(Request(Function.NEXT, flags=m.DATA))
            done = await wire.ask(Request(Function.DELETE, key=taken.pairs[0].key))
            assert (done.error, done.flags) == ("", m.DELETED)
            assert sum(seen) == 4
            assert server.node.engine.handled == before + 4
        async with daemon(tmp_path) as server, connected(server) as wire:
            taken = await wire.ask(Request(Function.NEXT, flags=m.DATA, count=9))
            return [pair.value.data for pair in taken.pairs]

    assert asyncio.run(run()) == [b"http://h/2"]


def test_replies_wait_for_the_log(tmp_path):
    """Nothing is said to be on disk before it is, whoever else is answered meanwhile."""
    begun, go = threading.Event(), threading.Event()
    once = iter([True])

    async def run():
        async with (
            daemon(tmp_path) as server,
            connected(server) as wire,
            connected(server) as other,
        ):
            await wire.ask(push(b"http://h/0"))
            seen, persistence = spied(server.node), server.node._persistence
            commit = persistence.commit

            def slow(records):
                if next(once, False):
                    begun.set()
                    go.wait(10)
                commit(records)

            persistence.commit = slow
            server.node._commit_s = 10.0  # commits go to a thread
            wire.send(push())
            await asyncio.to_thread(begun.wait, 10)
            other.send(push(b"http://h/2"))
            taken = await other.ask(Request(Function.NEXT, flags=m.DATA))
            assert len(taken.pairs) == 1
            assert not other.heard
            assert (await wire.ask(nop())).error == ""
            assert not wire.heard
            go.set()
            first, second = await wire.hear(), await other.hear()
            assert (first.flags, second.flags) == (m.PERSIST, m.PERSIST)
            assert sum(seen) == 3

    asyncio.run(run())


def test_what_the_disk_refuses_is_said_to_each(tmp_path):
    """Replies that waited together are all refused, each under its own identifier."""

    async def run():
        async with (
            daemon(tmp_path) as server,
            connected(server) as wire,
            connected(server) as other,
        ):
            persistence, seen = server.node._persistence, spied(server.node)

            def full(_):
                raise LogWriteError("no space left")

            persistence.commit, commit = full, persistence.commit
            stream = b""
            for number in (7, 65_535):
                request = push(b"http://h/%d" % number)
                request.identifier = number
                stream += encode_request(request)
            wire.writer.write(stream)
            replies = [await wire.hear(), await wire.hear()]
            assert [(r.identifier, r.error, r.flags) for r in replies] == [
                (7, "disk: no space left", 0),
                (65_535, "disk: no space left", 0),
            ]
            assert sum(seen) == 2
            assert (await other.ask(push(b"http://h/3"))).error == "disk: no space left"
            assert sum(seen) == 2, "while the disk is full Python decides"
            persistence.commit = commit

    asyncio.run(run())


def test_the_order_of_a_line_stays(tmp_path):
    """What follows a request for Python is Python's, and QUIT ends after all replies."""

    async def run():
        async with daemon(tmp_path) as server, connected(server) as wire:
            seen = spied(server.node)
            stream = [
                push(),
                Request(Function.GET, flags=m.DATA, key=b"http://h/1"),
                push(b"http://h/2"),
                Request(Function.QUIT),
            ]
            for number, request in enumerate(stream, 1):
                request.identifier = number
            wire.writer.write(b"".join(map(encode_request, stream)))
            heard = [await wire.hear() for _ in stream]
            assert sorted(reply.identifier for reply in heard) == [1, 2, 3, 4]
            with pytest.raises(EOFError):
                await wire.hear()
            return sum(seen), len(server.node.engine.jobs)

    assert asyncio.run(run()) == (1, 2)


def test_a_daemon_that_asks_goes_through_python(tmp_path):
    """What another daemon tells must not get a timestamp of our own, even in the same segment."""

    async def run():
        async with daemon(tmp_path) as server, connected(server) as wire:
            seen = spied(server.node)
            hello = Request(Function.NOP, 1, key=b"peer:b")
            wire.writer.write(encode_request(hello) + encode_request(push()))
            await wire.hear(lambda reply: reply.identifier == 1)
            await wire.ask(push(b"http://h/2"))
            return seen

    assert asyncio.run(run()) == []


def test_a_request_that_fails_ends_its_line_alone(monkeypatch):
    """An error nobody foresaw costs the connection it came on, and is told."""
    told = []
    monkeypatch.setattr("sys.unraisablehook", told.append)

    async def run():
        async with (
            daemon() as server,
            connected(server) as wire,
            connected(server) as other,
        ):
            monkeypatch.setattr(type(server.node.engine.jobs.schedule), "domain", lambda *_: 1 // 0)
            wire.send(push())
            with pytest.raises(EOFError):
                await wire.hear()
            return (await other.ask(nop())).error

    assert asyncio.run(run()) == ""
    assert [each.exc_type for each in told] == [ZeroDivisionError]


def test_lines_refuse_what_is_no_table():
    """Tables that are none leave every request to Python; wrong arguments are errors."""
    lines = kernel.Lines(encode_reply, 4_096, 1 << 20, 1 << 26, 0)
    near, far = socket.socketpair()
    lines.add(near.detach(), "owner")
    lines.serve((), None, False)
    lines.direct = True
    far.sendall(encode_request(push()))
    [(_, requests, _)] = lines.turn(False)
    assert len(requests) == 1
    assert lines.carried() is None
    with pytest.raises(TypeError):
        lines.serve(())
    with pytest.raises(TypeError):
        kernel.native.free_slots(1, 2, 3)
    with pytest.raises(TypeError):
        kernel.native.set_told_types(int, str)
    lines.close()
    far.close()


# What a client is told.


@pytest.fixture
def clients():
    """A client that reads replies natively, and one that does not, of a daemon each."""
    with (
        daemon_thread() as first,
        daemon_thread() as second,
        Client(*first.address) as native,
        Client(*second.address) as plain,
    ):
        plain._asker = None
        yield native, plain


def calls():
    """Every kind of result and refusal the native half may meet."""
    yield "push", ("http://h/1",), {"payload": b"bytes", "start": 1.5}
    yield "push", ("http://h/2",), {"payload": "text", "start": 1.5}
    yield "push", ("http://h/3",), {"start": 1.5, "priority": 9}
    yield "push", ("http://h/4",), {"payload": 17, "start": 1.5}
    yield "push", ("http://" + "h" * 300 + "/5",), {"payload": b"x" * 70_000, "start": 1.5}
    yield "push", ("http://h/6",), {"priority": 256}
    yield "push", ("",), {}
    yield "push", ("http://h/é",), {"domain": "Über", "payload": b""}
    yield "push", (b"http://h/8",), {"domain": b"Other", "persist": False}
    yield "push", ("http://h/9",), {"delay": 0.0001, "priority": True}
    yield "push", ("http://h/10",), {"timestamp": 7, "priority": -1}
    yield "push", ("x" * 70_000,), {}
    yield "push", ("http://h/11",), {"payload": bytearray(b"array")}
    yield "next", ("nowhere",), {}
    yield "next", (b"other",), {"work_for": 60.0, "remove": True}
    yield "next", (), {"count": 65_536}
    yield "next", (), {"work_for": 60.0}
    yield "next", (), {"count": 2}
    yield "next", (), {"count": 9}
    yield "next", (), {}
    yield "push", ("http://h/7",), {"start": 4e9}
    yield "next", (), {}
    yield "done", (b"no:such:key",), {}
    yield "done", (b"k" * 70_000,), {}
    yield "delete", (b"nothing",), {}
    yield "set", ("k", "v"), {"timestamp": 5}
    yield "set", ("k", "w"), {"timestamp": 4, "overwrite": False}
    yield "get", ("k",), {}
    yield "ping", (), {}


def outcome(client, name, args, kwargs):
    """What a call gives, without what differs from daemon to daemon: times and keys with them."""
    try:
        result = getattr(client, name)(*args, **kwargs)
    except m.RefusedError as refused:
        return refused.code
    if isinstance(result, commands.Next):
        for job in result.jobs:
            assert kwargs.get("remove") or client.done(job.key) is True
            assert type(job) is commands.Lease
            assert type(job.deadline) is float
        jobs = [(job.key.split(b":")[:2], *job[1:3], job.attempts) for job in result.jobs]
        return type(result), jobs, result.wake_up
    if type(result) is int and name != "set":
        return int
    return type(result), result


@pytest.mark.parametrize("name", ["push", "next", "done"])
def test_quick_calls_take_what_their_commands_take(name):
    """The same parameters with the same defaults."""
    command = {"push": commands.push, "next": commands.next_, "done": commands.done}[name]
    expected = inspect.signature(command).parameters.values()
    _, *found = inspect.signature(getattr(Client, name)).parameters.values()
    assert found == list(expected)


def test_clients_are_told_the_same(clients):
    """With and without structures in between, results and refusals are equal."""
    native, plain = clients
    for name, args, kwargs in calls():
        results = [outcome(client, name, args, kwargs) for client in (native, plain)]
        assert results[0] == results[1], name


def test_replies_out_of_the_ordinary_are_read_as_before():
    """A reply with a notification before it, cut in two, damaged or another's is not taken for a result."""
    ordinary = encode_reply(Reply(1, m.DELETED, 77))
    told = encode_reply(Reply(0, m.NOTIFICATION, 5))
    for stream, result in [
        ([ordinary], True),
        ([told + ordinary], True),
        ([ordinary[:9], ordinary[9:]], True),
        ([encode_reply(Reply(2, m.DELETED, 77)), ordinary], True),
        ([encode_reply(Reply(1, 0, 77))], False),
        ([encode_reply(Reply(1, 0, 77, error="locked"))], "locked"),
        ([b"XX" + ordinary[2:]], "bad-message"),
    ]:
        assert told_through(stream) == result


def told_through(stream):
    """What `done` says if these pieces come as the reply, one by one."""
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, Client(*listening.getsockname()) as client:
        far, _ = listening.accept()

        def answer():
            with far:
                far.recv(65_536)
                for piece in stream:
                    far.sendall(piece)
                    wait_until_read(far)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            return client.done(b"key")
        except m.JournalError as error:
            return error.code
        finally:
            thread.join()


def wait_until_read(far):
    """Until the other side has taken everything: its buffer of unread bytes is empty."""
    left = array.array("i", [1])
    while left[0]:
        fcntl.ioctl(far.fileno(), termios.TIOCOUTQ, left)


def test_a_closed_client_touches_no_descriptor():
    """Its number may be somebody else's by now."""
    with daemon_thread() as server:
        client = Client(*server.address)
        client.close()
        for call in (client.ping, client.next):
            with pytest.raises(m.JournalError, match="closed") as raised:
                call()
            assert raised.value.code == "closed"


def test_direct_is_a_matter_of_the_moment():
    """Copies, a full disk or a stop leave everything to Python."""
    node = Node()
    assert node.direct
    node.engine.replicate = True
    assert not node.direct
    node.engine.replicate = False
    node._uneasy = True
    assert not node.direct
