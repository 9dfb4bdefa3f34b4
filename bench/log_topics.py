"""
One channel among many, and compression: what topic indexes save, and what zstd costs.

    python bench/log_topics.py [--full]

Two logs are written: `many` with all channels, and `alone` with the records of the one quiet channel only.
"resume" reads that channel from the start; the ratio against `alone` is the price of the others' traffic.
--full writes 10M records (2 GB); the default is 1M.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import virta
from virta.log.format import topic_lookup

CHANNELS = 10_000
EVENTS = 10
BATCH = 100
ROUNDS = 30
QUIET = "quiet"
VALUE = (
    b'{"specversion":"1.0","id":"%d","source":"/shop/7","type":"order.paid",'
    b'"data":{"customer":"c%d","total":%d,"currency":"EUR"}}'
)


def value(rng: random.Random, number: int) -> bytes:
    return VALUE % (number, rng.randrange(100_000), rng.randrange(10_000))


def write(folder: Path, records: int) -> None:
    """Write `many`, with EVENTS records of the quiet channel spread over it, and `alone`."""
    rng = random.Random(1)
    every = records // EVENTS
    with (
        virta.open(folder / "many", durability="none") as many,
        virta.open(folder / "alone", durability="none") as alone,
    ):
        for first in range(0, records, BATCH):
            batch = [
                (f"channel-{rng.randrange(CHANNELS)}", b"", value(rng, first + n))
                for n in range(BATCH)
            ]
            if first % every < BATCH:
                batch[0] = (QUIET, b"", batch[0][2])
                alone.append(*batch[0])
            many.append_many(batch)
        many.flush()
        alone.flush()


def measure(log: virta.log.Log, topic: str | None, rounds: int) -> tuple[float, int]:
    """Return the median time of a read in µs, and its records."""
    times, count = [], 0
    for _ in range(rounds):
        begun = time.perf_counter()
        count = sum(1 for record in log.read(topic) if record.topic == QUIET)
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times), count


def resume(folder: Path, records: int) -> None:
    print(
        f"one channel with {EVENTS} of {records:,} records, {CHANNELS:,} channels, batches of {BATCH}"
    )
    with virta.open(folder / "alone") as alone, virta.open(folder / "many") as many:
        size = sum(file.stat().st_size for file in (folder / "many").glob("*.ptix"))
        print(f"  {len(many.segments())} segments, {many.bytes / 1e6:,.0f} MB,"
              f" topic indexes {size / 1e6:,.1f} MB ({100 * size / many.bytes:.1f} %)")  # fmt: skip
        lone, found = measure(alone, QUIET, ROUNDS)
        assert found == EVENTS, found
        first, _ = measure(many, QUIET, 1)
        second, _ = measure(many, QUIET, 1)
        warm, found = measure(many, QUIET, ROUNDS)
        assert found == EVENTS, found
        full, found = measure(many, None, 1)
        assert found == EVENTS, found
        topic_lookup.TOPIC_LOOKUPS_MAX = 0
        scan, found = measure(many, QUIET, 3)
        assert found == EVENTS, found
        topic_lookup.TOPIC_LOOKUPS_MAX = 256
    for name, us in (
        ("alone: the channel in a log of its own", lone),
        ("many, with indexes", warm),
        ("many, first read of a handle (the active segment is read in order)", first),
        ("many, second read (the active segment's topics are collected)", second),
        ("many, without indexes (filter over all batches)", scan),
        ("many, full read", full),
    ):
        print(f"  {us:14,.0f} µs  {us / lone:10,.1f} x  {name}")
    print(
        f"  resume of one channel among the others / alone: {warm / lone:.2f} (target: at most 3)"
    )


def compression(folder: Path, records: int) -> None:
    print(f"compression, {records:,} JSON events of about {len(value(random.Random(1), 1))} bytes")
    rng = random.Random(2)
    events = [("events", b"0123456789abcdef", value(rng, n)) for n in range(1000)]
    for size in (1, 100, 1000):
        rates: dict[str, tuple[float, float, float]] = {}
        for kind in ("none", "zstd"):
            path = folder / f"c-{kind}-{size}"
            count = min(records, 20_000) if size == 1 else records
            with virta.open(path, durability="none", compression=kind) as log:  # type: ignore[arg-type]
                begun = time.perf_counter()
                for first in range(0, count, size):
                    at = first % 1000
                    log.append_many(events[at : at + size])
                append = count / (time.perf_counter() - begun)
                log.flush()
                begun = time.perf_counter()
                seen = sum(len(batch) for batch in log.read().batches())
                consume = seen / (time.perf_counter() - begun)
                assert seen == count, seen
                rates[kind] = append, consume, log.bytes / count
            shutil.rmtree(path)
        for kind, (append, consume, per_record) in rates.items():
            ratios = [a / b for a, b in zip(rates[kind], rates["none"], strict=True)]
            print(f"  batches of {size:4}  {kind:4}  append {append:12,.0f}/s ({ratios[0]:.2f} x)"
                  f"  consume {consume:12,.0f}/s ({ratios[1]:.2f} x)"
                  f"  {per_record:6.1f} bytes a record ({ratios[2]:.2f} x)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--full", action="store_true", help="10M records instead of 1M")
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    options = parser.parse_args()
    records = 10_000_000 if options.full else 1_000_000
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        begun = time.perf_counter()
        write(Path(folder), records)
        print(f"written in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        resume(Path(folder), records)
        compression(Path(folder), min(records, 300_000))
    os.sync()


if __name__ == "__main__":
    main()
