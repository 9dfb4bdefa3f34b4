"""Streams and CloudEvents over WebSocket, by a client of the `websockets` library."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
from server_harness import Consumer, event, narrow_socket, shut
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import State

from virta.errors import LogError
from virta.server.consumers.websocket import WebSocket
from waiting import until

VECTORS = Path(__file__).parents[2] / "vectors"
# Enough to fill the socket buffers of both ends, a narrow one among them, so that what follows waits in the queue.
FILLER = "x" * 6_000_000

NO_COLON = "has no colon: write `name:` for a single segment"


def load(name):
    return [json.loads(line) for line in (VECTORS / name).read_text().splitlines()]


def subscribe(server, streams, queued=250, **options):
    query = urlencode([("streams", text) for text in streams] + [("max_queued", queued)])
    return connect(
        f"ws://127.0.0.1:{server.port}/subscribe?{query}",
        compression=None,
        max_size=None,
        **options,
    )


def publish(server, *messages):
    body = json.dumps([{"publish_to": to, "payload": payload} for to, payload in messages])
    answer = server.request("POST", "/publish", body)
    assert (answer.status, answer.body) == (200, b""), answer


async def receive(socket, count):
    return [await asyncio.wait_for(socket.recv(), 10) for _ in range(count)]


def test_the_seeds_example(server):
    """Two subscribers, eight messages, in order, with canonical ids and keys in order."""
    streams = ["first:", "first:second", "first:second:", "first:second:third", "first:third"]
    streams += ["second:", "second:first", "second:third"]

    async def scenario():
        async with (
            subscribe(server, ["first:second", "second:first"]) as a,
            subscribe(server, ["first:"]) as b,
        ):
            await asyncio.to_thread(
                publish, server, *[(s, str(n)) for n, s in enumerate(streams, 1)]
            )
            return await receive(a, 6), await receive(b, 5)

    a, b = asyncio.run(scenario())

    assert [json.loads(text)["payload"] for text in a] == ["1", "2", "3", "4", "6", "7"]
    assert [json.loads(text)["payload"] for text in b] == ["1", "2", "3", "4", "5"]
    assert a[2] == '{"publish_to":"first:second","payload":"3"}'
    assert b[0] == '{"publish_to":"first","payload":"1"}'


def test_delivery_vectors(server):
    """One copy per matching subscription, through real sockets."""
    vectors = [v for v in load("subtub-vectors.jsonl") if "subscriptions" in v]

    async def one(vector, at):
        # A first segment of its own keeps the vectors apart; the end marker matches every subscription.
        prefix = f"v{at}:"
        streams = [prefix + text for text in vector["subscriptions"]]
        async with subscribe(server, streams) as socket:
            await asyncio.to_thread(
                publish, server, (prefix + vector["published"], "it"), (prefix, "end")
            )
            got = 0
            while json.loads(await asyncio.wait_for(socket.recv(), 10))["payload"] == "it":
                got += 1
            return got

    async def scenario():
        found = []
        for first in range(0, len(vectors), 20):
            some = vectors[first : first + 20]
            found += await asyncio.gather(*[one(v, first + n) for n, v in enumerate(some)])
        return found

    assert asyncio.run(scenario()) == [vector["deliveries"] for vector in vectors]


@pytest.mark.parametrize("vector", load("subtub-overflow-vectors.jsonl"), ids=range(13))
def test_overflow_vectors(server, vector):
    """A client that does not read keeps the newest `max_queued` copies; drops can be reported."""

    async def scenario():
        stall = f"stall{id(vector)}"
        streams = [*vector["subscriptions"], f"{stall}:"]
        query = urlencode(
            [("streams", s) for s in streams] + [("max_queued", vector["max_queued"])]
        )
        narrow = narrow_socket(server.port)
        reader, writer = await asyncio.open_connection(sock=narrow, limit=2**16)
        writer.write(
            f"GET /subscribe?{query} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        await asyncio.to_thread(publish, server, (f"{stall}:", FILLER))
        messages = [(text, str(n)) for n, text in enumerate(vector["published"])]
        await asyncio.to_thread(publish, server, *messages)
        writer.transport.resume_reading()
        size = len(FILLER) + len(
            json.dumps({"publish_to": stall, "payload": ""}, separators=(",", ":"))
        )
        await reader.readexactly(10 + size)
        received = []
        for _ in vector["received"]:
            head = await asyncio.wait_for(reader.readexactly(2), 10)
            assert head[0] == 0x81
            received.append(json.loads(await reader.readexactly(head[1])))
        # Whatever else were queued would come before this.
        await asyncio.to_thread(publish, server, (f"{stall}:", "end"))
        head = await asyncio.wait_for(reader.readexactly(2), 10)
        last = json.loads(await reader.readexactly(head[1]))
        await shut(writer)
        return [[m["publish_to"], int(m["payload"])] for m in received], last["payload"]

    assert asyncio.run(scenario()) == (vector["received"], "end")


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("max_queued=1", 404, "Not found"),
        ("streams=a:", 400, "max_queued must be an integer from 1 to 250, got ''"),
        ("streams=a:&max_queued=x", 400, "max_queued must be an integer from 1 to 250, got 'x'"),
        ("streams=a:&max_queued=0", 400, "max_queued must be from 1 to 250, got 0"),
        ("streams=a:&max_queued=251", 400, "max_queued must be from 1 to 250, got 251"),
        ("streams&max_queued=1", 400, "No streams requested"),
        ("streams=&max_queued=1", 400, f"Malformed stream id: stream id '' {NO_COLON}"),
        (
            "streams=a:&streams=b&max_queued=1",
            400,
            f"Malformed stream id: stream id 'b' {NO_COLON}",
        ),
        *[
            (
                f"streams=a:&max_queued={number}",
                400,
                f"max_queued must be an integer from 1 to 250, got {shown!r}",
            )
            for number, shown in (("--5", "--5"), ("%2B-5", "+-5"), ("9" * 5000, "9" * 40))
        ],
        ("streams&streams=a:&max_queued=1", 426, "Upgrade required for WebSocket communication."),
        ("%73treams=a:&max_queued=1", 426, "Upgrade required for WebSocket communication."),
        (
            "&" * 10001 + "streams=:&max_queued=1",
            400,
            "Malformed stream id: stream id ':' has only empty segments: name at least one",
        ),
        ("streams=a:&max_queued=%2B007", 426, "Upgrade required for WebSocket communication."),
    ],
)
def test_subscribe_refusals(server, query, status, text):
    """A bad parameter is 400 with a sentence, with and without the upgrade."""
    answer = server.request("GET", f"/subscribe?{query}")
    assert (answer.status, answer.body.decode()) == (status, text)
    if status == 426:
        return

    async def upgrade():
        async with connect(f"ws://127.0.0.1:{server.port}/subscribe?{query}"):
            pass

    with pytest.raises(InvalidStatus) as caught:
        asyncio.run(upgrade())
    assert caught.value.response.status_code == status
    assert caught.value.response.body.decode() == text


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ({}, 400, "Sec-WebSocket-Version header not present."),
        ({"Sec-WebSocket-Version": "12"}, 426, "This server only supports WebSocket version 13."),
        ({"Sec-WebSocket-Version": "13"}, 400, "Sec-WebSocket-Key header not present."),
    ],
)
def test_handshake_refusals(server, headers, status, text):
    """What a handshake lacks is said."""
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
    answer = server.request("GET", "/subscribe?streams=a:&max_queued=1", headers=upgrade | headers)

    assert (answer.status, answer.body.decode()) == (status, text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "Malformed message body: Invalid JSON: empty body"),
        ("{", "Malformed message body: Invalid JSON"),
        (
            '[{"publish_to":"a:","publish_to":"a:","payload":"x"}]',
            "Malformed message body: Invalid JSON",
        ),
        ("{}", "Invalid message body: Could not decode JSON: {}"),
        (
            '[{"publish_to":"a:"}]',
            'Invalid message body: Could not decode JSON: [\n  {\n    "publish_to": "a:"\n  }\n]',
        ),
        (
            '[{"publish_to":"a:","payload":"x"},{"publish_to":"b","payload":"x"}]',
            f"Invalid message body: message 2 of 2: stream id 'b' {NO_COLON}",
        ),
        (
            '[{"publish_to":"::","payload":"x"}]',
            "Invalid message body: message 1 of 1: stream id '::' has only empty segments",
        ),
        ('[{"publish_to":"a:","payload":1}]', "Invalid message body: Could not decode JSON: ["),
    ],
)
def test_publish_refusals(server, body, text):
    """A bad body is 400 in plain text; nothing of it is published."""
    answer = server.request("POST", "/publish", body)

    assert answer.status == 400
    assert answer.headers["content-type"] == "text/plain; charset=UTF-8"
    assert answer.body.decode().startswith(text)


def test_publish_accepts(server):
    """An empty array, unknown members and any content type are fine."""
    publish(server)
    answer = server.request(
        "POST", "/publish", '[{"publish_to":"a:","payload":"x","more":[{"y":1}]}]'
    )
    assert answer.status == 200
    assert server.request("GET", "/publish").status == 404


def test_control_characters_are_escaped(server):
    """Text arrives unescaped but for control characters, DEL to APC included."""

    async def scenario():
        async with subscribe(server, ["esc:"]) as socket:
            await asyncio.to_thread(publish, server, ("esc:é", "ü\x7f\x9f\n"))
            return await receive(socket, 1)

    assert asyncio.run(scenario()) == ['{"publish_to":"esc:é","payload":"ü\\u007f\\u009f\\n"}']


def test_drops_can_be_told(server):
    """With `drops=1` a client learns how many messages it lost."""

    async def scenario():
        query = "streams=drops:&max_queued=1&drops=1"
        url = f"ws://127.0.0.1:{server.port}/subscribe?{query}"
        options = {"compression": None, "max_size": None, "max_queue": 1}
        async with connect(url, sock=narrow_socket(server.port), **options) as socket:
            socket.transport.pause_reading()
            await asyncio.to_thread(publish, server, ("drops:", FILLER))
            await asyncio.to_thread(publish, server, *[("drops:", str(n)) for n in range(5)])
            socket.transport.resume_reading()
            return (await receive(socket, 3))[1:]

    lost, last = asyncio.run(scenario())

    assert json.loads(lost) == {"dropped": 4}
    assert json.loads(last)["payload"] == "4"


def test_pings_and_going_away(start):
    """The server pings in silence, answers pings, and says goodbye with 1001."""

    async def scenario(server):
        async with subscribe(server, ["p:"], ping_interval=None) as socket:
            await asyncio.wait_for(await socket.ping(b"hello"), 10)
            stopping = asyncio.ensure_future(asyncio.to_thread(server.stop))
            with pytest.raises(ConnectionClosed) as caught:
                await asyncio.wait_for(socket.recv(), 10)
            assert await stopping == 0
            return caught.value

    closed = asyncio.run(scenario(start("--ping-interval-ms", 100, "--durability", "none")))

    assert closed.rcvd.code == 1001


def test_cloudevents_in_and_out(server):
    """On a channel, subprotocol cloudevents.json: events go in and out as text messages."""

    async def scenario():
        url = f"ws://127.0.0.1:{server.port}/channels/ce?x=1"
        async with connect(url, subprotocols=["cloudevents.json"]) as socket:
            assert socket.subprotocol == "cloudevents.json"
            consumer = await Consumer.open(server.port, "/channels/ce")
            await consumer.connected()
            await socket.send(json.dumps(event("in", {"x": 1})))
            seen = await consumer.frame()
            await asyncio.to_thread(
                server.publish, "ce", event("no", {"x": 2}), event("out", {"x": 1})
            )
            found = await receive(socket, 2)
            await consumer.close()
            await socket.send("not json")
            with pytest.raises(ConnectionClosed) as caught:
                await asyncio.wait_for(socket.recv(), 10)
            return seen, found, caught.value

    seen, found, closed = asyncio.run(scenario())

    assert seen.json["id"] == "in"
    assert [json.loads(text)["id"] for text in found] == ["in", "out"]
    assert (closed.rcvd.code, closed.rcvd.reason) == (1007, "invalid-json-body")


def test_channel_socket_needs_the_subprotocol(server):
    """Without the subprotocol there is no agreement on what messages are."""

    async def scenario():
        async with connect(f"ws://127.0.0.1:{server.port}/channels/ce"):
            pass

    with pytest.raises(InvalidStatus) as caught:
        asyncio.run(scenario())

    assert json.loads(caught.value.response.body)["code"] == "missing-subprotocol"


def test_a_socket_may_name_many_streams(server):
    """The head may have 40 KiB, and all of it may be ids; those that match get a copy each."""
    streams = [f"many:{n:05}" for n in range(1500)]

    async def scenario():
        async with subscribe(server, streams) as socket:
            await asyncio.to_thread(publish, server, ("many:00000", "x"), ("many:01499", "y"))
            return [json.loads(text)["publish_to"] for text in await receive(socket, 2)]

    assert asyncio.run(scenario()) == ["many:00000", "many:01499"]


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/channels/{}/from/earliest?x=1", {}, ["a", "c", "live"]),
        ("/channels/{}?x=1", {"Last-Event-ID": "%2F%2Ftest+a"}, ["c", "live"]),
        ("/channels/{}?x=1", {"Last-Event-ID": "nobody"}, ["virta.gap", "live"]),
        ("/channels/{}/from/999999999", {}, ["virta.gap", "live"]),
    ],
)
def test_cloudevents_sockets_resume(server, path, headers, expected):
    """The same URL resumes over a socket as over server-sent events; a gap is reported by an event."""
    channel = f"ws-resume-{len(path)}-{expected[0]}"
    server.publish(channel, event("a", {"x": 1}), event("b", {"x": 2}), event("c", {"x": 1}))

    async def scenario():
        url = f"ws://127.0.0.1:{server.port}{path.format(channel)}"
        protocols = ["cloudevents.json"]
        async with connect(url, subprotocols=protocols, additional_headers=headers) as socket:
            history = await receive(socket, len(expected) - 1)
            await asyncio.to_thread(server.publish, channel, event("live", {"x": 1}))
            return history + await receive(socket, 1)

    heard = [json.loads(text) for text in asyncio.run(scenario())]

    assert [e["type"] if e["type"] == "virta.gap" else e["id"] for e in heard] == expected


def test_a_socket_that_takes_nothing_for_too_long_is_dropped(start):
    """The time a consumer has is counted from when it is full, not by the beat of the pings."""

    async def scenario(server):
        url = f"ws://127.0.0.1:{server.port}/channels/s/from/earliest"
        narrow = narrow_socket(server.port)
        options = {"ping_interval": None, "max_queue": 1, "close_timeout": 0, "sock": narrow}
        async with connect(url, subprotocols=["cloudevents.json"], **options):
            wanted = "virta_slow_disconnects_total 1.0"
            await until(lambda: wanted in server.request("GET", "/metrics").body.decode())

    flags = ["--slow-consumer-ms-max", 200, "--slow-consumer-bytes-max", 100_000_000]
    with start("--durability", "none", *flags) as server:
        for n in range(12):
            server.publish("s", event(str(n), "x" * 900_000))
        asyncio.run(asyncio.wait_for(scenario(server), 20))


def test_a_publication_refused_when_its_sender_is_gone():
    """A socket has no answers: a log that refuses closes it, and leaves one that is closed already alone."""
    said = []
    gone = SimpleNamespace(is_closing=lambda: True, write=said.append)
    here = SimpleNamespace(is_closing=lambda: False, write=said.append)
    for transport in (gone, here):
        loop = SimpleNamespace(time=lambda: 0.0)
        connection = SimpleNamespace(service=None, loop=loop, transport=transport, principal=None)
        socket = WebSocket(connection, b"GET")
        socket._protocol.state = State.OPEN
        socket._published(LogError("no space", code="log_disk_full"))

    assert said == [b"\x88\x0f" + (1011).to_bytes(2, "big") + b"log_disk_full"]
