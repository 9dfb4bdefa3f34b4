"""Kept connections: used again, bounded, replaced when the server closed them, closed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading

import pytest
from test_disconnects import WAIT_S, accepted, listening

import virta
from virta.client import async_pool, exchange
from virta.errors import ClientError
from waiting import turns, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = {"specversion": "1.0", "type": "t", "source": "/s", "id": "1"}


def frame(number):
    return (
        b"event: data\nid: 0123456789ab.%d\n"
        b'data: {"specversion":"1.0","type":"t","source":"/s","id":"%d"}\n\n'
    ) % (number + 1, number)


class Peers:
    """A server whose connections the test reads and answers, one request at a time."""

    def __init__(self):
        self._arrived = asyncio.Queue()
        self._writers = []
        self.count = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def _accept(self, reader, writer):
        self.count += 1
        self._writers.append(writer)
        await self._arrived.put((reader, writer))

    async def next(self):
        return await asyncio.wait_for(self._arrived.get(), WAIT_S)


async def request_of(reader):
    """One request without a body, or with a short one."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.partition(b":")[2]))
    return head


async def answering(reader, writer):
    """Answer whatever comes."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            await request_of(reader)
            writer.write(OK)
    writer.close()


def test_a_connection_serves_many_requests():
    """One after the other needs one connection; it ends with the client."""

    async def run():
        async with Peers() as peers:
            async with virta.AsyncClient(peers.url) as client:
                first = asyncio.create_task(client.ready())
                serving = asyncio.create_task(answering(*await peers.next()))
                assert await first
                for _ in range(20):
                    assert await client.publish("c", EVENT) == "none"
            await asyncio.wait_for(serving, WAIT_S)
            return peers.count

    assert asyncio.run(run()) == 1


def test_connections_are_bounded(monkeypatch):
    """More requests than connections wait their turn, and all are answered; bursts use them again."""
    monkeypatch.setattr(async_pool, "CONNECTIONS_MAX", 3)

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            asked = [asyncio.create_task(client.ready()) for _ in range(20)]
            serving = [asyncio.create_task(answering(*await peers.next())) for _ in range(3)]
            ready = await asyncio.wait_for(asyncio.gather(*asked), WAIT_S)
            ready += await asyncio.gather(*[client.ready() for _ in range(20)])
            await client.close()
            await asyncio.wait_for(asyncio.gather(*serving), WAIT_S)
            return ready, peers.count

    assert asyncio.run(run()) == ([True] * 40, 3)


def test_connections_at_once_are_limited(monkeypatch):
    """While the server does not answer, no further connection is opened."""
    monkeypatch.setattr(async_pool, "CONNECTIONS_MAX", 3)

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            asked = [asyncio.create_task(client.ready()) for _ in range(10)]
            for _ in range(3):
                await request_of((await peers.next())[0])
            # One more connection is accepted after all that were opened before.
            _, last = await asyncio.open_connection("127.0.0.1", peers.port)
            await peers.next()
            count = peers.count
            last.close()
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            return count

    assert asyncio.run(run()) == 3 + 1


SAFE = [
    ("ready", (), True),
    ("publish", ("c", EVENT), True),
    ("publish_streams", (("a:b", "x"),), False),
    ("request", ("PUT", "/journal/keys/k", b"1"), True),
    ("request", ("POST", "/journal/jobs/next", b"{}"), False),
]


@pytest.mark.parametrize(("name", "arguments", "safe"), SAFE)
def test_asyncio_repeats_only_what_is_safe(name, arguments, safe):
    """Cut off on a kept connection, a request is sent again only if it may arrive twice."""

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            first = asyncio.create_task(client.ready())
            reader, writer = await peers.next()
            await request_of(reader)
            writer.write(OK)
            assert await first
            asked = asyncio.create_task(getattr(client, name)(*arguments))
            await request_of(reader)
            writer.close()  # read, and not answered
            if safe:
                reader, writer = await peers.next()
                await request_of(reader)
                writer.write(OK)
            (outcome,) = await asyncio.gather(asked, return_exceptions=True)
            await client.close()
            writer.close()
            return peers.count, getattr(outcome, "code", None)

    assert asyncio.run(run()) == ((2, None) if safe else (1, "unreachable"))


@pytest.mark.parametrize(("name", "arguments", "safe"), SAFE)
def test_blocking_repeats_only_what_is_safe(name, arguments, safe):
    """The same for the blocking client."""
    with listening() as (listener, url), virta.Client(url) as client:
        outcome = []

        def ask():
            client.ready()
            try:
                getattr(client, name)(*arguments)
                outcome.append(None)
            except ClientError as error:
                outcome.append(error.code)

        thread = threading.Thread(target=ask)
        thread.start()
        with accepted(listener) as peer:
            assert peer.recv(65536).startswith(b"GET /readyz")
            peer.sendall(OK)
            while not peer.recv(65536).endswith((b"\r\n\r\n", b"}", b"]", b"1")):
                pass
        if safe:
            with accepted(listener) as peer:
                peer.recv(65536)
                peer.sendall(OK)
                thread.join(WAIT_S)
        thread.join(WAIT_S)
        listener.setblocking(False)

        assert outcome == [None if safe else "unreachable"]
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("farewell", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n"])
def test_what_the_server_closed_while_idle_is_not_used(farewell):
    """Also for requests that must not be repeated: a connection that has ended is noticed before."""

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            first = asyncio.create_task(client.ready())
            reader, writer = await peers.next()
            await request_of(reader)
            writer.write(OK)
            assert await first
            writer.write(farewell)
            writer.close()
            await writer.wait_closed()
            asked = asyncio.create_task(client.publish_streams(("a:b", "x")))
            serving = asyncio.create_task(answering(*await peers.next()))
            await asyncio.wait_for(asked, WAIT_S)
            await client.close()
            await serving
            return peers.count

    assert asyncio.run(run()) == 2


def serving(listener, peers):
    """Accept whatever comes, and answer every request, in threads; `peers` lists the connections."""

    def answer(peer):
        with peer, contextlib.suppress(OSError):
            while peer.recv(65536):
                peer.sendall(OK)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                peers.append(accepted(listener))
                threading.Thread(target=answer, args=(peers[-1],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def test_threads_that_end_leave_no_connection():
    """Connections belong to the client, not to the threads that used them."""
    with listening() as (listener, url), virta.Client(url) as client:
        peers = []
        serving(listener, peers)
        for _ in range(10):
            thread = threading.Thread(target=client.ready)
            thread.start()
            thread.join(WAIT_S)

        assert len(peers) == 1
        assert len(client._pool._open) == 1


def test_blocking_connections_expire(monkeypatch):
    """One that was idle for long is closed, not used."""
    with listening() as (listener, url), virta.Client(url) as client:
        peers = []
        serving(listener, peers)
        assert client.ready()
        monkeypatch.setattr(exchange, "IDLE_S", 0.0)
        assert client.ready()

        assert len(peers) == 2
        assert client._pool._open == set()


FORKED = """
import os, sys, virta
client = virta.Client(sys.argv[1])
client.request("GET", "/parent")
if os.fork() == 0:
    client.request("GET", "/child")
    os._exit(0)
os.wait()
client.request("GET", "/parent")
"""


def test_a_forked_child_has_connections_of_its_own():
    """Answers to the child must not reach the parent, nor the reverse."""
    with listening() as (listener, url):
        peers = []
        serving(listener, peers)
        subprocess.run([sys.executable, "-c", FORKED, url], check=True, timeout=30)

        assert len(peers) == 2


def test_closing_ends_running_requests():
    """A request that waits when its client is closed fails, and nothing is left open."""

    async def run():
        async with Peers() as peers:
            client = virta.AsyncClient(peers.url)
            asked = asyncio.create_task(client.publish("c", EVENT))
            reader, writer = await peers.next()
            await request_of(reader)
            await client.close()
            with pytest.raises(ClientError) as caught:
                await asyncio.wait_for(asked, WAIT_S)
            ended = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return caught.value.code, ended, len(client._pool._open)

    assert asyncio.run(run()) == ("unreachable", b"", 0)


def test_a_cancelled_request_gives_up_its_connection():
    """What was asked on it may still be answered: it is not for the next request."""

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            asked = asyncio.create_task(client.ready())
            reader, writer = await peers.next()
            await request_of(reader)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            ended = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return asked.cancelled(), ended, len(client._pool._open)

    assert asyncio.run(run()) == (True, b"", 0)


def test_idle_connections_are_closed_after_a_while(monkeypatch):
    """A client that pauses keeps no connections for nothing."""
    monkeypatch.setattr(exchange, "IDLE_S", 0.05)

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            asked = asyncio.create_task(client.ready())
            serving = asyncio.create_task(answering(*await peers.next()))
            assert await asked
            await asyncio.wait_for(serving, WAIT_S)
            return len(client._pool._open)

    assert asyncio.run(run()) == 0


def test_one_client_in_two_loops():
    """A client may outlive an event loop; connections may not."""
    client = []

    async def run(peers):
        asked = asyncio.create_task(client[0].ready())
        serving = asyncio.create_task(answering(*await peers.next()))
        ready = await asked
        await client[0].close()
        await serving
        return ready

    async def scenario():
        async with Peers() as peers:
            if not client:
                client.append(virta.AsyncClient(peers.url))
            client[0]._pool._address.port = peers.port
            return await run(peers)

    assert [asyncio.run(scenario()), asyncio.run(scenario())] == [True, True]


async def subscribed(peers, client, *frames):
    """Open a subscription; return it and the server's side after the head and some frames."""
    events = client.subscribe("c")
    reading = asyncio.create_task(anext(events))
    reader, writer = await peers.next()
    head = await request_of(reader)
    assert b"virta-positions: 1" in head.lower()
    writer.write(STREAM + b"".join(frames))
    return events, reading, reader, writer


def test_async_with_ends_a_subscription():
    """Leaving the block closes its connection; `last_event_id` is what was given last."""

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            both = frame(4) + frame(5)
            events, reading, reader, writer = await subscribed(peers, client, both)
            async with events:
                one = await asyncio.wait_for(reading, WAIT_S)
                place = events.last_event_id
                two = await anext(events)
            ended = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            with pytest.raises(StopAsyncIteration):
                await anext(events)
            return (one.event.id, one.offset, place), (two.id, two.offset), ended

    one, two, ended = asyncio.run(run())
    assert one == ("4", 4, "0123456789ab.5")
    assert two == ("0123456789ab.6", 5)
    assert ended == b""


def test_a_cancelled_read_loses_nothing():
    """`asyncio.wait_for(anext(events), …)` may give up; the subscription continues."""

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            events, reading, _, writer = await subscribed(peers, client, frame(0))
            await reading
            for number in range(1, 4):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(events), 0.02)
                writer.write(frame(number))
                assert (await asyncio.wait_for(anext(events), WAIT_S)).offset == number
            await events.close()
            writer.close()
            return peers.count

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize("state", ["connecting", "reading", "waiting"])
def test_closing_wakes_a_task_that_reads(state, monkeypatch):
    """Whatever it waits for: an answer, an event, or the next attempt."""

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            events = client.subscribe("c")
            reading = asyncio.create_task(anext(events))
            reader, writer = await peers.next()
            await request_of(reader)
            if state == "reading":
                writer.write(STREAM + frame(1))
                await reading
                reading = asyncio.create_task(anext(events))
                await turns()
            if state == "waiting":
                waits = []
                wait_s = events._state.wait_s
                monkeypatch.setattr(events._state, "wait_s", lambda: waits.append(1) or wait_s())
                writer.write(STREAM + b"retry: 60000\nevent: disconnect\ndata: {}\n\n")
                writer.close()
                await until(lambda: waits)
            await events.close()
            writer.close()
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(reading, WAIT_S)

    asyncio.run(run())


def test_only_one_task_reads():
    """Two readers of one subscription would each miss what the other gets; also while it connects."""

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            events = client.subscribe("c")
            for answer in (STREAM + frame(1), b""):
                reading = asyncio.create_task(anext(events))
                await turns()
                with pytest.raises(RuntimeError, match="another task"):
                    await anext(events)
                if answer:
                    reader, writer = await peers.next()
                    await request_of(reader)
                    writer.write(answer)
                    assert (await reading).offset == 1
            await events.close()
            await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(run())


def test_closing_a_subscription_to_streams_that_connects():
    """A task that waits for the handshake stops waiting."""

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            messages = client.subscribe_streams("a:")
            reading = asyncio.create_task(anext(messages))
            reader, _ = await peers.next()
            head = (await request_of(reader)).lower()
            assert b"virta-positions: 1" in head
            await messages.close()
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(reading, WAIT_S)

    asyncio.run(run())


def test_closing_ends_a_request_that_could_be_repeated():
    """Closed is closed: what was cut off by it is not sent again."""

    async def run():
        async with Peers() as peers:
            client = virta.AsyncClient(peers.url)
            first = asyncio.create_task(client.ready())
            reader, writer = await peers.next()
            await request_of(reader)
            writer.write(OK)
            assert await first
            asked = asyncio.create_task(client.publish("c", EVENT))
            await request_of(reader)
            await client.close()
            with pytest.raises(ClientError):
                await asyncio.wait_for(asked, WAIT_S)
            return peers.count

    assert asyncio.run(run()) == 1


def test_a_reader_that_pauses_does_not_fill_the_memory(monkeypatch):
    """What is not read stays with the server, and arrives when it is."""
    monkeypatch.setattr(async_pool, "UNREAD_BYTES_MAX", 4096)
    count = 200_000

    async def run():
        async with Peers() as peers, virta.AsyncClient(peers.url) as client:
            events, reading, _, writer = await subscribed(peers, client, frame(0))
            await reading
            sent = b"".join(map(frame, range(1, count)))
            writer.write(sent)
            transport = events._source._transport
            await until(lambda: not transport.is_reading())
            unsent = writer.transport.get_write_buffer_size()
            last = None
            async with asyncio.timeout(60):
                async for one in events:
                    last = one.offset
                    if last == count - 1:
                        break
            await events.close()
            writer.close()
            return unsent, len(sent)

    unsent, size = asyncio.run(run())
    assert unsent > size / 2
