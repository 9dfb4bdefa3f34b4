"""
A driver of its own: copies a log to another as a stream, until its input is used up.

    python copy_driver.py MASTER IN OUT CHECKPOINT RECORDS_PER_TRIGGER [LAKES]

IN is a directory or a URL. With VIRTA_TEST_ANSWERS=FILE the answers of bounded queries over IN are written there
before the stream starts: all ids, those that pass a filter, and the pairs that `match_log` finds; with
VIRTA_TEST_HIDDEN=LOG also why a large write to that log, which executors do not see, fails. With VIRTA_TEST_LOCAL=LOG
the queries run over that directory, too, and a second stream copies it to OUT-local. Once there is a directory LAKES
it compacts the log into one lake after the other there, beside the stream and after it, until its standard input ends.
An environment.tar.gz in the working directory is what executors run.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

import virta.spark
from virta.filters import parse
from virta.spark.lake import compact
from virta.spark.launch.session import use_packed_python


def keep_compacting(source, lakes):
    while not Path(lakes).is_dir():
        threading.Event().wait(0.02)
    for number in itertools.count():
        compact(source, f"{lakes}/{os.getpid()}-{number}")


FILTERS = {
    "paid": parse("ok=true&n=>50"),
    "typed": parse("type = 'order.paid' AND source = '/shop/1'", "cesql"),
    "none": parse("user=nobody"),
}


def answers(spark, source):
    """Return what bounded queries over a log find."""
    events = virta.spark.read(source, spark=spark, events=True, split_bytes=65536)
    kept = virta.spark.where(events, parse({"range": {"n": {"gte": 50}}}, "koncorde"))
    pairs = virta.spark.match_log(
        source, FILTERS, spark=spark, columns="offset long, filter_id string"
    )
    return {
        "batch": sorted([row.offset, row.id] for row in events.select("offset", "id").collect()),
        "where": sorted(row.id for row in kept.select("id").collect()),
        "match": sorted([row.offset, row.filter_id] for row in pairs.collect()),
    }


def refusal(spark, log):
    """Return why a task with over 256 KiB of rows cannot be written to a log."""
    rows = spark.range(0, 1000, numPartitions=1).select(F.repeat(F.lit("x"), 1000).alias("value"))
    try:
        rows.write.format("virta").option("topic", "t").mode("append").save(log)
    except PySparkException as error:
        return str(error)
    return None


def write_answers(spark, source, path):
    """Write what is found over the log, and over a local one."""
    found = {"source": answers(spark, source)}
    if local := os.environ.get("VIRTA_TEST_LOCAL"):
        found["local"] = answers(spark, local)
    if hidden := os.environ.get("VIRTA_TEST_HIDDEN"):
        found["refusal"] = refusal(spark, hidden)
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps(found))
    draft.replace(path)


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
        threading.Thread(target=keep_compacting, args=(source, lakes), daemon=True).start()
    if path := os.environ.get("VIRTA_TEST_ANSWERS"):
        write_answers(spark, source, path)
    copy(spark, source, target, checkpoint, limit).awaitTermination()
    if local := os.environ.get("VIRTA_TEST_LOCAL"):
        copy(spark, local, f"{target}-local", f"{checkpoint}-local", limit).awaitTermination()
    if lakes is not None:
        sys.stdin.read()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
