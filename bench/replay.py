"""
Replay: records a second of CPU time that one consumer's history takes, by filter.

    python bench/replay.py [--records 200000] [--rounds 3]

A log of small CloudEvents is replayed to a subscription that only counts its bytes, as the server replays it to a
consumer that resumes: read in pieces in a thread, filtered, encoded as server-sent events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import virta.log
from virta.filters import parse
from virta.hub.hub import Hub
from virta.hub.idempotency import Idempotency
from virta.hub.resume.replay import Replayer
from virta.hub.subscription import ChannelSubscription

BATCH = 1000
KINDS = 100
FILTERS = {
    "everything": ("", "query-string"),
    "1 in 100, query string": ("kind=7", "query-string"),
    "1 in 100, CESQL": ("type = 'com.example.kind7'", "cesql"),
    "1 in 100, CloudEvents": ([{"exact": {"type": "com.example.kind7"}}], "cloudevents"),
    "1 in 100, Koncorde": ({"equals": {"kind": 7}}, "koncorde"),
    "none, Koncorde": ({"equals": {"kind": KINDS}}, "koncorde"),
}


class Counting:
    """A sink that counts."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, payload: bytes) -> None:
        self.bytes += len(payload)

    def end(self, reason: str) -> None:
        raise AssertionError(reason)


def event(number: int) -> bytes:
    return json.dumps(
        {
            "specversion": "1.0",
            "id": f"id-{number}",
            "source": "//bench.example/replay",
            "type": f"com.example.kind{number % KINDS}",
            "time": "2026-01-01T00:00:00Z",
            "data": {"kind": number % KINDS, "number": number, "text": "x" * 120},
        }
    ).encode()


async def replay(log: virta.log.Log, source: object, dialect: str) -> tuple[float, int]:
    hub = Hub(position=log.next_offset)
    sink = Counting()
    with ThreadPoolExecutor(4) as executor:
        table = Idempotency(keys_max=1, horizon_s=1.0)
        replayer = Replayer(hub, log, table, executor)
        subscription = ChannelSubscription("1-0", "c", parse(source, dialect), sink)
        began = time.process_time()
        await replayer.run(
            subscription,
            replayer.at("earliest"),
            drained=lambda: None,
            report_gap=lambda gap, _: print("gap", gap),
        )
        return time.process_time() - began, sink.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="virta-replay-") as directory:
        log = virta.log.open(Path(directory) / "log", durability="none")
        for first in range(0, options.records, BATCH):
            numbers = range(first, min(first + BATCH, options.records))
            log.append_many([("c", b"", event(n)) for n in numbers])
        results = {}
        for name, (source, dialect) in FILTERS.items():
            taken = [asyncio.run(replay(log, source, dialect)) for _ in range(options.rounds)]
            best = min(seconds for seconds, _ in taken)
            results[name] = options.records / best
            print(
                f"{name:<24} {results[name]:>10,.0f} records/s, {taken[0][1]:,} bytes", flush=True
            )
        log.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
