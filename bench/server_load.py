"""
The load for the server's benchmark: raw protocols on uvloop, so that the client is not the limit.

Runs as a process of its own: `python server_load.py SCENARIO PORT SECONDS [NUMBER]` prints one JSON line.
Requests carry the token in `VIRTA_BENCH_TOKEN`, if there is one.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import sys
import time

import uvloop

PAD = "x" * 130
# Deliveries have ended when nothing arrived for this long; wait at most this many times.
QUIET_S = 0.5
QUIET_TICKS_MAX = 20
STRUCTURED = b"application/cloudevents+json"
BATCH = b"application/cloudevents-batch+json"
TOKEN = os.environ.get("VIRTA_BENCH_TOKEN", "").encode()
AUTH = b"Authorization: Bearer %b\r\n" % TOKEN if TOKEN else b""
# The first bytes that a consumer receives: from Virta, on a WebSocket, from NATS, from Nchan.
CONNECTED = (b"event: connect", b" 101 ", b"PONG", b": hi\n")


def event(number, key=0):
    return (
        b'{"specversion":"1.0","type":"com.example.bench","source":"//bench/load","id":"%012d",'
        b'"time":"2026-01-01T00:00:00Z","data":{"key":%d,"user":"someone","amount":12.5,"pad":"%b"}}'
        % (number, key, PAD.encode())
    )


def post(channel, body, kind=STRUCTURED):
    return (
        b"POST /channels/%b HTTP/1.1\r\nHost: localhost\r\n%bContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (channel, AUTH, kind, len(body), body)
    )


class Publisher(asyncio.Protocol):
    """Sends the next request when the last is answered."""

    def __init__(self, make, state, answer=b"HTTP/1.1 20"):
        self.make, self.state, self.answer = make, state, answer

    def connection_made(self, transport):
        self.transport = transport
        self.send()

    def send(self):
        self.sent = time.perf_counter()
        self.transport.write(self.make())

    def data_received(self, data):
        answers = data.count(self.answer)
        if not answers:
            return
        state = self.state
        state.answered += answers
        state.latencies.append(time.perf_counter() - self.sent)
        if time.perf_counter() < state.until:
            self.send()


class Listener(asyncio.Protocol):
    """Counts the events that it receives."""

    def __init__(self, request, state, marker):
        self.request, self.state, self.marker = request, state, marker

    def connection_made(self, transport):
        transport.write(self.request)

    def data_received(self, data):
        self.state.received += data.count(self.marker)
        if any(sign in data for sign in CONNECTED):
            self.state.connected += 1


class State:
    def __init__(self, seconds):
        self.answered = self.received = self.connected = self.number = 0
        self.latencies = []
        self.until = time.perf_counter() + seconds


async def listeners(state, port, requests, marker):
    loop = asyncio.get_running_loop()
    for first in range(0, len(requests), 200):
        some = requests[first : first + 200]
        await asyncio.gather(
            *[
                loop.create_connection(lambda r=r: Listener(r, state, marker), "127.0.0.1", port)
                for r in some
            ]
        )
    while state.connected < len(requests):  # noqa: ASYNC110 - counted by callbacks
        await asyncio.sleep(0.01)


async def publishers(state, port, seconds, connections, make, answer=b"HTTP/1.1 20"):
    loop = asyncio.get_running_loop()
    print("{}", flush=True)  # consumers are connected: from here on it counts
    state.until = time.perf_counter() + seconds
    began = time.perf_counter()
    for _ in range(connections):
        await loop.create_connection(lambda: Publisher(make, state, answer), "127.0.0.1", port)
    while time.perf_counter() < state.until:  # noqa: ASYNC110 - a fixed time
        await asyncio.sleep(0.05)
    took = time.perf_counter() - began
    state.answered_in_time, state.received_in_time = state.answered, state.received
    # Deliveries under way are not lost.
    before = None
    for _ in range(QUIET_TICKS_MAX):
        if before == (before := (state.answered, state.received)):
            break
        await asyncio.sleep(QUIET_S)
    return took


def get(path):
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n%bAccept: text/event-stream\r\n\r\n" % (
        path.encode(),
        AUTH,
    )


def singles(state, channel, keys=1):
    def make():
        state.number += 1
        return post(channel, event(state.number, state.number % keys))

    return make


def batches(state, channel, size, keys):
    def make():
        first = state.number
        state.number += size
        body = b"[%b]" % b",".join([event(n, n % keys) for n in range(first, first + size)])
        return post(channel, body, BATCH)

    return make


async def run(scenario, port, seconds, number):
    state = State(seconds)
    state.number = int(time.time() * 1000) * 1000
    report = {}
    if scenario == "posts":
        took = await publishers(state, port, seconds, 64, singles(state, b"posts"))
        report = {"posts_s": state.answered_in_time / took}
    elif scenario == "batches":
        requests = [get(f"/channels/batches?key={n + 10_000_000}") for n in range(number)]
        await listeners(state, port, requests, b"event: data")
        took = await publishers(state, port, seconds, 8, batches(state, b"batches", 100, 1000))
        report = {"events_s": 100 * state.answered_in_time / took}
    elif scenario == "fanout":
        await listeners(state, port, [get("/channels/fanout")] * number, b"event: data")
        took = await publishers(state, port, seconds, 4, singles(state, b"fanout"))
        report = {
            "deliveries_s": state.received_in_time / took,
            "lost": state.answered * number - state.received,
        }
    elif scenario == "selective":
        requests = [get(f"/channels/selective?key={n // 5}") for n in range(number)]
        await listeners(state, port, requests, b"event: data")
        took = await publishers(state, port, seconds, 16, singles(state, b"selective", number // 5))
        report = {
            "events_s": state.answered_in_time / took,
            "lost": state.answered * 5 - state.received,
        }
    elif scenario == "idle":
        requests = [get(f"/channels/idle?key={n}") for n in range(number)]
        await listeners(state, port, requests, b"event: data")
        print("{}", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    elif scenario == "sockets":
        request = (
            b"GET /subscribe?streams=bench:&max_queued=250 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await listeners(state, port, [request] * number, b"publish_to")
        body = json.dumps([{"publish_to": "bench:a", "payload": PAD}]).encode()
        message = b"POST /publish HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
            len(body),
            body,
        )
        took = await publishers(state, port, seconds, 4, lambda: message)
        report = {
            "deliveries_s": state.received_in_time / took,
            "lost": state.answered * number - state.received,
        }
    elif scenario == "nats":
        request = b'CONNECT {"verbose":false}\r\nSUB bench 1\r\nPING\r\n'
        await listeners(state, port, [request] * number, b"MSG bench")
        body = event(1)
        message = b"PUB bench %d\r\n%b\r\nPING\r\n" % (len(body), body)
        took = await publishers(state, port, seconds, 4, lambda: message, b"PONG")
        report = {
            "deliveries_s": state.received_in_time / took,
            "lost": state.answered * number - state.received,
        }
    elif scenario == "nchan":
        await listeners(state, port, [get("/subscribe")] * number, b"\ndata: ")
        body = event(1)
        message = b"POST /publish HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
            len(body),
            body,
        )
        took = await publishers(state, port, seconds, 4, lambda: message)
        report = {
            "deliveries_s": state.received_in_time / took,
            "lost": state.answered * number - state.received,
        }
    if state.latencies:
        ordered = sorted(state.latencies)
        report["p50_ms"] = statistics.median(ordered) * 1000
        report["p99_ms"] = ordered[int(len(ordered) * 0.99)] * 1000
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(
        run(
            sys.argv[1],
            int(sys.argv[2]),
            float(sys.argv[3]),
            int(sys.argv[4] if len(sys.argv) > 4 else 0),
        )
    )
