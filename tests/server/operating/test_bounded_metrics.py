"""Figures stay bounded, whatever clients name."""

from __future__ import annotations

import json
import uuid
from http.client import HTTPConnection

from server_harness import event

from virta.hub.publisher import COUNTED_CHANNELS_MAX, PublishFigures


def series(server):
    lines = server.request("GET", "/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def test_clients_make_no_series(start):
    """Channels, queries, paths, domains, ids and filters of clients are no labels."""
    server = start("--durability", "none")
    server.publish("a", event("0"))
    server.request("GET", "/none")
    before = series(server)
    streams = []
    for number in range(40):
        name = uuid.uuid4().hex
        server.publish(name, event(name) | {"type": name})
        server.request("GET", f"/{name}")
        server.request("DELETE", f"/subscribers/{name}")
        body = json.dumps({"equals": {name: number}})
        assert server.request("POST", f"/filters/{name}/c", body).status < 300
        job = json.dumps({"uri": f"mail://{name}/1"})
        assert server.request("POST", "/journal/jobs", job).status < 300
        stream = HTTPConnection("127.0.0.1", server.port)
        stream.request("GET", f"/channels/{name}?{name}={number}")
        assert stream.getresponse().status == 200
        streams.append(stream)
    after = series(server)
    for stream in streams:
        stream.close()

    assert len(before) > 50
    assert after == before


def test_counts_by_channel_are_bounded():
    """Channels beyond the limit are not counted apart; known ones go on."""
    figures = PublishFigures()
    for number in range(COUNTED_CHANNELS_MAX + 50):
        figures.count(f"c{number}", 1)
    figures.count("c0", 4)

    assert len(figures.by_channel) == COUNTED_CHANNELS_MAX
    assert figures.by_channel["c0"] == 5
    assert f"c{COUNTED_CHANNELS_MAX}" not in figures.by_channel
