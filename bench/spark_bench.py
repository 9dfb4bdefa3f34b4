"""
Spark in numbers: reading, matching, writing, latency, executors; beside the alternatives.

    python bench/spark_bench.py [--events 1000000] [--filters 100,1000,10000,1000000] [--only read,match,…]

A line is the median of three runs after a warm-up, as a rate by the clock and as processor time: all of Spark's
JVM and its Python workers, in microseconds of one core an item. Every query ends in Spark's `noop` sink, so what is
measured is making rows. Events are 1M CloudEvents of about 190 bytes. Everything runs in one session on this machine,
except `executors`, which runs on a standalone cluster of separate processes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyspark
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

import virta
import virta.spark
from virta.filters import parse
from virta.filters.tree import conditions
from virta.spark.launch.java import ensure_java
from virta.spark.matching.filter_set import write_set

SEED = 7
RUNS = 3
PR_SET_CHILD_SUBREAPER = 36  # Linux
PATHS = {  # path in the data -> number of values
    "country": 5,
    "channel": 10,
    "status": 12,
    "city": 25,
    "brand": 2_000,
    "shop": 2_500,
    "user": 50_000,
    "sku": 100_000,
}
SELECTIVE = ("user", "sku", "shop")
SELECTIVE_FROM = 20_000  # filters; with fewer, any two to four paths
PARTS = ("read", "match", "sink", "latency", "executors")
EVENT_DDL = (
    "specversion string, id string, source string, type string, data struct<country: string,"
    " channel: string, status: string, city: string, brand: string, shop: string, user: string, sku: string>"
)
FOUND_DDL = "offset long, filter_id string"
TWO_DDL = "offset long, value binary"


def make_event(rng: random.Random, number: int) -> bytes:
    data = {name: f"{name[0]}{rng.randrange(count)}" for name, count in PATHS.items()}
    event = {
        "specversion": "1.0",
        "id": str(number),
        "source": "/bench",
        "type": "order",
        "data": data,
    }
    return json.dumps(event, separators=(",", ":")).encode()


def make_filters(count: int) -> dict[str, object]:
    """
    Two to four equalities each: 7.3 of 10,000 match an event.

    Of many filters each has a selective one, as subscriptions do: then about 4 of 1,000,000 match.
    """
    rng = random.Random(SEED + count)
    filters = {}
    for number in range(count):
        names = rng.sample(list(PATHS), rng.randrange(2, 5))
        if count > SELECTIVE_FROM and not set(names) & set(SELECTIVE):
            names[0] = rng.choice(SELECTIVE)
        terms = "&".join(f"{name}={name[0]}{rng.randrange(PATHS[name])}" for name in names)
        filters[str(number)] = parse(terms)
    return filters


def adopt_orphans() -> None:
    """
    Make this process the parent of processes below it whose own parent ends; it never waits for them.

    Spark's Python daemons end before their workers, whose time would be lost to `processor_seconds` otherwise.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# Spark's Python daemons ignore SIGCHLD, so Linux adds the time of their workers to nobody's, and idle workers end after
# a minute. What each was last seen to have used, by its number and start.
WORKERS: dict[tuple[int, str], float] = {}


def processor_seconds() -> float:
    """Of this process and all below it, those that ended included; call `adopt_orphans` first."""
    tick = os.sysconf("SC_CLK_TCK")
    parents, used, started = {}, {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(entry)
        parents[pid], started[pid] = int(fields[1]), fields[19]
        used[pid] = sum(map(int, fields[11:15])) / tick
    mine, found = {os.getpid()}, 1
    while found:
        more = {pid for pid, parent in parents.items() if parent in mine} - mine
        mine, found = mine | more, len(more)
    others = 0.0
    for pid in mine:
        if (pid, started[pid]) in WORKERS or is_daemon(parents[pid]):
            WORKERS[pid, started[pid]] = used[pid]
        else:
            others += used[pid]
    return others + sum(WORKERS.values())


def is_daemon(pid: int) -> bool:
    try:
        return b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def measured(work, runs: int = RUNS) -> tuple[float, float]:
    """Median seconds of some runs after one that does not count, by the clock and of processors."""
    work()
    seconds, processors = [], []
    for _ in range(runs):
        begun, used = time.perf_counter(), processor_seconds()
        work()
        seconds.append(time.perf_counter() - begun)
        processors.append(processor_seconds() - used)
    return statistics.median(seconds), statistics.median(processors)


def drain(df) -> tuple[float, float]:
    return measured(lambda: df.write.format("noop").mode("overwrite").save())


class Bench:
    def __init__(self, events: int, filters: list[int], directory: Path) -> None:
        self.events, self.filters, self.directory = events, filters, directory
        self.log = str(directory / "log")
        self.lines = str(directory / "events.jsonl")
        self.rows: list[dict[str, object]] = []
        self.sets: dict[int, str] = {}

    # Results.

    def note(self, name: str, count: int, spent: tuple[float, float]) -> float:
        """One line: items a second, and microseconds of processor an item, which are returned."""
        seconds, processor = spent
        each = processor / count * 1e6
        self.rows.append({"name": name, "per_second": count / seconds, "core_us": each})
        print(f"{name:56} {count / seconds:12,.0f} /s {each:10.2f} core-us", flush=True)
        return each

    def value(self, name: str, value: float, unit: str) -> None:
        self.rows.append({"name": name, "value": value, "unit": unit})
        print(f"{name:56} {value:12,.1f} {unit}", flush=True)

    def beside(self, name: str, *peers: str) -> None:
        """How many times as fast as each peer a line is, by the clock."""
        rate = {row["name"]: row.get("per_second") for row in self.rows}
        ratios = [f"{rate[name] / rate[peer]:.2f} times {peer}" for peer in peers if peer in rate]
        print(f"# {name}: {', '.join(ratios)}", flush=True)

    # The data, once as a log, as JSON lines and as Parquet.

    def fill(self) -> None:
        rng = random.Random(SEED)
        begun = time.perf_counter()
        with (
            virta.open(self.log, durability="none", segment_bytes=64 << 20) as log,
            Path(self.lines).open("wb") as lines,
        ):
            for at in range(0, self.events, 1000):
                batch = [make_event(rng, at + i) for i in range(min(1000, self.events - at))]
                log.append_many([("orders", "", value) for value in batch])
                lines.write(b"\n".join(batch) + b"\n")
            size = log.bytes
        seconds = time.perf_counter() - begun
        print(f"# {self.events:,} events, {size / 1e6:.0f} MB of log, made in {seconds:.0f} s")

    def start(self, master: str) -> None:
        begun = time.perf_counter()
        self.spark = virta.spark.session("virta-bench", master, **{"spark.driver.memory": "4g"})
        self.value("start: session", time.perf_counter() - begun, "s")
        parquet = self.directory / "parquet"
        if not parquet.exists():
            self.frame().write.option("compression", "zstd").parquet(str(parquet))

    def frame(self, ddl: str | None = None, **options: str):
        reader = self.spark.read.format("virta").options(**options)
        return (reader.schema(ddl) if ddl else reader).load(self.log)

    def found(self, path: str, **options: str):
        """What a filter set that is kept in a file finds, matched inside the source."""
        return self.frame(FOUND_DDL, filters=path, on="event", **options)

    # Measurements.

    def read(self) -> None:
        count, spark = self.events, self.spark
        five, two = "read: virta, 5 columns", "read: virta, offset and value"
        self.note(five, count, drain(self.frame()))
        self.note(two, count, drain(self.frame(TWO_DDL)))
        parquet = spark.read.parquet(str(self.directory / "parquet"))
        self.note("read: parquet, 5 columns", count, drain(parquet))
        self.note(
            "read: parquet, offset and value", count, drain(parquet.select("offset", "value"))
        )
        self.note("read: json with a schema", count, drain(spark.read.schema(EVENT_DDL).json(self.lines)))  # fmt: skip
        self.note("read: text", count, drain(spark.read.text(self.lines)))
        self.beside(five, "read: parquet, 5 columns", "read: json with a schema", "read: text")
        self.beside(two, "read: parquet, offset and value", "read: json with a schema")
        typed = self.frame(EVENT_DDL, events="true")
        self.note("read: virta, events with the same schema", count, drain(typed))
        self.beside("read: virta, events with the same schema", "read: json with a schema")
        events = spark.read.format("virta").option("events", "true").load(self.log)
        self.note("read: virta, all 17 columns of events", count, drain(events))
        self.beside("read: virta, all 17 columns of events", "read: json with a schema")
        events = self.frame("id string, type string, data variant", events="true")
        self.note("read: virta, events with VARIANT data", count, drain(events))
        peer = spark.read.text(self.lines).select(F.parse_json("value").alias("data"))
        self.note("read: text and parse_json", count, drain(peer))
        self.beside("read: virta, events with VARIANT data", "read: text and parse_json")

        def plain() -> None:
            with virta.open(self.log, read_only=True) as log:
                assert sum(1 for _ in log.read(visibility="committed")) == count

        self.note("read: plain Python, one core", count, measured(plain))
        self.beside(two, "read: plain Python, one core")

    def match(self) -> None:
        for size in self.filters:
            begun = time.perf_counter()
            gc.disable()  # a million filters are millions of objects, none of them garbage
            filters = make_filters(size)
            made = time.perf_counter()
            path = self.sets[size] = write_set(filters, str(self.directory))
            gc.enable()
            print(
                f"# {size:,} filters: parsed in {made - begun:.1f} s, compiled and written in"
                f" {time.perf_counter() - made:.1f} s ({Path(path).stat().st_size / 1e6:.0f} MB)"
            )
            begun = time.perf_counter()
            self.found(path, end="1").count()
            self.value(f"match: {size:,} filters, opened in", time.perf_counter() - begun, "s")
            found = self.found(path)
            print(f"# {found.count() / self.events:.2f} matches an event")
            inside = f"match: {size:,} filters in the source"
            self.note(inside, self.events, drain(found))
            if size > SELECTIVE_FROM:
                continue
            hits = virta.spark.match(self.frame(TWO_DDL), filters, keep=["offset"])
            self.note(f"match: {size:,} filters on a DataFrame", self.events, drain(hits))
            self.alternatives(filters)
            peers = [f"match: {size:,} filters {how}" for how in ("on a DataFrame", "as a join in SQL", "as Columns")]  # fmt: skip
            self.beside(inside, *peers)

    def alternatives(self, filters) -> None:
        """The same filters as Columns and as a join, on fewer events: they are slow."""
        size = len(filters)
        limit = min(self.events, 50_000 if size <= 100 else 5_000_000 // size)
        lines = self.spark.read.schema(EVENT_DDL).json(self.lines).limit(limit)
        lines = lines.repartition(2).cache()
        lines.count()
        terms_of = {
            name: [(c.path[1], c.value) for c in conditions(f.tree)] for name, f in filters.items()
        }
        if size <= 100:  # at 10,000 Spark is still planning after minutes
            cases = [F.when(all_hold(terms), F.lit(name)) for name, terms in terms_of.items()]
            found = F.explode(F.array_compact(F.array(*cases))).alias("filter_id")
            self.note(
                f"match: {size:,} filters as Columns", limit, drain(lines.select("id", found))
            )
        table = self.spark.createDataFrame(
            [(n, p, v, len(terms)) for n, terms in terms_of.items() for p, v in terms],
            "filter_id string, path string, expected string, needed int",
        )
        pairs = lines.select("id", F.explode(F.map_entries(F.create_map(*[
            x for p in PATHS for x in (F.lit(p), F.col(f"data.{p}"))]))).alias("e"))  # fmt: skip
        joined = (
            pairs.select("id", F.col("e.key").alias("path"), F.col("e.value").alias("expected"))
            .join(F.broadcast(table), ["path", "expected"])
            .groupBy("id", "filter_id")
            .agg(F.count(F.lit(1)).alias("n"), F.first("needed").alias("needed"))
            .where("n = needed")
        )
        self.note(f"match: {size:,} filters as a join in SQL", limit, drain(joined))
        lines.unpersist()

    def sink(self) -> None:
        frame = self.frame("topic string, key binary, value binary")
        targets = iter(range(100))

        def written(kind: str):
            return lambda: (
                frame.write.format(kind)
                .mode("append")
                .save(str(self.directory / f"out-{kind}-{next(targets)}"))
            )

        self.note("sink: virta (group durability)", self.events, measured(written("virta")))
        self.note("sink: parquet", self.events, measured(written("parquet")))
        self.beside("sink: virta (group durability)", "sink: parquet")

    def latency(self) -> None:
        """From append to foreachBatch, one record every 50 ms."""
        path, seen, sent = str(self.directory / "live"), {}, {}
        with virta.open(path) as log:
            log.append("t", "", b"0")

            def take(batch, _):
                now = time.perf_counter()
                for row in batch.select("offset").collect():
                    seen[row.offset] = now

            query = (
                self.spark.readStream.format("virta").load(path).writeStream.foreachBatch(take)
                .option("checkpointLocation", str(self.directory / "checkpoint"))
                .trigger(processingTime="0 seconds").start()
            )  # fmt: skip
            pause = threading.Event()
            while not seen:
                pause.wait(0.05)
            for _ in range(200):
                sent[int(log.append("t", "", b"x"))] = time.perf_counter()
                pause.wait(0.05)
            while len(seen) < 201:
                pause.wait(0.05)
            query.stop()
        times = sorted(seen[o] - at for o, at in sent.items())
        self.value("latency: append to foreachBatch, p50", statistics.median(times) * 1000, "ms")
        self.value("latency: append to foreachBatch, p99", times[int(len(times) * 0.99)] * 1000, "ms")  # fmt: skip

    def executors(self) -> None:
        """The same read and match on one executor process and on two, each of one core."""
        sizes = (1000, self.filters[-1])
        for size in set(sizes) - self.sets.keys():
            self.sets[size] = write_set(make_filters(size), str(self.directory))
        names = ("read, offset and value", *(f"match {size:,} filters" for size in sizes))
        sets = [word for size in sizes for word in ("--set", self.sets[size])]
        with Cluster(self.directory / "cluster", 2) as url:
            for count in (1, 2):
                out = subprocess.run(
                    [sys.executable, __file__, "--child", str(count), "--directory", str(self.directory), "--master", url,
                     "--events", str(self.events), *sets],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                spent = map(float, out.stdout.split()[-3:])
                for name, seconds in zip(names, spent, strict=True):
                    rate = self.events / seconds
                    self.rows.append({"name": f"executors: {count}, {name}", "per_second": rate})
                    print(f"executors: {count}, {name:42} {rate:12,.0f} /s", flush=True)
        for name in names:
            self.beside(f"executors: 2, {name}", f"executors: 1, {name}")

    def child(self, count: int, master: str, sets: list[str]) -> None:
        conf = {"spark.cores.max": count, "spark.executor.cores": 1, "spark.executor.memory": "1g"}
        self.spark = virta.spark.session("virta-bench-child", master, **conf)
        frames = [self.frame(TWO_DDL), *(self.found(path) for path in sets)]
        print(*(drain(frame)[0] for frame in frames))
        self.spark.stop()


class Cluster:
    """Spark's own master and workers as processes; the pip package has the classes but not the scripts."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory, self.workers = directory, workers
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> str:
        self.directory.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        url = f"spark://127.0.0.1:{port}"
        self.run("master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        for number in range(self.workers):
            place = str(self.directory / f"worker-{number}")
            self.run("worker.Worker", "-c", "1", "-m", "1200m", "--host", "127.0.0.1", "--webui-port", "0", "-d", place, url)  # fmt: skip
        return url

    def run(self, name: str, *arguments: str) -> None:
        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "JAVA_HOME": str(ensure_java()),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "PYTHONPATH": str(Path(virta.__file__).parent.parent),
            "PYSPARK_PYTHON": sys.executable,
        }
        with (self.directory / f"{len(self.processes)}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments],
                    env=environment, stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            process.wait(30)


def all_hold(terms):
    column = F.lit(True)
    for path, value in terms:
        column &= F.col(f"data.{path}") == F.lit(value)
    return column


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--filters", default="100,1000,10000,1000000")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    adopt_orphans()
    sizes = sorted(int(size) for size in options.filters.split(","))
    if options.child:
        bench = Bench(options.events, sizes, Path(options.directory))
        bench.child(options.child, options.master, options.set)
        return
    print(
        f"# {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.master}"
    )
    with tempfile.TemporaryDirectory(prefix="virta-bench-") as directory:
        bench = Bench(options.events, sizes, Path(directory))
        bench.fill()
        wanted = [part for part in PARTS if part in options.only.split(",")]
        if wanted != ["executors"]:
            bench.start(options.master)
        for part in wanted:
            if part == "executors" and hasattr(bench, "spark"):
                bench.spark.stop()
            getattr(bench, part)()
        if wanted[-1] != "executors":
            bench.spark.stop()
    if options.json:
        Path(options.json).write_text(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    main()
