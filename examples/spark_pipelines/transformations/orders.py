"""
A streaming table of orders from a log, and the large ones as events back into it.

Spark allows no look at a DataFrame's columns in here, so these functions use Spark's own functions only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

spark = SparkSession.active()
LOG = spark.conf.get("virta.log")
LARGE = 100


@dp.table
def orders() -> DataFrame:
    """Return orders with typed columns; `consumer` lets the log know how far this table has read."""
    events = (
        spark.readStream.format("virta")
        .option("events", "true")
        .option("topics", "orders")
        .option("consumer", "spark-pipelines.orders")
        .load(LOG)
    )
    return events.where("invalid IS NULL").select(
        "id",
        "timestamp",
        F.expr("try_variant_get(data, '$.city', 'string')").alias("city"),
        F.expr("try_variant_get(data, '$.total', 'double')").alias("total"),
    )


dp.create_sink("large_orders", format="virta", options={"path": LOG, "topic": "orders.large"})


@dp.append_flow(target="large_orders")
def large_orders() -> DataFrame:
    """Return large orders as CloudEvents; the log has each once, also after a restart."""
    event = F.struct(
        F.lit("1.0").alias("specversion"),
        "id",
        F.lit("/orders").alias("source"),
        F.lit("order.large").alias("type"),
        F.struct("city", "total").alias("data"),
    )
    large = spark.readStream.table("orders").where(F.col("total") >= LARGE)
    return large.select(F.to_json(event).alias("value"))
