"""SIGKILL at any time: nothing acknowledged is lost, no offset is given twice, nothing torn is ever read."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import time
import zlib
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import pytest
from crash_tools import children, compile_shim, fork, join, rounds_of, run_scenario, seed_of

import virta

HERE = Path(__file__).parent
WRITERS = 3
ROUNDS_PER_LIFE = 10
# offset, records, batch number, checksum of all its values, durability
ACK = struct.Struct("<QIIIB")
# writer, batch number, index in the batch, records in the batch
STAMP = struct.Struct("<HIII")
LEVELS = ("none", "none", "interval", "group", "fsync")
NOISE = random.Random(7).randbytes(1 << 20) * 13


class Ack(NamedTuple):
    offset: int
    count: int
    number: int
    digest: int
    level: int


def make_batch(rng: random.Random, writer: int, number: int) -> list[tuple[str, bytes, bytes]]:
    """From one empty record to twelve megabytes."""
    kind = rng.random()
    if kind < 0.6:
        count, size = rng.randrange(1, 4), rng.randrange(200)
    elif kind < 0.95:
        count, size = rng.randrange(1, 300), rng.randrange(400)
    else:
        count, size = rng.randrange(1, 4), rng.randrange(1, 4_000_000)
    at = rng.randrange(1 << 20)
    return [
        (
            f"w{writer}",
            str(i % 7),
            STAMP.pack(writer, number, i, count) + NOISE[at + i : at + i + size],
        )
        for i in range(count)
    ]


def digest_of(values) -> int:
    crc = 0
    for value in values:
        crc = zlib.crc32(value, crc)
    return crc


def write_until_killed(
    path: Path, acks: Path, writer: int, seed: str, idempotent: bool, write_end: int
) -> None:
    """Append batches and note each acknowledgement where a kill cannot take it back."""
    os.set_blocking(write_end, False)  # the parent stops reading when it has seen enough
    fd = os.open(acks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    done = read_acks(acks)
    number = done[-1].number + 1 if done else 0
    choose = random.Random(f"{seed}:levels")
    with virta.open(path, durability="group", lock_timeout=60) as log:
        while True:
            # An idempotent producer that restarts sends its unacknowledged batch again, and it is the same batch.
            rng = random.Random(f"{writer}:{number}" if idempotent else f"{seed}:{number}")
            batch = make_batch(rng, writer, number)
            level = choose.randrange(len(LEVELS))
            producer = (1000 + writer, number) if idempotent else None
            at = log.append_many(batch, durability=LEVELS[level], producer=producer)
            digest = digest_of(value for _, _, value in batch)
            os.write(fd, ACK.pack(at, at.count, number, digest, level))
            number += 1
            with suppress(BlockingIOError):
                os.write(write_end, b".")


def read_acks(path: Path) -> list[Ack]:
    data = path.read_bytes() if path.exists() else b""
    return [Ack(*row) for row in ACK.iter_unpack(data[: len(data) // ACK.size * ACK.size])]


def follow_until_stop(path: Path, result: Path, visibility: str) -> None:
    """Read along from the very start; note what was seen as a count and a hash."""
    seen, count = blake2b(), 0
    with virta.open(path, wait=30, durability="none") as log:
        for record in log.read(follow=True, visibility=visibility):
            seen.update(b"%d %s " % (record.offset, record.topic) + record.value)
            count += 1
            if record.topic == b"stop":
                break
    result.write_text(f"{count} {seen.hexdigest()}")


def check_log(
    path: Path, acks: dict[int, list[Ack]], follower: int, result: Path, idempotent: bool
) -> int:
    """Everything the tests promise about one log after its writers' deaths; its number of records."""
    batches: dict[int, tuple[int, int, int]] = {}  # first offset -> writer, number, digest
    sent: set[tuple[int, int]] = set()
    seen, expected, open_batch, crc = blake2b(), 0, None, 0
    with virta.open(path) as log:
        stop = log.append("stop", b"", b"")
        assert log.verify().problems == []
        for record in log.read():
            assert record.offset == expected, "offsets are not dense"
            expected += 1
            seen.update(b"%d %s " % (record.offset, record.topic) + record.value)
            if record.topic == b"stop":
                assert open_batch is None, "a batch was cut"
                continue
            writer, number, index, count = STAMP.unpack_from(record.value)
            assert record.topic == f"w{writer}"
            if index == 0:
                assert open_batch is None, "a batch is not contiguous"
                open_batch, crc = (writer, number, record.offset), 0
            assert open_batch == (writer, number, record.offset - index), "batches are mixed"
            crc = zlib.crc32(record.value, crc)
            if index == count - 1:
                batches[record.offset - index] = (writer, number, crc)
                if idempotent:
                    assert (writer, number) not in sent, "a batch was written twice"
                    sent.add((writer, number))
                open_batch = None
        for writer in range(WRITERS):
            found = [record.offset for record in log.read(f"w{writer}")]
            expected_of = [r.offset for r in log.read() if r.topic == f"w{writer}"]
            assert found == expected_of, "an index gives another answer"
    for writer, rows in acks.items():
        assert len({ack.offset for ack in rows}) == len(rows), "an offset was given twice"
        for ack in rows:
            assert batches.get(ack.offset) == (writer, ack.number, ack.digest), "acknowledged, lost"
    assert stop == expected - 1
    assert join(follower) == 0
    assert result.read_text() == f"{expected} {seen.hexdigest()}", "the follower saw another log"
    return expected


def live(rng: random.Random, folder: Path, life: int) -> Counter[str]:
    """One log through some rounds of killed writers."""
    path, result = folder / f"log{life}", folder / f"seen{life}"
    idempotent = life % 3 == 2
    segment_bytes = rng.choice((4096, 65536, 1 << 20, 8 << 20))
    compression = rng.choice(("none", "zstd"))
    virta.open(path, segment_bytes=segment_bytes, compression=compression).close()
    kills = 0
    acks = {w: folder / f"acks{life}-{w}" for w in range(WRITERS)}
    with children() as pids:
        follower = fork(follow_until_stop, path, result, rng.choice(("durable", "committed")))
        pids.append(follower)
        for number in range(ROUNDS_PER_LIFE):
            read_end, write_end = os.pipe()
            writers = [
                fork(write_until_killed, path, acks[w], w, f"{rng.random()}", idempotent, write_end)
                for w in range(WRITERS)
            ]
            os.close(write_end)
            pids.extend(writers)
            # Mostly they get to work first, however long opening and the first sync take on this machine.
            for _ in range(WRITERS if rng.random() < 0.8 else 0):
                os.read(read_end, 1)
            # This waits for nothing: the time of death is the random input of this test.
            time.sleep(rng.choice((0.01, 0.05, 0.3)) * rng.random())
            for pid in rng.sample(writers, WRITERS):
                time.sleep(rng.random() * 0.02)
                os.kill(pid, signal.SIGKILL)
            for pid in writers:
                assert join(pid) == -signal.SIGKILL, f"a writer failed in round {number}"
                kills += 1
            os.close(read_end)
        acked = {w: read_acks(a) for w, a in acks.items()}
        records = check_log(path, acked, follower, result, idempotent)
        torn = len(list(path.glob("quarantine/*.bin")))
    shutil.rmtree(path)
    return Counter(
        kills=kills,
        records=records,
        acknowledged=sum(len(read_acks(a)) for a in acks.values()),
        torn=torn,
    )


@pytest.mark.slow
def test_killed_writers(tmp_path):
    """500 SIGKILLs of writers at random points, three at once, all durabilities, rollovers, a live follower."""
    rng = seed_of("sigkill")
    total: Counter[str] = Counter()
    started = time.monotonic()
    while total["kills"] < rounds_of(170) * WRITERS:
        total += live(rng, tmp_path, total["logs"])
        total["logs"] += 1
    print(dict(total), f"{time.monotonic() - started:.1f} s")
    assert total["kills"] >= min(500, rounds_of(170) * WRITERS)
    assert total["acknowledged"] > total["kills"] / 2, (
        "the writers died too young to prove anything"
    )


# --- groups ----------------------------------------------------------------------------------------

SEEN = struct.Struct("<QQIQ")  # kind (0 seen, 1 about to commit, 2 committed), offset, member, µs


def consume_until_killed(path: Path, notes: Path, member: int, seed: str, stop_at: int) -> None:
    rng = random.Random(seed)
    fd = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def note(kind: int, offset: int) -> None:
        os.write(fd, SEEN.pack(kind, offset, member, time.monotonic_ns() // 1000))

    with (
        virta.open(path, durability="none") as log,
        log.consumer("group", partitions=8) as consumer,
    ):
        pending = 0
        for record in consumer.read(follow=True, timeout=None if stop_at < 0 else 1.5):
            note(0, record.offset)
            pending += 1
            if pending >= rng.randrange(1, 40):
                note(1, record.offset)
                consumer.commit()
                note(2, record.offset)
                pending = 0
        note(1, 0)
        consumer.commit()


@pytest.mark.slow
def test_killed_group_members(tmp_path):
    """Members of a group die at any time: every record is delivered at least once, per key in order."""
    rng = seed_of("group")
    path, total = tmp_path / "log", 0
    notes: list[Path] = []
    members: list[int] = []
    with virta.open(path, durability="none", segment_bytes=65536) as log, children() as pids:
        for number in range(rounds_of(30)):
            batch = [("t", str(rng.randrange(50)), b"%d" % i) for i in range(rng.randrange(1, 400))]
            total = log.append_many(batch) + len(batch)
            while len(members) < 3:
                notes.append(tmp_path / f"notes-{len(notes)}")
                seed = f"{rng.random()}"
                members.append(fork(consume_until_killed, path, notes[-1], number, seed, -1))
                pids.append(members[-1])
            # One dies, the others live on and take over its work: the time of death is random input.
            time.sleep(rng.choice((0.05, 0.3)) * rng.random())
            victim = members.pop(rng.randrange(3))
            os.kill(victim, signal.SIGKILL)
            assert join(victim) == -signal.SIGKILL
        time.sleep(0.3)  # time enough to take over, and to do it wrong
        for pid in members:
            os.kill(pid, signal.SIGKILL)
            assert join(pid) == -signal.SIGKILL
        notes.append(tmp_path / "notes-last")
        assert join(fork(consume_until_killed, path, notes[-1], 999, "last", total)) == 0
        (info,) = log.consumers()
        assert (info.position, info.lag) == (total, 0)
        keys = {record.offset: bytes(record.key) for record in log.read()}
    delivered: set[int] = set()
    for file in notes:
        rows = list(SEEN.iter_unpack(file.read_bytes())) if file.exists() else []
        last: dict[bytes, int] = {}
        for kind, offset, _, _ in rows:
            if kind == 0:
                delivered.add(offset)
                # A partition goes from member to member only with everything committed: none goes back.
                key = keys[offset]
                assert offset > last.get(key, -1), "a key's records out of order"
                last[key] = offset
    assert delivered == set(range(total)), "a record was not delivered"


def commit_until_killed(path: Path, notes: Path, write_end: int) -> None:
    os.set_blocking(write_end, False)
    fd = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    with virta.open(path, durability="group") as log, log.consumer("one", partitions=1) as consumer:
        for record in consumer.read(follow=True):
            os.write(fd, SEEN.pack(1, record.offset + 1, 0, 0))
            consumer.commit()
            os.write(fd, SEEN.pack(2, record.offset + 1, 0, 0))
            with suppress(BlockingIOError):
                os.write(write_end, b".")


@pytest.mark.slow
def test_killed_commits(tmp_path):
    """A position never goes back behind an acknowledged commit, nor beyond what was being committed."""
    rng = seed_of("commits")
    path, notes = tmp_path / "log", tmp_path / "notes"
    with virta.open(path, durability="none") as log:
        for _ in range(500):
            log.append_many([("t", b"k", b"%d" % i) for i in range(40)])
        log.flush()
        before = 0
        for _ in range(rounds_of(50)):
            read_end, write_end = os.pipe()
            log.append("t", b"k", b"one more, whatever is committed by now")
            pid = fork(commit_until_killed, path, notes, write_end)
            os.close(write_end)
            if rng.random() < 0.5:
                os.read(read_end, 1)  # it has committed something, however slow this machine is
            time.sleep(0.01 + rng.random() * 0.1)  # the time of death is random input
            os.kill(pid, signal.SIGKILL)
            assert join(pid) == -signal.SIGKILL
            os.close(read_end)
            rows = list(SEEN.iter_unpack(notes.read_bytes())) if notes.exists() else []
            acknowledged = max((o for kind, o, _, _ in rows if kind == 2), default=0)
            attempted = max((o for kind, o, _, _ in rows if kind == 1), default=0)
            infos = log.consumers()
            position = infos[0].position if infos else 0
            assert max(before, acknowledged) <= position <= attempted
            before = position
    assert before > 0


# --- death at every single call --------------------------------------------------------------------


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = compile_shim(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("no C compiler: deaths inside single calls are not tested")
    return library


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["", "1"], ids=["native", "plain"])
@pytest.mark.parametrize(
    "name",
    [
        "death_in_rollover",
        "death_in_headroom",
        "death_in_care",
        "death_in_indexing",
        "death_in_commit",
        "death_in_recovery",
    ],
)
def test_death_at_every_call(shim, memory, name, plain):
    """Die before, in the middle of and after every call that changes a file; the log that is left is whole."""
    output = run_scenario(HERE / "scenarios.py", name, shim, memory, VIRTA_PLAIN=plain)
    assert "deaths" in output
