"""What the clients do when a server is stuck, cut off or closed at an unlucky time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest

import virta
from virta.client.blocking_pool import BlockingPool
from virta.errors import ClientError

WAIT_S = 10
CLOSE_DELIMITED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b"event: gap\ndata: {}\n\n"
)


@contextlib.contextmanager
def listening():
    """A server that does what the test does, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        yield listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


def accepted(listener):
    peer, _ = listener.accept()
    peer.settimeout(WAIT_S)
    return peer


@contextlib.contextmanager
def reading(events):
    """A thread that reads all of a subscription; `ended` is set at its end."""
    ended = threading.Event()
    received = []

    def read():
        try:
            received.extend(events)
        except ClientError as error:
            received.append(error)
        ended.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield ended, received
    thread.join(WAIT_S)


@pytest.mark.parametrize("reconnect", [True, False])
def test_closing_a_subscription_that_waits_for_its_server(reconnect):
    """A thread that waits for an answer is woken at once, without an error."""
    with listening() as (listener, url), virta.Client(url) as client:
        events = client.subscribe("c", reconnect=reconnect)
        with reading(events) as (ended, received), accepted(listener) as peer:
            assert peer.recv(65536).startswith(b"GET /channels/c")
            events.close()

            assert ended.wait(WAIT_S)
        assert received == []


def test_closing_a_subscription_that_has_no_length():
    """A stream that ends with its connection, as behind some proxies, is cut as well."""
    with listening() as (listener, url), virta.Client(url) as client:
        begun = threading.Event()
        events = client.subscribe("c", on_gap=lambda _: begun.set())
        with reading(events) as (ended, received), accepted(listener) as peer:
            peer.recv(65536)
            peer.sendall(CLOSE_DELIMITED)
            assert begun.wait(WAIT_S)
            events.close()

            assert ended.wait(WAIT_S)
        assert received == []


def test_closing_a_subscription_as_it_connects(monkeypatch):
    """It is cut when it is connected, though there was nothing to cut when it was closed."""
    with listening() as (listener, url), virta.Client(url) as client:
        events = client.subscribe("c")
        connect = BlockingPool.connect

        def close_first(pool, timeout):
            events.close()
            return connect(pool, timeout)

        monkeypatch.setattr(BlockingPool, "connect", close_first)
        with reading(events) as (ended, received), accepted(listener):
            assert ended.wait(WAIT_S)
        assert received == []


def test_a_request_is_sent_once():
    """Cut off before it is answered, a request on a new connection is in doubt, and not repeated."""
    with listening() as (listener, url), virta.Client(url) as client:
        refused = []

        def publish():
            try:
                client.publish_streams(("s", "once"))
            except ClientError as error:
                refused.append(error.code)

        thread = threading.Thread(target=publish)
        thread.start()
        with accepted(listener) as peer:
            assert b"POST /publish" in peer.recv(65536)
        thread.join(WAIT_S)
        listener.setblocking(False)

        assert refused == ["unreachable"]
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_kept_connection_that_was_closed_is_made_anew():
    """The server may close an idle connection: the next request uses a new one."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with listening() as (listener, url), virta.Client(url) as client:

        def serve():
            for _ in range(2):
                with accepted(listener) as peer:
                    peer.recv(65536)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()

        assert [client.ready(), client.ready()] == [True, True]
        thread.join(WAIT_S)


def test_asyncio_leaves_nothing_behind_at_a_stuck_server():
    """A body that could not be sent in time is given up with its connection."""

    async def run():
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(ClientError, match="none within"):
                await virta.AsyncClient(url, timeout=0.05).request("POST", "/", bytes(20_000_000))
            peer, _ = listener.accept()
            reader, writer = await asyncio.open_connection(sock=peer)
            size = 0
            async with asyncio.timeout(WAIT_S):
                with contextlib.suppress(ConnectionResetError):
                    while piece := await reader.read(1 << 20):
                        size += len(piece)
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            return size

    assert asyncio.run(run()) < 20_000_000


def test_asyncio_does_not_wait_for_a_stuck_server_to_close():
    """An answer that came before the body was read is the answer."""

    async def run():
        with listening() as (listener, url):
            answered = asyncio.create_task(
                virta.AsyncClient(url, timeout=600).request("POST", "/", bytes(20_000_000))
            )
            with await asyncio.to_thread(accepted, listener) as peer:
                await asyncio.to_thread(
                    peer.sendall, b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}"
                )
                with pytest.raises(ClientError) as refused:
                    await asyncio.wait_for(answered, WAIT_S)
            return refused.value.status

    assert asyncio.run(run()) == 413


@pytest.mark.parametrize("head", [b"hello\r\n\r\n", b"\r\n\r\n", b"HTTP/1.1 ok\r\n\r\n"])
def test_asyncio_gets_something_else_than_http(head):
    """An answer that is not HTTP is an error, and its connection is closed."""

    async def run():
        with listening() as (listener, url):
            client = virta.AsyncClient(url)
            for asked in (client.ready(), anext(client.subscribe("c", reconnect=False))):
                task = asyncio.ensure_future(asked)
                with await asyncio.to_thread(accepted, listener) as peer:
                    await asyncio.to_thread(peer.sendall, head)
                    (outcome,) = await asyncio.gather(task, return_exceptions=True)
                    closed = await asyncio.to_thread(ends, peer)
                found.append((outcome is False or outcome.code == "unreachable", closed))

    found = []
    asyncio.run(run())
    assert found == [(True, True), (True, True)]


def ends(peer):
    """Whether the other side closes."""
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(65536):
            continue
    return True
