"""
The index beside its peers, from source against from source, on what all of them can say.

Koncorde (npm), Lucene Monitor (Maven) and a-tree (crates.io) register the same filters in their own language and match the
same documents; answers are compared document by document before anything is believed. A peer that cannot be installed here
is skipped with the reason. Peers get parsed documents; ours are objects too in the column `objects`, and JSON in `JSON`.
Rates are of processor time.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import match_koncorde
import match_workload as workload
from virta.match import Matcher

HERE = Path(__file__).parent / "peers"
LUCENE = "9.11.1"
BUILD_SECONDS_MAX = 900
RUN_SECONDS_MAX = 240
ARRAY = 10_000

# Conditions are (operation, field, value): text, number, range (open ends), in, exists, contains.


def basic(rng):
    chosen = rng.sample(range(20), rng.randint(1, 4))
    made = []
    for place, field in enumerate(chosen):
        if field < 10:
            made.append(("text", f"f{field:02}", f"v{rng.randrange(1000):03}"))
        elif place == 0 or rng.random() < 0.5:
            made.append(("number", f"i_f{field}", rng.randrange(1000)))
        else:
            low = rng.randrange(1000)
            made.append(("range", f"i_f{field}", (low, low + rng.randint(10, 300))))
    return made


def basic_document(rng):
    texts = {f"f{n:02}": f"v{rng.randrange(1000):03}" for n in range(10)}
    return texts | {f"i_f{n}": rng.randrange(1000) for n in range(10, 20)}


def lists(rng):
    return [("in", f"f{rng.randrange(10):02}", [f"v{n}" for n in rng.sample(range(20_000), 20)])]


def list_document(rng):
    return {f"f{n:02}": f"v{rng.randrange(20_000)}" for n in range(10)}


def clauses(rng):
    return [("number", f"i_c{n:02}", rng.randrange(3)) for n in range(50)]


def clause_document(rng):
    return {f"i_c{n:02}": rng.randrange(3) for n in range(50)}


def presence(rng):
    return [("exists", f"e{rng.randrange(400)}", None)]


def presence_document(rng):
    return {f"e{n}": "x" for n in rng.sample(range(400), 20)}


def elements(rng):
    return [("contains", "i_tags", rng.randrange(1_000_000))]


def element_document(rng):
    return {"i_tags": [rng.randrange(1_000_000) for _ in range(ARRAY)]}


SETS = {
    "equalities, ranges": (basic, basic_document, 500),
    "lists of 20": (lists, list_document, 500),
    "50 clauses": (clauses, clause_document, 200),
    "exists only": (presence, presence_document, 300),
    "arrays of 10,000": (elements, element_document, 20),
}


def koncorde_source(conditions):
    forms = {
        "text": lambda n, v: {"equals": {n: v}},
        "number": lambda n, v: {"equals": {n: v}},
        "range": lambda n, v: {"range": {n: {"gt": v[0], "lt": v[1]}}},
        "in": lambda n, v: {"in": {n: v}},
        "exists": lambda n, _: {"exists": n},
        "contains": lambda n, v: {"exists": f"{n}[{v}]"},
    }
    parts = [forms[op](name, value) for op, name, value in conditions]
    return parts[0] if len(parts) == 1 else {"and": parts}


def atree_source(conditions):
    forms = {
        "text": lambda n, v: f'{n} = "{v}"',
        "number": lambda n, v: f"{n} = {v}",
        "range": lambda n, v: f"{n} > {v[0]} and {n} < {v[1]}",
        "in": lambda n, v: f"{n} in {json.dumps(v)}",
        "exists": lambda n, _: f"{n} is not null",
        "contains": lambda n, v: f"{n} one of [{v}]",
    }
    return " and ".join(forms[op](name, value) for op, name, value in conditions)


def lucene_source(conditions):
    forms = {
        "text": lambda n, v: f"+{n}:{v}",
        "number": lambda n, v: f"+{n}:{v}",
        "range": lambda n, v: f"+p{n}:[{v[0] + 1} TO {v[1] - 1}]",
        "in": lambda n, v: f"+{n}:({' '.join(v)})",
        "exists": lambda n, _: f"+{n}:x",  # every document has this value where it has the field
        "contains": lambda n, v: f"+{n}:{v}",
    }
    return " ".join(forms[op](name, value) for op, name, value in conditions)


def lucene_document(document):
    fields = []
    for name, value in document.items():
        values = value if isinstance(value, list) else [value]
        fields += [f"{name}={one}" for one in values]
    return "\t".join(fields)


def ours(filters, documents, seconds):
    sources = [json.dumps(koncorde_source(conditions)) for conditions in filters]
    texts = [json.dumps(document).encode() for document in documents]
    gc.collect()
    memory, matcher, ids = resident(), Matcher(), []
    took = workload.elapsed(lambda: ids.extend(matcher.add_many(sources, dialect="koncorde")))
    used = resident() - memory
    lines: dict[str, list[int]] = {}
    for number, id_ in enumerate(ids):
        lines.setdefault(id_, []).append(number)
    answers = [sorted(n for id_ in matcher.match(d) for n in lines[id_]) for d in documents]
    return {
        "engine": "virta", "register": len(sources) / took, "bytes": used / len(filters), "answers": answers,
        "objects": workload.item_rate(matcher.match, documents, seconds),
        "json": workload.item_rate(matcher.match, texts, seconds),
    }  # fmt: skip


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def command(arguments, where=None, seconds=BUILD_SECONDS_MAX):
    """Run a command; return its output and None, or None and the reason."""
    try:
        run = subprocess.run(
            arguments, cwd=where, capture_output=True, text=True, check=False, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{arguments[0]}: {error}"
    if run.returncode:
        lines = [line for line in (run.stdout + run.stderr).splitlines() if "rror" in line]
        return None, f"{arguments[0]}: {lines[0][:200] if lines else run.returncode}"
    return run.stdout, None


@lru_cache
def atree():
    """Return the program and None, or None and the reason why it cannot be built."""
    if not shutil.which("cargo"):
        return None, "no cargo"
    target = workload.CACHE / "atree"
    build = ["cargo", "build", "--quiet", "--release", "--target-dir", str(target)]
    _, reason = command([*build, "--manifest-path", str(HERE / "atree" / "Cargo.toml")])
    return (None, reason) if reason else ([str(target / "release" / "match-atree")], None)


@lru_cache
def lucene():
    """Return the program and None, or None and the reason why it cannot be built."""
    if not shutil.which("mvn") or not shutil.which("javac"):
        return None, "no Maven or no Java compiler"
    home = workload.CACHE / "lucene"
    if not (home / "lib").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "pom.xml").write_text(
            (HERE / "lucene.pom.xml").read_text().replace("VERSION", LUCENE)
        )
        copy = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib"]
        _, reason = command(copy, home)
        if reason:
            return None, reason
    path = str(home / "lib" / "*")
    compiler = ["javac", "-cp", path, "-d", str(home / "classes"), str(HERE / "MonitorPeer.java")]
    _, reason = command(compiler)
    run = ["java", "-Xmx4g", "-cp", f"{path}:{home / 'classes'}", "MonitorPeer"]
    return (None, reason) if reason else (run, None)


def external(name, program, filters, documents, seconds):
    """Run a peer's program on files; return its row."""
    arguments, reason = program()
    if reason:
        return {"engine": name, "skipped": reason}
    with tempfile.TemporaryDirectory() as directory:
        files = [str(Path(directory, part)) for part in ("filters", "documents", "answers")]
        for file, lines in zip(files, (filters, documents), strict=False):
            Path(file).write_text("".join(line + "\n" for line in lines))
        output, reason = command(
            [*arguments, *files[:2], str(seconds), files[2]], seconds=RUN_SECONDS_MAX
        )
        if reason:
            return {"engine": name, "skipped": reason}
        answers = [[int(n) for n in x.split()] for x in Path(files[2]).read_text().split("\n")[:-1]]
    return {"engine": name, **json.loads(output.splitlines()[-1]), "answers": answers}


def koncorde(filters, documents, seconds):
    sources = [koncorde_source(conditions) for conditions in filters]
    found, reason = match_koncorde.measure(sources, documents, seconds)
    if found is None:
        return {"engine": "Koncorde 4.6", "skipped": reason}
    return {"engine": "Koncorde 4.6", **found}


def peers(filters, documents, seconds):
    """Yield the row of each peer on the same filters and documents."""
    yield koncorde(filters, documents, seconds)
    sources, lines = map(lucene_source, filters), map(lucene_document, documents)
    yield external("Lucene Monitor", lucene, sources, lines, seconds)
    yield external("a-tree", atree, map(atree_source, filters), map(json.dumps, documents), seconds)


def rows(size, seconds, only=None):
    """Yield the rows of every set: ours first, then its peers', each with `equal` or `skipped`."""
    for name, (make, document, count) in SETS.items():
        if only and only not in name:
            continue
        rng = random.Random(name)
        filters = [make(rng) for _ in range(size)]
        documents = [document(rng) for _ in range(count)]
        if make is clauses:  # random ones never match
            filters[::100] = [
                [("number", n, v) for n, v in documents[i % count].items()]
                for i in range(len(filters[::100]))
            ]
        own = ours(filters, documents, seconds)
        answers = own.pop("answers")
        hits = sum(map(len, answers))
        yield {"set": name, "filters": size, "hits": hits / count, **own}
        for row in peers(filters, documents, seconds):
            if "answers" in row:
                row["equal"] = row.pop("answers") == answers
            elif "hits" in row:  # Koncorde finds equal filters once, and so do we
                row["equal"] = True
                distinct = {json.dumps(koncorde_source(f), sort_keys=True) for f in filters}
                if len(distinct) == size:
                    row["equal"] = abs(row["hits"] * count - hits) < 0.5
            yield {"set": name, "filters": size, **row}


def run(size, seconds, only=None, output=None):
    """Print a line a row; return 1 if a peer's answers differ or it is faster."""
    print(
        f"{'set':20}{'engine':16}{'register/s':>12}{'objects/s':>12}{'JSON/s':>10}{'bytes':>8}  ours is",
        flush=True,
    )
    wrong, done, own = False, [], {}
    for row in rows(size, seconds, only):
        done.append(row)
        if row.get("skipped"):
            print(f"{row['set']:20}{row['engine']:16}skipped: {row['skipped']}", flush=True)
            continue
        if row["engine"] == "virta":
            own = row
        cells = "".join(
            f"{row[key]:{width},.0f}" if row.get(key) else " " * width
            for key, width in (("register", 12), ("objects", 12), ("json", 10), ("bytes", 8))
        )
        times = ""
        if row is not own:
            times = f"  {own['objects'] / row['objects']:,.1f}x matching, {own['register'] / row['register']:,.1f}x registering"
            wrong = wrong or not row["equal"] or own["objects"] < row["objects"]
            times += "" if row["equal"] else "; ANSWERS DIFFER"
        print(f"{row['set']:20}{row['engine']:16}{cells}{times}", flush=True)
    if output is not None:
        output.write_text(json.dumps(done))
    return 1 if wrong else 0
