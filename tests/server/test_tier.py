"""A server that ships its log to object storage."""

from __future__ import annotations

import asyncio
import re

import pytest
from server_harness import Consumer, Server, event

import virta
from waiting import wait_until

pytest.importorskip("obstore", reason="object storage needs obstore")


def metric(server, name):
    text = server.request("GET", "/metrics").body.decode()
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


async def replay(server, count):
    consumer = await Consumer.open(server.port, "/channels/orders/from/earliest")
    await consumer.connected()
    frames = await consumer.frames(count)
    await consumer.close()
    return frames


def test_a_server_ships_and_replays_from_the_store(tmp_path):
    """After retention has removed local segments, a consumer still gets everything from the beginning."""
    url = f"file://{tmp_path}/store"
    with virta.open(tmp_path / "data" / "log", segment_bytes=4096):
        pass
    (tmp_path / "virta.toml").write_text(f'[log.tier]\nurl = "{url}"\ninterval_ms = 10\n')
    with Server(tmp_path / "data", "--config", tmp_path / "virta.toml") as server:
        for number in range(60):
            server.publish("orders", event(str(number), source="/shop", data={"n": number}))
        wait_until(lambda: metric(server, "virta_tier_lag_records") == 0, "shipping")
        assert metric(server, "virta_tier_shipped_offset") == 60
        assert metric(server, "virta_tier_failing") == 0
        health = server.request("GET", "/health").json
        assert health["tier"] == {"url": url, "shippedOffset": 60, "pendingRecords": 0, "pendingBytes": 0, "problem": None}  # fmt: skip
        assert [c["state"] for c in health["checks"] if c["name"] == "tier"] == ["ok"]
        with virta.open(tmp_path / "data" / "log") as log:
            assert log.retain(max_bytes=0).first_offset > 0

        frames = asyncio.run(replay(server, 60))

        assert [frame.json["data"]["n"] for frame in frames] == list(range(60))
    with virta.open(url) as shipped:
        assert shipped.next_offset == 60


def test_an_unusable_url_stops_the_start(tmp_path):
    server = Server(tmp_path / "data", "--tier-url", "ftp://somewhere")

    server.stop()
    assert server.process.returncode != 0
    assert "is not the URL of a store" in "".join(server.said)
