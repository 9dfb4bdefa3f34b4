"""
Nothing is left of a closed connection, of whatever kind, with the cyclic collector off.

A server counts its own objects (`leak_child.py`). Each kind of connection is opened and closed several times; afterwards
no type may have more objects than before.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from server_harness import BATCH, DEADLINE_S, STRUCTURED, event, read

from virta.server.settings import BY_NAME
from waiting import wait_until

CHILD = Path(__file__).parent / "leak_child.py"
# How often each kind comes and goes. Fewer objects more of one type than GROWTH_MAX are no growth: caches of the
# interpreter and pools of threads move by a few.
TIMES = 24
WARM_UP = 3
GROWTH_MAX = 12
PAUSE_S = 0.05
BODY_TIMEOUT_MS = 200
FLAGS = ["--durability", "none", "--body-timeout-ms", BODY_TIMEOUT_MS]
FLAGS += ["--slow-consumer-bytes-max", 65_536, "--slow-consumer-ms-max", 60_000]
# Ids are kept for this long on purpose.
FLAGS += ["--idempotency-expiration-ms", 500]
if "webhook_allow" in BY_NAME:
    FLAGS += ["--webhook-allow", "127.0.0.1"]
FILLER = "x" * 60_000
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset
MASK = b"\0\0\0\0"  # of a client's frames: leaves their bytes as they are
EVENT = json.dumps(event("same", {"n": 1})).encode()


class CountingServer:
    """A server without garbage collector that reports its objects."""

    def __init__(self, data_dir, *flags, tls=None):
        command = [sys.executable, str(CHILD), "serve", "--server-port", "0", "--journal-port", "0"]
        command += ["--data-dir", str(data_dir), *map(str, flags)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("VIRTA_")}
        self.tls = tls
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean,
        )
        self.port = 0
        self.said = []
        while not self.port:
            self.said.append(self.process.stdout.readline())
            assert self.said[-1], self.said
            if b'"listening"' in self.said[-1]:
                self.port = int(json.loads(self.said[-1])["url"].rsplit(":", 1)[1])
        self._reading = Thread(target=lambda: self.said.extend(self.process.stdout), daemon=True)
        self._reading.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.terminate()
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reading.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()

    def ask(self, wanted=""):
        self.process.stdin.write(wanted.encode() + b"\n")
        self.process.stdin.flush()
        for line in self.process.stderr:
            if line.startswith(b'{"objects"'):
                return json.loads(line)
        raise AssertionError(self.said)

    def growth(self, before):
        """Types that have more objects than before."""
        now = self.ask()["objects"]
        found = {name: now[name] - before.get(name, 0) for name in now}
        return {name: more for name, more in found.items() if more > GROWTH_MAX}

    @contextlib.contextmanager
    def connection(self, **options):
        made = socket.socket()
        if options.get("narrow"):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.settimeout(DEADLINE_S)
        made.connect(("127.0.0.1", self.port))
        if self.tls:
            made = self.tls.wrap_socket(made)
        with made:
            yield made

    def head(self, line, *headers):
        lines = [line, f"Host: 127.0.0.1:{self.port}", *headers]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def post(self, path, body, kind=STRUCTURED, *headers):
        size = f"Content-Length: {len(body)}"
        return self.head(f"POST {path} HTTP/1.1", f"Content-Type: {kind}", size, *headers) + body

    def answer(self, request, *, until=None):
        """Return the response on a new connection, to its end or up to a mark."""
        with self.connection() as made:
            made.sendall(request)
            return read(made, until)


def frame(opcode, payload):
    """A client's WebSocket frame."""
    assert len(payload) < 126
    return bytes([0x80 | opcode, 0x80 | len(payload)]) + MASK + payload


def upgrade(server, path, *headers):
    key = base64.b64encode(b"k" * 16).decode()
    more = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    return server.head(f"GET {path} HTTP/1.1", *more, f"Sec-WebSocket-Key: {key}", *headers)


# The kinds: what one connection does, from its opening to its end.


def sse(server):
    assert b" 200 " in server.answer(server.head("GET /channels/x?n=1 HTTP/1.1"), until=b"connect")


def sse_reset(server):
    with server.connection() as made:
        made.sendall(server.head("GET /channels/x HTTP/1.1"))
        read(made, b"connect")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def sse_with_events(server):
    with server.connection() as made:
        made.sendall(server.head("GET /channels/x HTTP/1.1"))
        read(made, b"connect")
        body = json.dumps(event(os.urandom(8).hex())).encode()
        server.answer(server.post("/channels/x", body), until=b"}")
        read(made, b"event: data")


def sse_replay(server):
    request = server.head("GET /channels/replayed/from/earliest HTTP/1.1")
    assert b'"old"' in server.answer(request, until=b'"old"')


def sse_replay_cut(server):
    """Disconnect in the middle of history that does not fit the socket."""
    with server.connection(narrow=True) as made:
        made.sendall(server.head("GET /channels/long/from/earliest HTTP/1.1"))
        read(made, b"event: data")


def sse_unknown_id(server):
    request = server.head("GET /channels/x HTTP/1.1", "Last-Event-ID: /none+1")
    server.answer(request, until=b"event: gap")


def sse_http_1_0(server):
    server.answer(server.head("GET /channels/x HTTP/1.0"), until=b"connect")


def sse_behind_requests(server):
    """Three requests in one piece, the last becomes a stream."""
    post = server.post("/channels/x", EVENT)
    pieces = post + post + server.head("GET /channels/x HTTP/1.1")
    server.answer(pieces, until=b"connect")


def filter_stream_removed(server):
    """Register a filter, open its stream and remove it: the stream ends."""
    body = json.dumps({"filter": {"equals": {"a": os.urandom(4).hex()}}}).encode()
    made = server.answer(server.post("/filters/i/c", body, "application/json"), until=b"}")
    id_ = json.loads(made.partition(b"\r\n\r\n")[2])["id"]
    with server.connection() as stream:
        stream.sendall(server.head(f"GET /filters/{id_}/events HTTP/1.1"))
        read(stream, b"connect")
        server.answer(server.head(f"DELETE /filters/{id_} HTTP/1.1", "Connection: close"))
        assert b"filter-removed" in read(stream)


def refused_filter(server):
    body = b'{"filter": {"equals": 1}}'
    close = "Connection: close"
    assert b" 400 " in server.answer(server.post("/filters/i/c", body, "application/json", close))


def subtub_socket(server):
    with server.connection() as made:
        made.sendall(upgrade(server, "/subscribe?streams=a:b&max_queued=5"))
        read(made, b"\r\n\r\n")
        made.sendall(frame(8, struct.pack(">H", 1000)))
        read(made)


def subtub_socket_cut(server):
    with server.connection() as made:
        made.sendall(upgrade(server, "/subscribe?streams=a:b&max_queued=5"))
        read(made, b"\r\n\r\n")


def events_socket(server):
    with server.connection() as made:
        wanted = "Sec-WebSocket-Protocol: cloudevents.json"
        made.sendall(upgrade(server, "/channels/x?n=1", wanted))
        read(made, b"\r\n\r\n")
        made.sendall(frame(1, EVENT) + frame(8, struct.pack(">H", 1000)))
        read(made)


def events_socket_replay(server):
    with server.connection() as made:
        wanted = "Sec-WebSocket-Protocol: cloudevents.json"
        made.sendall(upgrade(server, "/channels/replayed/from/earliest", wanted))
        read(made, b'"old"')


def events_socket_refused(server):
    """Closed by the server, since the message is not an event."""
    with server.connection() as made:
        wanted = "Sec-WebSocket-Protocol: cloudevents.json"
        made.sendall(upgrade(server, "/channels/x", wanted))
        read(made, b"\r\n\r\n")
        made.sendall(frame(1, b"not JSON"))
        read(made, b"\x88")


def no_socket(server):
    """A handshake that is refused."""
    assert b" 400 " in server.answer(upgrade(server, "/channels/x"))


def short_post(server):
    post = server.post("/channels/x", EVENT, STRUCTURED, "Connection: close")
    assert b" 202 " in server.answer(post)


def kept_post(server):
    post = server.post("/channels/x", EVENT)
    assert b" 202 " in server.answer(post, until=b"}")


def post_cut(server):
    """Disconnect before the response."""
    with server.connection() as made:
        made.sendall(server.post("/channels/x", EVENT))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def half_post(server):
    """Disconnect in the middle of the body."""
    with server.connection() as made:
        made.sendall(server.post("/channels/x", EVENT)[:-5])


def post_timeout(server):
    """The body does not arrive in time."""
    assert b" 408 " in server.answer(server.post("/channels/other", EVENT)[:-5])


def head_timeout(server):
    server.answer(b"POST /chan")


def messages(server):
    body = b'[{"publish_to":"a:b","payload":"p"}]'
    assert b" 200 " in server.answer(
        server.post("/publish", body, "application/json"), until=b"\r\n\r\n"
    )


def refused_post(server):
    post = server.post("/channels/x", b"not JSON", STRUCTURED, "Connection: close")
    assert b" 400 " in server.answer(post)


def route(server):
    assert b" 200 " in server.answer(server.head("GET /readyz HTTP/1.1", "Connection: close"))


def kept_route(server):
    assert b" 200 " in server.answer(server.head("GET /metrics HTTP/1.1"), until=b"\r\n\r\n")


def pipelined_routes(server):
    one = server.head("GET /readyz HTTP/1.1")
    last = server.head("GET /readyz HTTP/1.1", "Connection: close")
    assert server.answer(one + one + last).count(b" 200 ") == 3


def route_cut(server):
    """Disconnect while the application works."""
    with server.connection() as made:
        made.sendall(server.head("GET /openapi.json HTTP/1.1") * 3)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def half_route(server):
    """Disconnect in the middle of a body for the application."""
    with server.connection() as made:
        made.sendall(server.post("/filters/i/c", b'{"exists": "a"}', "application/json")[:-3])


def route_timeout(server):
    assert b" 408 " in server.answer(
        server.post("/filters/i/c", b'{"exists": "a"}', "application/json")[:-3]
    )


def waiting_for_a_job(server):
    """Disconnect while waiting for a job."""
    with server.connection() as made:
        body = b'{"domain": "d.example", "work_for": 30, "wait": 60}'
        made.sendall(server.post("/journal/jobs/next", body, "application/json"))
        # Answered after it, so the wait has begun.
        server.answer(server.head("GET /readyz HTTP/1.1", "Connection: close"))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def unknown_route(server):
    assert b" 404 " in server.answer(server.head("GET /nothing HTTP/1.1", "Connection: close"))


def bad_request(server):
    assert b" 400 " in server.answer(b"this is not HTTP\r\n\r\n")


def bad_host(server):
    assert b" 400 " in server.answer(b"GET /readyz HTTP/1.1\r\n\r\n")


def long_line(server):
    assert b" 414 " in server.answer(server.head(f"GET /channels/{'x' * 5000} HTTP/1.1"))


def long_head(server):
    assert b" 431 " in server.answer(server.head("GET /readyz HTTP/1.1", "A: " + "x" * 9000))


def large_body(server):
    head = server.head("POST /channels/x HTTP/1.1", "Content-Length: 99999999999")
    assert b" 4" in server.answer(head)


def ignored_upgrade(server):
    head = server.head("GET /readyz HTTP/1.1", "Upgrade: h2c", "Connection: Upgrade, close")
    assert b" 200 " in server.answer(head)


def silent(server):
    """Connect and disconnect."""
    with server.connection():
        pass


KINDS = [
    *(sse, sse_reset, sse_with_events, sse_replay, sse_replay_cut, sse_unknown_id, sse_http_1_0),
    *(sse_behind_requests, filter_stream_removed, refused_filter, subtub_socket, subtub_socket_cut),
    *(events_socket, events_socket_replay, events_socket_refused, no_socket, short_post, kept_post),
    *(post_cut, half_post, post_timeout, head_timeout, messages, refused_post, route, kept_route),
    *(pipelined_routes, route_cut, half_route, route_timeout, waiting_for_a_job, unknown_route),
    *(bad_request, bad_host, long_line, long_head, large_body, ignored_upgrade, silent),
]
# These wait for a deadline of the server: together, so that it is waited for once.
TOGETHER = {post_timeout, head_timeout, route_timeout}


def several(server, kind, times):
    if kind not in TOGETHER:
        for _ in range(times):
            kind(server)
        return
    with ThreadPoolExecutor(times) as pool:
        list(pool.map(kind, [server] * times))


def stable_objects(server):
    """Return the server's objects once their number no longer changes."""
    server.answer(server.head("GET /readyz HTTP/1.1", "Connection: close"))
    counts = [server.ask()["objects"]]

    def unchanged():
        counts.append(server.ask()["objects"])
        return sum(counts[-1].values()) == sum(counts[-2].values())

    wait_until(unchanged, "a number of objects that stays the same", pause=PAUSE_S)
    return counts[-1]


def prepare(server):
    """Publish history, and request the documents that are cached."""
    server.answer(server.head("GET /openapi.json HTTP/1.1", "Connection: close"))
    server.answer(server.post("/channels/replayed", json.dumps(event("old")).encode()), until=b"}")
    batch = json.dumps([event(str(n), FILLER) for n in range(100)]).encode()
    server.answer(server.post("/channels/long", batch, BATCH), until=b"}")


def wait_until_flat(server, before):
    more = {}

    def flat():
        nonlocal more
        if more:
            short_post(server)  # ids that are too old are forgotten when something is published
        more = server.growth(before)
        return not more

    try:
        wait_until(flat, pause=PAUSE_S)
    except AssertionError:
        first = max(more, key=lambda name: ("virta" in name, more[name]))
        raise AssertionError(f"{more}\n{first}: {server.ask(first)['referrers']}") from None


def check_flat(server, kind):
    """Open and close connections, then wait until nothing is left of them."""
    several(server, kind, WARM_UP)  # what is made once: caches, threads, tables
    before = stable_objects(server)
    several(server, kind, TIMES)
    wait_until_flat(server, before)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    with CountingServer(tmp_path_factory.mktemp("data"), *FLAGS) as server:
        prepare(server)
        yield server


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_is_left(counting, kind):
    """No object of a connection outlives it."""
    check_flat(counting, kind)


def slow_disconnects(server):
    text = server.answer(server.head("GET /metrics HTTP/1.1", "Connection: close")).decode()
    return float(re.search(r"^virta_slow_disconnects_total (.+)$", text, re.MULTILINE)[1])


def drop_all(server, times):
    """Open streams that read nothing, and publish until the server has dropped them."""
    wanted = slow_disconnects(server) + times
    with contextlib.ExitStack() as stack:
        for _ in range(times):
            made = stack.enter_context(server.connection(narrow=True))
            made.sendall(server.head("GET /channels/slow HTTP/1.1"))
            read(made, b"connect")
        deadline = time.monotonic() + DEADLINE_S
        while slow_disconnects(server) < wanted:
            assert time.monotonic() < deadline
            batch = json.dumps([event(os.urandom(8).hex(), FILLER) for _ in range(10)]).encode()
            server.answer(server.post("/channels/slow", batch, BATCH), until=b"}")


def test_nothing_is_left_of_slow_consumers(counting):
    """Nothing is left of a consumer that was disconnected for slowness, or of what was queued for it."""
    drop_all(counting, WARM_UP)
    before = stable_objects(counting)
    drop_all(counting, TIMES)
    wait_until_flat(counting, before)


class Agreeing(BaseHTTPRequestHandler):
    """A webhook's sink that consents to everything and accepts every event."""

    def do_OPTIONS(self):
        self.send_response(200)
        self.send_header("WebHook-Allowed-Origin", "*")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_nothing_is_left_of_webhooks(counting):
    """
    A subscription that was made, delivered to and deleted leaves nothing.

    A request that is cut off midway leaves cycles of the HTTP library's own, which the collector finds.
    """
    sink = ThreadingHTTPServer(("127.0.0.1", 0), Agreeing)
    Thread(target=sink.serve_forever, daemon=True).start()
    body = {"sink": f"http://127.0.0.1:{sink.server_port}/", "protocol": "HTTP"}
    body["config"] = {"channel": "hooked"}

    def webhook(server):
        sent = json.dumps(body).encode()
        made = server.answer(server.post("/subscriptions", sent, "application/json"), until=b"}}")
        id_ = json.loads(made.partition(b"\r\n\r\n")[2])["id"]
        happened = json.dumps(event(os.urandom(8).hex())).encode()
        server.answer(server.post("/channels/hooked", happened), until=b"}")
        show = server.head(f"GET /subscriptions/{id_} HTTP/1.1", "Connection: close")
        wait_until(lambda: b'"delivered":1' in server.answer(show), pause=PAUSE_S)
        server.answer(server.head(f"DELETE /subscriptions/{id_} HTTP/1.1", "Connection: close"))

    try:
        check_flat(counting, webhook)
    finally:
        sink.shutdown()
        sink.server_close()


def test_nothing_is_left_of_tls(tmp_path):
    """Connections over TLS leave nothing."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    flags = [*FLAGS, "--tls-cert", certificate, "--tls-key", key]
    with CountingServer(tmp_path / "data", *flags, tls=context) as server:
        prepare(server)
        for kind in (sse, sse_replay, subtub_socket_cut, short_post, kept_post, route, bad_request):
            check_flat(server, kind)
