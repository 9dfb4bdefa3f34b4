"""
A driver for tests of table sinks: a log's events, shuffled, to a channel, Parquet, Delta and Iceberg, until it is killed.

    python table_driver.py DIRECTORY JARS MASTER available-now|continuous

Prints `ready` when its query runs. Reads `log` in DIRECTORY and writes `out`, `parquet`, `delta` and the Iceberg table lake.db.t.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.spark.launch.session import session
from virta.spark.pipeline import Pipeline, Sink, Source
from virta.spark.pipeline.builder import build
from virta.spark.pipeline.fan_out import FanOut
from virta.spark.pipeline.runner import begin

CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
    "spark.sql.shuffle.partitions": "3",
    "spark.executor.memory": "900m",
    "spark.driver.memory": "1500m",
}
SINKS = (
    Sink(kind="channel", topic="copy", log="out", name="channel"),
    Sink(kind="parquet", path="parquet", name="parquet"),
    Sink(kind="delta", path="delta", name="delta"),
    Sink(kind="iceberg", table="lake.db.t", name="iceberg"),
)


def start(directory: str, jars: str, master: str):
    """Return a session with the connectors."""
    return session(
        "tables",
        master,
        **CONF,
        **{
            "spark.jars": jars,
            "spark.sql.catalog.lake.warehouse": f"{directory}/iceberg",
            "spark.sql.warehouse.dir": f"{directory}/warehouse",
        },
    )


def main() -> None:
    directory, jars, master, trigger = sys.argv[1:5]
    spark = start(directory, jars, master)
    pipeline = Pipeline(
        name="tables",
        source=Source(log="log"),
        sinks=SINKS,
        trigger=trigger,
        checkpoint="checkpoint",
        directory=str(Path(directory)),
    )
    rows = build(spark, pipeline).flow.repartition(3, F.rand())  # another order in every attempt
    fan_out = FanOut(pipeline, on_begin=None, on_dead=lambda _: None)
    query = begin(rows.writeStream.foreachBatch(fan_out), "rows", pipeline)
    print("ready", flush=True)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
