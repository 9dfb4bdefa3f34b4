"""`virta top` against a running server."""

from __future__ import annotations

import json
import subprocess
import sys

from server_harness import Server, event


def top(*arguments):
    command = [sys.executable, "-m", "virta", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def test_one_sample_as_text_and_json(tmp_path):
    """The figures of /stats, readable and as JSON."""
    with Server(tmp_path / "data", "--durability", "none") as server:
        server.publish("orders", event("1"))
        url = f"http://127.0.0.1:{server.port}"
        while server.request("GET", "/stats").json["now"]["nextOffset"] == 0:
            pass  # the next sample is at most a second away
        text, data = top("--url", url), top("--url", url, "--json", "--once")

    assert "events in" in text.stdout
    assert "next offset 1" in text.stdout
    assert json.loads(data.stdout)["nextOffset"] == 1


def test_a_server_that_is_not_there():
    """One line says what is wrong."""
    done = top("--url", "http://127.0.0.1:9")

    assert done.returncode == 1
    assert "does not answer" in done.stderr
