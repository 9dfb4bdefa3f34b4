"""Pipelined requests: each is answered in order, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from types import SimpleNamespace

import pytest
import uvicorn
from server_harness import DEADLINE_S, STRUCTURED, event, read
from uvicorn.server import ServerState

from virta.access.principal import ANYONE
from virta.filters import parse
from virta.hub.hub import Hub
from virta.hub.subscription import SlowPolicy
from virta.server.access.scan_budget import ScanBudget
from virta.server.consumers.sse import SseConsumer
from virta.server.http.deadlines import NEVER
from virta.server.http.server import HttpServer
from virta.server.http.stream_options import StreamOptions

HOST = b"HTTP/1.1\r\nHost: localhost\r\n"
UPGRADE = (
    b"GET /channels/u " + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"Sec-WebSocket-Protocol: cloudevents.json\r\n\r\n"
)


def post(path, body, kind=STRUCTURED):
    head = b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind.encode(), len(body))
    return b"POST %b " % path + HOST + head + body


def publication(id_):
    return post(b"/channels/turns", json.dumps(event(id_)).encode())


def waiting(domain):
    """Return a request that waits for a job longer than any test."""
    body = json.dumps({"domain": domain, "wait": 60}).encode()
    return post(b"/journal/jobs/next", body, "application/json")


def dial(server, data):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
    connection.sendall(data)
    return connection


def until_read(server):
    """After these requests everything sent before them has been read."""
    for _ in range(3):
        assert server.request("GET", "/journal/stats").status == 200


def statuses(answer):
    return re.findall(rb"HTTP/1\.1 (\d+)", answer)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"GET /channels/" + b"x" * 5000, b"414"),
        (b"GET /livez HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", b"431"),
        (b"no HTTP\r\n\r\n", b"400"),
        (UPGRADE, b"400"),
    ],
    ids=["line", "head", "noise", "upgrade"],
)
def test_an_unreadable_request_is_refused_after_earlier_responses(server, bad, status):
    """A publication in progress is answered first, and so are others."""
    with dial(server, publication(f"before-{status}") + bad) as connection:
        answer = read(connection)

    assert statuses(answer) == [b"202", status]
    assert server.request("GET", "/metrics").body.find(b"virta_outstanding_events 0.0") > 0


def test_a_body_that_cannot_be_read_is_refused_at_once(server):
    """Also when the application waits for the rest of it, and after a publication."""
    chunked = (
        b"POST /filters/validate "
        + HOST
        + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nno size\r\n"
    )
    for before in (b"", publication("chunks")):
        with dial(server, before + chunked) as connection:
            assert statuses(read(connection))[-1] == b"400"


def test_a_draining_server_answers_all_requests_of_a_connection(start):
    """The first response of a draining server is not the last, if more requests had arrived."""
    with start("--durability", "none") as server:
        stream = b"GET /channels/late " + HOST + b"\r\n"
        with (
            dial(server, waiting("a") + waiting("b") + publication("behind")) as jobs,
            dial(server, waiting("c") + stream) as stream_behind,
        ):
            until_read(server)
            server.process.send_signal(signal.SIGTERM)
            assert statuses(read(jobs)) == [b"200", b"200", b"202"]
            response = read(stream_behind)
        assert server.stop() == 0

    assert statuses(response) == [b"200", b"200"]
    assert response.endswith(b"0\r\n\r\n")
    assert b"event: disconnect" in response


def test_a_client_that_disconnects_gets_no_job(start):
    """A waiting request ends when its peer closes or half-closes, also if other requests follow it."""
    with start() as server:
        left = dial(server, waiting("left") + waiting("other"))
        until_read(server)
        left.close()
        until_read(server)
        server.request("POST", "/journal/jobs", b'{"uri": "http://left/1"}')
        shown = server.request("GET", "/journal/jobs/show?uri=http://left/1")
        assert shown.json["state"] == "ready"

        with dial(server, waiting("half") + waiting("other")) as half:
            half.shutdown(socket.SHUT_WR)
            answer = read(half)
        assert statuses(answer) == [b"200", b"200"]


def test_a_filter_removed_while_its_stream_is_queued(start):
    """A queued stream ends as it would have if it had begun at once."""
    with start() as server:
        made = server.request("POST", "/filters/i/c", b'{"exists": "a"}').json["id"]
        stream = b"GET /filters/%b/events " % made.encode() + HOST + b"\r\n"
        with dial(server, waiting("turn") + stream) as connection:
            until_read(server)
            assert server.request("DELETE", f"/filters/{made}").status == 204
            server.request("POST", "/journal/jobs", b'{"uri": "http://turn/1"}')
            response = read(connection)

    assert statuses(response) == [b"200", b"200"]
    assert b'"reason":"filter-removed"' in response


class Transport(asyncio.Transport):
    """Records what is written and whether it was closed."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.closing = self.aborted = False

    def write(self, data):
        self.written += data

    def close(self):
        self.closing = True

    def abort(self):
        self.aborted = True

    def is_closing(self):
        return self.closing

    def pause_reading(self):
        pass

    resume_reading = pause_reading


def set_deadline(timed, deadline):
    timed.deadline = deadline


def connected(**state):
    """Return a connection of a service that has only what it needs, and its transport."""
    timers = SimpleNamespace(now=0.0, set=set_deadline)
    service = SimpleNamespace(
        connections_opened=0, line_bytes_max=100, head_bytes_max=100, idle_s=1.0, timers=timers,
        body_s=5.0, draining=False, config=SimpleNamespace(max_connections=10),
        auth=SimpleNamespace(cors=b"", credentials=None), on_access_changed=[],
    )  # fmt: skip
    service.__dict__.update(state)
    config = uvicorn.Config(lambda: None, ws="none", lifespan="off", log_config=None)
    config.load()
    made = HttpServer(service)(config=config, server_state=ServerState())
    made.connection_made(Transport())
    return made, made.transport


def test_a_connection_accepted_while_the_server_stops():
    """It is closed at once: nothing else would close it."""

    async def scenario():
        for draining in (False, True):
            made, transport = connected(draining=draining)
            assert transport.closing is draining
            made.deadline = NEVER

    asyncio.run(scenario())


def test_the_time_of_a_request_counts_from_its_first_byte():
    """Neither a connection that was idle before nor later bytes change its deadline."""

    async def scenario():
        made, transport = connected()
        timers = made.service.timers
        timers.now = 0.9  # 0.1 s before an idle connection is closed
        made.data_received(b"GET /li")
        assert made.deadline == 5.9
        timers.now = 4.0
        made.data_received(b"vez HTTP/1.1\r\n")
        assert made.deadline == 5.9
        made.expired(6.0)
        assert transport.closing

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_is_disconnected_while_its_request_arrives():
    """The time to read responses is not that of the next request."""

    async def scenario():
        made, transport = connected()
        made.data_received(b"GET /li")
        made.pause_writing()
        assert made.deadline <= made.loop.time() + 1.0
        made.resume_writing()
        assert made.deadline == 5.0
        made.pause_writing()
        made.expired(made.deadline)
        assert transport.aborted

    asyncio.run(scenario())


def test_a_stream_after_unread_responses_is_paused_from_the_start():
    """The transport pauses the connection only once, before it becomes a stream."""

    async def scenario():
        signs = []
        stream = SimpleNamespace(
            begin=lambda: signs.append("begin"),
            pause_writing=lambda: signs.append("full"),
            resume_writing=lambda: signs.append("room"),
        )
        made, _ = connected()
        made.pause_writing()
        made.become(stream, None)
        made.resume_writing()
        return signs

    assert asyncio.run(scenario()) == ["begin", "full", "room"]


def test_nothing_follows_the_end_of_a_stream():
    """A client that does not read it in time is disconnected; no ping follows the last chunk."""
    transport, loop = Transport(), SimpleNamespace(time=lambda: 1.0)
    deadlines = []
    timers = SimpleNamespace(now=0.0, set=lambda _, deadline: deadlines.append(deadline))
    service = SimpleNamespace(
        hub=Hub(),
        timers=timers,
        ping_s=0.1,
        slow_policy=SlowPolicy(seconds_max=30.0),
        scans=ScanBudget(None),
    )
    parser = SimpleNamespace(get_http_version=lambda: "1.1")
    protocol = SimpleNamespace(
        principal=ANYONE,
        service=service,
        transport=transport,
        loop=loop,
        cors=b"",
        parser=parser,
        headers=[],
    )
    options = StreamOptions(b"", None, positions=False, in_url=False)
    everything = parse("", "query-string")
    stream = SseConsumer(protocol, "c", everything, query="", start=None, options=options)
    stream.begin()
    stream.finish("shutdown")
    written = transport.written

    stream.expired(deadlines[-1])

    assert deadlines[-1] == 31.0
    assert written.endswith(b"0\r\n\r\n")
    assert (transport.written, transport.aborted) == (written, True)
