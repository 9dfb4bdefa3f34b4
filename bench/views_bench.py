"""
Measure live views: `make bench-views`, with `BENCH_ARGS=--full` for 1M rows, 10,000 views and 5,000 subscribers.

1. table: in the process: bytes a row and a membership, start from the table file against a rebuild, passes, steps.
2. server: over HTTP, in one run: events a second, processor time of the server an event and publish -> frame of live
   views and of plain subscriptions with the same filters, in bursts that alternate between two servers with equal
   logs; then a restart and the resume of every subscriber.
3. peer: PostgreSQL with LISTEN/NOTIFY, every result asked for again after a change.

    python bench/views_bench.py [--full] [--only table,server,peer] [--rows N] [--views N] [--subscribers N] [--pairs N]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import uvloop

import virta
from views_peer import measure_peer
from views_table import measure_table
from views_workload import (
    BATCH,
    CHANGES,
    CHANNEL,
    TIME,
    cpu_s,
    fill,
    percentiles,
    query,
    random_event,
    resident,
)

PACED_PER_S = 200
# Batches that are ready before the clock runs: the client is not to be the limit.
BATCHES_MAX = 3000
PARTS = ("table", "server", "peer")


class BenchServer:
    """`virta serve` in its own process."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        options = {
            "server-port": port, "journal-port": "none", "data-dir": directory, "log-level": "warn",
            "view-linger-s": 600,
        }  # fmt: skip
        flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        with open(directory / "server.txt", "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "virta", "serve", *flags], stdout=output, stderr=output
            )

    async def ready(self, port: int) -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()


class Subscriber(asyncio.Protocol):
    """
    Keeps what arrives until it is read, so that the client is not the limit of a burst.

    It counts changes, and keeps latencies and the last position.
    """

    def __init__(self, path: str, since: str = "") -> None:
        last = f"Last-Event-ID: {since}\r\n" if since else ""
        self.request = f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n{last}\r\n"
        self.timed = False  # whether latencies are kept
        self.latencies: list[float] = []
        self.position = ""
        self.reset = False
        self.started = asyncio.get_running_loop().create_future()
        self.arrived = 0
        self._changes = 0
        self._parts: list[bytes] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self.request.encode())

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self.arrived += 1
        if self.timed:
            now = time.time_ns()
            self.latencies += [(now - int(t)) / 1e6 for t in TIME.findall(self._read())]
        elif not self.started.done():
            whole = self._read()
            self.reset = self.reset or b"event: reset" in whole
            if b"event: live" in whole or b"event: connect" in whole:
                self.started.set_result(None)

    def take_changes(self) -> int:
        """Return how many changes came since the last call."""
        self._read()
        changes, self._changes = self._changes, 0
        return changes

    def _read(self) -> bytes:
        """Read the frames that are complete, and return them."""
        whole, end, rest = b"".join(self._parts).rpartition(b"\n\n")
        self._parts = [rest]
        whole += end
        self._changes += len(CHANGES.findall(whole))
        at = whole.rfind(b"\nid: ")
        if at >= 0:
            self.position = whole[at + 5 :].split(b"\n", 1)[0].decode()
        return whole


async def connect(port: int, paths: list[str], since: list[str] | None = None) -> list[Subscriber]:
    loop = asyncio.get_running_loop()
    made = []
    for path, position in zip(paths, since or itertools.repeat(""), strict=False):
        _, one = await loop.create_connection(
            lambda path=path, position=position: Subscriber(path, position), "127.0.0.1", port
        )
        made.append(one)
    await asyncio.gather(*[one.started for one in made])
    for one in made:
        one.take_changes()
    return made


class Load:
    """Publishes to a server."""

    def __init__(self, options: argparse.Namespace, port: int) -> None:
        self.options = options
        self.port = port
        self.numbers = itertools.count()

    def body(self, size: int) -> bytes:
        options = self.options
        events = [random_event(next(self.numbers), options.views, options.rows) for _ in range(size)]  # fmt: skip
        body = b"[" + b",".join(events) + b"]"
        return (
            b"POST /channels/%b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/cloudevents-batch+json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (CHANNEL.encode(), len(body), body)
        )

    async def burst(self) -> tuple[int, float]:
        """Publish batches as fast as they are answered; return the events and the seconds."""
        bodies = [self.body(BATCH) for _ in range(BATCHES_MAX)]
        began = time.perf_counter()
        sent = await self._publish(bodies, BATCH)
        return sent, time.perf_counter() - began

    async def paced(self) -> None:
        await self._publish((self.body(1) for _ in itertools.count()), 1, PACED_PER_S)

    async def _publish(self, bodies, size: int, pace: int | None = None) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        end = time.monotonic() + self.options.seconds
        sent = 0
        for body in bodies:
            writer.write(body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b" 202 " in answer.split(b"\r\n", 1)[0], answer
            await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", answer)[1]))
            sent += size
            if pace is not None:
                await asyncio.sleep(1 / pace)
            if time.monotonic() >= end:
                break
        writer.close()
        return sent


class Kind:
    """Plain subscriptions or live views of one server, and what was measured of them."""

    def __init__(self, name: str, server: BenchServer, load: Load) -> None:
        self.name = name
        self.server = server
        self.load = load
        self.subscribers: list[Subscriber] = []
        self.rates: list[float] = []  # events a second, of each burst
        self.loops: list[float] = []  # µs of the event loop an event
        self.frames: list[float] = []  # an event

    async def open(self) -> None:
        options, pid = self.load.options, self.server.process.pid
        suffix = "/live" if self.name == "live" else ""
        paths = [f"/channels/{CHANNEL}{suffix}?{query(n % options.views)}" for n in range(options.subscribers)]  # fmt: skip
        began, used = time.perf_counter(), cpu_s(pid)[0]
        self.subscribers = await connect(self.load.port, paths)
        opened, opening = time.perf_counter() - began, cpu_s(pid)[0] - used
        if self.name == "live" and options.views > options.subscribers:
            # The other views stand without a consumer.
            rest = [f"/channels/{CHANNEL}/live?{query(n)}" for n in range(options.subscribers, options.views)]  # fmt: skip
            for one in await connect(self.load.port, rest):
                one.transport.close()
        print(
            f"{self.name:5}: {options.subscribers} subscribers open in {opened:.2f} s, {opening:.2f} s CPU of the server",
            flush=True,
        )

    async def burst(self) -> None:
        pid = self.server.process.pid
        used = cpu_s(pid)
        sent, seconds = await self.load.burst()
        await no_more_frames(self.subscribers)
        whole, loop = (1e6 * (after - b) / sent for after, b in zip(cpu_s(pid), used, strict=True))
        self.rates.append(sent / seconds)
        self.loops.append(loop)
        self.frames.append(sum(one.take_changes() for one in self.subscribers) / sent)
        print(
            f"{self.name:5}: {sent / seconds:,.0f} events/s, {whole:.1f} µs CPU of the server an event "
            f"({loop:.1f} of its event loop), {self.frames[-1]:.2f} frames an event; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )

    async def pace(self) -> None:
        for one in self.subscribers:
            one.timed = True
        await self.load.paced()
        latencies = [found for one in self.subscribers for found in one.latencies]
        print(
            f"{self.name:5}: publish -> frame at {PACED_PER_S} events/s: {percentiles(latencies)}; "
            f"server has {resident(self.server.process.pid) / 1e6:.0f} MB",
            flush=True,
        )


async def no_more_frames(subscribers: list[Subscriber]) -> None:
    """Wait until no frame arrives any more."""
    seen, now = -1, 0
    while seen != now:
        seen = now
        await asyncio.sleep(0.3)
        now = sum(one.arrived for one in subscribers)


async def measure_server(directory: Path, options: argparse.Namespace) -> None:
    """Two servers with equal logs, one for each kind: bursts alternate, so that other work meets both."""
    with virta.open(directory / "plain" / "log") as log:
        fill(log, options.rows, options.views)
    shutil.copytree(directory / "plain", directory / "live")
    kinds = []
    try:
        for name in ("plain", "live"):
            port = free_port()
            server = BenchServer(directory / name, port)
            kinds.append(Kind(name, server, Load(options, port)))
            await server.ready(port)
            await kinds[-1].open()
        for _ in range(options.pairs):
            for kind in kinds:
                await kind.burst()
        for kind in kinds:
            await kind.pace()
        print_ratios(*kinds)
        kinds[0].server.stop()
        await measure_restart(directory / "live", kinds[1])
    finally:
        for kind in kinds:
            kind.server.stop()


def print_ratios(plain: Kind, live: Kind) -> None:
    rates = [a / b for a, b in zip(live.rates, plain.rates, strict=True)]
    loops = [b / a for a, b in zip(live.loops, plain.loops, strict=True)]
    pairs = ", ".join(f"{rate:.2f} and {loop:.2f}" for rate, loop in zip(rates, loops, strict=True))
    print(f"live / plain of each pair, events/s and by CPU of the event loop: {pairs}")
    rate, loop = median(rates), median(loops)
    print(
        f"live / plain, median of the pairs: {rate:.2f} events/s (target: at least 0.7), {loop:.2f} by CPU of the event loop; "
        f"medians {median(live.rates):,.0f} and {median(plain.rates):,.0f} events/s, "
        f"{median(live.loops):.1f} and {median(plain.loops):.1f} µs an event"
    )
    # The same filters, bytes and batches; but a view also sends a row that leaves it, a plain subscription does not.
    more = median(live.frames) / median(plain.frames)
    print(
        f"live / plain by frames: {more * rate:.2f} frames/s, {more * loop:.2f} by CPU of the event loop",
        flush=True,
    )


async def measure_restart(directory: Path, live: Kind) -> None:
    """Restart the server, and resume every subscriber."""
    since = [one.position for one in live.subscribers]
    await live.load.burst()  # changes while they are away
    live.server.stop()
    began = time.perf_counter()
    live.server = BenchServer(directory, live.load.port)
    await live.server.ready(live.load.port)
    listening = time.perf_counter() - began
    paths = [one.request.split(" ", 2)[1] for one in live.subscribers]
    again = await connect(live.load.port, paths, since)
    print(
        f"resume of {len(again)} subscribers after a restart: {time.perf_counter() - began - listening:.2f} s "
        f"after {listening:.2f} s of start-up, {cpu_s(live.server.process.pid)[0]:.2f} s CPU of the server in all; "
        f"{sum(one.reset for one in again)} of them with a reset"
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--full", action="store_true", help="1M rows, 10,000 views, 5,000 subscribers")  # fmt: skip
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--views", type=int)
    parser.add_argument("--subscribers", type=int)
    parser.add_argument("--pairs", type=int, default=5, help="bursts of each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    options = parser.parse_args()
    usual = (1_000_000, 10_000, 5_000) if options.full else (50_000, 1_000, 200)
    for name, value in zip(("rows", "views", "subscribers"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    print(
        f"{options.rows:,} rows, {options.views:,} views, {options.subscribers:,} subscribers; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        if "table" in options.only:
            measure_table(Path(directory), options.rows, options.views)
        if "server" in options.only:
            uvloop.run(measure_server(Path(directory), options))
        if "peer" in options.only:
            measure_peer(options.rows, options.views, options.subscribers, options.seconds, PACED_PER_S)  # fmt: skip


if __name__ == "__main__":
    main()
