"""
The matching workload, and how rates are measured: documents, and filters as they come and as subscriptions usually are.

`filters` is the shared, frozen set of 10k and 100k lines; the same generator, seeded, makes the million.
`selective` is the same kind with at least one equality in each filter. Compiling a million filters takes a
minute, so compiled sets are kept in build/bench-match.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import random
import time
from pathlib import Path

from virta.filters import parse
from virta.match import compile_filter

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "build" / "bench-match"
SHARED = Path(os.environ.get("VIRTA_SHARED", ROOT.parent / "shared")) / "vectors" / "match-bench"
SIZES = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000}
STRINGS = [f"f{i:02}" for i in range(10)]
INTEGERS = [f"f{i:02}" for i in range(10, 20)]
KINDS = ["create", "update", "delete", "publish"]
FORMAT = 4  # of the cache: raise it when compiled programs change
# Of one timed block: long beside a clock read and beside the resolution of the clocks.
BLOCK_SECONDS = 0.05
BLOCK_MIN = 20  # documents, however slow they are


class Generator:
    """Random filters of the benchmark's kind."""

    def __init__(self, seed, *, selective):
        self.rng = random.Random(seed)
        self.selective = selective

    def filter(self):
        conditions = [self.condition() for _ in range(self.rng.randint(1, 4))]
        if self.selective and not any("equals" in condition for condition in conditions):
            conditions[0] = self.equals()
        return conditions[0] if len(conditions) == 1 else {"and": conditions}

    def equals(self):
        rng = self.rng
        if rng.random() < 0.5:
            return {"equals": {rng.choice(STRINGS): f"v{rng.randrange(1000):03}"}}
        return {"equals": {rng.choice(INTEGERS): rng.randrange(1000)}}

    def condition(self):
        roll = self.rng.random()
        if roll < 0.6:
            return self.equals()
        if roll < 0.8:
            return self.range()
        if roll < 0.9:
            return self.presence()
        return self.text() if roll < 0.95 else self.circle()

    def range(self):
        rng = self.rng
        low = rng.randrange(1000)
        field, below, above = (
            rng.choice(INTEGERS),
            rng.choice(["lt", "lte"]),
            rng.choice(["gt", "gte"]),
        )
        roll = rng.random()
        if roll < 0.15:
            return {"range": {field: {above: low}}}
        if roll < 0.3:
            return {"range": {field: {below: low}}}
        return {"range": {field: {above: low, below: low + rng.randint(10, 300)}}}

    def presence(self):
        rng = self.rng
        keyword = rng.choice(["exists", "missing"])
        if rng.random() < 0.7:
            return {keyword: rng.choice(STRINGS + INTEGERS)}
        return {keyword: f'tags["t{rng.randrange(50)}"]'}

    def text(self):
        rng = self.rng
        if rng.random() < 0.5:
            digits = f"{rng.randrange(100):02}"
            low = rng.randrange(9)
            pattern = rng.choice(
                [
                    f"^v{digits}",
                    f"{digits}$",
                    f"^v[{low}-{low + 1}]{digits[0]}",
                    f"{digits[0]}.{digits[1]}",
                ]
            )
            value = pattern if rng.random() < 0.8 else {"value": pattern, "flags": "i"}
            return {"regexp": {rng.choice(STRINGS): value}}
        roll = rng.random()
        if roll < 0.4:
            return {"match": {"meta": {"kind": rng.choice(KINDS), "level": rng.randint(1, 5)}}}
        if roll < 0.7:
            return {"match": {"tags": [f"t{rng.randrange(50)}"]}}
        return {
            "match": {
                rng.choice(STRINGS): f"v{rng.randrange(1000):03}",
                "meta": {"kind": rng.choice(KINDS)},
            }
        }

    def circle(self):
        rng = self.rng
        metres = round(math.exp(rng.uniform(math.log(500), math.log(50_000))))
        point = {"lat": round(rng.uniform(42.3, 51), 5), "lon": round(rng.uniform(-4.8, 8.2), 5)}
        return {"geoDistance": {"loc": point, "distance": f"{metres}m"}}


def documents():
    """The documents, as lines of JSON."""
    return (SHARED / "docs-2k.jsonl").read_bytes().splitlines()


def answers():
    """For each document the lines of filters-10k that match, without those Koncorde gets wrong."""
    quirks = set(json.loads((SHARED / "quirk-lines-10k.json").read_text()))
    lines = (SHARED / "answers-10k.jsonl").read_text().splitlines()
    return [[n for n in json.loads(line) if n not in quirks] for line in lines], quirks


def filters(family, size):
    """Koncorde filters of a set, in order."""
    shared = SHARED / f"filters-{size}.jsonl"
    if family == "filters" and shared.exists():
        return [json.loads(line) for line in shared.read_text().splitlines()]
    generator = Generator(f"{family}-{size}", selective=family == "selective")
    return [generator.filter() for _ in range(SIZES[size])]


def compiled(family, size):
    """The set's filters in order, as (digest, program, opaque conditions); equal ones are one object."""
    path = CACHE / f"{family}-{size}-{FORMAT}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    sources = filters(family, size)
    parts = [sources[i : i + 5_000] for i in range(0, len(sources), 5_000)]
    known = {}
    programs = []
    with multiprocessing.Pool() as pool:
        for part in pool.imap(_compile, parts):
            programs += [known.setdefault(entry[0], entry) for entry in part]
    CACHE.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(programs, protocol=5))
    return programs


def _compile(sources):
    forms = (compile_filter(parse(source, "koncorde")) for source in sources)
    return [(form.digest, *form.encoded) for form in forms]


# Rates.


def elapsed(run):
    """
    Seconds a run takes on one core: of the clock, or of the thread's CPU time when that is less.

    The two differ only when other processes want the core.
    """
    wall, cpu = time.perf_counter(), time.thread_time()
    run()
    return min(time.perf_counter() - wall, time.thread_time() - cpu)


def best_rate(events, seconds, run, clock=elapsed):
    """Events a second: the best of as many runs as fit."""
    best = 0.0
    end = time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        best = max(best, events / clock(run))
    return best


def item_rate(call, items, seconds):
    """
    Items a second: the best of as many blocks as fit, with no clock read inside a block.

    A clock read takes as long as a fast match. match_koncorde.js does the same.
    """
    count, block = BLOCK_MIN // 2, []

    def run():
        for item in block:
            call(item)

    took = 0.0
    while took < BLOCK_SECONDS:
        count *= 2
        block = [items[i % len(items)] for i in range(count)]
        took = elapsed(run)
    return best_rate(count, seconds, run)
