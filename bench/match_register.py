"""
Registration from source: filters a second that `Matcher.add` takes as text or objects, in each dialect, on one core.

Filters have one to four conditions: equalities and ranges, a prefix in one of ten. Koncorde's are the frozen set
of the benchmark, which has patterns, circles and arrays too, where that is at hand. `plain` is the same with the plain parser and
compiler; every canonical form is compared before anything is measured. Rates are of processor time. Where Node is there,
Koncorde registers its own in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from pathlib import Path

import match_koncorde
import match_workload as workload
from virta.match import Matcher
from virta.match.compile import compile_source

RATE_MIN = 75_000
COMPARED = 2_000  # sources whose canonical forms are compared, a dialect


class Conditions:
    """Conditions of one filter as (attribute, operator, value), the same for each dialect."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)

    def filter(self) -> list[tuple[str, str, object]]:
        rng = self.rng
        names = rng.sample([f"f{i:02}" for i in range(20)], rng.randint(1, 4))
        return [self.condition(name) for name in names]

    def condition(self, name: str) -> tuple[str, str, object]:
        rng = self.rng
        roll = rng.random()
        if roll < 0.4:
            return name, "text", f"v{rng.randrange(1000):03}"
        if roll < 0.65:
            return name, "number", rng.randrange(1000)
        if roll < 0.9:
            low = rng.randrange(1000)
            return name, "range", (low, low + rng.randint(10, 300))
        return name, "prefix", f"v{rng.randrange(100):02}"


def query_string(conditions):
    terms, ranged = [], False
    for name, op, value in conditions:
        if op in ("range", "prefix"):
            if ranged:  # a query string takes one of these
                terms.append(f"{name}=v{value[0] if op == 'range' else value}")
            elif op == "range":
                terms += [f"{name}=>{value[0]}", f"{name}=<{value[1]}"]
            else:
                terms.append(f"{name}=~{value}")
            ranged = True
        else:
            terms.append(f"{name}={value}")
    return "&".join(terms)


def cesql(conditions):
    forms = {
        "text": lambda n, v: f"{n} = '{v}'",
        "number": lambda n, v: f"{n} = {v}",
        "range": lambda n, v: f"{n} > {v[0]} AND {n} < {v[1]}",
        "prefix": lambda n, v: f"{n} LIKE '{v}%'",
    }
    return " AND ".join(forms[op](name, value) for name, op, value in conditions)


def cloudevents(conditions):
    parts = []
    for name, op, value in conditions:
        if op == "range":
            parts.append({"sql": f"{name} > {value[0]} AND {name} < {value[1]}"})
        else:
            parts.append({"prefix" if op == "prefix" else "exact": {name: str(value)}})
    return parts[0] if len(parts) == 1 else {"all": parts}


def koncorde(conditions):
    forms = {
        "text": lambda n, v: {"equals": {n: v}},
        "number": lambda n, v: {"equals": {n: v}},
        "range": lambda n, v: {"range": {n: {"gt": v[0], "lt": v[1]}}},
        "prefix": lambda n, v: {"in": {n: [v, v + "0"]}},
    }
    parts = [forms[op](name, value) for name, op, value in conditions]
    return parts[0] if len(parts) == 1 else {"and": parts}


MAKERS = {
    "query-string": query_string,
    "cesql": cesql,
    "cloudevents": cloudevents,
    "koncorde": koncorde,
}


def sets(size):
    """(dialect, name of the set, sources)."""
    for dialect, make in MAKERS.items():
        conditions = Conditions(f"{dialect} {size}")
        yield (
            dialect,
            "equalities, ranges",
            [make(conditions.filter()) for _ in range(workload.SIZES[size])],
        )
    if workload.SHARED.exists():
        for family in ("filters", "selective"):
            yield "koncorde", family, workload.filters(family, size)


def measure(dialect, sources, rounds):
    for source in sources[:COMPARED]:
        native, plain = (compile_source(source, dialect, engine=e) for e in ("auto", "plain"))
        assert (native.canonical, native.encoded) == (plain.canonical, plain.encoded), source
    best = plain_best = 0.0
    for _ in range(rounds):
        matcher = Matcher()
        gc.collect()
        started = time.process_time()
        matcher.add_many(sources, dialect=dialect)
        best = max(best, len(sources) / (time.process_time() - started))
    part = sources[:COMPARED]
    started = time.process_time()
    matcher = Matcher()
    for source in part:
        matcher.add(compile_source(source, dialect, engine="plain"))
    plain_best = len(part) / (time.process_time() - started)
    return best, plain_best


def run(sizes, rounds, output=None) -> int:
    """Measure each dialect; return 1 if one is below RATE_MIN."""
    print(f"{'dialect':13}{'set':20}{'filters':>9}{'register/s':>12}{'plain/s':>10}{'times':>7}")
    rows = []
    for size in sizes:
        for dialect, name, sources in sets(size):
            rate, plain = measure(dialect, sources, rounds)
            rows.append(
                {
                    "dialect": dialect,
                    "set": name,
                    "filters": len(sources),
                    "rate": rate,
                    "plain": plain,
                }
            )
            print(
                f"{dialect:13}{name:20}{len(sources):9,}{rate:12,.0f}{plain:10,.0f}{rate / plain:7.1f}",
                flush=True,
            )
        if workload.SHARED.exists():
            for row in match_koncorde.rows("selective", size, 0.2, ("re2",)):
                text = (
                    row.get("skipped")
                    or f"{'Koncorde 4.6':13}{'selective':20}{row['filters']:9,}{row['register']:12,.0f}"
                )
                print(text, flush=True)
    if output is not None:
        output.write_text(json.dumps(rows))
    slow = [row for row in rows if row["rate"] < RATE_MIN]
    for row in slow:
        print(f"below {RATE_MIN:,}: {row['dialect']} {row['set']}: {row['rate']:,.0f} a second")
    return 1 if slow else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["10k", "100k"], choices=list(workload.SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    return run(args.sizes, args.rounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
