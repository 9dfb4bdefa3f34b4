"""Logs for the tests of this directory: random events, written by the log itself."""

from __future__ import annotations

import json
import random

import virta

SEGMENT_BYTES = 64 * 1024


def make_event(rng, number):
    data = {
        "n": rng.randrange(100),
        "price": rng.choice([1.5, 2, 99.25]),
        "user": f"u{rng.randrange(20)}",
        "ok": rng.random() < 0.5,
        "tags": rng.sample(["red", "green", "blue"], rng.randrange(3)),
        "deep": {"city": rng.choice(["Oslo", "Rome", None])},
    }
    return {
        "specversion": "1.0",
        "id": str(number),
        "source": f"/shop/{rng.randrange(3)}",
        "type": rng.choice(["order.made", "order.paid", "user.seen"]),
        "time": f"2026-01-01T00:{rng.randrange(60):02d}:{rng.randrange(60):02d}Z",
        "data": data,
    }


def fill(
    path, count=500, *, seed=1, segment_bytes=SEGMENT_BYTES, topics=("orders", "users"), first=0
):
    """Append random events in batches of random size; returns the events."""
    rng = random.Random(seed)
    events = [make_event(rng, first + i) for i in range(count)]
    with virta.open(path, segment_bytes=segment_bytes, durability="interval") as log:
        at = 0
        while at < count:
            size = rng.choice([1, 3, 20])
            log.append_many(
                [
                    (rng.choice(topics), e["data"]["user"], json.dumps(e).encode())
                    for e in events[at : at + size]
                ]
            )
            at += size
    return events


def read_log(path, topics=None):
    with virta.open(path, create=False, read_only=True) as log:
        return list(log.read(topics))
