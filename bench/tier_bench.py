"""
What shipping to object storage costs the append path, and what a reader of one topic fetches from the store.

    python bench/tier_bench.py [--records N] [--rounds N] [--url URL]

Three logs are appended to in turns, in the same run: without a shipper, with one in a thread of the same process (as
in `virta serve`), and with one in another process (`virta log ship --follow`). The ratio is rate with / rate without.
The store is a directory unless `--url` names another one (s3://bucket/prefix); shippers upload every 100 ms.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import virta
from virta.tier.background import BackgroundShipper
from virta.tier.store import TierStore

INTERVAL_MS = 100
SEGMENT_BYTES = 16 * 1024 * 1024
VALUE = bytes(range(128))
KINDS = ("none", "thread", "process")


def append(log: virta.log.Log, records: int, batch: int) -> tuple[float, float]:
    """Append and return (records/s, CPU µs a record of this process)."""
    rows = [("events", b"0123456789abcdef", VALUE)] * batch
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(0, records, batch):
        log.append_many(rows)
    spent = time.perf_counter() - begun
    return records / spent, (time.process_time() - cpu) / records * 1e6


def measure(kind: str, folder: Path, url: str, options: dict[str, str], records: int, batch: int) -> tuple[float, float]:  # fmt: skip
    path = folder / "log"
    with virta.open(path, segment_bytes=SEGMENT_BYTES, **options) as log:  # type: ignore[arg-type]
        log.append("events", b"", b"first")
        shipper, child = None, None
        if kind == "thread":
            shipper = BackgroundShipper(log, url, interval_s=INTERVAL_MS / 1000)
            shipper.start()
        elif kind == "process":
            command = [sys.executable, "-m", "virta", "log", "ship", str(path), url]
            child = subprocess.Popen(
                [*command, "--follow", "--interval-ms", str(INTERVAL_MS)],
                stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert child.stderr is not None
            child.stderr.readline()  # it is at work
        result = append(log, records, batch)
        if shipper is not None:
            shipper.stop(60)
            assert shipper.status().lag == 0, shipper.status()
        if child is not None:
            child.terminate()
            child.wait(60)
    shutil.rmtree(path)
    return result


def shipping(folder: Path, url: str, records: int, rounds: int) -> None:
    for batch, options in (
        (100, {"durability": "none"}),
        (100, {"durability": "group"}),
        (100, {"durability": "none", "compression": "zstd"}),
        (1, {"durability": "none"}),
    ):
        count = records if batch > 1 else records // 10
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            for kind in KINDS:
                place = f"{url}/{batch}-{'-'.join(options.values())}-{kind}-{number}"
                found[kind].append(measure(kind, folder, place, options, count, batch))
        print(f"append, batches of {batch}, {', '.join(options.values())}, {count:,} records")
        base = statistics.median(rate for rate, _ in found["none"])
        for kind, rows in found.items():
            rate = statistics.median(rate for rate, _ in rows)
            cpu = statistics.median(cpu for _, cpu in rows)
            name = {"none": "no shipper", "thread": "shipper in a thread", "process": "in another process"}[kind]  # fmt: skip
            print(f"  {name:20} {rate:12,.0f}/s  {rate / base:5.2f} x  {cpu:6.2f} CPU µs a record")


def topics(folder: Path, url: str, records: int) -> None:
    """Read a topic with 10 events among 1,000 topics from the store, and count what is fetched."""
    from virta.tier import Shipper  # noqa: PLC0415

    place = f"{url}/topics"
    path = folder / "topics"
    with virta.open(path, segment_bytes=SEGMENT_BYTES // 8, durability="none") as log:
        for first in range(0, records, 100):
            rows = [(f"t{(first + n * 7) % 1000}", b"", VALUE) for n in range(100)]
            if first % (records // 10) < 100:
                rows[0] = ("quiet", b"", VALUE)
            log.append_many(rows)
        with Shipper(log, TierStore(place)) as shipper:
            shipper.ship()
        total = log.bytes
    seen: list[int] = []
    for name in ("read", "read_ranges", "stream"):
        _count(name, seen)
    for what, topic in (("one quiet topic", "quiet"), ("the same again", "quiet"), ("everything", None)):  # fmt: skip
        seen.clear()
        if what != "the same again":
            shipped = virta.open(place)
        begun = time.perf_counter()
        got = sum(record.topic == b"quiet" for record in shipped.read(topic))
        spent = time.perf_counter() - begun
        assert got == 10, got
        print(f"  {what:20} {spent * 1e3:10.1f} ms  {sum(seen) / 1e6:8.2f} of {total / 1e6:.0f} MB fetched")  # fmt: skip


def _count(name: str, seen: list[int]) -> None:
    real = getattr(TierStore, name)

    def counted(self: TierStore, *arguments: object) -> object:
        found = real(self, *arguments)
        pieces = [found] if isinstance(found, bytes) else list(found)
        seen.append(sum(map(len, pieces)))
        return found if isinstance(found, bytes) else pieces

    setattr(TierStore, name, counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="a store; default: a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.url or f"file://{folder}/store"
        shipping(Path(folder), url, options.records, options.rounds)
        print(f"reading from the store, {options.records:,} records, 1,000 topics")
        topics(Path(folder), url, options.records)


if __name__ == "__main__":
    main()
