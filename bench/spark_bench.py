"""
The Spark room in numbers: reading, matching, writing, latency, executors; beside the alternatives.

    python bench/spark_bench.py [--events 1000000] [--filters 100,10000,1000000] [--only read,match,…]

One line per measurement, the median of three runs after a warm-up; events are 1M CloudEvents of about
190 bytes. Everything runs in one session on this machine, except `executors`, which starts its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

import virta
import virta.spark
from virta.filters import parse
from virta.filters.tree import conditions

SEED = 7
RUNS = 3
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
PARTS = ("read", "match", "sink", "latency", "executors")
EVENT_DDL = (
    "specversion string, id string, source string, type string, data struct<country: string,"
    " channel: string, status: string, city: string, brand: string, shop: string, user: string, sku: string>"
)


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
    """Two to four equalities each; of many filters each has a selective one, as subscriptions do."""
    rng = random.Random(SEED + count)
    filters = {}
    for number in range(count):
        names = rng.sample(list(PATHS), rng.randrange(2, 5))
        if count > 20_000 and not set(names) & set(SELECTIVE):
            names[0] = rng.choice(SELECTIVE)
        terms = "&".join(f"{name}={name[0]}{rng.randrange(PATHS[name])}" for name in names)
        filters[str(number)] = parse(terms)
    return filters


def measured(work, runs: int = RUNS) -> float:
    """Median seconds of some runs after one that does not count."""
    work()
    seconds = []
    for _ in range(runs):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


class Bench:
    def __init__(self, events: int, filters: list[int], directory: Path) -> None:
        self.events, self.filters, self.directory = events, filters, directory
        self.log = str(directory / "log")
        self.rows: list[tuple[str, float, str]] = []

    def note(self, name: str, value: float, unit: str) -> None:
        self.rows.append((name, value, unit))
        print(f"{name:58} {value:14,.1f} {unit}", flush=True)

    def rate(self, name: str, count: int, seconds: float) -> None:
        self.note(name, count / seconds / 1000, "k/s")

    # The data, once as a log, as JSON lines and as Parquet.

    def fill(self) -> None:
        rng = random.Random(SEED)
        begun = time.perf_counter()
        with (
            virta.open(self.log, durability="none", segment_bytes=64 << 20) as log,
            (self.directory / "events.jsonl").open("wb") as lines,
        ):
            for at in range(0, self.events, 1000):
                batch = [make_event(rng, at + i) for i in range(min(1000, self.events - at))]
                log.append_many([("orders", "", value) for value in batch])
                lines.write(b"\n".join(batch) + b"\n")
            size = log.bytes
        print(
            f"# {self.events:,} events, {size / 1e6:.0f} MB of log, made in {time.perf_counter() - begun:.0f} s"
        )

    def start(self, master: str):
        self.spark = virta.spark.session("virta-bench", master, **{"spark.driver.memory": "4g"})
        parquet = self.directory / "parquet"
        if not parquet.exists():
            self.frame().write.option("compression", "zstd").parquet(str(parquet))

    def frame(self, ddl: str | None = None, **options: str):
        reader = self.spark.read.format("virta").options(**options)
        return (reader.schema(ddl) if ddl else reader).load(self.log)

    def drain(self, df) -> float:
        return measured(lambda: df.write.format("noop").mode("overwrite").save())

    # Measurements.

    def read(self) -> None:
        count, spark = self.events, self.spark
        self.rate("read: virta, 5 columns", count, self.drain(self.frame()))
        self.rate(
            "read: virta, offset and value",
            count,
            self.drain(self.frame("offset long, value binary")),
        )
        self.rate(
            "read: spark.read.parquet, 5 columns",
            count,
            self.drain(spark.read.parquet(str(self.directory / "parquet"))),
        )
        lines = str(self.directory / "events.jsonl")
        self.rate(
            "read: spark.read.json with a schema",
            count,
            self.drain(spark.read.schema(EVENT_DDL).json(lines)),
        )
        self.rate("read: spark.read.text", count, self.drain(spark.read.text(lines)))
        few = self.frame(
            "id string, type string, data variant", events="true", end=str(min(count, 100_000))
        )
        self.rate("read: virta, events with VARIANT data", min(count, 100_000), self.drain(few))
        begun = time.perf_counter()
        with virta.open(self.log, read_only=True) as log:
            plain = sum(1 for _ in log.read(visibility="committed"))
        self.rate("read: plain Python, one core", plain, time.perf_counter() - begun)

    def match(self) -> None:
        for size in self.filters:
            begun = time.perf_counter()
            filters = make_filters(size)
            print(f"# {size:,} filters made in {time.perf_counter() - begun:.0f} s")
            limit = self.events if size <= 100_000 else min(self.events, 200_000)
            found = virta.spark.match_log(
                self.log, filters, spark=self.spark, end=limit, columns="offset long, filter_id string",
                directory=str(self.directory),
            )  # fmt: skip
            seconds = self.drain(found)
            self.note(
                f"match: {size:,} filters in the source", 2e6 * seconds / limit, "core-us/event"
            )
            self.rate(f"match: {size:,} filters in the source", limit, seconds)
            if size <= 10_000:
                frame = self.frame("offset long, value binary")
                hits = virta.spark.match(frame, filters, keep=["offset"])
                seconds = self.drain(hits)
                self.note(
                    f"match: {size:,} filters on a DataFrame",
                    2e6 * seconds / self.events,
                    "core-us/event",
                )
            if size <= 100:
                self.match_alternatives(filters)

    def match_alternatives(self, filters) -> None:
        """The same filters as Columns and as a join, on fewer events: they are slow."""
        size, limit = len(filters), min(self.events, 50_000)
        lines = (
            self.spark.read.schema(EVENT_DDL)
            .json(str(self.directory / "events.jsonl"))
            .limit(limit)
            .repartition(2)
            .cache()
        )
        lines.count()
        terms_of = {
            name: [(c.path[1], c.value) for c in conditions(f.tree)] for name, f in filters.items()
        }
        cases = [F.when(all_hold(terms), F.lit(name)) for name, terms in terms_of.items()]
        by_column = lines.select(
            "id", F.explode(F.array_compact(F.array(*cases))).alias("filter_id")
        )
        self.note(
            f"match: {size:,} filters as Columns",
            2e6 * self.drain(by_column) / limit,
            "core-us/event",
        )
        table = self.spark.createDataFrame(
            [(n, p, v, len(terms)) for n, terms in terms_of.items() for p, v in terms],
            "filter_id string, path string, held string, needed int",
        )
        pairs = lines.select("id", F.explode(F.map_entries(F.create_map(*[
            x for p in PATHS for x in (F.lit(p), F.col(f"data.{p}"))]))).alias("e"))  # fmt: skip
        joined = (
            pairs.select("id", F.col("e.key").alias("path"), F.col("e.value").alias("held"))
            .join(F.broadcast(table), ["path", "held"])
            .groupBy("id", "filter_id")
            .agg(F.count(F.lit(1)).alias("n"), F.first("needed").alias("needed"))
            .where("n = needed")
        )
        self.note(
            f"match: {size:,} filters as a join in SQL",
            2e6 * self.drain(joined) / limit,
            "core-us/event",
        )
        lines.unpersist()

    def sink(self) -> None:
        limit = min(self.events, 200_000)
        frame = self.frame("topic string, key binary, value binary", end=str(limit))
        target = self.directory / "out"
        seconds = measured(lambda: frame.write.format("virta").mode("append").save(str(target)))
        self.rate("sink: rows into a log (group durability)", limit, seconds)

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
        self.note("latency: append to foreachBatch, p50", statistics.median(times) * 1000, "ms")
        self.note(
            "latency: append to foreachBatch, p99", times[int(len(times) * 0.99)] * 1000, "ms"
        )

    def executors(self) -> None:
        """The same read and match on one executor process and on two, each of one core."""
        for count in (1, 2):
            out = subprocess.run(
                [sys.executable, __file__, "--child", str(count), "--directory", str(self.directory), "--events", str(self.events)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            read, match = map(float, out.stdout.split()[-2:])
            self.rate(f"executors: {count}, read 2 columns", self.events, read)
            self.rate(f"executors: {count}, match 1,000 filters in the source", self.events, match)

    def child(self, count: int) -> None:
        os.environ.setdefault("PYTHONPATH", str(Path(virta.__file__).parent.parent))
        self.spark = virta.spark.session("virta-bench-child", f"local-cluster[{count},1,1024]")
        read = self.drain(self.frame("offset long, value binary"))
        found = virta.spark.match_log(
            self.log, make_filters(1000), spark=self.spark, columns="offset long, filter_id string",
            directory=str(self.directory),
        )  # fmt: skip
        print(read, self.drain(found))
        self.spark.stop()


def all_hold(terms):
    column = F.lit(True)
    for path, value in terms:
        column &= F.col(f"data.{path}") == F.lit(value)
    return column


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--filters", default="100,10000,1000000")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.filters.split(",")]
    if options.child:
        Bench(options.events, sizes, Path(options.directory)).child(options.child)
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
