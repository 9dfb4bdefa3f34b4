"""
Memory while following: a writer appends, a follower reads, both report their resident size.

    python bench/log_soak.py [--seconds 60] [--rate 2000] [--max-slope 64]

The log rolls over and old segments are dropped meanwhile, as in service. Printed at the end: the slope of
the resident size over the time after the first fifth (warm-up). Exit code 1 when it is over --max-slope KiB/min.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import virta

fork = multiprocessing.get_context("fork")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
SEGMENT_BYTES = 8 * 1024 * 1024
KEEP_BYTES = 32 * 1024 * 1024
BATCH = 10
SAMPLES_MAX = 3600


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB


class Sampler:
    """The resident size at even intervals, never more than SAMPLES_MAX of them."""

    def __init__(self, seconds: float):
        self.step = max(seconds / SAMPLES_MAX, 0.5)
        self.begun = self.due = time.monotonic()
        self.samples: list[tuple[float, int]] = []

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self.due:
            self.due = now + self.step
            self.samples.append((now - self.begun, resident_kib()))


def write(path: Path, seconds: float, rate: int, pipe) -> None:
    sample = Sampler(seconds)
    count = 0
    with virta.open(path, segment_bytes=SEGMENT_BYTES, durability="interval") as log:
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            log.append_many([("events", b"0123456789abcdef", b"v" * 273)] * BATCH)
            count += BATCH
            if count % 10_000 == 0:
                log.retain(max_bytes=KEEP_BYTES)
            sample()
            time.sleep(max(0.0, begun + count / rate - time.monotonic()))
        log.append("end", b"", b"")
    pipe.send((count, sample.samples))


def follow(path: Path, seconds: float, pipe) -> None:
    sample = Sampler(seconds)
    count = 0
    with (
        virta.open(path, read_only=True, visibility="committed") as log,
        log.read(follow=True) as reader,
    ):
        for record in reader:
            if record.topic == "end":
                break
            count += 1
            if count % 100 == 0:
                sample()
    pipe.send((count, sample.samples))


def slope(samples: list[tuple[float, int]], seconds: float) -> float:
    """Least squares through the samples after the warm-up, in KiB per minute."""
    late = [(t / 60, kib) for t, kib in samples if t >= seconds / 5]
    if len(late) < 3:
        return 0.0
    mean_t = sum(t for t, _ in late) / len(late)
    mean_k = sum(k for _, k in late) / len(late)
    spread = sum((t - mean_t) ** 2 for t, _ in late)
    return sum((t - mean_t) * (k - mean_k) for t, k in late) / spread


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=int, default=2000, help="records per second")
    parser.add_argument(
        "--max-slope", type=float, default=64, help="KiB per minute that still count as flat"
    )
    parser.add_argument("--dir", default="/var/tmp")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="virta-soak-", dir=args.dir))
    try:
        virta.open(place / "log", segment_bytes=SEGMENT_BYTES).close()
        ends = {}
        children = []
        for name, work, extra in (("follower", follow, ()), ("writer", write, (args.rate,))):
            ours, theirs = fork.Pipe(duplex=False)
            child = fork.Process(target=work, args=(place / "log", args.seconds, *extra, theirs))
            child.start()
            ends[name] = ours
            children.append(child)
        found = {name: pipe.recv() for name, pipe in ends.items()}
        for child in children:
            child.join()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    steep = False
    for name, (count, samples) in found.items():
        rise = slope(samples, args.seconds)
        steep |= rise > args.max_slope
        sizes = [kib for _, kib in samples]
        print(
            f"{name:9} {count:9} records  resident {sizes[0] / 1024:.1f} to {sizes[-1] / 1024:.1f} MiB"
            f" (most {max(sizes) / 1024:.1f})  slope {rise:+.1f} KiB/min"
        )
    print("memory is flat" if not steep else f"memory grows by more than {args.max_slope} KiB/min")
    return 1 if steep or found["writer"][0] != found["follower"][0] else 0


if __name__ == "__main__":
    sys.exit(main())
