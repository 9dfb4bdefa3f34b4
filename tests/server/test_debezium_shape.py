"""The recipe of docs/cdc.md for other databases: a channel accepts what Debezium Server's HTTP sink posts."""

from __future__ import annotations

import asyncio
import json

from server_harness import Consumer, Server


def posted(pos, op, before, after):
    """Return the body of one request as Debezium Server 3.6.0 sent it for MariaDB; its `id` is the position only."""
    source = {"version": "3.6.0.Final", "connector": "mariadb", "name": "shop", "ts_ms": 1795114497000, "snapshot": "false",
              "db": "inventory", "sequence": None, "table": "orders", "server_id": 223344, "gtid": None,
              "file": "mysql-bin.000001", "pos": pos, "row": 0}  # fmt: skip
    return {
        "id": f"name:shop;file:mysql-bin.000001;pos:{pos}",
        "source": "/debezium/mariadb/shop",
        "specversion": "1.0",
        "type": "io.debezium.connector.mariadb.DataChangeEvent",
        "time": "2026-11-19T18:54:57.000Z",
        "datacontenttype": "application/json",
        "iodebeziumop": op,
        "iodebeziumname": "shop",
        "iodebeziumtable": "orders",
        "iodebeziumrow": 0,
        "iodebeziumgtid": None,
        "iodebeziumtxid": None,
        "data": {
            "before": before,
            "after": after,
            "source": source,
            "op": op,
            "ts_ms": 1795114497001,
            "transaction": None,
        },
    }


def row(id_, status, total="1.00"):
    return {"id": id_, "status": status, "total": total}


# The first read of two rows, an update, one INSERT of three rows, one UPDATE of two, and a delete.
BODIES = [
    posted(1744, "r", None, row(1, "new", "9.50")),
    posted(1744, "r", None, row(2, "new")),
    posted(1911, "u", row(1, "new", "9.50"), row(1, "paid", "9.50")),
    posted(2191, "c", None, row(3, "new")),
    posted(2191, "c", None, row(4, "paid")),
    posted(2191, "c", None, row(5, "new")),
    posted(2453, "u", row(3, "new"), row(3, "paid")),
    posted(2453, "u", row(4, "paid"), row(4, "sent")),
    posted(2814, "d", row(2, "new"), None),
]


def post(server):
    for body in BODIES:
        answer = server.request(
            "POST", "/channels/shop", json.dumps(body), {"Content-Type": "application/cloudevents+json"}
        )  # fmt: skip
        assert answer.status == 202


def test_every_row_arrives(tmp_path):
    """With the flag of the recipe, rows with one `id` are all delivered; a live view has the rows of the table."""
    with Server(tmp_path, "--idempotency-expiration-ms", "0") as server:

        async def check():
            consumer = await Consumer.open(
                server.port, "/channels/shop?/after/status=paid&../iodebeziumtable=orders"
            )
            await consumer.connected()
            post(server)
            found = [(await consumer.frame()).json["data"]["after"]["id"] for _ in range(3)]
            await consumer.close()
            return found

        assert asyncio.run(check()) == [1, 4, 3]
        rows = server.request("GET", "/channels/shop/rows?$key=/data/id").json["rows"]
        assert {one["key"]: one["event"]["data"]["status"] for one in rows} == {
            "1": "paid",
            "3": "paid",
            "4": "sent",
            "5": "new",
        }
        post(server)  # once more, as after a restart of Debezium
        again = server.request("GET", "/channels/shop/rows?$key=/data/id").json["rows"]
        assert [one["event"]["data"] for one in again] == [one["event"]["data"] for one in rows]


def test_rows_with_one_id_are_repeats_otherwise(tmp_path):
    """Why the recipe needs the flag."""
    with Server(tmp_path) as server:
        post(server)
        (channel,) = server.request("GET", "/channels").json["channels"]
        assert (channel["name"], channel["records"]) == ("shop", 5)
