"""
Measure live views: `make bench-views`, or `python bench/views_bench.py --rows 1000000 --views 10000 --subscribers 5000`.

In the process: bytes a row and a membership, steps a second, start from the table file against a rebuild. Over HTTP, in
one run against one server: events a second and publish -> frame of live views and of plain subscriptions with the same
filters, then a SIGKILL and the resume of every subscriber.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import virta
from virta.filters import parse
from virta.views.limits import ViewLimits
from virta.views.tables.changes import KeyRule, read_event_change
from virta.views.tables.passes import MembershipPass, reader_of
from virta.views.tables.table_file import open_table, save_table
from virta.views.view import View, ViewFilter

CHANNEL = "orders"
BATCH = 100
PACED_PER_S = 200
TIME = re.compile(rb'"t":(\d+)')
# A frame that carries a change, of a plain subscription or of a view.
CHANGES = re.compile(rb"event: (?:data|enter|update|leave)\n")


def event(number: int, views: int, rows: int) -> bytes:
    key = random.randrange(rows)
    data = {
        "id": key,
        "group": key % views,
        "status": random.choice(["paid", "new"]),
        "text": "x" * 100,
        "t": time.time_ns(),
    }
    made = {"specversion": "1.0", "id": str(number), "source": "/b", "type": "order", "subject": str(key), "data": data}  # fmt: skip
    return json.dumps(made, separators=(",", ":")).encode()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# In the process.


def measure_table(directory: Path, rows: int, views: int) -> None:
    log = virta.open(directory / "log")
    for start in range(0, rows, 1000):
        records = []
        for key in range(start, min(rows, start + 1000)):
            data = {"id": key, "group": key % views, "status": "paid", "text": "x" * 100}
            made = {"specversion": "1.0", "id": f"r{key}", "source": "/b", "type": "order", "subject": str(key), "data": data}  # fmt: skip
            records.append((CHANNEL, b"", json.dumps(made, separators=(",", ":")).encode()))
        log.append_many(records, durability="none")
    log.flush()
    limits = ViewLimits(view_cache_bytes_max=0)
    before = resident()
    began = time.perf_counter()
    table = open_table(log, CHANNEL, KeyRule(), limits=limits)
    rebuilt = time.perf_counter() - began
    per_row = (resident() - before) / rows
    print(
        f"{rows} rows: {per_row:.0f} bytes a row, without values (ring of {len(table.ring)} touches included)"
    )

    save_table(log, table, directory / "views")
    began = time.perf_counter()
    open_table(log, CHANNEL, KeyRule(), directory=directory / "views", limits=limits)
    loaded = time.perf_counter() - began
    print(
        f"start: rebuild {rebuilt:.2f} s, table file {loaded:.2f} s: {rebuilt / loaded:.1f} times as fast"
    )

    before = resident()
    made = [View(table, ViewFilter(parse(f"group={n}&status=paid"))) for n in range(views)]
    for view in made:
        table.index.add(view)
    filters = resident() - before
    before = resident()
    began = time.perf_counter()
    work = MembershipPass(table, made)
    for piece in work.pieces():
        piece.match(reader_of(log, CHANNEL))
        work.finish(piece)
    work.end()
    members = sum(view.count for view in made)
    print(
        f"{views} views: {filters / views:.0f} bytes a view; pass over all rows {time.perf_counter() - began:.2f} s; "
        f"{members} memberships, {max(0, resident() - before) / max(1, members):.0f} bytes each"
    )

    values = [event(n, views, rows) for n in range(20_000)]
    position = table.position
    began = time.perf_counter()
    for start in range(0, len(values), BATCH):
        changes = [
            (position + at, read_event_change(b"", value, table.rule))
            for at, value in enumerate(values[start : start + BATCH])
        ]
        position += BATCH
        for view in table.apply(changes, position):
            view.deliver()
    print(f"live step alone: {len(values) / (time.perf_counter() - began):,.0f} events/s")
    log.close()


# Over HTTP.


class BenchServer:
    """`virta serve` in its own process."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        command = [
            sys.executable,
            "-m",
            "virta",
            "serve",
            "--server-port",
            str(port),
            "--journal-port",
            "none",
        ]
        command += [
            "--data-dir",
            str(directory),
            "--view-linger-s",
            "600",
            "--view-save-s",
            "5",
            "--log-level",
            "warn",
        ]
        with open(directory / "server.txt", "ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    async def ready(self, port: int) -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


class Subscriber(asyncio.Protocol):
    """Counts changes, and keeps latencies and the last position."""

    def __init__(self, path: str, since: str = "") -> None:
        self.request = (
            f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n"
            + (f"Last-Event-ID: {since}\r\n" if since else "")
            + "\r\n"
        )
        self.changes = 0
        self.latencies: list[float] = []
        self.position = ""
        self.started = asyncio.get_running_loop().create_future()
        self.tail = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self.request.encode())

    def data_received(self, data: bytes) -> None:
        now = time.time_ns()
        whole, _, self.tail = (self.tail + data).rpartition(b"\n\n")
        self.changes += len(CHANGES.findall(whole))
        self.latencies += [(now - int(t)) / 1e6 for t in TIME.findall(whole)]
        at = whole.rfind(b"\nid: ")
        if at >= 0:
            self.position = whole[at + 5 :].split(b"\n", 1)[0].decode()
        if not self.started.done() and (b"event: live" in whole or b"event: connect" in whole):
            self.started.set_result(None)


async def connect(port: int, paths: list[str], since: list[str] | None = None) -> list[Subscriber]:
    loop = asyncio.get_running_loop()
    made = []
    for at, path in enumerate(paths):
        _, one = await loop.create_connection(
            lambda path=path, at=at: Subscriber(path, since[at] if since else ""), "127.0.0.1", port
        )
        made.append(one)
    await asyncio.gather(*[one.started for one in made])
    for one in made:
        one.changes = 0
        one.latencies.clear()
    return made


async def publish(
    port: int, numbers, views: int, rows: int, *, seconds: float, pace: int | None
) -> int:
    """Publish batches for some seconds; return the number of events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    size = BATCH if pace is None else 1
    sent = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        body = b"[" + b",".join(event(next(numbers), views, rows) for _ in range(size)) + b"]"
        head = f"POST /channels/{CHANNEL} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/cloudevents-batch+json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 202 " in answer.split(b"\r\n", 1)[0], answer
        length = int(re.search(rb"(?i)content-length: (\d+)", answer)[1])
        await reader.readexactly(length)
        sent += size
        if pace is not None:
            await asyncio.sleep(1 / pace)
    writer.close()
    return sent


async def measure_server(directory: Path, options: argparse.Namespace) -> None:
    server = BenchServer(directory, options.port)
    numbers = iter(range(10**9))
    try:
        await server.ready(options.port)
        rates: dict[str, float] = {}
        subscribers: list[Subscriber] = []
        paths: list[str] = []
        for kind, suffix in (("plain", ""), ("live", "/live")):
            paths = [
                f"/channels/{CHANNEL}{suffix}?group={n % options.views}&status=paid"
                for n in range(options.subscribers)
            ]
            began = time.perf_counter()
            subscribers = await connect(options.port, paths)
            opened = time.perf_counter() - began
            began = time.perf_counter()
            sent = await publish(
                options.port,
                numbers,
                options.views,
                options.rows,
                seconds=options.seconds,
                pace=None,
            )
            rates[kind] = sent / (time.perf_counter() - began)
            for one in subscribers:
                one.latencies.clear()
            await asyncio.sleep(0.5)
            for one in subscribers:
                one.latencies.clear()
            await publish(
                options.port,
                numbers,
                options.views,
                options.rows,
                seconds=options.seconds,
                pace=PACED_PER_S,
            )
            found = sorted(x for one in subscribers for x in one.latencies) or [0.0]
            print(
                f"{kind:5}: {options.subscribers} subscribers open in {opened:.2f} s; {rates[kind]:,.0f} events/s, "
                f"{sum(one.changes for one in subscribers)} frames; publish -> frame "
                f"p50 {found[len(found) // 2]:.2f} ms, p99 {found[int(len(found) * 0.99)]:.2f} ms"
            )
            if kind == "plain":
                for one in subscribers:
                    one.transport.close()
        print(f"live / plain: {rates['live'] / rates['plain']:.2f} (target: at least 0.7)")
        since = [one.position for one in subscribers]
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        began = time.perf_counter()
        server = BenchServer(directory, options.port)
        await server.ready(options.port)
        listening = time.perf_counter() - began
        again = await connect(options.port, paths, since)
        print(
            f"resume of {len(again)} subscribers after SIGKILL: {time.perf_counter() - began - listening:.2f} s "
            f"after {listening:.2f} s of start-up"
        )
    finally:
        server.process.terminate()
        server.process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--views", type=int, default=1000)
    parser.add_argument("--subscribers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    options.port = options.port or free_port()
    print(
        f"{options.rows} rows, {options.views} views, {options.subscribers} subscribers, {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as directory:
        measure_table(Path(directory), options.rows, options.views)
        asyncio.run(measure_server(Path(directory), options))
    print("peers: RethinkDB and PostgreSQL with LISTEN/NOTIFY are not measured here")


if __name__ == "__main__":
    main()
