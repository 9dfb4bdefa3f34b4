"""Limits of bodies and names: encodings, messages, unfinished bodies, names that are not UTF-8."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import socket
import subprocess
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from server_harness import BATCH, DEADLINE_S, STRUCTURED, event, read
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from waiting import turns, wait_until

JSON = "application/json"
MEBIBYTE = 1024 * 1024
EVENT = json.dumps(event("1"))
ROUTES = [
    ("POST", "/channels/c", STRUCTURED, EVENT),
    ("PUT", "/channels/c", BATCH, f"[{EVENT}]"),
    ("POST", "/publish", JSON, '[{"publish_to":"a","payload":"b"}]'),
    ("POST", "/filters/i/c", JSON, '{"filter":{"exists":"a"}}'),
    ("POST", "/filters/i/c/test", JSON, '{"document":{}}'),
    ("POST", "/filters/validate", JSON, '{"filter":{"exists":"a"}}'),
    ("POST", "/subscriptions", JSON, "{}"),
    ("PUT", "/journal/keys/k", JSON, '{"value":1}'),
    ("POST", "/journal/jobs", JSON, '{"uri":"http://e.example/"}'),
]


def talk(server, data, until=None):
    """Send bytes on a new connection; return the response."""
    with closing(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)) as made:
        made.sendall(data)
        return read(made, until)


def head(server, method, path, *lines):
    first = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", *lines]
    return ("\r\n".join(first) + "\r\n\r\n").encode()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: " ".join(route[:2]))
def test_compressed_bodies_are_refused(server, route):
    """415 for a content encoding, 501 for a transfer encoding; `identity` is none."""
    method, path, kind, text = route
    body = gzip.compress(text.encode())
    size = f"Content-Length: {len(body)}"
    for encoding in ("gzip", "GZIP", "br", "identity, gzip"):
        lines = [f"Content-Type: {kind}", f"Content-Encoding: {encoding}", size]
        response = talk(server, head(server, method, path, *lines) + body)
        assert response.startswith(b"HTTP/1.1 415 "), response
        assert b"Accept-Encoding: identity\r\n" in response
        assert b'"unsupported-content-encoding"' in response
    for encoding in ("gzip, chunked", "gzip", "deflate"):
        lines = [f"Content-Type: {kind}", f"Transfer-Encoding: {encoding}"]
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        response = talk(server, head(server, method, path, *lines) + chunk)
        assert response.startswith(b"HTTP/1.1 501 "), response
        assert b'"unsupported-transfer-encoding"' in response
    headers = {"Content-Type": kind, "Content-Encoding": "identity"}
    assert server.request(method, path, text, headers).status not in {415, 501}


@pytest.mark.parametrize("path", ["/channels/c", "/subscribe?streams=a:b&max_queued=5"])
@pytest.mark.parametrize("pieces", [[b"{}"], [b"{", b"}"]], ids=["whole", "fragments"])
def test_binary_messages_close_the_socket(server, path, pieces):
    """A binary message closes the socket with a reason; nothing of it is published."""

    async def scenario():
        url = f"ws://127.0.0.1:{server.port}{path}"
        async with connect(url, subprotocols=["cloudevents.json"]) as made:
            await made.send(pieces if len(pieces) > 1 else pieces[0])
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(made.recv(), DEADLINE_S)
            return closed.value.rcvd

    response = asyncio.run(scenario())

    assert (response.code, response.reason) == (1003, "binary messages are not accepted: send text")


def unfinished(server):
    text = server.request("GET", "/metrics").body.decode()
    line = next(x for x in text.splitlines() if x.startswith("virta_unfinished_body_bytes "))
    return float(line.split()[1])


@pytest.mark.parametrize("route", [ROUTES[0], ROUTES[4]], ids=["hot", "cold"])
def test_unfinished_bodies_are_bounded(start, route):
    """Above the limit the oldest gets 503; the others and a small publication succeed."""
    method, path, kind, _ = route
    server = start("--max-unfinished-body-bytes", 4 * MEBIBYTE, "--durability", "none")
    lines = [f"Content-Type: {kind}", f"Content-Length: {2 * MEBIBYTE}"]
    with ExitStack() as stack:
        uploads = []
        for _ in range(8):
            made = stack.enter_context(
                closing(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))
            )
            made.sendall(head(server, method, path, *lines) + b" " * (MEBIBYTE + 4096))
            uploads.append(made)
        # Three fit: the other five were refused, those that came first.
        for made in uploads[:5]:
            response = read(made)
            assert response.startswith(b"HTTP/1.1 503 "), response
            assert response.count(b"Retry-After: 1\r\n") == 1
            assert b'"too-many-unfinished-bodies"' in response
        assert server.publish("small", event("1")).status == 202
        assert 3 * MEBIBYTE <= unfinished(server) <= 4 * MEBIBYTE
        for made in uploads[5:]:
            made.sendall(b" " * (MEBIBYTE - 4096))
            assert not read(made, b"\r\n").startswith(b"HTTP/1.1 503 ")
    assert unfinished(server) == 0


def resident(server):
    """Return the resident memory of a server in bytes."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_tiny_chunks_take_no_more_than_their_bytes(start):
    """A body in chunks of two bytes takes about as much memory as its size."""
    server = start("--durability", "none")
    size = 4 * MEBIBYTE
    lines = f"Content-Type: {STRUCTURED}", "Transfer-Encoding: chunked"
    before = resident(server)
    with closing(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)) as made:
        made.sendall(head(server, "POST", "/channels/c", *lines))
        made.sendall(b"2\r\n  \r\n" * (size // 2))
        wait_until(lambda: unfinished(server) >= size)
        assert resident(server) - before < 8 * size
        body = EVENT.encode()
        made.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert read(made, b"\r\n").startswith(b"HTTP/1.1 202 ")


def test_pending_and_socket_messages_count_too(start):
    """Small bodies with cached heads and unfinished WebSocket messages share the limit."""
    server = start("--max-unfinished-body-bytes", MEBIBYTE, "--durability", "none")
    pad = json.dumps(event("1", "x" * 60_000))
    post = head(
        server, "POST", "/channels/c", f"Content-Type: {STRUCTURED}", f"Content-Length: {len(pad)}"
    )
    assert b" 202 " in talk(server, post + pad.encode(), b"}")
    with ExitStack() as stack:
        uploads = []
        for _ in range(30):
            made = stack.enter_context(
                closing(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))
            )
            made.sendall(post + pad.encode()[:-10])
            uploads.append(made)
        assert read(uploads[0]).startswith(b"HTTP/1.1 503 ")
        uploads[-1].sendall(pad.encode()[-10:])
        assert read(uploads[-1], b"\r\n").startswith(b"HTTP/1.1 202 ")
        code = asyncio.run(_long_message(server))
        assert code == 1013
    assert unfinished(server) == 0


def test_only_the_oldest_unfinished_body_is_refused(start):
    """Above the limit the body whose first byte is oldest is refused, and no other."""
    server = start("--max-unfinished-body-bytes", MEBIBYTE, "--durability", "none")
    pad = json.dumps(event("1", "x" * 60_000)).encode()
    lines = f"Content-Type: {STRUCTURED}", f"Content-Length: {len(pad)}"
    post = head(server, "POST", "/channels/c", *lines)
    assert b" 202 " in talk(server, post + pad, b"}")
    piece = post + pad[:-10]
    with ExitStack() as stack:
        uploads = []

        def hold():
            made = stack.enter_context(
                closing(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))
            )
            made.sendall(piece)
            uploads.append(made)

        def wait_for(size):
            wait_until(lambda: unfinished(server) >= size)

        for number in range(1, MEBIBYTE // len(piece) + 1):
            hold()
            wait_for(number * len(piece))
        uploads[0].sendall(pad[-10:-9])  # which makes it no younger
        wait_for(number * len(piece) + 1)
        hold()
        response = read(uploads[0])
        assert response.startswith(b"HTTP/1.1 503 "), response
        assert response.count(b"Retry-After: ") == 1
        for made in uploads[1:]:
            made.sendall(pad[-10:])
            assert read(made, b"\r\n").startswith(b"HTTP/1.1 202 ")
    assert unfinished(server) == 0


def test_a_refused_socket_can_finish_sending(start):
    """A client that is refused in the middle of a message can send the rest, and then reads the reason."""
    server = start("--max-unfinished-body-bytes", MEBIBYTE, "--durability", "none")
    upgrade = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Protocol: cloudevents.json",
    )
    fragment = b"\xff" + (65_536).to_bytes(8, "big") + bytes(4) + b"x" * 65_536
    with closing(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)) as made:
        made.sendall(head(server, "GET", "/channels/c", *upgrade))
        assert read(made, b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")
        with suppress(ConnectionError):  # it was closed in the middle
            made.sendall(b"\x01" + fragment + (b"\x00" + fragment) * 511)

        assert b"too-many-unfinished-bodies" in read(made)


async def _long_message(server):
    """Send fragments of one endless message until the server closes."""
    async with connect(
        f"ws://127.0.0.1:{server.port}/channels/c", subprotocols=["cloudevents.json"]
    ) as made:

        async def fragments():
            while True:
                yield "x" * 65_536
                await turns()

        sending = asyncio.ensure_future(made.send(fragments()))
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(made.recv(), DEADLINE_S)
        await asyncio.gather(sending, return_exceptions=True)
        return closed.value.rcvd.code


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/channels/%FF", "invalid-channel"),
        ("GET", "/channels/%FE", "invalid-channel"),
        ("GET", "/channels/a%C3/from/earliest", "invalid-channel"),
        ("GET", "/channels/a/from/%FF", "invalid-start"),
        ("GET", "/metrics/keycounts/%FF", "invalid-channel"),
        ("POST", "/filters/%FF/c", "invalid-name"),
        ("GET", "/filters/i/%ED%A0%80", "invalid-name"),
        ("POST", "/filters/i/%FF/test", "invalid-name"),
    ],
)
def test_names_are_utf_8(server, method, path, code):
    """Names that are not UTF-8 are refused: with replacement characters, two names would be equal."""
    body = EVENT if method == "POST" else None
    answer = server.request(method, path, body, {"Content-Type": STRUCTURED})

    assert (answer.status, answer.code) == (400, code)


def test_stream_ids_are_utf_8(server):
    """The same for streams in a query."""
    for query in ("streams=%FF&max_queued=5", "streams=a&streams=%C3:b&max_queued=5"):
        answer = server.request("GET", f"/subscribe?{query}")
        assert (answer.status, answer.body) == (400, b"Malformed stream id")


def test_a_token_file_that_others_can_read_is_refused(start, tmp_path):
    """If the group or others have rights the server does not start, and names the remedy."""
    file = tmp_path / "tokens"
    file.write_text("a-token-of-sixteen-characters\n")
    for mode in (0o644, 0o640, 0o620, 0o604):
        file.chmod(mode)
        server = start("--token-file", file)
        assert server.stop() != 0
        assert f"chmod 600 {file}" in "".join(server.said)
    file.chmod(0o600)
    assert start("--token-file", file).port


def test_root_is_warned(start):
    """Running as root gives one warning; other users get none."""
    server = start()
    user = int(subprocess.run(["id", "-u"], capture_output=True, check=True).stdout)
    server.stop()
    lines = map(json.loads, "".join(server.said).splitlines())
    said = [line for line in lines if line["message"] == "running_as_root"]

    assert len(said) == (user == 0)


def send_until_it_fails(made, data):
    while True:
        made.sendall(data)


def test_a_closed_socket_that_still_receives_is_aborted(start):
    """A client that continues to send after the close frame is disconnected."""
    server = start("--max-unfinished-body-bytes", MEBIBYTE, "--durability", "none")
    lines = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Protocol: cloudevents.json",
    ]
    size = 65_536
    first, more = (bytes([code, 0xFF]) + size.to_bytes(8, "big") + bytes(4) for code in (1, 0))
    with closing(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)) as made:
        made.sendall(head(server, "GET", "/channels/c", *lines))
        assert b" 101 " in read(made, b"\r\n\r\n")
        made.sendall(first + b"x" * size)
        with pytest.raises(ConnectionError):  # a timeout is none
            send_until_it_fails(made, more + b"x" * size)
    assert unfinished(server) == 0
