"""A full disk: publishers get an error, no accepted event is lost, and free space repairs it."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest
from server_harness import STRUCTURED, Consumer, event, ids


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(start, small_disk):
    """A publication that cannot be stored is refused with the reason; all others are in the log once."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000))

    async def history(port, count):
        consumer = await Consumer.open(port, "/channels/full/from/earliest")
        await consumer.connected()
        found = ids(await consumer.frames(count))
        await consumer.close()
        return found

    with start("--journal-port", "none", data_dir=small_disk / "data") as server:

        def publish(id_):
            body = json.dumps(event(id_, "x" * 60_000))
            return server.request("POST", "/channels/full", body, {"Content-Type": STRUCTURED})

        accepted = []
        while (answer := publish(str(len(accepted)))).status == 202:
            accepted.append(str(len(accepted)))
        full = server.request("GET", "/readyz")
        alive = server.request("GET", "/livez")
        ballast.unlink()
        assert publish("after").status == 202
        ready = server.request("GET", "/readyz")
        found = asyncio.run(history(server.port, len(accepted) + 1))

    assert (answer.status, answer.code) == (507, "insufficient-storage")
    assert "No space left" in answer.json["message"]
    assert (full.status, b"free some space" in full.body) == (503, True)
    assert (alive.status, ready.status) == (200, 200)
    assert found == [*accepted, "after"]
