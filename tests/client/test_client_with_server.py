"""The clients and their commands against a real server, which is killed under them."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading

import pytest
from server_harness import command, event, ids, lasting_port

import virta
from virta.client.blocking_pool import BlockingPool
from virta.client.resume import POSITION
from virta.errors import ClientError
from virta.event import Event
from virta.hub.delivery import STREAMS
from waiting import until


@pytest.fixture
def client(server):
    with virta.Client(f"http://127.0.0.1:{server.port}") as made:
        yield made


def first_ids(events, count):
    return [next(events).event.id for _ in range(count)]


def test_publish_and_subscribe(client):
    """Events go in as objects or values and come out as values."""
    made = Event.new("t", "/s", {"x": 2}, id="one")
    client.publish("c1", event("zero", {"x": 0}), made)

    with client.subscribe("c1", "x=>1", start="earliest") as events:
        found = [next(events)]

    assert found[0].event == made
    assert POSITION.fullmatch(found[0].id)[1] == str(found[0].offset + 1)


def test_start_and_resume(client):
    """A later subscription continues behind the last event of an earlier one."""
    client.publish("c2", *[event(str(n)) for n in range(5)])
    with client.subscribe("c2", start="earliest") as events:
        assert first_ids(events, 3) == ["0", "1", "2"]

    with client.subscribe("c2", last_event_id=events.last_event_id, reconnect=False) as more:
        assert first_ids(more, 2) == ["3", "4"]


def test_offsets_and_duplicates(client, server):
    """A publication returns its event's offset and whether it was a repeat; so does what is received."""
    batch = client.publish("where", event("a"), event("b"), event("c"))
    single = client.publish("where", event("d"))
    again = client.publish("where", event("b"))

    assert (single.offset, single.duplicate) == (batch.offset + 3, False)
    assert (again.offset, again.duplicate) == (batch.offset + 1, True)
    assert again == again.durability == "none"
    with client.subscribe("where", start="earliest") as events:
        found = [next(events) for _ in range(4)]
    assert [one.offset for one in found] == list(range(batch.offset, batch.offset + 4))
    with client.subscribe("where", start=found[1].id) as events:
        assert first_ids(events, 2) == ["c", "d"]
    with client.subscribe("where", start=found[1].offset) as events:
        assert first_ids(events, 2) == ["b", "c"]

    async def scenario():
        async with virta.AsyncClient(f"http://127.0.0.1:{server.port}") as other:
            repeat = await other.publish("where", event("d"))
            async with other.subscribe("where", last_event_id=found[2].id) as events:
                return repeat.offset, repeat.duplicate, (await anext(events)).offset

    assert asyncio.run(scenario()) == (single.offset, True, single.offset)


def test_events_during_a_restart_are_delivered(start):
    """Also by a subscription that has not received anything yet, and by one of streams."""
    flags = ["--durability", "group", "--server-port", lasting_port()]
    server = start(*flags)

    async def scenario(server):
        async with (
            virta.AsyncClient(f"http://127.0.0.1:{server.port}") as client,
            client.subscribe("quiet", "x=1") as events,
            client.subscribe_streams("a:") as messages,
        ):
            waiting = [asyncio.create_task(anext(one)) for one in (events, messages)]
            await until(lambda: events.last_event_id and messages.last_event_id)
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            with virta.open(server.data_dir / "log") as log:
                for n in (1, 2):
                    log.append("quiet", "", event(str(n), {"x": n}))
                    log.append(STREAMS, "", {"publish_to": "a:b", "payload": str(n)})
            await asyncio.to_thread(start, *flags)
            return [await asyncio.wait_for(task, 20) for task in waiting]

    received, message = asyncio.run(scenario(server))
    assert received.event.id == "1"
    assert message == ("a:b", "1")


def test_a_closed_subscription_keeps_no_connection(client, monkeypatch):
    """Also when it is not read any more: `close` closes it, not the garbage collector."""
    client.publish("c3", event("1"))
    opened, stream = [], BlockingPool.stream
    monkeypatch.setattr(
        BlockingPool, "stream", lambda *given: opened.append(stream(*given)) or opened[-1]
    )
    events = client.subscribe("c3", start="earliest")
    assert first_ids(events, 1) == ["1"]

    events.close()

    assert [connection.socket.fileno() for connection, _ in opened] == [-1]
    assert list(events) == []


def test_refusals_are_errors(client, server):
    """What the server refuses is an error with its code; a dead server is one without a status."""
    with pytest.raises(ClientError) as caught:
        client.publish("meta", event("x"))
    assert (caught.value.status, caught.value.code) == (403, "disallowed-meta-channel-send")
    with pytest.raises(ClientError) as caught:
        next(client.subscribe("c", "x=~5"))
    assert caught.value.code == "non-string-for-starts-with"
    with pytest.raises(ClientError) as caught:
        virta.Client("http://127.0.0.1:1").publish("c", event("x"))
    assert (caught.value.status, caught.value.code) == (None, "unreachable")
    assert client.ready()
    assert not virta.Client("http://127.0.0.1:1").ready()


def test_streams_and_filters(client):
    """Streams and registered filters through the client."""
    streams = client.subscribe_streams("a:b", max_queued=10)
    received_all = []
    reading = threading.Thread(target=lambda: received_all.append(next(streams)))
    reading.start()
    while not received_all:
        client.publish_streams(("a:", "hello"))
        reading.join(0.05)
    streams.close()
    assert received_all == [("a", "hello")]

    id_ = client.filters.register("i", "cl", {"equals": {"a": 1}})["id"]
    assert client.filters.exists("i", "cl")
    assert not client.filters.exists("i", "cl2")
    assert client.filters.ids("i", "cl") == [id_]
    assert client.filters.test("i", "cl", {"a": 1}, "d") == [id_]
    assert client.filters.validate("a=1", dialect="query-string")["valid"]
    client.publish("i/cl", event("f1", {"a": 1}), event("f2", {"a": 2}))
    with client.filters.events(id_, start="earliest") as events:
        assert first_ids(events, 1) == ["f1"]
    client.filters.remove(id_)
    assert client.filters.ids("i", "cl") == []


def test_reconnect_and_resume_over_kills(start):
    """A subscriber whose server is killed and started again misses nothing and sees nothing twice."""
    flags = ["--durability", "group", "--server-port", lasting_port()]
    server = start(*flags)
    received_all = []
    done = threading.Event()
    client = virta.Client(f"http://127.0.0.1:{server.port}")
    events = client.subscribe("k", "odd=true")

    def listen():
        for received in events:
            received_all.append(received.event.id)
            if received.event.id == "149":
                break
        done.set()

    listening = threading.Thread(target=listen)
    listening.start()
    for round_ in range(3):
        published = round_ * 50
        while server.request("GET", "/metrics").body.decode().find("virta_consumers 1.0") < 0:
            pass
        for n in range(published, published + 50):
            server.publish("k", event(str(n), {"odd": n % 2 == 1}))
        if round_ < 2:
            server.stop(signal.SIGKILL)
            server = start(*flags)
    assert done.wait(20)
    events.close()
    listening.join(10)
    client.close()
    server.stop()

    assert received_all == [str(n) for n in range(1, 150, 2)]


def test_asyncio_client(server):
    """The same from asyncio, with its own WebSocket reader."""

    async def scenario():
        async with virta.AsyncClient(f"http://127.0.0.1:{server.port}") as client:
            assert await client.ready()
            assert await client.publish("a1", event("1"), event("2")) == "none"
            found = []
            async for received in client.subscribe("a1", start="earliest"):
                found.append(received.event.id)
                if len(found) == 2:
                    break
            with pytest.raises(ClientError, match="403"):
                await client.publish("meta", event("1"))
            with pytest.raises(ClientError):
                await anext(aiter(client.subscribe("a1", "x=~5")))
            id_ = (await client.filters.register("i", "as", "x=1", dialect="query-string"))["id"]
            assert await client.filters.ids("i", "as") == [id_]
            assert await client.filters.test("i", "as", {"x": 1}) == [id_]
            await client.publish("i/as", event("3", {"x": 1}))
            async for received in client.filters.events(id_, start="earliest"):
                found.append(received.event.id)
                break
            await client.filters.remove(id_)
            return found

    assert asyncio.run(scenario()) == ["1", "2", "3"]


def consumer_connected(server):
    while "virta_consumers 1.0" not in server.request("GET", "/metrics").body.decode():
        pass


def test_asyncio_publishes_at_once(server):
    """Hundreds of publications share a bounded number of connections, and all arrive once."""

    async def scenario():
        async with virta.AsyncClient(f"http://127.0.0.1:{server.port}") as client:
            made = [client.publish("burst", event(str(n))) for n in range(300)]
            async with client.subscribe("burst") as events:
                first = asyncio.create_task(anext(events))
                await asyncio.to_thread(consumer_connected, server)
                results = await asyncio.gather(*made)
                found = [(await first).event.id]
                async with asyncio.timeout(20):
                    while len(found) < 300:
                        found.append((await anext(events)).event.id)
            return results, found

    results, found = asyncio.run(scenario())
    assert results == ["none"] * 300
    assert sorted(found, key=int) == [str(n) for n in range(300)]


def test_waiting_is_said_once(caplog, monkeypatch):
    """A subscription that finds no server says so, once, and goes on trying."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    attempts = []
    with virta.Client(f"http://127.0.0.1:{port}") as client:
        subscription = client.subscribe("nobody")
        stream = BlockingPool.stream

        def counted(*arguments):
            attempts.append(arguments)
            if len(attempts) == 3:
                subscription.close()
            return stream(*arguments)

        monkeypatch.setattr(BlockingPool, "stream", counted)
        assert list(subscription) == []

    assert len(attempts) == 3
    (record,) = caplog.records
    assert f"no answer from 127.0.0.1:{port}: connection refused" in record.getMessage()
    assert "is `virta serve` running?" in record.getMessage()
    assert "trying again" in record.getMessage()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_refused_connection_says_what_to_start(host):
    """Both clients and the commands name the address and how to start a server there."""
    port = lasting_port()
    url = f"http://{host}:{port}"
    said = []

    async def scenario():
        async with virta.AsyncClient(url) as client:
            with pytest.raises(ClientError) as caught:
                await client.publish("c", event("1"))
            said.append(caught.value.message)
            with pytest.raises(ClientError) as caught:
                await anext(client.subscribe_streams("a:", reconnect=False))
            said.append(caught.value.message)

    asyncio.run(scenario())
    with virta.Client(url) as client:
        for asked in (
            lambda: client.publish("c", event("1")),
            lambda: next(client.subscribe("c", reconnect=False)),
            lambda: next(client.subscribe_streams("a:", reconnect=False)),
        ):
            with pytest.raises(ClientError) as caught:
                asked()
            said.append(caught.value.message)
    for arguments in (["publish", "c", "--data", "1"], ["subscribe", "c", "--no-reconnect"]):
        whole = [sys.executable, "-m", "virta", *arguments, "--url", url]
        out = subprocess.run(whole, capture_output=True, text=True, timeout=30, check=False)
        assert out.returncode == 1
        said.append(out.stderr)

    for text in said:
        assert f"no answer from {host}:{port}: connection refused" in text
        assert f"is `virta serve` running? Start it with `virta serve --port {port}`" in text


def test_official_sdk_agrees(server):
    """Events made by the CloudEvents SDK are accepted in both modes and come out equal."""
    from cloudevents.core.bindings.http import to_binary, to_structured
    from cloudevents.core.formats.json import JSONFormat
    from cloudevents.core.v1.event import CloudEvent

    made = {
        "type": "t",
        "source": "/sdk",
        "specversion": "1.0",
        "datacontenttype": "application/json",
    }
    with virta.Client(f"http://127.0.0.1:{server.port}") as client:
        for mode, convert in (("b", to_binary), ("s", to_structured)):
            message = convert(CloudEvent(made | {"id": mode}, {"x": 1}), JSONFormat())
            answer = server.request("POST", "/channels/sdk", message.body, dict(message.headers))
            assert answer.status == 202, answer
        with client.subscribe("sdk", start="earliest") as events:
            found = [next(events).event for _ in range(2)]

    assert [(e.id, e.type, e.source, e.data) for e in found] == [
        ("b", "t", "/sdk", {"x": 1}),
        ("s", "t", "/sdk", {"x": 1}),
    ]
    assert ids([]) == []


def test_queries_and_names_are_escaped(client):
    """What no URL can hold may stand in a query or a name all the same."""
    client.publish("umlauts", event("a", {"name": "J\u00f6rg M\u00fcller #1"}), event("b", {}))
    with client.subscribe("umlauts", "name=J\u00f6rg M\u00fcller #1", start="earliest") as events:
        assert first_ids(events, 1) == ["a"]

    id_ = client.filters.register("my index", "\u00fc#?", {"exists": "name"})["id"]
    assert client.filters.ids("my index", "\u00fc#?") == [id_]


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "nowhere", "ftp://x"])
def test_bad_addresses(url):
    """An address that is none is an error of the client, not a traceback of the library."""
    for kind in (virta.Client, virta.AsyncClient):
        with pytest.raises(ClientError) as caught:
            kind(url)
        assert caught.value.code == "bad-address"


class Proxy(threading.Thread):
    """Answers each connection with the next of some texts, then closes it."""

    def __init__(self, *answers):
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self._answers = answers
        self.start()

    def run(self):
        with self.listening:
            for answer in self._answers:
                connection, _ = self.listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)


FRAME = (
    b'event: data\nid: %2Fs+1\ndata: {"specversion":"1.0","type":"t","source":"/s","id":"1"}\n\n'
)
UNWELL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + FRAME
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x;x=1\r\n%b\r\n0\r\n\r\n" % (
    len(FRAME),
    FRAME,
)


@pytest.mark.parametrize("stream", [PLAIN, CHUNKED])
def test_subscriptions_survive_a_503_of_a_proxy(stream):
    """A 503 while the server restarts is waited out; bodies may be delimited in all forms of HTTP."""
    with virta.Client(Proxy(UNWELL, stream).url).subscribe("c") as events:
        assert next(events).id == "%2Fs+1"

    async def scenario():
        async with virta.AsyncClient(Proxy(UNWELL, stream).url) as client:
            return (await anext(client.subscribe("c"))).id

    assert asyncio.run(scenario()) == "%2Fs+1"


def test_asyncio_timeouts_are_client_errors():
    """A server that does not answer is the same error for both clients."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def scenario():
            await virta.AsyncClient(url, timeout=0.1).publish("c", event("x"))

        with pytest.raises(ClientError) as caught:
            asyncio.run(scenario())
    assert caught.value.code == "unreachable"


def test_asyncio_filters_have_all_methods(server):
    """What the blocking client can do with filters, the other can."""

    async def scenario():
        async with virta.AsyncClient(f"http://127.0.0.1:{server.port}") as client:
            valid = await client.filters.validate({"exists": "a"})
            before = await client.filters.exists("aio all", "c")
            await client.filters.register("aio all", "c", {"exists": "a"})
            return valid["valid"], before, await client.filters.exists("aio all", "c")

    assert asyncio.run(scenario()) == (True, False, True)


def test_streams_are_subscribed_again_after_a_restart(start):
    """A cut does not end a subscription to streams; messages sent after it is back are received."""

    async def receive(client, messages, text):
        while True:
            waiting = asyncio.ensure_future(anext(messages))
            while not waiting.done():
                await client.publish_streams(("a:b", text))
                await asyncio.wait([waiting], timeout=0.05)
            if waiting.result() == ("a:b", text):
                return

    async def scenario():
        flags = ["--durability", "none", "--server-port", lasting_port()]
        server = start(*flags)
        client = virta.AsyncClient(f"http://127.0.0.1:{server.port}")
        messages = client.subscribe_streams("a:")
        await receive(client, messages, "first")
        await asyncio.to_thread(server.stop)
        again = await asyncio.to_thread(start, *flags)
        assert again.port, again.said
        await receive(client, messages, "second")
        await messages.aclose()
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


ODD_EVENTS = [
    {"source": "", "id": ""},
    {"source": "/s", "id": "2", "type": 5, "time": "soon", "UPPER": [1], "x": None},
    {"source": "/s", "id": "3", "data_base64": "!!"},
    {"source": "/s", "id": "4", "data": {}, "data_base64": "AA=="},
    {"source": "/s", "id": "5", "datacontenttype": 7, "data_base64": 5},
    {"source": "/s b", "id": "c d\x1b[2J\n", "type": "\x1b]0;title\x07", "data_base64": "AAEC"},
]


def test_whatever_the_server_takes_its_clients_can_read(server, client):
    """An odd event does not end a subscription, and each can be resumed from."""
    client.publish("odd", *ODD_EVENTS)
    huge = b'{"source":"/s","id":"huge","data":{"n":1e999}}'
    kind = {"Content-Type": "application/cloudevents+json"}
    client.request("POST", "/channels/odd", huge, kind)
    count = len(ODD_EVENTS) + 1

    with client.subscribe("odd", start="earliest") as events:
        received_all = [next(events) for _ in range(count)]
    with client.subscribe("odd", last_event_id=received_all[-2].id) as events:
        assert first_ids(events, 1) == ["huge"]
    out = command(server, "subscribe", "odd", "--from", "earliest", "--count", str(count))

    assert [one.event.id for one in received_all] == [e["id"] for e in ODD_EVENTS] + ["huge"]
    assert received_all[-1].event.data == {"n": float("inf")}
    assert out.stdout.splitlines()[-1].encode() == huge


def test_what_is_no_stream_is_no_subscription(client):
    """An id of no filter is an error at once, not something to come back to."""
    for id_ in ("0" * 64, "no-id"):
        with pytest.raises(ClientError) as caught:
            next(client.filters.events(id_))
        assert caught.value.status == 404
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(ClientError) as caught:
        next(virta.Client(Proxy(page).url).subscribe("c"))
    assert caught.value.code == "not-a-stream"

    async def scenario():
        return await anext(virta.AsyncClient(Proxy(page).url).subscribe("c"))

    with pytest.raises(ClientError, match="text/html"):
        asyncio.run(scenario())
