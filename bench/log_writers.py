"""Many processes on one log: throughput of four producers, and group commit with one to sixteen writers."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path

import virta

fork = multiprocessing.get_context("fork")
VALUE = b"v" * 265


def producer(path: Path, number: int, records: int, size: int, barrier) -> None:
    with virta.open(path, durability="none") as log:
        barrier.wait()
        for start in range(0, records, size):
            log.append_many(
                [
                    ("events", b"%016d" % number, i.to_bytes(8, "big") + VALUE)
                    for i in range(start, start + size)
                ]
            )
        barrier.wait()


def writer(path: Path, seconds: float, barrier, pipe) -> None:
    delays = []
    with virta.open(path, durability="group") as log:
        barrier.wait()
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            log.append("events", b"0123456789abcdef", VALUE)
            delays.append(time.perf_counter() - now)
    pipe.send(delays)


def check(path: Path, processes: int, records: int) -> None:
    """Every record once, each producer's in its order."""
    expected = dict.fromkeys(range(processes), 0)
    with virta.open(path, read_only=True, visibility="committed") as log:
        for record in log.read():
            number = int(record.key)
            assert int.from_bytes(record.value[:8], "big") == expected[number]
            expected[number] += 1
    assert set(expected.values()) == {records}


def produce(parent: Path, processes: int, records: int, size: int) -> float:
    place = Path(tempfile.mkdtemp(prefix="virta-bench-", dir=parent))
    try:
        virta.open(place / "log", durability="none").close()
        barrier = fork.Barrier(processes + 1)
        children = [
            fork.Process(target=producer, args=(place / "log", n, records, size, barrier))
            for n in range(processes)
        ]
        for child in children:
            child.start()
        barrier.wait()
        begun = time.perf_counter()
        barrier.wait()
        rate = processes * records / (time.perf_counter() - begun)
        for child in children:
            child.join()
        check(place / "log", processes, records)
        return rate
    finally:
        shutil.rmtree(place)


def commit(parent: Path, processes: int, seconds: float) -> tuple[float, float, float]:
    """Durable single appends/s of all writers together, and p50 and p99 of one append in ms."""
    place = Path(tempfile.mkdtemp(prefix="virta-bench-", dir=parent))
    try:
        virta.open(place / "log").close()
        barrier = fork.Barrier(processes)
        pipes, children = [], []
        for _ in range(processes):
            ours, theirs = fork.Pipe(duplex=False)
            child = fork.Process(target=writer, args=(place / "log", seconds, barrier, theirs))
            child.start()
            pipes.append(ours)
            children.append(child)
        delays = sorted(d for pipe in pipes for d in pipe.recv())
        for child in children:
            child.join()
        return (
            len(delays) / seconds,
            delays[len(delays) // 2] * 1e3,
            delays[len(delays) * 99 // 100] * 1e3,
        )
    finally:
        shutil.rmtree(place)


def run(parent: Path, *, quick: bool) -> dict:
    records = 20_000 if quick else 100_000
    seconds = 0.5 if quick else 2.0
    results: dict = {}
    print(f"\nfour processes, {records} records each, not durable (checked: complete and in order)")
    for size in (1, 10, 100):
        rate = results[f"4 producers, batch {size}"] = produce(parent, 4, records, size)
        print(f"  batch {size:4}  {rate:12,.0f} records/s", flush=True)
    print("\ngroup commit, one record per append")
    for processes in (1, 2, 4, 8, 16):
        rate, p50, p99 = results[f"{processes} writers"] = commit(parent, processes, seconds)
        print(
            f"  {processes:2} writers {rate:10,.0f} durable appends/s   p50 {p50:.2f} ms  p99 {p99:.2f} ms",
            flush=True,
        )
    return results
