"""
Spark's connectors for Kafka, Delta and Iceberg: the Maven coordinates of each version of Spark that has them.

Checked against Maven Central on 2026-11-18. None of them has a release for Spark 4.3 yet.
"""

from __future__ import annotations

import pyspark

COORDINATES: dict[str, dict[str, str]] = {
    "kafka": {
        "4.1": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.3",
        "4.2": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    },
    "delta": {
        "4.1": "io.delta:delta-spark_4.1_2.13:4.4.0",
        "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0",
    },
    "iceberg": {"4.1": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"},
}


def spark_version() -> str:
    """Return the running Spark's version as coordinates name it: 4.1."""
    return ".".join(pyspark.__version__.split(".")[:2])


def missing_connector(name: str) -> str:
    """Return what to do about a connector that Spark does not find."""
    known = COORDINATES[name]
    version = spark_version()
    if version in known:
        advice = f"give spark.jars.packages={known[version]}, by --conf or [spark] conf"
    else:
        versions = " and ".join(known)
        advice = f"Maven Central has it for Spark {versions}, this is {pyspark.__version__}"
    return f"Spark's connector for {name} is missing: {advice}"
