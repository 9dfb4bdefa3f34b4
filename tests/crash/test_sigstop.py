"""Members of a consumer that are stopped, continued and killed at any time: everything is consumed, nothing goes back."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from crash_tools import children, fork, join, rounds_of, seed_of

import virta
from virta.errors import ConsumerError
from virta.log.consumers.positions import Positions
from virta.log.engine import kernel
from waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

# Plain Python decodes a chunk of records in about the time that a native member gets for its whole lease.
LEASE_S = 0.4 if kernel.NATIVE else 4.0
PARTITIONS = 8
MEMBERS = 3
# kind, offset, µs since boot
NOTE = struct.Struct("<BQQ")
SEEN, COMMITTED, FENCED = range(3)
DEADLINE_S = 60.0


def consume(path: Path, notes: Path, seed: str) -> None:
    """Note every record, and of every commit whether it counted."""
    rng = random.Random(seed)
    fd = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def note(kind: int, offset: int) -> None:
        os.write(fd, NOTE.pack(kind, offset, time.monotonic_ns() // 1000))

    with (
        virta.open(path, durability="none") as log,
        log.consumer("group", partitions=PARTITIONS, lease=LEASE_S) as consumer,
    ):
        while True:
            pending: list[int] = []
            limit = rng.randrange(1, 20)
            for record in consumer.read(follow=True, timeout=0.05):
                note(SEEN, record.offset)
                pending.append(record.offset)
                if len(pending) >= limit:
                    break
            try:
                consumer.commit()
                kind = COMMITTED
            except ConsumerError as exc:
                if exc.code != "consumer_lost":
                    raise
                kind = FENCED
            for offset in pending:
                note(kind, offset)


def slots(path: Path) -> list[int]:
    positions = Positions(path, "group", read_only=True)
    try:
        return [slot.next for slot in positions.read()]
    finally:
        positions.close()


def until(condition, what: str) -> None:
    wait_until(condition, what, seconds=DEADLINE_S)


class Group:
    """Member processes, which of them are stopped, and what each has noted."""

    def __init__(self, folder: Path, path: Path, pids: list[int], rng: random.Random) -> None:
        self.running: list[int] = []
        self.stopped: list[int] = []
        self.notes: list[Path] = []
        self.done: Counter[str] = Counter()
        self._folder, self._path, self._pids, self._rng = folder, path, pids, rng

    def start(self) -> None:
        self.notes.append(self._folder / f"notes-{len(self.notes)}")
        pid = fork(consume, self._path, self.notes[-1], f"{self._rng.random()}")
        self._pids.append(pid)
        self.running.append(pid)

    def stop(self) -> None:
        pid = self.running.pop(self._rng.randrange(len(self.running)))
        os.kill(pid, signal.SIGSTOP)
        self.stopped.append(pid)
        self.done["stopped"] += 1

    def go_on(self) -> None:
        if self.stopped:
            pid = self.stopped.pop(self._rng.randrange(len(self.stopped)))
            os.kill(pid, signal.SIGCONT)
            self.running.append(pid)
            self.done["continued"] += 1

    def kill(self) -> None:
        group = self._rng.choice([g for g in (self.running, self.stopped) if g])
        pid = group.pop(self._rng.randrange(len(group)))
        os.kill(pid, signal.SIGKILL)
        assert join(pid) == -signal.SIGKILL
        self.done["killed"] += 1

    def rows(self) -> list[list[tuple[int, int, int]]]:
        found = []
        for path in self.notes:
            data = path.read_bytes() if path.exists() else b""
            found.append(list(NOTE.iter_unpack(data[: len(data) // NOTE.size * NOTE.size])))
        return found


def check_deliveries(rows: list[list[tuple[int, int, int]]], total: int) -> int:
    """Every record seen, none committed twice or seen after its commit; how many were seen again."""
    seen = Counter(offset for each in rows for kind, offset, _ in each if kind == SEEN)
    assert set(seen) == set(range(total)), "a record was not delivered"
    committed: dict[int, tuple[int, int]] = {}
    for number, each in enumerate(rows):
        for kind, offset, at in each:
            if kind == COMMITTED:
                assert offset not in committed, f"offset {offset} was committed by two members"
                committed[offset] = (number, at)
    for each in rows:
        for kind, offset, at in each:
            if kind == SEEN and offset in committed:
                assert at <= committed[offset][1], f"offset {offset} came again after its commit"
    return sum(count - 1 for count in seen.values())


@pytest.mark.slow
def test_hung_group_members(tmp_path):
    """SIGSTOP, SIGCONT and SIGKILL at random: at least once, no commit undone, no double commit, no lasting lag."""
    rng = seed_of("hung")
    path, total = tmp_path / "log", 0
    with virta.open(path, durability="none", segment_bytes=65536) as log, children() as pids:
        group = Group(tmp_path, path, pids, rng)
        for _ in range(MEMBERS):
            group.start()
        until(log.consumers, "no member joined")
        before = slots(path)
        for _ in range(rounds_of(40)):
            batch = [("t", str(rng.randrange(50)), b"%d" % i) for i in range(rng.randrange(1, 300))]
            batch += [("other", "", b"")] * rng.randrange(3)
            total = log.append_many(batch) + len(batch)
            action = rng.choice((group.stop, group.stop, group.go_on, group.kill))
            action()
            while len(group.running) < 1 or len(group.running) + len(group.stopped) < MEMBERS:
                group.start()
            time.sleep(rng.random() * 0.2)  # the time of the next signal is random input
            now = slots(path)
            assert all(a <= b for a, b in zip(before, now, strict=True)), "a position went back"
            before = now
        # Stopped members stay stopped: the others consume everything.
        until(lambda: log.consumers()[0].lag == 0, f"lag stays at {log.consumers()[0]}")
        while group.stopped:
            group.go_on()
        # Continued members take part again, and change nothing that was committed.
        until(lambda: log.consumers()[0].hung == 0, "a member that was continued stays hung")
        more = [("t", str(i), b"") for i in range(200)]
        total = log.append_many(more) + len(more)
        until(lambda: log.consumers()[0].lag == 0, f"lag stays at {log.consumers()[0]}")
        for pid in group.running:
            os.kill(pid, signal.SIGKILL)
            assert join(pid) == -signal.SIGKILL
    again = check_deliveries(group.rows(), total)
    fenced = sum(kind == FENCED for each in group.rows() for kind, _, _ in each)
    print(dict(group.done), f"{total} records, {again} delivered again, {fenced} of fenced commits")
