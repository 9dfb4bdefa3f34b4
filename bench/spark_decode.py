"""
What decoding events costs in Spark, beside `spark.read.json` on the same events.

    python bench/spark_decode.py [--events 1000000] [--warm 5] [--rounds 3] [--directory DIR]

NEXMark events of 373 bytes. A figure is core-microseconds an event of the whole process tree: after rounds that do
not count (Java compiles what is hot for some millions of rows), the median of some rounds, of which every other one
runs in reverse order. All rows end in the `noop` sink.
`targets` are those of the design. A line "…, decoded before" is a source that yields the very same Arrow batches from a
mapped file: what Spark itself takes for them, which no decoder can be below.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import virta.spark
from nexmark import TOPICS, write
from spark_bench import adopt_orphans, processor_seconds
from virta.spark.launch.worker_memory import prepare_memory
from virta.spark.schemas import EVENT
from virta.spark.source.options import read_options
from virta.spark.source.source import LogReader

FIVE = "time timestamp, data struct<auction: bigint, bidder: bigint, price: bigint, channel: string, url: string>"
TWELVE = (
    "id string, source string, type string, specversion string, datacontenttype string, dataschema string,"
    " subject string, time timestamp, extensions map<string, string>, data variant, data_binary binary,"
    " invalid string"
)
TARGETS = {"time and struct of five": 1.3, "twelve event columns": 2.2, "all seventeen": 3.2}


class DecodedSource(DataSource):
    """Yields Arrow batches that `write_decoded` wrote: transport and rows, no reading and no decoding."""

    @classmethod
    def name(cls) -> str:
        return "decoded"

    def reader(self, schema):  # noqa: ARG002 - the files have it
        return DecodedReader(self.options["path"])


class DecodedReader(DataSourceReader):
    def __init__(self, path: str) -> None:
        self.path = path

    def partitions(self):
        return [InputPartition(str(file)) for file in sorted(Path(self.path).glob("*.arrow"))]

    def read(self, partition):
        prepare_memory()
        with pa.memory_map(partition.value) as file:
            reader = pa.ipc.open_file(file)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)


def write_decoded(directory: Path, schema: str | None) -> str:
    """Write the batches of the source, a file for each of its partitions; return their directory."""
    kind = EVENT if schema is None else StructType.fromDDL(schema)
    target = directory / f"decoded-{len(kind.fields)}"
    if not target.exists():
        target.mkdir()
        reader = LogReader(read_options({"path": str(directory / "log"), "events": "true"}), kind)
        for number, partition in enumerate(reader.partitions()):
            batches = list(reader.read(partition))
            with pa.ipc.new_file(str(target / f"{number:05d}.arrow"), batches[0].schema) as file:
                for batch in batches:
                    file.write_batch(batch)
    return str(target)


def frames(spark, directory: Path):
    """Return what is measured, by name."""

    def events(schema: str | None = None):
        reader = spark.read.format("virta").option("events", "true")
        return (reader.schema(schema) if schema else reader).load(str(directory / "log"))

    def decoded(schema: str | None):
        reader = spark.read.format("decoded").schema(schema or EVENT)
        return reader.load(write_decoded(directory, schema))

    spark.dataSource.register(DecodedSource)
    lines = [str(directory / f"{topic}.jsonl") for topic in TOPICS]
    return {
        "time and struct of five": events(FIVE),
        "the same, decoded before": decoded(FIVE),
        "twelve event columns": events(TWELVE),
        "the twelve, decoded before": decoded(TWELVE),
        "all seventeen": events(),
        "all, decoded before": decoded(None),
        "all, one referenced": events().select("id"),
        "raw value": spark.read.format("virta").schema("value binary").load(str(directory / "log")),
        "spark.read.json, time and struct": spark.read.schema(FIVE).json(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="keep the data here for the next run")
    options = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="virta-decode-") as temporary:
        directory = options.directory or Path(temporary)
        if not (directory / "log").exists():
            write(directory, options.events)
        spark = virta.spark.session("virta-decode", "local[2]", **{"spark.driver.memory": "4g"})
        found = frames(spark, directory)
        spent: dict[str, list[float]] = {name: [] for name in found}
        for round_ in range(options.warm + options.rounds):
            for name in list(found) if round_ % 2 else reversed(list(found)):
                used = processor_seconds()
                found[name].write.format("noop").mode("overwrite").save()
                spent[name].append((processor_seconds() - used) / options.events * 1e6)
        peer = statistics.median(spent["spark.read.json, time and struct"][options.warm :])
        for name, all_ in spent.items():
            middle = statistics.median(all_[options.warm :])
            target = f", target {TARGETS[name]}" if name in TARGETS else ""
            rounds = " ".join(f"{one:.2f}" for one in all_)
            print(f"{name:36} {middle:6.2f} core-us ({rounds}), {middle / peer:.2f} x json{target}")
        spark.stop()


if __name__ == "__main__":
    main()
