"""A server keeps serving when another process truncates its mapped files."""

from __future__ import annotations

import json
import os
import signal

from server_harness import event

import virta


def call(server, path, body):
    return server.request(
        "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def test_truncated_maps_do_not_end_the_server(start):
    """Control page of the log and the journal's files cut to nothing: publishing, reading and jobs still work."""
    server = start()
    with server:
        server.publish("orders", event("1"))
        maps = [p for p in server.data_dir.rglob("*") if p.name in {"control", "leases"}]
        assert len(maps) >= 2, maps
        for number in range(2, 6):
            for path in maps:
                os.truncate(path, 0)
            server.publish("orders", event(str(number)))
            server.publish("mail", event(str(number)))
            assert server.request("GET", "/readyz").status == 200
            job = {"uri": f"http://h/{number}"}
            assert call(server, "/journal/jobs", job).status == 201
            taken = call(server, "/journal/jobs/next", {"domain": "h", "work_for": 60})
            assert f"http://h/{number}" in taken.body.decode()
        assert server.stop(signal.SIGTERM) == 0
    with virta.open(server.data_dir / "log") as log:
        assert log.recovered == []
        assert sum(1 for _ in log.read()) == 9
