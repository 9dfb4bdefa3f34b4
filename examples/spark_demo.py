"""A log, some orders, and what Spark makes of them: filters, windows, and results back in the log."""

from __future__ import annotations

import json
import random
import tempfile

import virta
import virta.spark
from virta.filters import parse
from virta.spark.pipeline.model import Aggregate, Pipeline, Sink, Source
from virta.spark.pipeline.runner import run


def main() -> None:
    rng = random.Random(1)  # noqa: S311 - an example needs no secrets
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/log"
        with virta.open(path) as log:
            for number in range(1000):
                event = {
                    "specversion": "1.0",
                    "id": str(number),
                    "source": "/shop",
                    "type": "order",
                    "data": {
                        "city": rng.choice(["Oslo", "Rome"]),
                        "total": rng.randrange(500),
                        "status": rng.choice(["open", "paid"]),
                    },
                }
                log.append("orders", "", json.dumps(event).encode())

        spark = virta.spark.session(master="local[2]")
        events = virta.spark.read(path, events=True)
        dear = virta.spark.where(events, parse("status=paid&total=>450"))
        print(f"{dear.count()} paid orders over 450")

        run(
            spark,
            Pipeline(
                name="per-city",
                source=Source(log=path, topics=("orders",)),
                columns={"city": "variant_get(data, '$.city', 'string')"},
                aggregate=Aggregate(
                    window="1 hour", by=("city",), mode="update", aggregates={"orders": "count(*)"}
                ),
                sinks=(Sink(kind="channel", topic="orders.per-city"),),
                directory=directory,
            ),
        )
        with virta.open(path, read_only=True) as log:
            for record in log.read("orders.per-city"):
                print(record.offset, json.loads(record.value)["data"])
        spark.stop()


if __name__ == "__main__":
    main()
