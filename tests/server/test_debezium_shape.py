"""The recipe of docs/cdc.md for other databases: a channel accepts what Debezium Server's HTTP sink posts."""

from __future__ import annotations

import asyncio
import json

from server_harness import Consumer, Server


def posted(number, op, before, after):
    """Return the body of one request, in the shape of `debezium.format.value=cloudevents` (Debezium 2.x and 3.x)."""
    source = {"version": "3.0.0.Final", "connector": "mysql", "name": "shop", "ts_ms": 1_700_000_000_000, "snapshot": "false",
              "db": "inventory", "table": "orders", "server_id": 1, "file": "binlog.000003", "pos": 100 + number, "row": 0}  # fmt: skip
    return {
        "id": f"name:shop;file:binlog.000003;pos:{100 + number}",
        "source": "/debezium/mysql/shop",
        "specversion": "1.0",
        "type": "io.debezium.connector.mysql.DataChangeEvent",
        "time": "2026-11-18T02:00:00.000Z",
        "datacontenttype": "application/json",
        "iodebeziumop": op,
        "iodebeziumname": "shop",
        "iodebeziumtable": "orders",
        "iodebeziumtsms": "1700000000000",
        "data": {
            "before": before,
            "after": after,
            "source": source,
            "op": op,
            "ts_ms": 1_700_000_000_001,
        },
    }


def test_changes_are_queried_by_row_and_repeats_are_dropped(tmp_path):
    """Structured CloudEvents arrive; a query selects by the row; a repeat after a restart is delivered once."""
    bodies = [
        posted(1, "c", None, {"id": 1, "status": "new"}),
        posted(2, "u", {"id": 1, "status": "new"}, {"id": 1, "status": "paid"}),
        posted(2, "u", {"id": 1, "status": "new"}, {"id": 1, "status": "paid"}),
        posted(3, "u", {"id": 1, "status": "paid"}, {"id": 1, "status": "paid", "note": "x"}),
    ]
    with Server(tmp_path) as server:

        async def check():
            consumer = await Consumer.open(
                server.port, "/channels/shop?/after/status=paid&../iodebeziumtable=orders"
            )
            await consumer.connected()
            for body in bodies:
                answer = server.request(
                    "POST", "/channels/shop", json.dumps(body), {"Content-Type": "application/cloudevents+json"}
                )  # fmt: skip
                assert answer.status == 202
            found = [(await consumer.frame()).json["id"][-3:] for _ in range(2)]
            await consumer.close()
            return found

        assert asyncio.run(check()) == ["102", "103"]
