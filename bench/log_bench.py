"""
The log against its peers: same machine, same run, same work.

    python bench/log_bench.py [--quick] [--records 1000000] [--seconds 5] [--rounds 1] [--only virta,sqlite] [--json FILE]

Work: records of topic `events` (6 B), key 16 B, value 273 B, 300 B as a Puro record. A produce cell appends
batches until --records or --seconds are reached, whichever comes first; the table of n says how many that were.
`none` acknowledges once the system has taken the record, `durable` once it is on disk (fsync or fdatasync).
Consume reads everything back. End to end: another process receives records that
are appended at 1000/s; time from just before the append to the receipt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import log_peers_embedded
import log_peers_servers
import log_writers
from log_peers_servers import Missing

TOPIC = b"events"
KEY = b"0123456789abcdef"
VALUE = b"v" * 273
RECORD = (TOPIC, KEY, VALUE)
BATCHES = (1, 100, 1000)
PACE_PER_S = 1000
PEERS = (*log_peers_embedded.PEERS, *log_peers_servers.PEERS)
# A fresh interpreter: no client survives a fork of its connection.
spawn = multiprocessing.get_context("spawn")


@contextmanager
def workplace(parent: Path):
    place = Path(tempfile.mkdtemp(prefix="virta-bench-", dir=parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def produce(peer, size: int, records: int, seconds: float) -> tuple[float, int]:
    """Append until enough; records/s and how many."""
    batch = [RECORD] * size
    append, work = (peer.append_one, RECORD) if size == 1 else (peer.append, batch)
    append(work)  # files made, caches warm
    count = 0
    rounds = max(1, 256 // size)  # the clock is read once in a while
    begun = time.perf_counter()
    deadline = begun + seconds
    while count < records:
        for _ in range(rounds):
            append(work)
        count += rounds * size
        if time.perf_counter() >= deadline:
            break
    return count / (time.perf_counter() - begun), count


def consume(peer) -> tuple[float, int]:
    """Read everything back."""
    begun = time.perf_counter()
    count = peer.read_all()
    return count / (time.perf_counter() - begun), count


def receive(kind, place: Path, level: str, count: int, pipe) -> None:
    """The other end of the latency measurement, in its own process."""
    peer = kind(place, level)
    values = peer.follow()
    next(values)
    pipe.send("ready")
    delays = []
    for value in values:
        delays.append(time.monotonic_ns() - int.from_bytes(value[:8], "big"))
        if len(delays) >= count:
            break
    pipe.send(delays)
    peer.close()


def latency(kind, place: Path, level: str, count: int) -> tuple[float, float]:
    """p50 and p99 in microseconds of append to receipt, at a steady pace."""
    peer = kind(place, level)
    peer.append_one(RECORD)
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=receive, args=(kind, place, level, count, theirs))
    child.start()
    try:
        assert ours.poll(30)
        assert ours.recv() == "ready"
        due = time.monotonic()
        for _ in range(count):
            due += 1 / PACE_PER_S
            time.sleep(max(0.0, due - time.monotonic()))
            stamp = time.monotonic_ns().to_bytes(8, "big")
            peer.append_one((TOPIC, KEY, stamp + VALUE[8:]))
        if not ours.poll(30):
            return float("nan"), float("nan")
        delays = sorted(ours.recv())
    finally:
        child.join(5)
        if child.is_alive():
            child.terminate()
            child.join()
        peer.close()
    return delays[len(delays) // 2] / 1000, delays[len(delays) * 99 // 100] / 1000


def measure(kind, parent: Path, args) -> dict:
    """All cells of one system: {cell: (value, n)}."""
    cells = {}
    for level in ("none", "durable"):
        for size in BATCHES:
            with workplace(parent) as place:
                peer = kind(place, level)
                try:
                    cells[f"{level} {size}"] = produce(peer, size, args.records, args.seconds)
                    if level == "none" and size == BATCHES[-1]:
                        cells["consume"] = consume(peer)
                finally:
                    peer.close()
        if kind.follow:
            with workplace(parent) as place:
                p50, p99 = latency(kind, place, level, args.latency)
                cells[f"{level} p50"], cells[f"{level} p99"] = (
                    (p50, args.latency),
                    (p99, args.latency),
                )
    return cells


def better(cell: str, one: tuple[float, int], other: tuple[float, int]) -> tuple[float, int]:
    """Of two rounds the better one: what a busy neighbour took away is not the system's doing."""
    return min(one, other) if cell.endswith(("p50", "p99")) else max(one, other)


def si(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.1f} k" if value >= 1e3 else f"{value:.0f}"


COLUMNS = [f"none {b}" for b in BATCHES] + [f"durable {b}" for b in BATCHES] + ["consume"]
DELAYS = ["none p50", "none p99", "durable p50", "durable p99"]


def show(title: str, columns: list[str], rows: list[tuple[str, list[str]]]) -> None:
    widths = [max(len(c), *(len(cells[i]) for _, cells in rows)) for i, c in enumerate(columns)]
    name = max(len(n) for n, _ in rows)
    print(f"\n{title}")
    print("  ".join([" " * name, *(c.rjust(w) for c, w in zip(columns, widths, strict=True))]))
    for label, cells in rows:
        print(
            "  ".join(
                [label.ljust(name), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))]
            )
        )


def print_tables(results: dict[str, dict]) -> None:
    def rows(cell):
        return [(name, [cell(name, cells, c) for c in COLUMNS]) for name, cells in results.items()]

    ours = results.get("virta", {})
    show(
        "records/s (batch of 1, 100, 1000)",
        COLUMNS,
        rows(lambda _, cells, c: si(cells[c][0]) if c in cells else "-"),
    )
    show(
        "n of each cell", COLUMNS, rows(lambda _, cells, c: si(cells[c][1]) if c in cells else "-")
    )
    if ours:
        show(
            "virta is so many times as fast", COLUMNS,
            rows(lambda _, cells, c: f"{ours[c][0] / cells[c][0]:.2f}" if c in cells and c in ours else "-"),
        )  # fmt: skip
    delayed = [(n, c) for n, c in results.items() if "none p50" in c]
    if delayed:
        table = [(n, [f"{c[d][0]:.0f}" for d in DELAYS]) for n, c in delayed]
        show(f"end to end, µs at {PACE_PER_S}/s (another process receives)", DELAYS, table)


def measure_round(kind, parent: Path, args, results: dict[str, dict]) -> None:
    begun = time.perf_counter()
    try:
        cells = measure(kind, parent, args)
    except (Missing, ImportError) as error:
        print(f"{kind.name}: SKIPPED, {error}", flush=True)
        return
    print(f"{kind.name}: measured in {time.perf_counter() - begun:.0f} s", flush=True)
    known = results.setdefault(kind.name, cells)
    for cell, found in cells.items():
        known[cell] = better(cell, known[cell], found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="100 k records, at most 0.5 s a cell")
    parser.add_argument("--records", type=int)
    parser.add_argument("--seconds", type=float, help="most time for one produce cell")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measure so often, keep each cell's best"
    )
    parser.add_argument("--latency", type=int, help="records of a latency cell")
    parser.add_argument(
        "--only", help="comma-separated beginnings of names, e.g. virta,sqlite,writers"
    )
    parser.add_argument("--dir", default="/var/tmp", help="where to work; must be a real disk")
    parser.add_argument("--json", help="also write the cells to this file")
    args = parser.parse_args()
    args.records = args.records or (100_000 if args.quick else 1_000_000)
    args.seconds = args.seconds or (0.5 if args.quick else 5.0)
    args.latency = args.latency or (500 if args.quick else 3000)
    wanted = tuple(w.strip().lower() for w in args.only.split(",")) if args.only else None

    parent = Path(args.dir)
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, in {parent}"
    )
    results: dict[str, dict] = {}
    chosen = [kind for kind in PEERS if not wanted or kind.name.lower().startswith(wanted)]
    for _ in range(args.rounds):
        for kind in chosen:
            measure_round(kind, parent, args, results)
    if results:
        print_tables(results)
    if wanted is None or "writers".startswith(wanted):
        results["writers"] = log_writers.run(parent, quick=args.quick)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
