"""Thorium's recorded behaviour, end to end: publish over HTTP, see what each consumer got."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from server_harness import Consumer, ids

VECTORS = Path(__file__).parent.parent / "vectors"


def load(name, expected):
    lines = (VECTORS / name).read_text().splitlines()
    return [(v["query"], v["event"], v[expected], v["id"]) for v in map(json.loads, lines)]


async def outcomes(server, vectors):
    """Open a consumer per query on one channel, publish every event, end the server, read the rest."""
    consumers = {}
    refused = {}
    for query, _, expected, name in vectors:
        if isinstance(expected, dict):
            consumer = await Consumer.open(
                server.port, f"/channels/v?{query}", expect=expected["status"]
            )
            refused[name] = json.loads(await consumer.body())
            await consumer.close()
        else:
            consumers[name] = await Consumer.open(server.port, f"/channels/v?{query}")
            await consumers[name].connected()
    events = [vector[1] for vector in vectors]
    for first in range(0, len(events), 50):
        await asyncio.to_thread(server.publish, "v", *events[first : first + 50], events[0])
    stopping = asyncio.ensure_future(asyncio.to_thread(server.stop))
    heard = {}
    for name, consumer in consumers.items():
        frames = await consumer.rest()
        assert consumer.ended
        assert frames[-1].event == "disconnect"
        assert frames[-1].retry == "2000"
        heard[name] = ids(frames)
        await consumer.close()
    assert await stopping == 0
    return heard, refused


def check(server, vectors):
    heard, refused = asyncio.run(outcomes(server, vectors))
    wrong = []
    for query, event, expected, name in vectors:
        if isinstance(expected, dict):
            if refused[name]["code"] != expected["code"]:
                wrong.append((name, query, refused[name]))
        elif heard[name].count(event["id"]) != (expected == "match"):
            wrong.append((name, query, heard[name].count(event["id"])))
    assert wrong == []


def test_all_vectors(start):
    """544 queries stand on one channel; each hears its event exactly when it should."""
    vectors = load("thorium-vectors.jsonl", "expect")
    assert len(vectors) == 544

    check(start("--durability", "none", "--thorium-compatible"), vectors)


def test_contested_vectors(start):
    """Where document and source part, the recommended side holds."""
    check(
        start("--durability", "none", "--thorium-compatible"),
        load("thorium-contested.jsonl", "recommend"),
    )
