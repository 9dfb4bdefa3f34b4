"""
NEXMark q0 to q8 over a Virta log and its lake, beside Spark on JSON lines and on Parquet, and DuckDB on both.

    python bench/nexmark_bench.py [--events 10000000] [--queries q0,q1,…] [--engines virta,json,…] [--directory DIR]

A figure is core-microseconds an event of the whole log: processor time of the JVM, its Python workers and this process,
the median of `--runs` rounds after `--warm-up` rounds that do not count. A round runs every engine once, every second
round in reverse order, so that no engine pays for what Java compiles for all. A ratio is the median of the ratios within
rounds, with the least and the most. Rows are thrown away (Spark's `noop` sink, DuckDB's Arrow reader). Virta reads one
log in which the topics are mixed; the others have a file for each topic, which is less to read. `streams` runs each
query once as a stream that writes its rows to another log. The rows of log, lake and stream are compared with DuckDB's,
and rows that differ end the run. With `--directory` the data stay there for the next run.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import virta
import virta.spark
from nexmark import last_events, write
from nexmark_queries import DUCKDB, FIELDS, QUERIES, run
from nexmark_streams import Streams
from nexmark_tables import (
    Duck,
    from_json,
    from_lake,
    from_log,
    from_parquet,
    write_lake,
    write_parquet,
)
from spark_bench import adopt_orphans, processor_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

ENGINES = ("virta", "lake", "json", "parquet", "duckdb-json", "duckdb-parquet", "streams")


class NexmarkBench:
    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory, self.events = options, directory, options.events
        self.log = str(directory / "log")

    def prepare(self) -> None:
        """Write what is missing of the data."""
        if not Path(self.log).exists():
            begun = time.perf_counter()
            size = write(self.directory, self.events)
            print(
                f"# {self.events:,} events of {size / self.events:.0f} bytes, made in {time.perf_counter() - begun:.0f} s"
            )
        conf = {"spark.driver.memory": "4g"}
        self.spark = virta.spark.session("virta-nexmark", self.options.master, **conf)
        if not (self.directory / "bid.parquet").exists():
            write_parquet(self.spark, self.directory)
        if not (self.directory / "lake" / "lake.json").exists():
            write_lake(self.directory)

    def check(self, name: str, engine: str, rows: DataFrame) -> None:
        """End the run if the rows of a query are not those of DuckDB: equal in number and in the sum of their hashes."""
        duck = Duck(self.directory)
        duck.define(FIELDS[name])
        with tempfile.TemporaryDirectory(dir=self.directory) as place:
            rows.write.mode("overwrite").parquet(place)
            names, *wanted = duck.checksum(DUCKDB[name])
            _, *found = duck.checksum(f"FROM '{place}/*.parquet'", names)
        if wanted != found or not wanted[0]:
            sys.exit(f"{name} on {engine}: {found[0]} rows differ from DuckDB's {wanted[0]}")

    def reader(self, engine: str) -> Callable[[str, str], DataFrame]:
        if engine == "virta":
            return from_log(self.spark, self.log, end=self.events)
        readers = {"lake": from_lake, "json": from_json, "parquet": from_parquet}
        return readers[engine](self.spark, self.directory)

    def core_us(self, name: str, engines: list[str]) -> dict[str, list[float]]:
        """Return core-microseconds an event of a query in each round, by engine."""
        work = {engine: self.work(name, engine) for engine in engines if engine != "streams"}
        spent: dict[str, list[float]] = {engine: [] for engine in work}
        for number in range(self.options.warm_up + self.options.runs):
            for engine in list(work) if number % 2 else list(work)[::-1]:
                used = processor_seconds()
                work[engine]()
                spent[engine].append((processor_seconds() - used) / self.events * 1e6)
        found = {engine: rounds[self.options.warm_up :] for engine, rounds in spent.items()}
        return found | ({"streams": [self.stream(name)]} if "streams" in engines else {})

    def work(self, name: str, engine: str) -> Callable[[], None]:
        """Return a function that runs a query once and throws its rows away."""
        if engine.startswith("duckdb"):
            duck = Duck(self.directory, parquet=engine == "duckdb-parquet")
            duck.define(FIELDS[name])
            return lambda: duck.drain(DUCKDB[name])
        frame = run(name, self.reader(engine))
        return lambda: frame.write.format("noop").mode("overwrite").save()

    def stream(self, name: str) -> float:
        """Run a query once as a stream, to the end of the log."""
        with virta.open(self.log) as log:
            if log.next_offset == self.events:
                log.append_many(list(last_events(self.events)))
        with tempfile.TemporaryDirectory(dir=self.directory) as place:
            streams = Streams(self.spark, self.log, Path(place), maxRecordsPerTrigger=1_000_000)
            used = processor_seconds()
            rows = streams.run(name)
            used = processor_seconds() - used
            self.check(name, "a stream", rows)
        return used / self.events * 1e6


def beside(spent: dict[str, list[float]]) -> str:
    """Return the log and the lake as multiples of their peers: the median over rounds, and the least and the most."""
    pairs = [("virta", "json"), ("virta", "duckdb-json"), ("lake", "parquet")]
    found = {
        f"{own} / {peer}": [a / b for a, b in zip(spent[own], spent[peer], strict=True)]
        for own, peer in pairs
        if own in spent and peer in spent
    }
    return ", ".join(
        f"{name} {statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
        for name, each in found.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--queries", default=",".join(QUERIES))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--directory", type=Path, help="keep the data here for the next run")
    options = parser.parse_args()
    adopt_orphans()
    engines = [engine for engine in ENGINES if engine in options.engines.split(",")]
    print(f"# {platform.machine()}, {os.cpu_count()} cores, {options.master}, core-us an event")
    with tempfile.TemporaryDirectory(prefix="virta-nexmark-") as temporary:
        bench = NexmarkBench(options, options.directory or Path(temporary))
        bench.prepare()
        print(f"{'':4}" + "".join(f"{engine:>16}" for engine in engines), flush=True)
        for name in options.queries.split(","):
            for engine in (one for one in ("virta", "lake") if one in engines):
                bench.check(name, engine, run(name, bench.reader(engine)))
            spent = bench.core_us(name, engines)
            line = "".join(f"{statistics.median(spent[engine]):16.2f}" for engine in engines)
            print(f"{name:4}{line}   # {beside(spent)}", flush=True)
        bench.spark.stop()


if __name__ == "__main__":
    main()
