"""
Every keyword, operator and function of every dialect, each alone: documents a second against filters of that kind.

A kind whose filters leave the index shows here: it is far slower than the others. Filters of a kind differ in the
literals that people vary; documents are CloudEvents with data, or plain documents for Koncorde. Prints the rate of
single calls (`match` on bytes, as the server's loop would), the slowest call, which is the pause of an event loop, and
the slowest first call after registration.
"""

# ruff: noqa: ARG005 - every maker of a filter takes the same values and uses some

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import match_koncorde
from virta.filters import parse, preload
from virta.match import Matcher

WORDS = [f"w{i}" for i in range(400)]
PAUSE_MS_MAX = 5.0
RATE_MIN = 20_000
COLD_REGEXPS = 5000


def event(rng: random.Random) -> dict:
    n = rng.randrange(6000)
    return {
        "specversion": "1.0", "id": f"e-{rng.randrange(10**6)}", "source": f"/shop/{rng.choice(WORDS)}",
        "type": f"com.{rng.choice(WORDS)}.order.{rng.choice(WORDS)}.v{n % 9}", "subject": f"Item {n} {rng.choice(WORDS)}",
        "n": n, "m": rng.randrange(100), "text": str(n), "flag": n % 2 == 0,
        "data": {
            "status": rng.choice(WORDS), "total": rng.randrange(6000), "name": f"{rng.choice(WORDS)}-{n}",
            "user": {"id": rng.randrange(6000)}, "tags": [rng.choice(WORDS) for _ in range(4)],
        },
    }  # fmt: skip


def document(rng: random.Random) -> dict:
    n = rng.randrange(6000)
    return {
        "status": rng.choice(WORDS), "n": n, "name": f"{rng.choice(WORDS)}-{n}", "_id": f"d{n}",
        "tags": [rng.choice(WORDS) for _ in range(4)], "loc": {"lat": rng.uniform(42, 51), "lon": rng.uniform(-4, 8)},
        "items": [{"sku": f"s{rng.randrange(6000)}", "qty": rng.randrange(5), "at": {"x": n}} for _ in range(3)],
        "user": {"id": n, "name": rng.choice(WORDS)}, "scores": [rng.randrange(6000) for _ in range(3)],
    }  # fmt: skip


Kind = tuple[str, str, Callable[[int, random.Random], object]]


def cesql() -> list[Kind]:
    texts = {
        "=": "type = 'com.{w}.order.{x}.v{d}'", "!=": "n != {i}", "<>": "text <> '{i}'", "= integer": "n = {i}",
        "integer =": "{i} = n", "<": "n < {i}", "<=": "n <= {i}", ">": "n > {i}", ">=": "n >= {i}",
        "range": "n > {i} AND n < {j}", "IN": "n IN ({i}, {j})", "NOT IN": "n NOT IN ({i}, {j}) AND m = {m}",
        "IN text": "source IN ('/shop/{w}', '/shop/{x}')", "LIKE prefix": "type LIKE 'com.{w}.%'",
        "LIKE suffix": "type LIKE '%.{w}.v{d}'", "LIKE inner": "type LIKE '%.{w}.v%'", "LIKE both": "type LIKE 'com.{w}.%.v{d}'",
        "LIKE _": "type LIKE 'com._{d}.%.{w}.v_'", "NOT LIKE": "type NOT LIKE '%.{w}.v%' AND n = {i}",
        "EXISTS": "EXISTS flag AND n = {i}", "NOT": "NOT (n < {i})", "AND": "m = {m} AND text = '{i}'",
        "OR": "n = {i} OR text = '{j}'", "XOR": "n = {i} XOR m = {m}", "NOT attribute": "NOT flag AND n = {i}",
        "+": "n + {m} = {i}", "-": "n - {m} > {i}", "*": "n * 3 = {i}", "/": "n / 7 = {m}", "%": "n % 1000 = {m}",
        "unary -": "-n = -{i}", "ABS": "ABS(n) = {i}", "BOOL": "BOOL(flag) AND n = {i}", "INT": "INT(text) = {i}",
        "STRING": "STRING(n) = '{i}'", "IS_BOOL": "IS_BOOL(flag) AND n = {i}", "IS_INT": "IS_INT(text) AND n = {i}",
        "CONCAT": "CONCAT(source, ':', n) = '/shop/{w}:{i}'", "CONCAT_WS": "CONCAT_WS('-', source, n) = '/shop/{w}-{i}'",
        "LEFT": "LEFT(subject, 7) = 'Item {d}{d}'", "RIGHT": "RIGHT(type, 5) = '{x}.v{d}'", "LENGTH": "LENGTH(subject) = {m}",
        "LOWER": "LOWER(subject) = 'item {i} {w}'", "UPPER": "UPPER(subject) = 'ITEM {i} {w}'",
        "SUBSTRING": "SUBSTRING(subject, 6, 4) = '{i}'", "TRIM": "TRIM(subject) = 'Item {i} {w}'",
        "two attributes": "n = m AND n = {i}", "attributes": "n + m > {i}", "text of number": "time = '2024-01-{m}'",
    }  # fmt: skip

    def maker(text: str) -> Callable[[int, random.Random], object]:
        def make(_: int, rng: random.Random) -> object:
            i = rng.randrange(6000)
            return text.format(
                w=rng.choice(WORDS), x=rng.choice(WORDS), d=rng.randrange(9), m=rng.randrange(100), i=i,
                j=i + rng.randrange(1, 40),
            )  # fmt: skip

        return make

    return [("cesql", name, maker(text)) for name, text in texts.items()]


def query_string() -> list[Kind]:
    def kind(name: str, text: str) -> Kind:
        def make(_: int, rng: random.Random) -> object:
            i = rng.randrange(6000)
            return text.format(
                w=rng.choice(WORDS), x=rng.choice(WORDS), i=i, j=i + rng.randrange(1, 40)
            )

        return "query-string", name, make

    return [
        kind("equal", "status={w}&total={i}"), kind("!", "status=!{w}&total={i}"), kind("! alone", "name=!{w}-{i}"),
        kind("<", "total=<{i}"), kind("<=", "total=<={i}"), kind(">", "total=>{i}"), kind(">=", "total=>={i}"),
        kind("range", "total=>{i}&total=<{j}"), kind("~", "name=~{w}-"), kind("[", "tags=[{w}"), kind(";", "total={i};total={j}"),
        kind("pointer", "/user/id={i}"), kind("attribute", "../source=/shop/{w}&total={i}"), kind("text range", 'name=>"{w}"&total={i}'),
    ]  # fmt: skip


def cloudevents() -> list[Kind]:
    def kind(name: str, make: Callable[[str, str, int, int], object]) -> Kind:
        return (
            "cloudevents",
            name,
            lambda _, rng: make(
                rng.choice(WORDS), rng.choice(WORDS), rng.randrange(9), rng.randrange(6000)
            ),
        )

    return [
        kind("exact", lambda w, x, d, i: {"exact": {"type": f"com.{w}.order.{x}.v{d}"}}),
        kind("exact number", lambda w, x, d, i: {"exact": {"text": f"{i}"}}),
        kind("prefix", lambda w, x, d, i: {"prefix": {"type": f"com.{w}."}}),
        kind("suffix", lambda w, x, d, i: {"suffix": {"type": f"{w}.v{d}"}}),
        kind("all", lambda w, x, d, i: {"all": [{"prefix": {"type": "com."}}, {"exact": {"text": f"{i}"}}]}),
        kind("any", lambda w, x, d, i: {"any": [{"exact": {"source": f"/shop/{w}"}}, {"exact": {"text": f"{i}"}}]}),
        kind("not", lambda w, x, d, i: {"all": [{"not": {"suffix": {"type": f"{w}.v{d}"}}}, {"exact": {"text": f"{i}"}}]}),
        kind("not alone", lambda w, x, d, i: {"not": {"exact": {"source": f"/shop/{w}{i}"}}}),
        kind("sql", lambda w, x, d, i: {"sql": f"n = {i}"}),
    ]  # fmt: skip


def koncorde() -> list[Kind]:
    def kind(name: str, make: Callable[[str, int, random.Random], object]) -> Kind:
        return "koncorde", name, lambda _, rng: make(rng.choice(WORDS), rng.randrange(6000), rng)

    def near(rng: random.Random) -> dict:
        return {"loc": {"lat": rng.uniform(42, 51), "lon": rng.uniform(-4, 8)}}

    return [
        kind("equals", lambda w, i, r: {"equals": {"name": f"{w}-{i}"}}),
        kind("in", lambda w, i, r: {"in": {"name": [f"{w}-{i}", f"{w}-{i + 1}", f"{w}-{i + 2}"]}}),
        kind("ids", lambda w, i, r: {"ids": {"values": [f"d{i}", f"d{i + 1}"]}}),
        kind("exists", lambda w, i, r: {"and": [{"exists": "status"}, {"equals": {"n": i}}]}),
        kind("exists in array", lambda w, i, r: {"exists": f'tags["{w}"]'}),
        kind("missing", lambda w, i, r: {"and": [{"missing": f"x{i}"}, {"equals": {"n": i}}]}),
        kind("missing alone", lambda w, i, r: {"missing": f"x{i}"}),
        kind("range", lambda w, i, r: {"range": {"n": {"gte": i, "lt": i + 30}}}),
        kind("regexp", lambda w, i, r: {"regexp": {"name": f"^{w}-{i % 100}[0-9]+$"}}),
        kind("not regexp", lambda w, i, r: {"and": [{"not": {"regexp": {"n": f"^{i}$"}}}, {"equals": {"name": f"{w}-{i}"}}]}),
        kind("match", lambda w, i, r: {"match": {"user": {"id": i}}}),
        kind("match array", lambda w, i, r: {"match": {"tags": [w]}}),
        kind("match objects", lambda w, i, r: {"match": {"items": [{"sku": f"s{i}", "qty": i % 5}]}}),
        kind("match nested", lambda w, i, r: {"match": {"items": [{"at": {"x": i}}, {"qty": 1}]}}),
        kind("not match objects", lambda w, i, r: {"not": {"match": {"items": [{"sku": f"s{i}", "qty": i % 5}]}}}),
        kind("select", lambda w, i, r: {"select": {"field": "scores", "index": i % 3, "query": {"equals": {"value": i}}}}),
        kind("select from end", lambda w, i, r: {"select": {"field": "items", "index": -1, "query": {"equals": {"value.sku": f"s{i}"}}}}),
        kind("select range", lambda w, i, r: {"select": {"field": "scores", "index": 0, "query": {"range": {"value": {"gt": i, "lt": i + 20}}}}}),
        kind("not select", lambda w, i, r: {"not": {"select": {"field": "scores", "index": 0, "query": {"equals": {"value": i}}}}}),
        kind("geoDistance", lambda w, i, r: {"geoDistance": {**near(r), "distance": "5km"}}),
        kind("geoDistanceRange", lambda w, i, r: {"geoDistanceRange": {**near(r), "from": "1km", "to": "5km"}}),
        kind("geoBoundingBox", lambda w, i, r: box(near(r)["loc"])),
        kind("geoPolygon", lambda w, i, r: polygon(near(r)["loc"])),
        kind("nothing", lambda w, i, r: {"and": [{"not": {"nothing": True}}, {"equals": {"n": i}}]}),
        kind("and", lambda w, i, r: {"and": [{"equals": {"status": w}}, {"range": {"n": {"gt": i}}}]}),
        kind("or", lambda w, i, r: {"or": [{"equals": {"name": f"{w}-{i}"}}, {"equals": {"n": i}}]}),
        kind("not", lambda w, i, r: {"and": [{"not": {"equals": {"status": w}}}, {"equals": {"n": i}}]}),
        kind("not alone", lambda w, i, r: {"not": {"equals": {"name": f"{w}-{i}"}}}),
        kind("bool", lambda w, i, r: {"bool": {"must": [{"equals": {"n": i}}], "must_not": [{"equals": {"status": w}}]}}),
    ]  # fmt: skip


def box(at: dict) -> dict:
    lat, lon = at["lat"], at["lon"]
    return {
        "geoBoundingBox": {
            "loc": {"top": lat + 0.05, "left": lon, "bottom": lat, "right": lon + 0.05}
        }
    }


def polygon(at: dict) -> dict:
    lat, lon = at["lat"], at["lon"]
    corners = [[lat, lon], [lat + 0.05, lon], [lat + 0.05, lon + 0.05], [lat, lon + 0.05]]
    return {"geoPolygon": {"loc": {"points": corners}}}


def measure(kind: Kind, size: int, seconds: float, *, koncorde: bool = False) -> dict:
    """Register filters of a kind, then match documents one by one; Koncorde does the same if asked."""
    dialect, name, make = kind
    rng = random.Random(f"{dialect} {name}")
    sources = [make(number, rng) for number in range(size)]
    build = document if dialect == "koncorde" else event
    documents = [json.dumps(build(rng)).encode() for _ in range(500)]
    matcher = Matcher()
    started = time.perf_counter()
    filters = [parse(source, dialect) for source in sources]
    matcher.add_many(filters)
    added = time.perf_counter() - started
    started = time.perf_counter()
    matcher.match(documents[0])
    first = time.perf_counter() - started
    gc.collect()
    hits = calls = 0
    worst = 0.0
    cpu = time.thread_time()
    spent = 0.0
    while spent < seconds:
        for text in documents:
            before = time.thread_time()
            hits += len(matcher.match(text))
            worst = max(worst, time.thread_time() - before)
            calls += 1
            if calls % 50 == 0 and time.thread_time() - cpu > seconds:
                break
        spent = time.thread_time() - cpu
    row = {
        "dialect": dialect, "kind": name, "filters": len(matcher), "rate": round(calls / spent), "hits": round(hits / calls, 2),
        "worst_ms": round(worst * 1000, 2), "first_ms": round(first * 1000, 2), "adds": round(size / added),
        "unindexed": matcher.stats()["unindexed"],
    }  # fmt: skip
    if dialect == "koncorde" and koncorde:
        row |= beside(
            sources, documents, sum(len(matcher.match(text)) for text in documents), seconds
        )
    return row


def beside(sources: list, documents: list[bytes], hits: int, seconds: float) -> dict:
    """Return what Koncorde does with the same filters and documents, which it gets parsed."""
    found, reason = match_koncorde.measure(
        sources, [json.loads(text) for text in documents], seconds
    )
    if found is None:
        return {"koncorde_skipped": reason}
    equal = abs(found["hits"] * len(documents) - hits) < 0.5
    return {
        "koncorde": round(found["objects"]),
        "koncorde_hits": found["hits"],
        "hits_equal": equal,
    }


def run(args: argparse.Namespace) -> int:
    """Measure every kind and print a line each; return 1 if one is too slow with the first number of filters."""
    kinds = [*query_string(), *koncorde(), *cesql(), *cloudevents()]
    if args.only:
        kinds = [kind for kind in kinds if args.only in f"{kind[0]} {kind[1]}"]
    rows = []
    print(
        f"{'dialect':13}{'kind':20}{'filters':>8}{'docs/s':>10}{'hits':>9}{'worst ms':>10}{'first ms':>10}{'scanned':>9}{'Koncorde':>11}"
    )
    for size in args.sizes:
        for kind in kinds:
            row = measure(kind, size, args.seconds, koncorde=size == args.sizes[0])
            rows.append(row)
            print(line_of(row), flush=True)
    rows += [cold_regexps()] if not args.only or args.only in "koncorde cold regexps" else []
    slow = [row for row in rows if row["rate"] < RATE_MIN and row["filters"] <= args.sizes[0]]
    for row in slow:
        print(f"below {RATE_MIN:,}: {row['dialect']} {row['kind']}: {row['rate']:,} documents/s")
    behind = [row for row in rows if row["rate"] < row.get("koncorde", 0)]
    for row in behind:
        print(f"below Koncorde: {row['kind']}: {row['rate']:,}, Koncorde {row['koncorde']:,}")
    for reason in sorted({row["koncorde_skipped"] for row in rows if "koncorde_skipped" in row}):
        print(f"Koncorde skipped: {reason}")
    for row in rows:
        if not row.get("hits_equal", True):
            print(f"hits differ: {row['kind']}: {row['hits']}, Koncorde {row['koncorde_hits']}")
    paused = [row for row in rows if row["worst_ms"] > PAUSE_MS_MAX]
    for row in paused:
        print(
            f"over {PAUSE_MS_MAX} ms: {row['dialect']} {row['kind']}, {row['filters']:,} filters: {row['worst_ms']} ms"
        )
    print(f"worst pause of an event loop: {max(row['worst_ms'] for row in rows)} ms")
    if args.json:
        args.json.write_text(json.dumps(rows))
    return 1 if slow or paused or behind else 0


def line_of(row: dict) -> str:
    peer = f"{row['koncorde']:,}" if "koncorde" in row else ""
    return (
        f"{row['dialect']:13}{row['kind']:20}{row['filters']:8,}{row['rate']:10,}{row['hits']:9,}"
        f"{row['worst_ms']:10}{row['first_ms']:10}{row['unindexed']:9,}{peer:>11}"
    )


def cold_regexps() -> dict:
    """Register 5,000 regexps one by one, as an event loop would, then match texts that none has seen."""
    preload()
    rng = random.Random(5)
    sources = [
        {"regexp": {"name": f"^{rng.choice(WORDS)}-{rng.randrange(6000)}[0-9]+(a|b)?$"}}
        for _ in range(COLD_REGEXPS)
    ]
    texts = [json.dumps(document(rng)).encode() for _ in range(300)]
    matcher, pauses, hits = Matcher(), [], 0
    for source in sources:
        started = time.thread_time()
        matcher.add(source, dialect="koncorde")
        pauses.append(time.thread_time() - started)
    began = time.thread_time()
    for text in texts:
        started = time.thread_time()
        hits += len(matcher.match(text))
        pauses.append(time.thread_time() - started)
    row = {
        "dialect": "koncorde", "kind": "cold regexps", "filters": len(matcher), "hits": round(hits / len(texts), 2),
        "rate": round(len(texts) / (time.thread_time() - began)), "worst_ms": round(max(pauses) * 1000, 2),
        "first_ms": round(pauses[len(sources)] * 1000, 2), "unindexed": matcher.stats()["unindexed"],
    }  # fmt: skip
    print(line_of(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[3000], help="filters of each kind")
    parser.add_argument("--seconds", type=float, default=0.3, help="of matching, a kind")
    parser.add_argument("--only", help="kinds whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
