"""
Spark over history and live: the same log, the same filter, first as a batch, then as a stream that goes on.

    python examples/spark_history_and_live.py
"""

from __future__ import annotations

import json
import tempfile
import threading

import virta
import virta.spark
from virta.filters import parse

PAID = "status=paid"


def order(number: int) -> tuple[str, str, bytes]:
    """Return an order as a record: every third one is paid."""
    data = {"total": number, "status": "paid" if number % 3 == 0 else "open"}
    event = {
        "specversion": "1.0",
        "id": str(number),
        "source": "/shop",
        "type": "order",
        "data": data,
    }
    return "orders", str(number), json.dumps(event).encode()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, virta.open(f"{directory}/log") as log:
        log.append_many([order(number) for number in range(300)])
        spark = virta.spark.session(master="local[2]")

        history = virta.spark.where(virta.spark.read(str(log.path), events=True), parse(PAID))
        print(f"history: {history.count()} paid orders")

        seen: list[str] = []
        enough = threading.Event()

        def on_batch(rows, _number) -> None:  # noqa: ANN001
            seen.extend(row.id for row in rows.select("id").collect())
            if len(seen) >= 200:
                enough.set()

        stream = spark.readStream.format("virta").option("events", "true").load(str(log.path))
        query = (
            virta.spark.where(stream, parse(PAID))
            .writeStream.foreachBatch(on_batch)
            .option("checkpointLocation", f"{directory}/checkpoint")
            .start()
        )
        log.append_many([order(number) for number in range(300, 600)])  # live, while the query runs
        enough.wait(120)
        query.stop()
        spark.stop()
        print(f"history and live: {len(seen)} paid orders, {len(set(seen))} different")


if __name__ == "__main__":
    main()
