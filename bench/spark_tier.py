"""
What reading a shipped log costs in Spark, beside the log's directory and Parquet in the same store.

    python bench/spark_tier.py [--events 1000000] [--warm 2] [--rounds 3] [--directory DIR]

The store is moto's S3 on loopback; its own processor time is not counted. NEXMark events of 373 bytes, `local[2]`; a
figure is core-microseconds an event and seconds by the clock, the median of some rounds. All rows end in the `noop` sink.
`spark.read.parquet` reads the store by Hadoop's S3A (hadoop-aws and the AWS SDK from Maven Central, 690 MB, kept in
~/.cache/virta/maven); where they cannot be downloaded its rows from the store are left out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import virta.spark
from nexmark import write
from spark_bench import adopt_orphans, processor_seconds
from spark_decode import FIVE

S3A_JARS = (
    "org.apache.hadoop:hadoop-aws:3.5.0",
    "software.amazon.awssdk:bundle:2.35.4",
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:1.3.1",
)
PUT_SECONDS_MAX = 300
RECORDS = "offset bigint, value binary"
SHAPES = {
    "offset and value": (RECORDS, {}),
    "time and a struct of five": (FIVE, {"events": "true"}),
}


def from_tests(name: str) -> Any:
    """Return a module that the tests of Spark use, too."""
    root = Path(__file__).parents[1] / "tests"
    sys.path[:0] = [str(root), str(root / "spark")]
    return importlib.import_module(name)


def s3a_jars() -> list[str]:
    try:
        return [str(from_tests("maven_jars").jar(one)) for one in S3A_JARS]
    except OSError as error:
        print(f"# no Parquet from the store: {error}")
        return []


def s3a_conf(endpoint: str, jars: list[str]) -> dict[str, str]:
    keys = {"endpoint": endpoint, "access.key": "test", "secret.key": "test", "path.style.access": "true"}  # fmt: skip
    keys["endpoint.region"] = "us-east-1"
    return {"spark.jars": ",".join(jars), **{f"spark.hadoop.fs.s3a.{k}": v for k, v in keys.items()}}  # fmt: skip


def put(url: str, data: bytes = b"") -> None:
    # Without a type of its own the body is a form to urllib, and moto reads it as one.
    kind = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, data, kind, method="PUT")
    urllib.request.urlopen(request, timeout=PUT_SECONDS_MAX).close()


def server_seconds() -> float:
    """Return the processor time of the store's process, a child of this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid() and b"moto.server" in (entry / "cmdline").read_bytes():  # fmt: skip
                    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            except OSError:
                continue
    raise RuntimeError("the store's process is not there")


def prepare(spark, directory: Path, endpoint: str) -> None:
    """Ship the log and put Parquet files of each shape beside it."""
    put(f"{endpoint}/bucket")
    command = [sys.executable, "-m", "virta", "log", "ship", str(directory / "log"), "s3://bucket/log"]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for number, (schema, options) in enumerate(SHAPES.values()):
        target = directory / f"shape-{number}"
        if not target.exists():
            rows = spark.read.format("virta").options(**options).schema(schema).load(str(directory / "log"))  # fmt: skip
            rows.write.option("compression", "zstd").parquet(str(target))
        for file in target.glob("*.parquet"):
            put(f"{endpoint}/bucket/{target.name}/{file.name}", file.read_bytes())


def frames(spark, directory: Path, *, has_s3a: bool):
    found = {}
    for number, (name, (schema, options)) in enumerate(SHAPES.items()):
        source = spark.read.format("virta").options(**options).schema(schema)
        found[f"{name}, directory"] = source.load(str(directory / "log"))
        found[f"{name}, store"] = source.load("s3://bucket/log")
        parquet = spark.read.schema(schema)
        found[f"{name}, Parquet, directory"] = parquet.parquet(str(directory / f"shape-{number}"))
        if has_s3a:
            found[f"{name}, Parquet, store"] = parquet.parquet(f"s3a://bucket/shape-{number}")
    return found


def measure(found, warm: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (core seconds, seconds) of each round; every other round runs in reverse order."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for round_ in range(warm + rounds):
        for name in list(found) if round_ % 2 else reversed(list(found)):
            begun, used = time.perf_counter(), processor_seconds() - server_seconds()
            found[name].write.format("noop").mode("overwrite").save()
            used = processor_seconds() - server_seconds() - used
            spent[name].append((used, time.perf_counter() - begun))
    return {name: all_[warm:] for name, all_ in spent.items()}


def run(options: argparse.Namespace, directory: Path) -> None:
    if not (directory / "log").exists():
        write(directory, options.events)
    jars = s3a_jars()
    s3 = from_tests("s3_server")
    with tempfile.TemporaryDirectory() as folder, s3.started_s3(Path(folder)) as endpoint:
        os.environ.update(s3.s3_environment(endpoint))
        conf = {"spark.driver.memory": "4g", **(s3a_conf(endpoint, jars) if jars else {})}
        spark = virta.spark.session("virta-tier", "local[2]", **conf)
        prepare(spark, directory, endpoint)
        spent = measure(frames(spark, directory, has_s3a=bool(jars)), options.warm, options.rounds)
        for name, rounds in spent.items():
            used = statistics.median(one for one, _ in rounds) / options.events * 1e6
            seconds = statistics.median(one for _, one in rounds)
            print(f"{name:44} {used:6.2f} core-us an event, {seconds:6.2f} s")
        spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="keep the data here for the next run")
    options = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="virta-tier-") as temporary:
        run(options, options.directory or Path(temporary))


if __name__ == "__main__":
    main()
