"""
Every keyword, operator and function of every dialect, each alone: documents a second against filters of that kind.

A kind whose filters leave the index shows here: it is far slower than the others. Filters of a kind differ in the
literals that people vary; documents are CloudEvents with data, or plain documents for Koncorde. Prints the rates of
`match` on parsed objects and on JSON, and of Koncorde on the same two (JSON.parse and test); the clock is read around
blocks of documents. A second pass registers the filters one by one, from text, matches, and removes them one by one, and
reads the clock around each call: its slowest call is the pause of an event loop, by what is called.

The clock of processor time goes on while the host does not run a virtual processor, so one call may seem long that was
not. A pass with a call over the limit is therefore repeated, twice at most. What the code does it does in each pass; so the pass
with the shortest slowest call counts, and the others are printed, with what the system says of the long calls.
"""

# ruff: noqa: ARG005 - every maker of a filter takes the same values and uses some

from __future__ import annotations

import argparse
import gc
import json
import mmap
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import match_koncorde
import match_workload as workload
from virta.filters import preload
from virta.match import Matcher
from virta.server.run import COLLECTOR

WORDS = [f"w{i}" for i in range(400)]
PAUSE_MS_MAX = 5.0
RATE_MIN = 20_000
SIZE = 3000  # filters with which a kind must reach RATE_MIN and is compared with Koncorde: more take that minutes
COLD_SIZE = 5000
COLD_REGEXPS = {"cold regexps": "^{w}-{i}[0-9]+(a|b)?$", "cold, no start": "{w}-{i}[0-9]+(a|b)?$"}
PASSES_MAX = 3
# Memory that is touched, and how long, to see how long a call of nothing may take on this machine.
FRESH_BYTES = 100 << 20
CONTROL_SECONDS = 10.0


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
    documents = [build(rng) for _ in range(500)]
    texts = [json.dumps(one).encode() for one in documents]
    matcher = Matcher()
    matcher.add_many(sources, dialect=dialect)
    hits = sum(len(matcher.match(text)) for text in texts)
    assert hits == sum(len(matcher.match(one)) for one in documents)
    row = {
        "dialect": dialect, "kind": name, "filters": len(matcher), "hits": round(hits / len(texts), 2),
        "objects": round(workload.item_rate(matcher.match, documents, seconds)),
        "json": round(workload.item_rate(matcher.match, texts, seconds)),
        "scanned": matcher.stats()["unindexed"],
    }  # fmt: skip
    if dialect == "koncorde" and koncorde:
        row |= beside(sources, documents, hits, seconds)
    # Python's collector, which runs inside the calls, must not find what a server would not have kept.
    filters = [source if isinstance(source, str) else json.dumps(source) for source in sources]
    del matcher, sources, documents
    return row | pauses(filters, dialect, texts)


def pauses(filters: list[str], dialect: str, texts: list[bytes]) -> dict:
    """Return the slowest calls of the best pass; `passes` has the slowest of each where there were several."""
    passes = [one_pass(filters, dialect, texts)]
    while passes[-1]["worst_ms"] > PAUSE_MS_MAX and len(passes) < PASSES_MAX:
        passes.append(one_pass(filters, dialect, texts))
    best = min(passes, key=lambda one: one["worst_ms"])
    if len(passes) > 1:
        best["passes"] = [one["worst_ms"] for one in passes]
        best["long_calls"] = [text for one in passes for text in one.pop("long_calls")]
    return best


def one_pass(filters: list[str], dialect: str, texts: list[bytes]) -> dict:
    """Return the slowest calls in ms of processor time: registering, the first event, any later one, removing."""
    matcher = Matcher()
    ids: list[str] = []
    long_calls: list[str] = []
    gc.collect()
    adds = call_times(
        lambda text: ids.append(matcher.add(text, dialect=dialect)), filters, "add", long_calls
    )
    calls = call_times(matcher.match, texts, "match", long_calls)
    removals = call_times(matcher.remove, ids, "remove", long_calls)
    assert len(matcher) == 0
    return {
        "long_calls": long_calls,
        "add_ms": max(adds),
        "first_ms": calls[0],
        "match_ms": max(calls[1:]),
        "remove_ms": max(removals),
        "worst_ms": max(adds + calls + removals),
    }


def call_times(
    call: Callable[[Any], object], items: list, what: str, long_calls: list[str]
) -> list[float]:
    """Return the processor time of each call in ms; what the system says of those over the limit goes to a list."""
    times = []
    for number, item in enumerate(items):
        before = resource.getrusage(resource.RUSAGE_THREAD)
        clock, started = time.perf_counter(), time.thread_time()
        call(item)
        took = (time.thread_time() - started) * 1000
        times.append(round(took, 2))
        if took > PAUSE_MS_MAX:
            clock = (time.perf_counter() - clock) * 1000
            now = resource.getrusage(resource.RUSAGE_THREAD)
            long_calls.append(
                f"{what} {number:,}: {took:.1f} ms, by the clock {clock:.1f}; "
                f"{now.ru_minflt - before.ru_minflt} page faults, {now.ru_nivcsw - before.ru_nivcsw} preemptions, "
                f"{(now.ru_stime - before.ru_stime) * 1000:.0f} ms in the kernel"
            )
    return times


def slowest_touch() -> float:
    """Return how many ms of processor time it takes at worst to touch a page of memory: nothing but the machine."""
    worst = 0.0
    end = time.perf_counter() + CONTROL_SECONDS
    while time.perf_counter() < end:
        with mmap.mmap(-1, FRESH_BYTES) as memory:
            for at in range(0, FRESH_BYTES, mmap.PAGESIZE):
                started = time.thread_time()
                memory[at] = 1
                worst = max(worst, time.thread_time() - started)
    return worst * 1000


def beside(sources: list, documents: list[dict], hits: int, seconds: float) -> dict:
    """Return what Koncorde does with the same filters and documents."""
    found, reason = match_koncorde.measure(sources, documents, seconds)
    if found is None:
        return {"koncorde_skipped": reason}
    return {
        "koncorde_objects": round(found["objects"]),
        "koncorde_json": round(found["json"]),
        "koncorde_hits": found["hits"],
        "hits_equal": abs(found["hits"] * len(documents) - hits) < 0.5,
    }


COLUMNS = [
    ("filters", 8), ("hits", 9), ("objects", 11), ("json", 11), ("koncorde_objects", 18), ("koncorde_json", 15),
    ("add_ms", 8), ("first_ms", 10), ("match_ms", 10), ("remove_ms", 11), ("scanned", 9),
]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure every kind and print a line each; return 1 if one is too slow or pauses too long."""
    preload()
    gc.freeze()  # these two as `virta serve` does at its start
    gc.set_threshold(*COLLECTOR)
    kinds = [*query_string(), *koncorde(), *cesql(), *cloudevents()]
    if args.only:
        kinds = [kind for kind in kinds if args.only in f"{kind[0]} {kind[1]}"]
    rows = []
    print(f"{'dialect':13}{'kind':20}" + "".join(f"{name:>{width}}" for name, width in COLUMNS))
    for size in args.sizes:
        for kind in kinds:
            rows.append(measure(kind, size, args.seconds, koncorde=size <= SIZE))
            print(line_of(rows[-1]), flush=True)
    for name, pattern in COLD_REGEXPS.items():
        if not args.only or args.only in f"koncorde {name}":
            rows.append(cold_regexps(name, pattern))
            print(line_of(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows))
    return 1 if complain(rows) else 0


def complain(rows: list[dict]) -> bool:
    """Print what is too slow, or cannot be compared; return whether anything is."""
    wrong = []
    for row in rows:
        name = f"{row['dialect']} {row['kind']}, {row['filters']:,} filters"
        for key in ("objects", "json"):
            limited = row["filters"] <= SIZE or row["kind"] in COLD_REGEXPS
            if limited and row.get(key, RATE_MIN) < RATE_MIN:
                wrong.append(f"below {RATE_MIN:,}: {name}: {row[key]:,} documents/s, {key}")
            if row.get(key, 0) < row.get(f"koncorde_{key}", 0):
                peer = row[f"koncorde_{key}"]
                wrong.append(f"below Koncorde: {name}: {row[key]:,}, Koncorde {peer:,}, {key}")
        if not row.get("hits_equal", True):
            wrong.append(f"hits differ: {name}: {row['hits']}, Koncorde {row['koncorde_hits']}")
        if row["worst_ms"] > PAUSE_MS_MAX:
            wrong.append(f"over {PAUSE_MS_MAX} ms: {name}: {row['worst_ms']} ms")
    for text in wrong:
        print(text)
    skipped: dict[str, list[str]] = {}
    for row in rows:
        if "koncorde_skipped" in row:
            skipped.setdefault(row["koncorde_skipped"], []).append(row["kind"])
    for reason, names in skipped.items():
        print(f"Koncorde skipped on {', '.join(names)}: {reason}")
    for row in rows:
        if "passes" in row:
            found = ", ".join(map(str, row["passes"]))
            print(f"several passes: {row['dialect']} {row['kind']}: slowest calls {found} ms")
            for text in row["long_calls"]:
                print(f"    {text}")
    if any("passes" in row for row in rows):
        print(
            f"slowest touch of a page of memory in {CONTROL_SECONDS:.0f} s, with no code of ours: "
            f"{slowest_touch():.1f} ms"
        )
    print(f"worst pause of an event loop: {max(row['worst_ms'] for row in rows)} ms")
    return bool(wrong)


def line_of(row: dict) -> str:
    cells = (f"{row[key]:>{width},}" if key in row else " " * width for key, width in COLUMNS)
    return f"{row['dialect']:13}{row['kind']:20}" + "".join(cells)


def cold_regexps(name: str, pattern: str) -> dict:
    """Register 5,000 regexps one by one, as an event loop would, then match texts that none has seen."""
    rng = random.Random(5)
    sources = [
        {"regexp": {"name": pattern.format(w=rng.choice(WORDS), i=rng.randrange(6000))}}
        for _ in range(COLD_SIZE)
    ]
    texts = [json.dumps(document(rng)).encode() for _ in range(300)]
    matcher = Matcher()
    for source in sources:
        matcher.add(source, dialect="koncorde")
    found: list[str] = []
    took = workload.elapsed(lambda: found.extend(x for text in texts for x in matcher.match(text)))
    return {
        "dialect": "koncorde", "kind": name, "filters": len(matcher), "hits": round(len(found) / len(texts), 2),
        "json": round(len(texts) / took), "scanned": matcher.stats()["unindexed"],
        **pauses([json.dumps(source) for source in sources], "koncorde", texts),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[SIZE], help="filters of each kind")
    parser.add_argument("--seconds", type=float, default=0.3, help="of matching, a kind")
    parser.add_argument("--only", help="kinds whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
