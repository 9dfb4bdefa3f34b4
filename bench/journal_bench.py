"""
Job queues side by side: put/s and reserve+acknowledge/s, with their latencies.

    python bench/journal_bench.py [--seconds 1.0] [--only NAME] [--json]

Every system runs on this machine, on its own directory of the same file system, and is used through a
Python client, by one process and by sixteen. Durable rows acknowledge after fsync; the others do not.
Batches are 100 jobs per request or pipeline. A system that is not installed is skipped with the reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time

from journal_peers import SYSTEMS, MissingError

CLIENTS = (1, 16)
BATCH = 100
FILL = 40_000


def timed(call, seconds, each=1):
    """Repeat a call for so long; latencies in µs and how much was done."""
    latencies = []
    did = 0
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        done = call()
        latencies.append((time.perf_counter() - began) * 1e6)
        if not done:
            break
        did += each if done is True else int(done)
    return did, latencies


def work(system, what, first, seconds, barrier, results):
    """One client process."""
    queue = system.client()
    number = [first]

    def put():
        queue.put(number[0])
        number[0] += 1
        return True

    def put_many():
        queue.put_many(range(number[0], number[0] + BATCH))
        number[0] += BATCH
        return BATCH

    call = {
        "put": put,
        "put x100": put_many,
        "reserve+ack": lambda: bool(queue.reserve_ack()),
        "reserve+ack x100": lambda: queue.reserve_ack_many(BATCH),
    }[what]
    if barrier is not None:
        barrier.wait()
    began = time.perf_counter()
    did, latencies = timed(call, seconds)
    results.put((did, time.perf_counter() - began, latencies[:50_000]))
    getattr(queue, "close", lambda: None)()


def measure(system, what, clients, seconds, base):
    """Rate and latencies of so many processes together."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    barrier = context.Barrier(clients)
    processes = [
        context.Process(
            target=work,
            args=(system, what, base + i * 10_000_000, seconds, barrier, results),
        )
        for i in range(clients)
    ]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    latencies = sorted(value for _, _, values in outcomes for value in values)
    return {
        "rate": sum(did / max(took, 1e-9) for did, took, _ in outcomes),
        "p50": statistics.median(latencies),
        "p99": latencies[int(len(latencies) * 0.99)],
    }


def fill(system, base, seconds):
    """Jobs to take: as many as a fast system takes, or as a slow one accepts in that time."""
    queue = system.client()
    end = time.perf_counter() + seconds
    for at in range(base, base + FILL, BATCH):
        queue.put_many(range(at, at + BATCH))
        if time.perf_counter() > end:
            break
    getattr(queue, "close", lambda: None)()


def row(kind, option, seconds):
    with tempfile.TemporaryDirectory(
        prefix="journal-bench-", dir=os.environ.get("BENCH_DIR")
    ) as path:
        system = kind(path, option)
        try:
            system.start()
            figures = {}
            base = 0
            for clients in CLIENTS:
                for what in ("put", "put x100", "reserve+ack", "reserve+ack x100"):
                    if clients > system.clients_max or (clients > 1 and what.endswith("x100")):
                        continue
                    base += 1_000_000_000
                    if what.startswith("reserve"):
                        fill(system, base, 2 * seconds)
                    figures[f"{what}, {clients} client{'s' * (clients > 1)}"] = measure(
                        system, what, clients, seconds, base + 500_000_000
                    )
        finally:
            system.stop()
    return {
        "system": system.name,
        "durability": system.durability,
        "lasting": system.lasting,
        **figures,
    }


def printed(rows):
    heads = [name for name in rows[0] if "," in name] if rows else []
    for lasting in (True, False):
        print(f"\n{'acknowledged after fsync' if lasting else 'not synced at acknowledgement'}:\n")
        print("| system | durability | " + " | ".join(heads) + " |")
        print("|---|---|" + "---|" * len(heads))
        for figures in rows:
            if figures["lasting"] == lasting:
                cells = [
                    f"{f['rate']:,.0f}/s ({f['p50']:.0f} / {f['p99']:.0f} µs)" if f else "-"
                    for f in (figures.get(head) for head in heads)
                ]
                print(
                    f"| {figures['system']} | {figures['durability']} | " + " | ".join(cells) + " |"
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default="", help="systems whose name holds this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for kind, option in SYSTEMS:
        if options.only.lower() not in kind.name.lower():
            continue
        print(f"{kind.name} ({option}) …", file=sys.stderr)
        try:
            rows.append(row(kind, option, options.seconds))
        except MissingError as missing:
            print(f"skipped: {kind.name} ({option}): {missing}")
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}; cells are rate (p50 / p99 of one call)"
    )
    printed(rows)


if __name__ == "__main__":
    main()
