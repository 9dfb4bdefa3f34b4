"""Captures that run beside the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time

import pytest
from server_harness import Consumer, Server

DEADLINE_S = 30


@pytest.fixture
def shop(tmp_path):
    db = sqlite3.connect(tmp_path / "shop.db")
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT)")
    db.commit()
    yield db, tmp_path
    db.close()


def started(server):
    """Return the process id of the capture, from the server's log."""
    for line in server.process.stdout:
        server.said.append(line.decode())
        if b"capture_started" in line:
            return json.loads(line)["pid"]
    raise AssertionError("".join(server.said))


def test_rows_reach_a_subscriber_and_a_killed_capture_comes_back(shop):
    """A change in the database is an event of the server; the process is restarted after SIGKILL."""
    db, folder = shop
    (folder / "virta.toml").write_text(
        f'[server]\ncdc = ["shop=sqlite:{folder}/shop.db"]\npipeline_backoff_ms = 10\n'
    )
    with Server(folder / "data", "--config", folder / "virta.toml") as server:
        pid = next(
            (json.loads(line)["pid"] for line in server.said if "capture_started" in line), None
        ) or started(server)

        async def check():
            consumer = await Consumer.open(
                server.port, "/channels/shop.main.orders?/after/status=paid"
            )
            await consumer.connected()
            db.execute("INSERT INTO orders VALUES (1, 'new'), (2, 'paid')")
            db.commit()
            assert (await consumer.frame()).json["data"]["after"] == {"id": 2, "status": "paid"}
            os.kill(pid, signal.SIGKILL)
            db.execute("UPDATE orders SET status = 'paid' WHERE id = 1")
            db.commit()
            assert (await consumer.frame()).json["data"]["after"]["id"] == 1
            await consumer.close()

        asyncio.run(check())
        deadline = time.monotonic() + DEADLINE_S
        wanted = ('virta_cdc_running{source="shop"} 1.0', 'virta_cdc_restarts{source="shop"} 1.0')
        while not all(text in server.request("GET", "/metrics").body.decode() for text in wanted):
            assert time.monotonic() < deadline

        found = server.request("GET", "/captures/shop").json
        assert {name: found[name] for name in ("name", "kind", "state", "restarts")} == {
            "name": "shop", "kind": "sqlite", "state": "running", "restarts": 1,
        }  # fmt: skip
        assert [one["name"] for one in server.request("GET", "/captures").json] == ["shop"]
        missing = server.request("GET", "/captures/other")
        assert (missing.status, missing.json["code"]) == (404, "not-found")
        assert "'other'" in missing.json["message"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["nonsense"], "it must be sqlite:FILE or postgresql://"),
        (["sqlite:a/x.db", "sqlite:b/x.db"], "two sources of cdc have the name 'x'"),
    ],
)
def test_bad_settings_are_sentences(tmp_path, texts, words):
    server = Server(tmp_path / "data", "--cdc", ",".join(texts))

    assert server.stop() == 1
    assert words in "".join(server.said)
