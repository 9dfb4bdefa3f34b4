"""The rows, events and filters of the benchmark of live views."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

CHANNEL = "orders"
BATCH = 100
PAD = "x" * 100
# Most changes of a row leave it in its view. Live views also send the others, as `leave`.
PAID = 0.8
TIME = re.compile(rb'"t":(\d+)')
TICKS = os.sysconf("SC_CLK_TCK")
# A frame that carries a change, of a plain subscription or of a view.
CHANGES = re.compile(rb"event: (?:data|enter|update|leave)\n")


def event(id_: str, key: int, views: int, status: str, at: int) -> bytes:
    """Return an event of about 240 bytes; its row belongs to the view `key % views` while it is paid."""
    return (
        f'{{"specversion":"1.0","id":"{id_}","source":"/b","type":"order","subject":"{key}",'
        f'"data":{{"id":{key},"group":{key % views},"status":"{status}","text":"{PAD}","t":{at}}}}}'
    ).encode()


def random_event(number: int, views: int, rows: int) -> bytes:
    status = "paid" if random.random() < PAID else "new"
    return event(str(number), random.randrange(rows), views, status, time.time_ns())


def query(number: int) -> str:
    return f"group={number}&status=paid"


def fill(log, rows: int, views: int) -> None:
    """Append every row once, paid."""
    for start in range(0, rows, 1000):
        keys = range(start, min(rows, start + 1000))
        records = [(CHANNEL, b"", event(f"r{key}", key, views, "paid", 0)) for key in keys]
        log.append_many(records, durability="none")
    log.flush()


def resident(pid: int | str = "self") -> int:
    """Return the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> tuple[float, float]:
    """Return the processor time of a process so far, user and system, and that of its first thread: the event loop."""
    found = []
    for path in (f"/proc/{pid}/stat", f"/proc/{pid}/task/{pid}/stat"):
        fields = Path(path).read_text().rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / TICKS)
    return found[0], found[1]


def percentiles(found: list[float]) -> str:
    if not found:
        return "no frame"
    found = sorted(found)
    return f"p50 {found[len(found) // 2]:.2f} ms, p99 {found[int(len(found) * 0.99)]:.2f} ms"
