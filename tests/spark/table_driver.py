"""
A driver for tests of table sinks: a log's events, shuffled, to a channel, Parquet, Delta and Iceberg, until it is killed.

    python table_driver.py DIRECTORY JARS MASTER available-now|continuous

Prints `ready` when its query runs. Reads `log` in DIRECTORY and writes `out`, `parquet`, and, if their jars are given,
`delta` and the Iceberg table lake.db.t.
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
    "spark.sql.shuffle.partitions": "3",
    "spark.executor.memory": "900m",
    "spark.driver.memory": "1500m",
}
DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
WAREHOUSE = "spark.sql.catalog.lake.warehouse"
ICEBERG = {
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
}
PLAIN_SINKS = (
    Sink(kind="channel", topic="copy", log="out", name="channel"),
    Sink(kind="parquet", path="parquet", name="parquet"),
)
DELTA_SINK = Sink(kind="delta", path="delta", name="delta")
ICEBERG_SINK = Sink(kind="iceberg", table="lake.db.t", name="iceberg")


def start(directory: str, jars: str, master: str):
    """Return a session with the connectors."""
    return session(
        "tables",
        master,
        **CONF,
        **(DELTA if "delta-spark" in jars else {}),
        **(ICEBERG | {WAREHOUSE: f"{directory}/iceberg"} if "iceberg" in jars else {}),
        **{"spark.jars": jars, "spark.sql.warehouse.dir": f"{directory}/warehouse"},
    )


def main() -> None:
    directory, jars, master, trigger = sys.argv[1:5]
    spark = start(directory, jars, master)
    pipeline = Pipeline(
        name="tables",
        source=Source(log="log"),
        sinks=(
            *PLAIN_SINKS,
            *([DELTA_SINK] if "delta-spark" in jars else []),
            *([ICEBERG_SINK] if "iceberg" in jars else []),
        ),
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
