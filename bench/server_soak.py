"""
`make soak-server`: thousands of idle consumers, a steady stream of events, and short connections.

Each consumer has its own filter and each event matches one of them, so that an event that is lost, doubled or out
of order is detected at once. Two more consumers match everything and read nothing. Connections of all kinds
(`server_churn.py`) open and close at a steady rate meanwhile. The server's memory and open descriptors are sampled every second.
Ends with 1 when something was lost, a short connection got a wrong answer, or memory or descriptors are not flat after
the warm-up.

The clients are raw protocols on uvloop in a process of their own; how much of a core they use is
reported, so that one can see that they were not the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from itertools import cycle
from pathlib import Path

import uvloop

from server_churn import Churn

BATCH_TYPE = b"application/cloudevents-batch+json"
MARK = b'"n":'
CONNECTIONS = 4
TICK_S = 0.005
# Longer than the server lets a consumer take nothing: then there are new ones that do not read.
STALL_S = 35.0
# How long the last events may take once nothing more is published.
LAST_S = 20.0
# Allocators keep some of what they were given; a leak of one event per delivery would be far more.
GROWTH_KIB_MAX = 16 * 1024
# The number of descriptors varies with the open connections and the log's segments.
GROWTH_DESCRIPTORS_MAX = 32
# Tables and pools fill during this time, or this share of a short run.
WARM_UP_S, WARM_UP_SHARE = 300.0, 0.5
# The median of this many samples is the level of descriptors: connections open and close every second.
LEVEL_SAMPLES = 9
TAIL_SAMPLES = 2


def event(number, key):
    return (
        b'{"specversion":"1.0","type":"soak","source":"//soak","id":"%d","data":{"key":%d,"n":%d}}'
        % (number, key, number)
    )


class Soak:
    """What is known of the run: when each event was sent, and who has heard what."""

    def __init__(self, consumers, port):
        self.consumers = consumers
        self.host = b"127.0.0.1:%d" % port
        self.sent_at = array("d")
        self.latencies = array("d")
        self.connected = self.heard = self.wrong = self.accepted = self.refused = self.cut = 0
        self.ending = False


class Consumer(asyncio.Protocol):
    """A consumer that expects every event of its key, in order."""

    def __init__(self, soak, key):
        self.soak, self.key, self.next, self.rest = soak, key, key, b""

    def connection_made(self, transport):
        asked = (self.key, self.soak.host)
        transport.write(b"GET /channels/soak?key=%d HTTP/1.1\r\nHost: %b\r\n\r\n" % asked)

    def data_received(self, data):
        data = self.rest + data
        end = data.rfind(b"\n\n")
        self.rest = data[end:]
        soak, now = self.soak, time.perf_counter()
        for piece in data[:end].split(MARK)[1:]:
            number = int(piece[: piece.index(b"}")])
            soak.heard += 1
            soak.wrong += number != self.next
            self.next = number + soak.consumers
            soak.latencies.append(now - soak.sent_at[number])
        if b"event: connect" in data[:end]:
            soak.connected += 1

    def connection_lost(self, _):
        self.soak.cut += not self.soak.ending


class Stalled(asyncio.Protocol):
    """A consumer of everything that reads nothing once it is connected."""

    def __init__(self, soak, policy):
        self.soak, self.policy = soak, policy

    def connection_made(self, transport):
        self.transport = transport
        transport.write(
            b"GET /channels/soak HTTP/1.1\r\nHost: %b\r\nVirta-Slow-Consumer: %b\r\n\r\n"
            % (self.soak.host, self.policy)
        )

    def data_received(self, _):
        self.transport.pause_reading()


class Publisher(asyncio.Protocol):
    """One connection that publishes batches, one after the other."""

    def __init__(self, soak):
        self.soak, self.busy, self.heard = soak, False, b""

    def connection_made(self, transport):
        self.transport = transport

    def publish(self, size):
        soak = self.soak
        first = len(soak.sent_at)
        numbers = range(first, first + size)
        body = b"[%b]" % b",".join([event(n, n % soak.consumers) for n in numbers])
        soak.sent_at.extend([time.perf_counter()] * size)
        self.busy, self.size = True, size
        self.transport.write(
            b"POST /channels/soak HTTP/1.1\r\nHost: %b\r\nContent-Type: %b\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (soak.host, BATCH_TYPE, len(body), body)
        )

    def data_received(self, data):
        self.heard += data
        if not self.heard.endswith(b"}"):
            return
        if self.heard.startswith(b"HTTP/1.1 202 "):
            self.soak.accepted += self.size
        else:
            self.soak.refused += self.size
        self.busy, self.heard = False, b""


async def stall(soak, port):
    """Keep two consumers that do not read, one of each policy."""
    loop = asyncio.get_running_loop()
    while True:
        transports = []
        for policy in (b"disconnect", b"drop-oldest"):
            stalled = socket.socket()
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.setblocking(False)
            await loop.sock_connect(stalled, ("127.0.0.1", port))
            made = await loop.create_connection(lambda p=policy: Stalled(soak, p), sock=stalled)
            transports.append(made[0])
        try:
            await asyncio.sleep(STALL_S)
        finally:
            for transport in transports:
                transport.abort()


async def publish(soak, port, seconds, rate, batch):
    """Keep the pace; gives the worst delay of a batch behind it."""
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: Publisher(soak), "127.0.0.1", port)
        for _ in range(CONNECTIONS)
    ]
    publishers = [protocol for _, protocol in made]
    turns, lag = cycle(publishers), 0.0
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        due = int((now - began) * rate) - len(soak.sent_at)
        while due >= batch:
            free = next((p for p in (next(turns) for _ in publishers) if not p.busy), None)
            if free is None:
                lag = max(lag, due / rate)
                break
            free.publish(batch)
            due -= batch
        await asyncio.sleep(TICK_S)
    while any(p.busy for p in publishers):  # noqa: ASYNC110 - counted by callbacks
        await asyncio.sleep(TICK_S)
    for transport, _ in made:
        transport.close()
    return lag


async def clients(options):
    """The second process: everything that talks to the server."""
    loop = asyncio.get_running_loop()
    soak = Soak(options.consumers, options.port)
    for key in range(options.consumers):
        await loop.create_connection(lambda k=key: Consumer(soak, k), "127.0.0.1", options.port)
    while soak.connected < options.consumers:  # noqa: ASYNC110 - counted by callbacks
        await asyncio.sleep(TICK_S)
    print("{}", flush=True)  # connected: from here on it counts
    stalling = asyncio.ensure_future(stall(soak, options.port))
    churn = Churn(options.port)
    churning = asyncio.ensure_future(churn.run(options.churn))
    used = time.process_time()
    began = time.perf_counter()
    lag = await publish(soak, options.port, options.seconds, options.rate, options.batch)
    churning.cancel()
    await asyncio.gather(churning, return_exceptions=True)
    took, used = time.perf_counter() - began, time.process_time() - used
    deadline = time.perf_counter() + LAST_S
    while soak.heard < soak.accepted and time.perf_counter() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(TICK_S)
    soak.ending = True
    stalling.cancel()
    ordered = sorted(soak.latencies)
    report = {
        "seconds": round(took, 1),
        "accepted": soak.accepted,
        "refused": soak.refused,
        "heard": soak.heard,
        "lost": soak.accepted - soak.heard,
        "out_of_order": soak.wrong,
        "cut": soak.cut,
        "events_s": round(soak.accepted / took),
        "lag_ms": round(lag * 1000, 1),
        "client_core": round(used / took, 2),
        "churned": sum(churn.done.values()),
        "churn_s": round(sum(churn.done.values()) / took, 1),
        "churn_kinds": churn.done,
        "churn_failed": churn.failed,
        "churn_failures": churn.failures,
    }
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999)):
        report[name] = round(ordered[int(len(ordered) * share)] * 1000, 2) if ordered else None
    report["max_ms"] = round(ordered[-1] * 1000, 2) if ordered else None
    print(json.dumps(report), flush=True)


def memory_kib(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def descriptors(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def level(samples):
    """Return the median of a few samples."""
    return sorted(samples)[len(samples) // 2]


def cpu_s(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(options, data):
    """Start the server; repeats are forgotten within the first half, so that its table is full then."""
    horizon_ms = int(min(180.0, options.seconds / 4) * 1000)
    command = [sys.executable, "-m", "virta", "serve", "--server-port", "0", "--journal-port"]
    command += ["none", "--data-dir", data, "--durability", options.durability]
    command += ["--idempotency-expiration-ms", str(horizon_ms)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    for line in server.stdout:
        if b'"listening"' in line:
            return server, int(json.loads(line)["url"].rsplit(":", 1)[1])
    raise SystemExit("the server did not start")


def run(options):
    data = tempfile.mkdtemp(prefix="virta-soak-", dir=os.environ.get("VIRTA_BENCH_DIR"))
    server, port = serve(options, data)
    memory, opened = [], []
    try:
        command = [sys.executable, __file__, "--port", str(port)]
        for name in ("consumers", "rate", "seconds", "batch", "churn"):
            command += [f"--{name}", str(getattr(options, name))]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        client.stdout.readline()
        used = cpu_s(server)
        while client.poll() is None:
            memory.append(memory_kib(server))
            opened.append(descriptors(server))
            try:
                client.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
        used = cpu_s(server) - used
        report = json.loads(client.stdout.read().splitlines()[-1])
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
        report["exit_code"] = server.returncode
    finally:
        for process in (server, client):
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()
        shutil.rmtree(data, ignore_errors=True)
    # The last samples are taken while the clients disconnect.
    memory, opened = memory[:-TAIL_SAMPLES], opened[:-TAIL_SAMPLES]
    share = min(WARM_UP_S / options.seconds, WARM_UP_SHARE)
    first = int(len(memory) * share)
    report["warm_up_s"] = round(options.seconds * share, 1)
    report["memory_kib"] = [memory[len(memory) * n // 4] for n in range(4)] + [memory[-1]]
    report["growth_kib"] = max(memory[first:]) - memory[first]
    report["descriptors"] = [opened[len(opened) * n // 4] for n in range(4)] + [opened[-1]]
    ended, began = opened[-LEVEL_SAMPLES:], opened[first : first + LEVEL_SAMPLES]
    report["growth_descriptors"] = level(ended) - level(began)
    report["server_core"] = round(used / report["seconds"], 2)
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--consumers", type=int, default=2000)
    parser.add_argument("--rate", type=int, default=5000, help="events a second")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument(
        "--churn", type=int, default=60, help="connections opened and closed per second"
    )
    parser.add_argument("--batch", type=int, default=10, help="events in a request")
    parser.add_argument("--durability", default="none")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.port is not None:
        uvloop.run(clients(options))
        return
    report = run(options)
    print(json.dumps(report))
    wrong = ("lost", "out_of_order", "refused", "cut", "churn_failed", "exit_code")
    flat = report["growth_kib"] < GROWTH_KIB_MAX
    flat = flat and report["growth_descriptors"] < GROWTH_DESCRIPTORS_MAX
    sys.exit(0 if flat and not any(report[name] for name in wrong) else 1)


if __name__ == "__main__":
    main()
