"""The life of a job over native lines, and replies a client reads without structures."""

from __future__ import annotations

import array
import asyncio
import fcntl
import inspect
import socket
import termios
import threading

import pytest
from journal_support import connected, daemon, daemon_thread, nop

from virta.errors import LogWriteError
from virta.journal import Client
from virta.journal.protocol import commands, kernel
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import encode_reply, encode_request
from virta.journal.protocol.messages import Function, Reply, Request

pytestmark = pytest.mark.skipif(kernel.Lines is None, reason="the native half was not built")


def push(uri=b"http://h/1", flags=m.PERSIST, **fields):
    return Request(Function.PUSH, flags=flags, key=uri, count=0, query=m.QUERY_RANGE, **fields)


def test_a_daemon_does_jobs(tmp_path):
    """The ordinary life of a job, and figures that count it; all of it is there after a restart."""

    async def run():
        async with daemon(tmp_path) as server, connected(server) as wire:
            before = server.node.engine.handled
            await wire.ask(push())
            await wire.ask(push(b"http://h/2"))
            taken = await wire.ask(Request(Function.NEXT, flags=m.DATA))
            done = await wire.ask(Request(Function.DELETE, key=taken.pairs[0].key))
            assert (done.error, done.flags) == ("", m.DELETED)
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
            persistence = server.node._persistence
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

    asyncio.run(run())


def test_what_the_disk_refuses_is_said_to_each(tmp_path):
    """Replies that waited together are all refused, each under its own identifier."""

    async def run():
        async with (
            daemon(tmp_path) as server,
            connected(server) as wire,
            connected(server) as other,
        ):
            persistence = server.node._persistence

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
            assert (await other.ask(push(b"http://h/3"))).error == "disk: no space left"
            persistence.commit = commit

    asyncio.run(run())


def test_the_order_of_a_line_stays(tmp_path):
    """Requests of one segment are carried out in order, and QUIT ends after all replies."""

    async def run():
        async with daemon(tmp_path) as server, connected(server) as wire:
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
            return len(server.node.engine.jobs)

    assert asyncio.run(run()) == 2


def test_a_request_that_fails_ends_its_line_alone(monkeypatch, caplog):
    """An unexpected error closes the connection it came on and is logged."""

    async def run():
        async with (
            daemon() as server,
            connected(server) as wire,
            connected(server) as other,
        ):
            monkeypatch.setattr(
                type(server.node.engine.jobs.scheduler), "domain", lambda *_: 1 // 0
            )
            wire.send(push())
            with pytest.raises(EOFError):
                await wire.hear()
            return (await other.ask(nop())).error

    assert asyncio.run(run()) == ""
    assert "ZeroDivisionError" in caplog.text


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
