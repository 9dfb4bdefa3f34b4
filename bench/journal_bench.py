"""
Job queues side by side: put/s and reserve+acknowledge/s, with their latencies.

    python bench/journal_bench.py [--seconds 0.5] [--rounds 5] [--pick best] [--only NAME,NAME] [--cpu] [--json]

Every system runs on this machine, on its own directory of the same file system, and is used through a
Python client, by one process and by sixteen. Durable rows acknowledge after fsync; the others do not.
Batches are 100 jobs per request or pipeline. A system that is not installed is skipped with the reason.
Ratios are made within each round, where everything is measured within seconds, and then summed up.
`--cpu` prints the CPU time of a job instead, in the server and in its clients: other load does not change that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from journal_peers import SYSTEMS, MissingError

MEASURES = (
    (1, "put"),
    (1, "put x100"),
    (1, "reserve+ack"),
    (1, "reserve+ack x100"),
    (16, "put"),
    (16, "reserve+ack"),
)
OURS = "virta"  # how the names of our rows begin
BATCH = 100
FILL = 40_000
QUARTILE_ROUNDS_MIN = 5


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
    began, cpu = time.perf_counter(), time.process_time()
    did, latencies = timed(call, seconds)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    results.put((did, took, latencies[:50_000], cpu))
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
    before = cpu_seconds(system)
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=120) for _ in processes]
    server = cpu_seconds(system) - before
    for process in processes:
        process.join()
    latencies = sorted(value for _, _, values, _ in outcomes for value in values)
    jobs = max(sum(did for did, *_ in outcomes), 1)
    return {
        "rate": sum(did / max(took, 1e-9) for did, took, *_ in outcomes),
        "p50": statistics.median(latencies),
        "p99": latencies[int(len(latencies) * 0.99)],
        "server_us": server / jobs * 1e6,
        "client_us": sum(cpu for *_, cpu in outcomes) / jobs * 1e6,
    }


def cpu_seconds(system):
    """Return the CPU time of a system's server process so far, 0 if there is none."""
    if system.process is None:
        return 0.0
    fields = Path(f"/proc/{system.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fill(system, base, seconds):
    """Jobs to take: as many as a fast system takes, or as a slow one accepts in that time."""
    queue = system.client()
    end = time.perf_counter() + seconds
    for at in range(base, base + FILL, BATCH):
        queue.put_many(range(at, at + BATCH))
        if time.perf_counter() > end:
            break
    getattr(queue, "close", lambda: None)()


def started(stack, path, only):
    """All systems at once: one that is idle costs nothing, and rounds can go from one to the next."""
    systems = []
    for kind, option in SYSTEMS:
        if not any(name.strip() in kind.name.lower() for name in only.lower().split(",")):
            continue
        directory = path / f"{len(systems):02d}"
        directory.mkdir()
        system = kind(directory, option)
        stack.callback(system.stop)
        try:
            system.start()
        except MissingError as missing:
            print(f"skipped: {kind.name} ({option}): {missing}")
        else:
            systems.append(system)
    return systems


def rounds_of(systems, rounds, seconds):
    """Every measure of every system, again and again, so that a disturbance hits all of them."""
    figures = {system: {} for system in systems}
    base = 0
    for number in range(rounds):
        for clients, what in MEASURES:
            for system in systems:
                if clients > system.clients_max:
                    continue
                base += 1_000_000_000
                if what.startswith("reserve"):
                    fill(system, base, 2 * seconds)
                found = measure(system, what, clients, seconds, base + 500_000_000)
                name = f"{what}, {clients} client{'s' * (clients > 1)}"
                figures[system].setdefault(name, []).append(found)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return figures


def summed_up(system, figures, pick):
    """One figure per measure: the median of the rounds, or the best one."""
    row = {
        "system": system.name,
        "durability": system.durability,
        "lasting": system.lasting,
        "rounds": figures,
    }
    for name, found in figures.items():
        ordered = sorted(found, key=lambda figure: figure["rate"])
        row[name] = ordered[-1] if pick == "best" else ordered[len(ordered) // 2]
    return row


def printed(rows, *, cpu):
    heads = [name for name in rows[0] if "," in name] if rows else []
    for lasting in (True, False):
        print(f"\n{'acknowledged after fsync' if lasting else 'not synced at acknowledgement'}:\n")
        print("| system | durability | " + " | ".join(heads) + " |")
        print("|---|---|" + "---|" * len(heads))
        for figures in rows:
            if figures["lasting"] == lasting:
                cells = [cell(figures.get(head), cpu=cpu) for head in heads]
                print(
                    f"| {figures['system']} | {figures['durability']} | " + " | ".join(cells) + " |"
                )


def cell(found, *, cpu):
    if found is None:
        return "-"
    if cpu:
        return f"{found['server_us']:.1f} + {found['client_us']:.1f} µs"
    return f"{found['rate']:,.0f}/s ({found['p50']:.0f} / {found['p99']:.0f} µs)"


def ratio_of(ours, peer, head):
    """How many times as fast as a peer, round by round: the median, and the quartiles if there are enough."""
    found = [
        one["rate"] / max(other["rate"], 1e-9)
        for one, other in zip(
            ours["rounds"].get(head, []), peer["rounds"].get(head, []), strict=False
        )
    ]
    if not found:
        return "-"
    median = f"{statistics.median(found):.2f}"
    if len(found) < QUARTILE_ROUNDS_MIN:
        return median
    low, _, high = statistics.quantiles(found, n=4)
    return f"{median} ({low:.2f}-{high:.2f})"


def ratios_printed(rows):
    """For each of our rows, how many times as fast as each peer that promises the same it is."""
    heads = [name for name in rows[0] if "," in name] if rows else []
    for ours in (row for row in rows if row["system"].startswith(OURS)):
        peers = [
            row
            for row in rows
            if row["lasting"] == ours["lasting"] and not row["system"].startswith(OURS)
        ]
        if not peers:
            continue
        print(f"\n{ours['system']} ({ours['durability']}) is so many times as fast:\n")
        print("| as | durability | " + " | ".join(heads) + " |")
        print("|---|---|" + "---|" * len(heads))
        for peer in peers:
            cells = [ratio_of(ours, peer, head) for head in heads]
            print(f"| {peer['system']} | {peer['durability']} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="systems whose name contains one of these, with commas between"
    )
    parser.add_argument("--pick", choices=["median", "best"], default="median")
    parser.add_argument("--cpu", action="store_true", help="CPU time of a job, not rates")
    parser.add_argument("--json", action="store_true", help="all rounds, for programs")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="journal-bench-", dir=os.environ.get("BENCH_DIR"))
        )
        Path(path).chmod(0o755)
        systems = started(stack, Path(path), options.only)
        figures = rounds_of(systems, options.rounds, options.seconds)
    rows = [summed_up(system, figures[system], options.pick) for system in systems]
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}; {options.pick} of {options.rounds} rounds of "
        f"{options.seconds} s; cells are "
        + ("CPU time of a job: server + clients" if options.cpu else "rate (p50 / p99 of one call)")
    )
    printed(rows, cpu=options.cpu)
    if not options.cpu:
        ratios_printed(rows)


if __name__ == "__main__":
    main()
