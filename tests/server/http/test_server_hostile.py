"""Hostile clients: answered or disconnected, never at the cost of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
import time
from pathlib import Path

import pytest
from server_harness import STRUCTURED, Consumer, event, ids, read
from test_event_input import ODD

TOKEN = "a-token-of-sixteen"
POST = f"POST /channels/h HTTP/1.1\r\nHost: localhost\r\nContent-Type: {STRUCTURED}\r\n"
CHUNKED = (POST + "Transfer-Encoding: chunked\r\n\r\n").encode()
BODY = b'{"source":"s","id":"1"}'
WHOLE = f"{POST}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
UPGRADE = (
    "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: cloudevents.json\r\n\r\n"
)
# What one connection may make the server keep, with room for buffers and the allocator.
GROWTH_KIB_MAX = 16 * 1024


def dial(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def talk(server, data, *, until=None):
    """Send, and read until the server closes or the response contains `until`."""
    with dial(server) as connection:
        connection.sendall(data)
        return read(connection, until)


def memory_kib(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def flood(connection, data, most):
    """Send until so much is sent or the server reads no more; return how much was sent."""
    connection.settimeout(1.0)
    sent = 0
    try:
        while sent < most:
            sent += connection.send(data)
    except OSError:
        pass
    connection.settimeout(10)
    return sent


def cpu_s(server):
    """Return the processor time of the server, which does not depend on other processes."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def upgraded(server, path):
    connection = dial(server)
    connection.sendall(f"GET {path} HTTP/1.1\r\n{UPGRADE}".encode())
    assert b" 101 " in connection.recv(65536)
    return connection


def frame(opcode, data, *, fin=True):
    size = len(data)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack(">H", size)
    return bytes([(0x80 if fin else 0) | opcode]) + length + b"\0\0\0\0" + data


def test_connect_is_no_method_here(server):
    """This is no proxy: CONNECT is 405 and the connection ends."""
    for target in (b"x:80", b"/channels/h"):
        answer = talk(server, b"CONNECT %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        assert answer.startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize("path", ["/channels/h", "/publish", "/livez", "/nowhere"])
def test_head_has_no_body(server, path):
    """A response to HEAD has no body, so the next response follows its head."""
    request = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    last = b"HEAD /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    answers = talk(server, request + last)

    first, second, rest = answers.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 ")
    assert second.startswith(b"HTTP/1.1 200 ")
    assert rest == b""


def test_absolute_form(server):
    """An absolute target reaches the hot routes too (RFC 9112 §3.2.2)."""
    request = WHOLE.replace(b"POST /", b"POST HTTP://localhost:1/", 1)
    assert b"HTTP/1.1 202 " in talk(server, request, until=b"}")
    assert b"HTTP/1.1 404 " in talk(
        server, b"GET http://localhost/none HTTP/1.1\r\nHost: localhost\r\n\r\n", until=b"}"
    )
    assert b"HTTP/1.1 200 " in talk(
        server, b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n", until=b"</html>"
    )


def test_http_1_0(server):
    """HTTP/1.0 has no 100, and its streams end with the connection."""
    old = WHOLE.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nExpect: 100-continue\r\n", 1)
    assert talk(server, old).startswith(b"HTTP/1.1 202 ")
    stream = talk(server, b"GET /channels/h HTTP/1.0\r\n\r\n", until=b"\n\n")
    assert b"Connection: close\r\n" in stream


def test_a_burst_of_requests_is_no_large_head(server):
    """Many requests in one write, the last incomplete, are all answered."""
    burst = WHOLE * 200
    with dial(server) as connection:
        connection.sendall(burst[:-40])
        received = b""
        while received.count(b"HTTP/1.1 202 ") < 199:
            received += connection.recv(65536)
        connection.sendall(burst[-40:])
        while received.count(b"HTTP/1.1 202 ") < 200:
            received += connection.recv(65536)

    assert b" 431 " not in received


@pytest.mark.parametrize(
    "endless",
    [
        CHUNKED + b"17\r\n" + BODY + b"\r\n0\r\n" + b"X-T: y\r\n" * 100_000,
        CHUNKED + b"17\r\n" + BODY + b"\r\n0\r\nX-T: " + b"y" * 1_000_000,
        CHUNKED + b"17;" + b"x" * 1_000_000,
        CHUNKED.replace(b"/channels/h", b"/filters/validate") + b"0\r\n" + b"X: y\r\n" * 100_000,
        b"GET /livez HTTP/1.1\r\n" + b"A: b\r\n" * 100_000,
        b"GET /livez HTTP/1.1\r\nA: " + b"b" * 1_000_000,
    ],
    ids=["trailers", "trailer", "chunk-extension", "cold-trailers", "headers", "header"],
)
def test_endless_heads_and_trailers(server, endless):
    """Framing that never ends is refused at the limit of a head."""
    with dial(server) as connection:
        flood(connection, endless, len(endless))
        received = connection.recv(65536)

    assert received.startswith(b"HTTP/1.1 431 ")


def test_bodies_have_to_arrive_in_time(start):
    """A body that arrives byte by byte is 408 on every route."""
    with start("--body-timeout-ms", 300) as server:
        for path in ("/filters/validate", "/journal/x", "/channels/h"):
            with dial(server) as connection:
                head = POST.replace("/channels/h", path) + "Content-Length: 1000\r\n\r\n"
                connection.sendall(head.encode())
                assert trickle(connection).startswith(b"HTTP/1.1 408 ")


def trickle(connection):
    """Send a byte at a time until the server responds."""
    connection.settimeout(0.05)
    began = time.monotonic()
    while time.monotonic() - began < 10:
        with contextlib.suppress(ConnectionError):  # it may have ended; what it said is there
            connection.sendall(b"x")
        try:
            return connection.recv(65536)
        except TimeoutError:
            continue
    return b""


@pytest.mark.parametrize(
    "request_bytes", [WHOLE, b"GET /channels/h?x=~5 HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_unread_answers_are_bounded(start, request_bytes):
    """A client that reads no responses is not read from, then disconnected."""
    with start("--durability", "none", "--tcp-idle-timeout-ms", 500) as server:
        before = memory_kib(server)
        with dial(server) as connection:
            sent = flood(connection, request_bytes * 500, 64_000_000)

            assert sent < 64_000_000
            assert memory_kib(server) - before < GROWTH_KIB_MAX
            cut = select.poll()
            cut.register(connection, select.POLLRDHUP)
            assert cut.poll(10_000)


def test_pings_of_a_client_that_does_not_read(server):
    """Unread pongs are bounded: the server stops reading."""
    before = memory_kib(server)
    with upgraded(server, "/subscribe?streams=a:&max_queued=1") as connection:
        sent = flood(connection, frame(9, b"x" * 125) * 500, 64_000_000)

        assert sent < 64_000_000
        assert memory_kib(server) - before < GROWTH_KIB_MAX


def test_tiny_frames_leave_time_for_others(server):
    """A flood of empty fragments takes no memory and does not delay other clients."""
    before = memory_kib(server)
    with upgraded(server, "/channels/h") as connection:
        connection.sendall(frame(1, b"{", fin=False))
        connection.setblocking(False)
        waits = []
        for _ in range(20):
            try:
                while True:
                    connection.send(frame(0, b"", fin=False) * 10_000)
            except BlockingIOError:
                pass
            began = cpu_s(server)
            assert server.request("GET", "/livez").status == 200
            waits.append(cpu_s(server) - began)

    assert sorted(waits)[10] < 0.2
    assert memory_kib(server) - before < GROWTH_KIB_MAX


def test_fragments_and_control_frames_between(server):
    """An event in pieces, split inside a character and with a ping between, is one event."""
    text = json.dumps(event("fragment-ä"), ensure_ascii=False).encode()
    cut = text.index("ä".encode()) + 1
    with upgraded(server, "/channels/fragments") as connection:
        connection.sendall(frame(1, text[:cut], fin=False) + frame(9, b"p") + frame(0, text[cut:]))
        received = b""
        while text not in received:
            received += connection.recv(65536)

    assert received.startswith(b"\x8a\x01p")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x02{}", 1002),  # not masked
        (frame(1, b"\xff"), 1007),
        (frame(0, b"x"), 1002),
        (frame(9, b"x" * 126), 1002),
        (frame(3, b""), 1002),
        (b"\x81\xff" + struct.pack(">Q", 2**40), 1009),
        (frame(8, struct.pack(">H", 1005)), 1002),
    ],
)
def test_bad_frames_close_with_their_code(server, data, code):
    """A frame that breaks the rules closes the socket with the code that says so."""
    with upgraded(server, "/channels/h") as connection:
        connection.sendall(data)
        received = connection.recv(65536)

    assert received[0] == 0x88
    assert struct.unpack(">H", received[2:4]) == (code,)


def test_a_token_is_no_part_of_the_query(start, tmp_path):
    """A token anywhere in the query does not change its meaning."""
    (tmp_path / "tokens").write_text(TOKEN)
    (tmp_path / "tokens").chmod(0o600)
    token = {"Authorization": f"Bearer {TOKEN}", "Content-Type": STRUCTURED}
    queries = [
        "x=1&access_token={}",
        "access_token={}&x=1",
        "access_token={};x=1",
        "x=1;access_token={}",
        "x=1&access_token={}&access_token=other",
        "x=1&access_token={};x=1",
    ]

    async def hear(server, query):
        consumer = await Consumer.open(server.port, "/channels/t?" + query.format(TOKEN))
        await consumer.connected()
        return consumer

    async def scenario(server):
        consumers = [await hear(server, query) for query in queries]
        for id_, x in (("no", 2), ("yes", 1)):
            body = json.dumps(event(id_, {"x": x}))
            await asyncio.to_thread(server.request, "POST", "/channels/t", body, token)
        found = [ids([await consumer.frame()]) for consumer in consumers]
        for consumer in consumers:
            await consumer.close()
        return found

    with start("--token-file", tmp_path / "tokens", "--token-in-url") as server:
        assert asyncio.run(scenario(server)) == [["yes"]] * len(queries)
        assert server.request("GET", "/metrics?access%5Ftoken=" + TOKEN).status == 401
        assert server.request("GET", "/metrics", headers={"Cookie": TOKEN}).status == 401


LENGTH = b"Content-Length: %d\r\n" % len(BODY)


@pytest.mark.parametrize(
    ("old", "new", "status", "code"),
    [
        (LENGTH, LENGTH + LENGTH, 400, b"invalid-content-length"),
        (LENGTH, LENGTH + b"Content-Length: 5\r\n", 400, b"invalid-content-length"),
        (LENGTH, b"Content-Length: +23\r\n", 400, b"invalid-content-length"),
        (LENGTH, b"Content-Length: 23, 23\r\n", 400, b"invalid-content-length"),
        (LENGTH, b"Content-Length:\r\n 23\r\n", 400, b"invalid-request"),
        (LENGTH, b"Content-Length : 23\r\n", 400, b"invalid-request"),
        (LENGTH, b"Content-Length:  %b23 \r\n" % (b"0" * 5000), 202, b"accepted"),
        (LENGTH, LENGTH + b"Transfer-Encoding: chunked\r\n", 400, b"invalid-content-length"),
        (LENGTH, b"Transfer-Encoding: xchunked\r\n", 501, b"unsupported-transfer-encoding"),
        (LENGTH, LENGTH + b"X: folded\r\n line\r\n", 400, b"invalid-request"),
        (b"\r\n", b"\n", 400, b"invalid-request"),
        (b"Host: localhost\r\n", b"", 400, b"invalid-host"),
        (b"Host: localhost\r\n", b"Host: localhost\r\nHost: y\r\n", 400, b"invalid-host"),
        (b"Host: localhost\r\n", b"Host: x y\r\n", 400, b"invalid-host"),
        (b"Host: localhost\r\n", b"Host:\r\n", 421, b"misdirected-host"),
        (b"HTTP/1.1\r\nHost: localhost\r\n", b"HTTP/1.0\r\n", 202, b"accepted"),
        (b"HTTP/1.1", b"HTTP/2.0", 505, b"invalid-version"),
    ],
)
def test_ambiguous_requests_are_refused(server, old, new, status, code):
    """Nothing after them is read, also when the same bytes arrive again."""
    request = WHOLE.replace(old, new)
    for _ in range(2):
        answer = talk(
            server, request + b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'"code":"%b"' % code in answer
        if status != 202:
            assert answer.count(b"Content-Length: ") == 1
            assert b"Connection: close\r\n" in answer


@pytest.mark.parametrize("line", [b"HTTP/1.1\r\nConnection: Upgrade, close\r\n", b"HTTP/1.0\r\n"])
def test_an_upgrade_that_is_ignored_still_closes(server, line):
    """The Connection header takes effect without the upgrade too."""
    request = WHOLE.replace(b"HTTP/1.1\r\n", line + b"Upgrade: h2c\r\n", 1)
    answer = talk(server, request)
    assert answer.startswith(b"HTTP/1.1 202 ")
    assert b"Connection: close\r\n" in answer


def test_trailers_are_no_attributes(server):
    """Trailers are not checked, so they do not change an event."""
    head = CHUNKED.replace(STRUCTURED.encode(), b"application/json\r\nce-source: s\r\nce-id: 1")
    head = head.replace(b"/channels/h", b"/channels/trailers")
    body = b"2\r\n{}\r\n0\r\nce-id: 2\r\nce-subject: x\r\n\r\n"
    assert talk(server, head + body, until=b"}").startswith(b"HTTP/1.1 202 ")

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/trailers/from/earliest")
        await consumer.connected()
        received = await consumer.frame()
        await consumer.close()
        return received.json

    found = asyncio.run(scenario())
    assert found == {"source": "s", "id": "1", "datacontenttype": "application/json", "data": {}}


def test_odd_events_are_delivered(server):
    """JSON that UTF-8 or a double cannot represent is delivered live and from history."""
    headers = {"Content-Type": "application/json"}
    registered = json.dumps({"filter": {"exists": "a"}})
    id_ = server.request("POST", "/filters/odd/c", registered, headers).json["id"]
    paths = [f"/filters/{id_}/events", "/channels/odd%2Fc?/a=!never", "/channels/odd%2Fc"]

    async def scenario():
        streams = [await Consumer.open(server.port, path) for path in paths]
        for stream in streams:
            await stream.connected()
        for body in [*ODD, b'{"source":"s","id":"end","data":{"a":1}}']:
            kind = "application/cloudevents-batch+json" if body[:1] == b"[" else STRUCTURED
            said = server.request("POST", "/channels/odd%2Fc", body, {"Content-Type": kind})
            assert said.status == 202, said
        streams.append(await Consumer.open(server.port, "/channels/odd%2Fc/from/earliest"))
        await streams[-1].connected()
        received = []
        for stream in streams:
            received.append([(made.id, made.data) for made in await stream.frames(len(ODD) + 2)])
            await stream.close()
        return received

    received = asyncio.run(scenario())
    assert received[0] == received[1] == received[2] == received[3]
    texts = [data for _, data in received[0]]
    assert texts[0] == '{"source":"s","id":"?","data":{"a":1}}'
    assert '"?\\ud83d\\ude00"' in texts[1]
    assert '"id":"7"' in texts[2]
