"""`Client.live`, `AsyncClient.live` and `virta live` against a real server, through a restart."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

from server_harness import Server

from virta.cli.operating.live import table_lines
from virta.client import AsyncClient, Client


def event(id_, key, **data):
    return {"specversion": "1.0", "id": str(id_), "source": "/s", "type": "order", "subject": key, "data": data}  # fmt: skip


def until(rows, kind):
    for change in rows:
        if change.kind == kind:
            return change
    raise AssertionError(f"the view ended before {kind}")


def test_rows_stay_current_through_a_kill(tmp_path):
    server = Server(tmp_path)
    port = server.port
    with server, Client(f"http://127.0.0.1:{port}") as client:
        server.publish("orders", event(1, "a", status="paid"))
        rows = client.live("orders", "status=paid")
        until(rows, "live")
        assert list(rows.rows) == ["a"]
        server.stop(signal.SIGKILL)
        with Server(tmp_path, "--server-port", port) as again:
            again.publish("orders", event(2, "a", status="new"))
            again.publish("orders", event(3, "b", status="paid"))
            assert until(rows, "leave").reason == "changed"
            until(rows, "enter")
            assert {key: row["data"]["status"] for key, row in rows.rows.items()} == {"b": "paid"}
            rows.close()


def test_the_asynchronous_client_and_aggregates(tmp_path):
    async def run(server):
        async with AsyncClient(f"http://127.0.0.1:{server.port}") as client:
            await client.publish("orders", event(1, "a", country="FI", total=2))
            async with client.live(
                "orders", select="count,sum(/data/total)", group="/data/country"
            ) as rows:
                async for change in rows:
                    if change.kind == "live":
                        break
                assert rows.groups == {"FI": {"group": "FI", "count": 1, "sum": 2}}
                await client.publish("orders", event(2, "a", country="SE", total=3))
                async for change in rows:
                    if change.kind == "aggregate":
                        break
                assert rows.groups == {"SE": {"group": "SE", "count": 1, "sum": 3}}

    with Server(tmp_path) as server:
        asyncio.run(asyncio.wait_for(run(server), 30))


def test_virta_live_prints_frames(tmp_path):
    with Server(tmp_path) as server:
        server.publish("orders", event(1, "a", status="paid"))
        url = f"http://127.0.0.1:{server.port}"
        command = [
            sys.executable,
            "-m",
            "virta",
            "live",
            "orders",
            "status=paid",
            "--once",
            "--url",
            url,
        ]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        assert [json.loads(line)["frame"] for line in out.splitlines()] == [
            "snapshot",
            "row",
            "live",
        ]
        refused = subprocess.run(
            [*command, "--key", "x"], capture_output=True, text=True, timeout=30, check=False
        )
        assert refused.returncode == 1
        assert "JSON pointer" in refused.stderr


def test_the_table_is_aligned():
    lines = table_lines({"b": {"data": {"n": 10}}, "a": {"data": {"n": 2, "t": "x\x1b"}}}, {})
    assert lines == ["key  n   t", "a    2   x\ufffd", "b    10"]
