"""
How many documents a second, against how many filters.

Each row runs in a process of its own: registration, memory, matching from objects and from JSON, on one
thread and two, and the time of single events. Answers are checked before anything is believed. Koncorde runs
beside it when Node is there. `--quick` leaves out the million and shortens the rest. Rates of one thread are
per second of CPU time where the machine is busy with other things; two threads and the times of single events
are by the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import match_cliffs
import match_koncorde
import match_peers
import match_register
import match_workload as workload
from virta.filters import parse
from virta.match.compile import compile_filter
from virta.match.engine import NativeEngine
from virta.match.plain import PlainEngine

BATCH = 1000  # events a call
CHECKED_DOCUMENTS = 10  # compared with the evaluator where no recorded answers are


def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wall(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def percentiles(engine, documents):
    times = []
    for document in documents:
        start = time.perf_counter_ns()
        engine.match(document)
        times.append((time.perf_counter_ns() - start) / 1000)
    cuts = statistics.quantiles(times, n=100)
    return cuts[49], cuts[98]


def in_threads(count, run):
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# One row, in its own process.


def native_row(family, size, seconds):
    programs = workload.compiled(family, size)
    distinct = list({entry[0]: entry for entry in programs}.values())
    lines = workload.documents()
    documents = [json.loads(line) for line in lines]
    gc.collect()
    gc.freeze()
    register = []
    used = 0
    for _ in range(1 if size == "1m" else 3):
        engine = NativeEngine()
        add = engine.index.add  # programs were compiled ahead
        before = memory()
        took = workload.elapsed(lambda add=add: [add(*program) for program in distinct])
        register.append(len(distinct) / took)
        used = used or memory() - before  # later ones reuse what the first freed
    hits = check(engine, family, size, programs, lines, documents)
    if size == "1m":
        lines, documents = lines[:500], documents[:500]
    batches = [lines[i : i + BATCH] for i in range(0, len(lines), BATCH)]

    def from_json():
        for batch in batches:
            engine.match_many(batch, numbers=True)

    row = {
        "engine": "virta",
        "family": family,
        "filters": len(distinct),
        "hits": hits,
        "register": max(register),
        "bytes": used / len(distinct),
        "objects": workload.best_rate(
            len(documents), seconds, lambda: [engine.match(document) for document in documents]
        ),
        "json": workload.best_rate(len(lines), seconds, from_json),
        "two": workload.best_rate(2 * len(lines), seconds, lambda: in_threads(2, from_json), wall),
    }
    row["p50"], row["p99"] = percentiles(engine, documents)
    row["churn"] = churn(engine, distinct, batches, seconds)
    return row


def churn(engine, programs, batches, seconds):
    """Removals and additions a second while two threads match."""
    done = threading.Event()

    def match():
        while not done.is_set():
            for batch in batches:
                engine.match_many(batch[:200], numbers=True)

    threads = [threading.Thread(target=match) for _ in range(2)]
    for thread in threads:
        thread.start()
    index = engine.index
    changes = 0
    start = time.perf_counter()
    while time.perf_counter() < start + min(seconds, 2):
        digest, program, opaques = programs[changes * 7919 % len(programs)]
        index.remove(digest)
        index.add(digest, program, opaques)
        changes += 1
    rate = changes / (time.perf_counter() - start)
    done.set()
    for thread in threads:
        thread.join()
    return rate


def check(engine, family, size, programs, lines, documents):
    """Compare with recorded answers or the evaluator; filters an event finds, on average."""
    by_digest = {}
    for line, entry in enumerate(programs):
        by_digest.setdefault(entry[0].hex(), []).append(line)
    if (family, size) == ("filters", "10k"):
        answers, quirks = workload.answers()
        for document, line, answer in zip(documents, lines, answers, strict=True):
            for found in (engine.match(document), engine.match(line)):
                got = sorted(n for id_ in found for n in by_digest[id_] if n not in quirks)
                assert got == answer, f"wrong answer for {line!r}"
    elif size != "1m":
        filters = [parse(source, "koncorde") for source in workload.filters(family, size)[:10_000]]
        for document in documents[:CHECKED_DOCUMENTS]:
            found = {
                n for id_ in engine.match(document) for n in by_digest[id_] if n < len(filters)
            }
            assert found == {n for n, filter_ in enumerate(filters) if filter_.matches(document)}
    sample = lines[:200]
    numbers, offsets = engine.match_many(sample, numbers=True)
    assert len(numbers) // 4 == sum(len(engine.match(document)) for document in documents[:200])
    return len(numbers) / 4 / (len(offsets) // 4 - 1)


def plain_row(family, size, seconds):
    sources = workload.filters(family, size)
    compiled = list(
        {c.id: c for c in map(compile_filter, (parse(s, "koncorde") for s in sources))}.values()
    )
    documents = [json.loads(line) for line in workload.documents()][: 400 if size == "10k" else 100]
    gc.collect()
    gc.freeze()
    engine = PlainEngine()
    before = memory()
    register = len(compiled) / workload.elapsed(lambda: [engine.add(form) for form in compiled])
    row = {
        "engine": "virta plain",
        "family": family,
        "filters": len(compiled),
        "register": register,
        "bytes": (memory() - before) / len(compiled),
        "objects": workload.best_rate(
            len(documents), seconds, lambda: [engine.match(document) for document in documents]
        ),
    }
    row["p50"], row["p99"] = percentiles(engine, documents)
    return row


# All of them.


def rows(args):
    sizes = ["10k", "100k"] if args.quick else ["10k", "100k", "1m"]
    seconds = 1.5 if args.quick else 5
    for family in ("filters", "selective"):
        for size in sizes:
            yield worker("native", family, size, seconds)
            if size == "10k" or (size == "100k" and not args.quick):
                yield worker("plain", family, size, seconds)
            if size != "1m" or args.koncorde_million:
                engines = ("re2",) if args.quick else ("re2", "js")
                yield from match_koncorde.rows(family, size, seconds, engines)


def worker(kind, family, size, seconds):
    command = [sys.executable, __file__, "--worker", kind, family, size, str(seconds)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{kind} {family} {size} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


HEADINGS = ["set", "engine", "filters", "objects/s", "JSON/s", "2 threads", "p50 us", "p99 us"]
HEADINGS += ["register/s", "bytes", "churn/s"]
KEYS = [
    "family",
    "engine",
    "filters",
    "objects",
    "json",
    "two",
    "p50",
    "p99",
    "register",
    "bytes",
    "churn",
]
WIDTHS = [10, 20, 9, 10, 10, 10, 10, 10, 11, 7, 8]


def line_of(row):
    cells = []
    for key, width in zip(KEYS, WIDTHS, strict=True):
        value = row.get(key)
        if value is None:
            cells.append("".rjust(width))
        elif isinstance(value, str):
            cells.append(value.ljust(width))
        else:
            cells.append((f"{value:,.1f}" if value < 100 else f"{value:,.0f}").rjust(width))
    return " ".join(cells).rstrip()


def print_ratios(done):
    """The native index beside the others of this run, on the same filters and documents."""
    ours = None
    for row in done:  # a set's own row comes first, its peers' after it
        if row.get("engine") == "virta":
            ours = row
        elif ours is not None and "engine" in row:
            ratios = [
                f"{key} {ours[key] / row[key]:,.1f}"
                for key in ("objects", "json", "register")
                if ours.get(key) and row.get(key)
            ]
            name = f"{ours['family']}, {ours['filters']:,} filters"
            print(f"# {name}: so many times {row['engine']}: {', '.join(ratios)}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="no million, shorter runs")
    parser.add_argument(
        "--koncorde-million",
        action="store_true",
        help="Koncorde with a million filters too: minutes",
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument(
        "--cliffs", action="store_true", help="every kind of filter alone, 3,000 each"
    )
    parser.add_argument("--kinds", help="with --cliffs and --peers: kinds whose name contains this")
    parser.add_argument(
        "--register", action="store_true", help="registration from source in every dialect"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="beside Koncorde, Lucene Monitor and a-tree, 10,000 filters",
    )
    parser.add_argument("--large", action="store_true", help="with --cliffs: 30,000 too")
    args = parser.parse_args()
    if args.worker:
        kind, family, size, seconds = args.worker
        make = native_row if kind == "native" else plain_row
        print(json.dumps(make(family, size, float(seconds))))
        return
    if args.register:
        sizes = ["10k"] if args.quick else ["10k", "100k"]
        raise SystemExit(match_register.run(sizes, 2 if args.quick else 3, args.json))
    if args.peers:
        raise SystemExit(match_peers.run(10_000, 1.0, args.kinds, args.json))
    if args.cliffs:
        sizes = [3000, 30_000] if args.large else [3000]
        options = argparse.Namespace(sizes=sizes, seconds=0.3, only=args.kinds, json=args.json)
        raise SystemExit(match_cliffs.run(options))
    if not workload.SHARED.exists():
        raise SystemExit(f"skipped: no workload in {workload.SHARED}")
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}; documents of 318 bytes"
    )
    print(
        " ".join(
            h.ljust(w) if i < 2 else h.rjust(w)
            for i, (h, w) in enumerate(zip(HEADINGS, WIDTHS, strict=True))
        )
    )
    done = []
    for row in rows(args):
        done.append(row)
        print(row["skipped"] if "skipped" in row else line_of(row), flush=True)
    print_ratios(done)
    match_peers.run(10_000, 0.5 if args.quick else 2.0)
    if args.json:
        args.json.write_text(json.dumps(done, indent=1))


if __name__ == "__main__":
    main()
