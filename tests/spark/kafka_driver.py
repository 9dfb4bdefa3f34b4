"""
A driver for tests of Kafka: a log to a Kafka topic, that topic to another log, with statuses.

    python kafka_driver.py DIRECTORY JARS BROKER

Prints a JSON line per run: the last status of each pipeline.
"""

from __future__ import annotations

import json
import sys

from virta.spark.launch.session import session
from virta.spark.pipeline import Pipeline, Sink, Source, run


def main() -> None:
    directory, jars, broker = sys.argv[1:4]
    spark = session("kafka", "local[2]", **{"spark.jars": jars})
    servers = {"kafka.bootstrap.servers": broker}
    to_kafka = Pipeline(
        name="to-kafka",
        source=Source(log="log"),
        sinks=(Sink(kind="kafka", topic="events", options=servers),),
        directory=directory,
    )
    reading = {**servers, "subscribe": "events", "startingOffsets": "earliest"}
    from_kafka = Pipeline(
        name="from-kafka",
        source=Source(format="kafka", options=reading),
        sinks=(Sink(kind="channel", topic="copy", log="out"),),
        directory=directory,
    )
    for pipeline in (to_kafka, from_kafka, from_kafka):
        print(json.dumps(run(spark, pipeline)), flush=True)
    limited = Pipeline(
        name="limited",
        source=Source(format="kafka", options={**reading, "maxOffsetsPerTrigger": "50"}),
        sinks=(Sink(kind="channel", topic="copy", log="limited"),),
        directory=directory,
    )
    seen: list[int] = []
    run(
        spark,
        limited,
        on_progress=lambda status: seen.append(next(iter(status["queries"].values()))["lag"]),
    )
    print(json.dumps(seen), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
