"""The seeds' own examples through the real server, byte for byte where they print bytes."""

from __future__ import annotations

import asyncio
import re

import pytest
from server_harness import Consumer, Server
from websockets.asyncio.client import connect

STRUCTURED = {"Content-Type": "application/cloudevents+json"}
BATCH = {"Content-Type": "application/cloudevents-batch+json"}
BINARY = {"Content-Type": "application/json", "ce-source": "//somewhere", "ce-id": "some-id"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends by default
STAMP = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z"
POSITION = rb"[0-9a-f]{12}\.\d+"
COMMENT = rb': {"timestamp":"' + STAMP + rb'"}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that answers as Thorium does."""
    flags = ["--durability", "none", "--thorium-compatible"]
    with Server(tmp_path_factory.mktemp("data"), *flags) as running:
        yield running


async def read_raw(port, path, until, *, meanwhile):
    """The bytes of a stream, chunks and all; `meanwhile` runs once it is connected."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    heard = await reader.readuntil(b"\n\n\r\n")
    await asyncio.to_thread(meanwhile)
    while until not in heard:
        heard += await asyncio.wait_for(reader.readuntil(b"\n\n\r\n"), 10)
    writer.close()
    await writer.wait_closed()
    return heard


def unchunked(raw):
    """Frames without their chunks, whose sizes have to be right."""
    frames = b""
    while raw:
        size, _, rest = raw.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        frames, raw = frames + rest[:length], rest[length + 2 :]
    return frames


@pytest.mark.parametrize(
    ("headers", "body", "line"),
    [
        (
            STRUCTURED,
            b'{"source":"//somewhere","id":"some-id","specversion":"1.0","data":{"x":1}}',
            b'{"source":"//somewhere","id":"some-id","specversion":"1.0","data":{"x":1}}',
        ),
        (
            BINARY | {"ce-specversion": "1.0"},
            b'{"x":1}',
            b'{"source":"//somewhere","id":"some-id","specversion":"1.0","datacontenttype":"application/json","data":{"x":1}}',
        ),
        (
            BATCH,
            b'[{"source":"//somewhere","id":"some-id","data":{"x":1}}]',
            b'{"source":"//somewhere","id":"some-id","data":{"x":1}}',
        ),
    ],
    ids=["structured", "binary", "batch"],
)
def test_thorium_frames(server, request, headers, body, line):
    """Connect, then the event with comment, name, id and data, in the chunks they came in."""
    path = f"/channels/seed-{request.node.callspec.id}"

    def publish():
        answer = server.request("POST", path, body, headers)
        assert (answer.status, answer.body) == (202, b'{"code":"accepted"}')

    raw = asyncio.run(read_raw(server.port, path, b"event: data", meanwhile=publish))

    assert re.fullmatch(
        rb"event: connect\nid: " + POSITION + rb'\ndata: {"timestamp":"' + STAMP
        + rb'","clientID":"\d+-\d+"}\n\n'
        + COMMENT.replace(b'"}', rb'","offset":\d+}')
        + rb"event: data\nid: %2F%2Fsomewhere\+some-id\ndata: "
        + re.escape(line)
        + rb"\n\n",
        unchunked(raw),
    )  # fmt: skip


def test_thorium_number_as_id(server):
    """The seed's batch has numbers as ids, and they come out as text."""

    def publish():
        body = (
            b'[{"source":"//s","id":123,"data":{"a":1}},{"source":"//s","id":124,"data":{"a":2}}]'
        )
        assert server.request("POST", "/channels/numbers", body, BATCH).status == 202

    raw = asyncio.run(
        read_raw(server.port, "/channels/numbers?a=2", b"event: data", meanwhile=publish)
    )

    assert unchunked(raw).endswith(
        b'id: %2F%2Fs+124\ndata: {"source":"//s","id":"124","data":{"a":2}}\n\n'
    )


def test_thorium_ping(start):
    """A ping is its name and the time, and the position that we add."""
    with start("--ping-interval-ms", 100) as server:
        raw = asyncio.run(
            read_raw(server.port, "/channels/p", b"event: ping", meanwhile=lambda: None)
        )

    assert re.search(
        rb"\n\nevent: ping\nid: " + POSITION + rb'\ndata: {"timestamp":"' + STAMP + rb'"}\n\n$',
        unchunked(raw),
    )


def test_thorium_meta(server):
    """A registration on `meta`, members in their order and the query as it was sent."""

    async def scenario():
        meta = await Consumer.open(server.port, "/channels/meta?channel=seen")
        await meta.connected()
        other = await Consumer.open(server.port, "/channels/seen?x=%3E1&y=%2A")
        client = (await other.connected()).json["clientID"]
        came = await meta.frame()
        await other.close()
        went = await meta.frame()
        await meta.close()
        return client.encode(), came, went

    client, came, went = asyncio.run(scenario())

    instance = re.escape(came.json["data"]["instanceID"].encode())
    for frame, sign, kind, query in (
        (came, rb"\+", b"registration", rb',"query":"x=%3E1&y=%2A"'),
        (went, rb"-", b"removal", b""),
    ):
        assert re.fullmatch(
            COMMENT
            + rb"event: data\nid: [^\n]+\n"
            + rb'data: {"source":"//name.djsweet.thorium","id":"%b %b%b %b","specversion":"1.0",'
            rb'"type":"name.djsweet.thorium.meta.query.%b","time":"%b","data":{"instanceID":"%b",'
            rb'"channel":"seen","clientID":"%b","queryID":"%b"%b}}\n\n'
            % (instance, sign, client, client, kind, STAMP, instance, client, client, query),
            frame.raw,
        )


def test_thorium_headers(server):
    """A JSON answer has these headers, and a 202 also tells its times; a stream has no ce- headers."""
    accepted = server.request("POST", "/channels/heads", b"{}", BINARY)
    refused = server.request("DELETE", "/channels/heads")

    common = {
        "cache-control", "connection", "access-control-allow-origin", "content-type", "content-length",
        "ce-specversion", "ce-datacontenttype", "ce-time", "ce-type", "ce-source", "ce-id",
    }  # fmt: skip
    times = {f"thorium-{name}-time" for name in ("body-read", "json-parse", "encode")}
    assert set(accepted.headers) == common | times | {"virta-durability", "virta-offset"}
    assert set(refused.headers) == common | {"allow"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "expected"),
    [
        ("POST", "/channels/e", {}, b"{}", 400, b'{"code":"missing-content-type"}'),
        ("POST", "/channels/e", {"Content-Type": "text/plain"}, b"{}", 400, b'{"code":"invalid-content-type","contentType":"text/plain"}'),
        ("POST", "/channels/e", STRUCTURED, b"{}", 400, b'{"code":"missing-event-source"}'),
        ("POST", "/channels/e", STRUCTURED, b'{"source":"s"}', 400, b'{"code":"missing-event-id"}'),
        ("POST", "/channels/e", BATCH, b'[{"source":"s","id":"1"},{"source":"s"}]', 400, b'{"code":"missing-event-id","offset":1}'),
        ("POST", "/channels/e", BINARY | {"ce-datacontenttype": "text/xml"}, b"{}", 400, b'{"code":"conflicting-data-type-headers"}'),
        ("POST", "/channels/e", BINARY | {"Content-Length": "0"}, None, 400, b'{"code":"invalid-content-length"}'),
        ("GET", "/channels/e", {"Content-Length": "0"}, None, 400, b'{"code":"unexpected-body"}'),
        ("POST", "/channels/meta", BINARY, b"{}", 403, b'{"code":"disallowed-meta-channel-send"}'),
        ("GET", "/nothing", {}, None, 404, b'{"code":"not-found"}'),
        ("GET", "/metrics/other", {}, None, 404, b'{"code":"not-found"}'),
        ("DELETE", "/channels/e", {}, None, 405, b'{"code":"invalid-method","method":"DELETE"}'),
        ("POST", "/channels/e", BINARY | {"Content-Length": "10485761"}, b"", 413, b'{"code":"body-too-large","maxBytes":10485760}'),
    ],
)  # fmt: skip
def test_thorium_refusals(server, method, path, headers, body, status, expected):
    """A refusal is its code and what the catalogue puts beside it, nothing else."""
    answer = server.request(method, path, body, headers)

    assert (answer.status, answer.body) == (status, expected)


def test_thorium_keycounts(server):
    """Terms of standing queries by path, as the description prints them."""

    async def scenario():
        queries = ["x=1", "x=2&/a/b=3"]
        consumers = [await Consumer.open(server.port, f"/channels/counted?{q}") for q in queries]
        for consumer in consumers:
            await consumer.connected()
        answer = await asyncio.to_thread(server.request, "GET", "/metrics/keycounts/counted")
        for consumer in consumers:
            await consumer.close()
        return answer.body

    assert asyncio.run(scenario()) == b'{"data":{"x":2,"a":{"b":1}}}'


def test_subtub_example(server):
    """Two subscribers, eight messages in one request of curl's: each frame as the seed prints it."""
    streams = ["first:", "first:second", "first:second:", "first:second:third", "first:third"]
    streams += ["second:", "second:first", "second:third"]
    body = ",".join(f'{{"publish_to":"{s}","payload":"{n}"}}' for n, s in enumerate(streams, 1))
    base = f"ws://127.0.0.1:{server.port}/subscribe?max_queued=100&streams="

    async def scenario():
        async with (
            connect(base + "first:second&streams=second:first") as a,
            connect(base + "first:") as b,
        ):
            answer = await asyncio.to_thread(server.request, "POST", "/publish", f"[{body}]", FORM)
            heard = [
                [await asyncio.wait_for(socket.recv(), 10) for _ in range(count)]
                for socket, count in ((a, 6), (b, 5))
            ]
        return answer, heard

    answer, (a, b) = asyncio.run(scenario())

    assert (answer.status, answer.body) == (200, b"")
    assert a == [
        '{"publish_to":"first","payload":"1"}',
        '{"publish_to":"first:second","payload":"2"}',
        '{"publish_to":"first:second","payload":"3"}',
        '{"publish_to":"first:second:third","payload":"4"}',
        '{"publish_to":"second","payload":"6"}',
        '{"publish_to":"second:first","payload":"7"}',
    ]
    assert b == [
        '{"publish_to":"first","payload":"1"}',
        '{"publish_to":"first:second","payload":"2"}',
        '{"publish_to":"first:second","payload":"3"}',
        '{"publish_to":"first:second:third","payload":"4"}',
        '{"publish_to":"first:third","payload":"5"}',
    ]
