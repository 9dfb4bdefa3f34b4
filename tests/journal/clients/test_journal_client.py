"""The clients speak Python: values, jobs and errors, blocking or awaited."""

from __future__ import annotations

import array
import asyncio
import fcntl
import inspect
import socket
import termios
import threading
import time
from contextlib import contextmanager

import pytest
from journal_support import daemon, daemon_thread

from virta.errors import JournalError
from virta.journal import AsyncClient, Client
from virta.journal.clients import aio
from virta.journal.clients.client_protocol import IDENTIFIER_MAX, ClientProtocol
from virta.journal.protocol import codec, commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import encode_reply
from virta.journal.protocol.messages import RefusedError, Reply, Request, Type, Value


def test_values_round_trip():
    """What is set comes back with its type; a missing key is the default."""
    with daemon_thread() as server, Client(*server.address) as client:
        for plain in (None, True, False, 0, -5, 2**62, 1.5, "text", "", b"\0\xff"):
            client.set("k", plain)
            got = client.get("k")
            assert (type(plain), plain) == (type(got), got)
        client.set("odd", Value(Type.INTEGER, b""))

        assert client.get("odd") == b""
        assert client.get("none") is None
        assert client.get("none", default=7) == 7
        with pytest.raises(RefusedError, match="overflow"):
            client.set("k", 2**63)


@pytest.mark.parametrize("wrong", [[1], {"a": 1}, (1,), object(), {1}])
def test_what_is_no_value(wrong):
    """A list is not taken for bytes: it is refused with its type and what would be right."""
    with pytest.raises(RefusedError, match=f"str, bytes or Value, not {type(wrong).__name__}"):
        commands.set_("k", wrong)
    with pytest.raises(RefusedError, match="type-mismatch"):
        commands.push("http://h/", payload=wrong)


@pytest.mark.parametrize("wrong", [5, None, 1.5, ["k"]])
def test_what_is_no_key(wrong):
    """A number is not taken for so many zeros."""
    for build in (commands.get, commands.done, commands.push):
        with pytest.raises(
            RefusedError, match=f"a key is str or bytes, not {type(wrong).__name__}"
        ):
            build(wrong)
    assert commands.get(bytearray(b"k")).request.key == b"k"
    assert commands.get("\udcff").request.key == b"\xff"


def test_commands_on_values():
    """Every command of the protocol has its method."""
    with daemon_thread() as server, Client(*server.address) as client:
        assert client.ping() > 0
        assert client.add("n", 5) == 5
        assert client.add("n", -7) == -2
        client.set("flag", False)
        assert client.invert("flag") is True
        client.set("text", "abcdef")
        client.truncate("text", 2)
        assert client.get("text") == "ab"
        client.lock("text", seconds=5)
        client.unlock("text")
        client.rename("text", "renamed")
        client.link("renamed", "alias")
        assert client.get("alias") == "ab"
        assert client.unlink("alias") is False
        assert client.delete("renamed") is True
        assert client.delete("renamed") is False
        with pytest.raises(RefusedError) as refused:
            client.set("n", 1, overwrite=False)
        assert refused.value.code == "already-exists"
        client.set("expired", 1, expires=time.time() - 1)
        assert client.get("expired") is None
        client.set("short", 1, expires=time.time() + 50)
        client.get("short", touch=100)
        assert client.details("short").expires > (time.time() + 90) * 1e6
        assert client.details("nope") is None


def test_pages():
    """Ranges and patterns come in pages that follow each other."""
    with daemon_thread() as server, Client(*server.address) as client:
        client.pipeline(commands.set_(f"k{i}", i, persist=False) for i in range(9))
        page = client.scan("k2", "k8", count=4)

        assert page.items == [(b"k2", 2), (b"k3", 3), (b"k4", 4), (b"k5", 5)]
        assert client.more(page.cursor).items == [(b"k6", 6), (b"k7", 7)]
        assert client.search("[13]$").items == [(b"k1", 1), (b"k3", 3)]


def test_jobs():
    """Push, take, extend, give back, fail and finish."""
    with daemon_thread() as server, Client(*server.address) as client:
        client.push("http://example.com/a", payload={"x": 1}.__repr__(), priority=3)
        client.push("task:b", domain="media", delay=60)
        (job,) = client.next("example.com", work_for=30).jobs

        assert (job.uri, job.payload, job.attempts) == (b"http://example.com/a", "{'x': 1}", 0)
        assert client.extend(job.key, 60) is True
        assert client.next("example.com").jobs == []
        client.give_back(job.key)
        (job,) = client.next("example.com").jobs
        assert client.fail(job.key, "boom")["attempts"] == 1
        assert client.admin("kick", uri="http://example.com/a") == {"kicked": 1}  # it is put off
        (job,) = client.next("example.com").jobs
        assert job.attempts == 1
        assert client.done(job.key) is True
        with pytest.raises(RefusedError, match="does-not-exist"):
            client.done(job.key)
        wake_up = client.next("media").wake_up
        assert 50 < wake_up - time.time() <= 60
        assert client.admin("kick", uri="task:b") == {"kicked": 1}
        assert [j.uri for j in client.next(remove=True, count=5).jobs] == [b"task:b"]
        assert client.next() == ([], None)


def test_domains_in_capitals():
    """Settings and jobs of a domain meet under one name, also with letters beyond ASCII."""
    with daemon_thread() as server, Client(*server.address) as client:
        client.push("mailto:a", domain="WÖRLD")
        client.admin("configure", domain="WÖRLD", settings={"paused": True})

        assert client.next("WÖRLD").jobs == []
        assert client.admin("stats", domain="wÖrld")["domains"][0]["ready"] == 1
        client.admin("configure", domain="WÖRLD", settings={"paused": False})
        assert client.next("WÖRLD").jobs[0].uri == b"mailto:a"


def test_keys_of_jobs_as_text_and_odd_ones():
    """A lease's key may come back as text, and from a domain that is none; a uri is no key of an attempt."""
    with daemon_thread() as server, Client(*server.address) as client:
        client.push(b"http://h\xff/1")
        client.push("http://g/1")
        odd = client.next("h\udcff").jobs[0]
        plain = client.next("g").jobs[0]

        assert client.fail(odd.key, "no luck")["attempts"] == 1
        assert client.extend(plain.key.decode(), 60) is True
        assert client.give_back(plain.key.decode()) is True
        with pytest.raises(RefusedError, match="that attempt is over"):
            client.fail("http://g/1", "it is not worked on")


def test_pipeline_keeps_order_and_errors():
    """A thousand commands at once: results in order, a refusal in its place."""
    with daemon_thread() as server, Client(*server.address) as client:
        batch = [commands.set_(f"k{i}", i) for i in range(1000)]
        batch[500] = commands.unlock("k1")
        batch += [commands.get(f"k{i}") for i in range(1000)]
        results = client.pipeline(batch)

    assert results[500].code == "not-owner"
    assert results[1000:] == [i if i != 500 else None for i in range(1000)]


def test_listening():
    """A listening client is notified of changes by others."""
    with (
        daemon_thread() as server,
        Client(*server.address) as listener,
        Client(*server.address) as writer,
    ):
        listener.set("k", 1, listen=True)
        assert listener.wait(0.01) is None
        writer.set("k", 2)

        assert listener.wait(5).pair.key == b"k"


def test_the_daemon_goes_away():
    """A lost or missing daemon is a coded error for both clients."""
    with daemon_thread() as server:
        address = server.address
        client = Client(*address)
        client.ping()
    with pytest.raises(JournalError) as lost:
        client.ping()
    client.close()
    assert lost.value.code == "disconnected"
    with pytest.raises(JournalError, match="virta journal serve"):
        Client(*address)

    async def run():
        async with daemon() as server:
            client = await AsyncClient.connect(*server.address)
            await client.ping()
        with pytest.raises(JournalError) as lost:
            await client.ping()
        await client.close()
        with pytest.raises(JournalError, match="virta journal serve"):
            await AsyncClient.connect(*server.address)
        return lost.value.code

    assert asyncio.run(run()) == "disconnected"


def test_async_client_runs_many_at_once(tmp_path):
    """Five hundred awaited commands share few commits and all succeed."""

    async def run():
        async with (
            daemon(tmp_path) as server,
            await AsyncClient.connect(*server.address) as client,
        ):
            await asyncio.gather(*(client.set(f"k{i}", i) for i in range(500)))
            values = await asyncio.gather(*(client.get(f"k{i}") for i in range(500)))
            page = await client.scan("k1", "k11")
            return values, page

    values, page = asyncio.run(run())
    assert list(range(500)) == values
    assert [k for k, _ in page.items] == sorted(
        b"k%d" % i for i in range(500) if b"k1" <= b"k%d" % i < b"k11"
    )


def test_a_daemon_that_lies_is_a_coded_error():
    """Bytes that are no reply end the client's connection with an error, not a hang."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = Client(*listener.getsockname())
    peer, _ = listener.accept()
    peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    with pytest.raises(JournalError, match="starts with"):
        client.ping()
    for each in (client, peer, listener):
        each.close()


def test_a_silent_daemon_is_given_up():
    """A reply that does not come in time ends the call; waiting for messages has its own time."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(*silent.getsockname(), timeout=0.05) as client,
    ):
        assert client.wait(0) is None
        assert client.wait(0.01) is None
        with pytest.raises(JournalError, match="no reply in time"):
            client.ping()


@contextmanager
def stuck():
    """A daemon that accepts and reads nothing; its window is small and stays so."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def connecting_with(option, size):
    """Return what connects a client with a buffer of that size."""

    def connect(address, timeout):
        connected = socket.create_connection(address, timeout)
        connected.setsockopt(socket.SOL_SOCKET, option, size)
        return connected

    return connect


@pytest.mark.usefixtures("engine")
def test_nothing_follows_part_of_a_request():
    """A request that could not be sent whole is the last: the daemon would read the next as its rest."""
    connect = connecting_with(socket.SO_SNDBUF, 4096)
    with (
        stuck() as listener,
        Client(*listener.getsockname(), timeout=0.05, connect=connect) as client,
    ):
        with pytest.raises(JournalError, match="no reply in time"):
            client.push("http://h/1", payload=b"x" * 8_000_000)
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(10)
            while peer.recv(65_536):
                continue  # to the end, which there is
        with pytest.raises(JournalError) as lost:
            client.ping()
    assert lost.value.code == "disconnected"


def test_a_pipeline_that_asks_and_sends_much():
    """Replies are taken while requests are sent; else both ends would wait for the other to read."""
    large = bytes(1_000_000)
    connect = connecting_with(socket.SO_RCVBUF, 262_144)
    with daemon_thread() as server, Client(*server.address, connect=connect) as client:
        client.set("large", large, persist=False)
        batch = [commands.get("large")] * 12
        batch += [commands.set_("other", large, persist=False)] * 12
        results = client.pipeline(batch)

    assert all(result == large for result in results[:12])
    assert all(isinstance(result, int) for result in results[12:])


def test_closing_a_line_to_a_daemon_that_reads_nothing(monkeypatch):
    """What was not sent is dropped after CLOSE_S_MAX, and calls that wait for a reply get an error."""
    monkeypatch.setattr(aio, "CLOSE_S_MAX", 0.05)

    async def run():
        with stuck() as listener:
            client = await AsyncClient.connect(*listener.getsockname())
            asking = asyncio.create_task(client.set("k", bytes(8_000_000)))
            await asyncio.sleep(0)
            await asyncio.wait_for(client.close(), 10)
            with pytest.raises(JournalError, match="was lost"):
                await asking

    asyncio.run(run())


def test_closing_that_is_cancelled():
    """It is closed all the same, and closing again finds it so."""

    async def run():
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: problems.append(it))
        async with daemon() as server:
            client = await AsyncClient.connect(*server.address)
            closing = asyncio.create_task(client.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait({closing})
            await asyncio.wait_for(client.close(), 10)
            return closing.cancelled(), client.connected, problems

    assert asyncio.run(run()) == (True, False, [])


# Both engines of an exchange.


def calls():
    """Every kind of result and refusal."""
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
    """Return what a call gives, without what differs from daemon to daemon: times and keys with them."""
    try:
        result = getattr(client, name)(*args, **kwargs)
    except RefusedError as refused:
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


@pytest.mark.skipif(codec.native_codec is None, reason="the native module is not built")
def test_both_engines_give_the_same_results(monkeypatch):
    """Results and refusals do not depend on who encodes, sends and decodes."""
    results = []
    for _ in range(2):
        with daemon_thread() as server, Client(*server.address) as client:
            results.append([outcome(client, *call) for call in calls()])
        monkeypatch.setattr("virta.journal.clients.client.exchange", None)
        monkeypatch.setattr(codec, "native_codec", None)

    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["push", "next", "done", "set", "fail"])
def test_methods_have_the_parameters_of_their_commands(name):
    """A method documents itself: name, parameters, defaults and docstring of the command."""
    command = getattr(commands, name, None) or getattr(commands, f"{name}_")
    for kind in (Client, AsyncClient):
        method = getattr(kind, name)

        assert inspect.signature(method) == inspect.signature(command)
        assert (method.__name__, method.__doc__) == (name, command.__doc__)


@pytest.mark.usefixtures("engine")
def test_unusual_replies_are_not_taken_for_the_result():
    """A reply after a notification, in two pieces, damaged, or to another request."""
    ordinary = encode_reply(Reply(1, m.DELETED, 77))
    notification = encode_reply(Reply(0, m.NOTIFICATION, 5))
    for stream, result in [
        ([ordinary], True),
        ([notification + ordinary], True),
        ([ordinary[:9], ordinary[9:]], True),
        ([encode_reply(Reply(2, m.DELETED, 77)), ordinary], True),
        ([encode_reply(Reply(1, 0, 77))], False),
        ([encode_reply(Reply(1, 0, 77, error="locked"))], "locked"),
        ([b"XX" + ordinary[2:]], "bad-message"),
    ]:
        assert result_of(stream) == result


def result_of(stream):
    """Return what `done` gives if these pieces arrive as the reply, one by one."""
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
        except JournalError as error:
            return error.code
        finally:
            thread.join()


def wait_until_read(far):
    """Wait until the other side has read everything: no byte that was sent is unacknowledged."""
    left = array.array("i", [1])
    while left[0]:
        fcntl.ioctl(far.fileno(), termios.TIOCOUTQ, left)


@pytest.mark.usefixtures("engine")
def test_calls_that_get_no_reply():
    """Silence, a late reply, an end and a closed client are coded errors, or are waited out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(*listener.getsockname(), timeout=0.05)
        far, _ = listener.accept()
        with pytest.raises(JournalError, match="no reply in time"):
            client.ping()
        late, wanted = encode_reply(Reply(1, 0, 4)), encode_reply(Reply(2, 0, 5))
        far.sendall(late + wanted[:9])
        far.sendall(wanted[9:])
        assert client.ping() == 5
        far.close()
        with pytest.raises(JournalError, match="lost"):
            client.ping()
        client.close()
        for call in (client.ping, client.next):
            with pytest.raises(JournalError, match="closed") as raised:
                call()
            assert raised.value.code == "closed"


@pytest.mark.skipif(codec.native_codec is None, reason="the native module is not built")
def test_misuse_of_the_native_exchange_is_an_error():
    """Descriptors that are none and wrong arguments are exceptions, not crashes."""
    exchange = codec.native_codec.exchange
    with pytest.raises(TypeError):
        exchange(1)
    with pytest.raises(TypeError):
        exchange("1", Request(0))
    with pytest.raises(OSError, match="Bad file"):
        exchange(-1, Request(0))
    assert exchange(-1, object()) is None
    assert exchange(-1, Request(0, timestamp=-1)) is None


# The protocol without I/O.


def test_identifiers_are_not_reused_while_outstanding():
    """They count up, skip 0 and those in use, and run out with a coded error."""
    protocol = ClientProtocol([].append)
    request = Request(0)
    protocol.send(request, "first")
    assert request.identifier == 1
    for _ in range(IDENTIFIER_MAX - 1):
        protocol.number(request)
    assert request.identifier == IDENTIFIER_MAX
    assert protocol.number(request) == 2, "1 is outstanding"
    protocol.outstanding.update(dict.fromkeys(range(1, IDENTIFIER_MAX + 1)))
    with pytest.raises(JournalError) as full:
        protocol.send(request, "more")
    assert full.value.code == "too-large"


def test_replies_find_their_requests():
    """In any order and in any pieces; notifications and late replies are kept apart."""
    notified = []
    protocol = ClientProtocol(notified.append)
    for token in ("a", "b"):
        protocol.send(Request(0), token)
    stream = b"".join(encode_reply(Reply(number)) for number in (2, 0, 9, 1))

    assert protocol.receive(stream[:20]) == [("b", Reply(2))]
    assert protocol.partial
    assert protocol.receive(stream[20:]) == [("a", Reply(1))]
    assert notified == [Reply(0)]
    assert not protocol.outstanding
    protocol.receive(b"nonsense")
    assert protocol.error is not None
    with pytest.raises(RefusedError):
        protocol.send(Request(0, timestamp=-1), "refused")
    assert not protocol.outstanding
