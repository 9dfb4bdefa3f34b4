"""
A driver of its own: copies a log to another as a stream, until its input is used up.

    python copy_driver.py MASTER IN OUT CHECKPOINT RECORDS_PER_TRIGGER [LAKES]

Once there is a directory LAKES it compacts the log into one lake after the other there, beside the stream and
after it, until its standard input ends. An environment.tar.gz in the working directory is what executors run.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

import virta.spark
from virta.filters import parse
from virta.spark.lake import compact
from virta.spark.launch.session import use_packed_python


def keep_compacting(spark, source, lakes):
    while not Path(lakes).is_dir():
        threading.Event().wait(0.02)
    for number in itertools.count():
        compact(source, f"{lakes}/{os.getpid()}-{number}", spark=spark)


def copy(spark, source, target, checkpoint, limit):
    """Start the stream; it ends when its input is used up."""
    events = virta.spark.read_stream(
        source, spark=spark, events=True, max_records=int(limit), split_bytes=65536
    )
    kept = virta.spark.where(events, parse({"exists": "n"}, "koncorde"))
    return (
        kept.select(F.lit("copy").alias("topic"), "key", "value")
        .writeStream.format("virta")
        .option("path", target)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )


def main(master, source, target, checkpoint, limit, lakes=None):
    packed = {}
    if Path("environment.tar.gz").exists():
        use_packed_python("environment")
        packed["spark.archives"] = "environment.tar.gz#environment"
    spark = virta.spark.session(
        "virta-copy",
        master,
        **{
            "spark.driver.memory": "700m",
            "spark.executor.memory": "600m",
            "spark.executor.cores": "1",
            "spark.sql.shuffle.partitions": "2",
            "spark.task.maxFailures": "8",
            "spark.driver.bindAddress": "127.0.0.1",
            **packed,
        },
    )
    if lakes is not None:
        arguments = (spark, source, lakes)
        threading.Thread(target=keep_compacting, args=arguments, daemon=True).start()
    query = copy(spark, source, target, checkpoint, limit)
    query.awaitTermination()
    if lakes is not None:
        sys.stdin.read()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
