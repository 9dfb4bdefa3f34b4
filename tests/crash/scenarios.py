"""
Workloads that die or fail at every single I/O call; run as `scenarios.py NAME FOLDER` under the shim of faulty_io.c.

Each workload runs in a forked child that arms the shim for its n-th call, for n = 1, 2, ... until it gets through.
After each child the parent, unharmed, checks what is left.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

from crash_tools import CHANGES, Action, Faults, Image, Kind, fork, image_of, join, restore

import virta
from virta.errors import LogError, LogSyncError, LogWriteError
from virta.log.format import topic_lookup
from virta.log.format.directory import segment_bases

CALLS_MAX = 2000
EACH_KIND_OF_DEATH = (Action.KILL_BEFORE, Action.KILL_AFTER)


class Notes:
    """What a child has to say, in a file that outlives it: lines of words."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notes"

    def clear(self) -> None:
        self.path.write_text("")

    def say(self, *words: object) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
        os.close(fd)

    def about(self, kind: str) -> list[int]:
        rows = [line.split() for line in self.path.read_text().splitlines()]
        return [int(row[1]) for row in rows if row[0] == kind]


def at_every_call(faults, start: Image, path: Path, work, check, actions, kinds=CHANGES, error=0):
    """Run `work` to its n-th call for every n, under every action; `check` after each. Returns the runs."""
    runs = 0
    for action in actions:
        for nth in count(1):
            assert nth < CALLS_MAX, "the workload does not end"
            restore(start, path)

            def child(nth=nth, action=action):
                faults.arm(path, kinds, nth, action, error)
                work()
                sys.exit(0 if faults.disarm() >= nth else 7)

            code = join(fork_exit(child))
            if code == 7:
                break
            if action in EACH_KIND_OF_DEATH:
                assert code == -signal.SIGKILL, f"{action.name} at call {nth}: exit code {code}"
            else:
                assert code == 0, f"{action.name} at call {nth}: exit code {code}"
            runs += 1
            try:
                check()
            except BaseException:
                print(f"after {action.name} at call {nth}")
                raise
    return runs


def fork_exit(work) -> int:
    def run() -> None:
        try:
            work()
        except SystemExit as exc:
            sys.stdout.flush()
            os._exit(int(exc.code or 0))

    return fork(run)


def contents(path: Path, **options) -> dict[int, tuple[bytes, bytes]]:
    with virta.open(path, read_only=True, visibility="committed") as log:
        return {r.offset: (bytes(r.key), r.value) for r in log.read(**options)}


def check_topics(path: Path) -> None:
    """Reading a topic by its indexes gives what a filter over all records gives."""
    with virta.open(path, read_only=True, visibility="committed") as log:
        records = list(log.read(on_gap="skip"))
        for topic in {record.topic for record in records} | {b"absent"}:
            found = list(log.read([bytes(topic)], on_gap="skip"))
            assert found == [record for record in records if record.topic == topic]


def prepare(path: Path, batches: int, size: int = 700) -> Image:
    with virta.open(path, durability="none", segment_bytes=4096) as log:
        for number in range(batches):
            key = str(number % 3)
            log.append_many([("t", key, b"%d" % number * 2), ("t", "", bytes([number]) * size)])
        log.flush()
    return image_of(path)


# --- deaths ----------------------------------------------------------------------------------------


def death_in_rollover(faults, folder: Path) -> None:
    path, notes = folder / "log", Notes(folder)
    start = prepare(path, 4)
    first = 8

    def work() -> None:
        notes.clear()
        with virta.open(path) as log:
            for number in range(6):
                level = ("group", "none", "fsync")[number % 3]
                batch = [("new", "", b"%d" % number + bytes(1400)), ("new", "", b"%d" % number)]
                notes.say("acked", int(log.append_many(batch, durability=level)))

    def check() -> None:
        acked = notes.about("acked")
        assert acked == list(range(first, first + 2 * len(acked), 2))
        before = contents(path)
        with virta.open(path) as log:
            end = log.append("end", "", b"end")
            assert log.verify().problems == []
            assert log.epoch == 0, "nothing published was lost"
        after = contents(path)
        check_topics(path)
        assert list(after) == list(range(end + 1))
        assert end in (first + 2 * len(acked), first + 2 * len(acked) + 2)
        assert after.pop(int(end)) == (b"", b"end")
        assert all(after[offset] == record for offset, record in before.items())
        for offset in range(first, end):
            number = b"%d" % ((offset - first) // 2)
            assert after[offset][1] == number + (b"" if offset % 2 else bytes(1400))

    runs = at_every_call(faults, start, path, work, check, EACH_KIND_OF_DEATH)
    print(f"{runs} deaths in rollover")
    assert runs > 40


def death_in_headroom(faults, folder: Path) -> None:
    """Single durable appends: zeros ahead in growing steps, a rollover out of them, and what closing cuts off."""
    path, notes = folder / "log", Notes(folder)
    with virta.open(path, segment_bytes=8192) as log:
        first = log.append("t", "", b"first") + 1
        start = image_of(path)  # with its headroom, as if its writer had been killed

    def work() -> None:
        notes.clear()
        with virta.open(path) as log:
            for number in range(9):
                level = ("group", "fsync", "group", "none")[number % 4]
                value = b"%d" % number * (30, 2500)[number % 2]
                notes.say("acked", int(log.append("new", "", value, durability=level)))

    def check() -> None:
        acked = notes.about("acked")
        assert acked == list(range(first, first + len(acked)))
        before = contents(path)
        (path / "control").unlink() if len(acked) % 2 else None
        assert contents(path).items() >= before.items()
        with virta.open(path) as log:
            assert log.verify().problems == []
            end = log.append("end", "", b"end")
            assert log.epoch == 0, "nothing published was lost"
        after = contents(path)
        assert end in (first + len(acked), first + len(acked) + 1)
        assert list(after) == list(range(end + 1))
        assert all(after[offset] == record for offset, record in before.items())
        for offset in range(first, end):
            number = offset - first
            assert after[offset][1] == b"%d" % number * (30, 2500)[number % 2]

    runs = at_every_call(faults, start, path, work, check, EACH_KIND_OF_DEATH)
    print(f"{runs} deaths in headroom")
    assert runs > 40


def death_in_care(faults, folder: Path) -> None:
    path = folder / "log"
    start = prepare(path, 14)
    whole = contents(path)
    active = segment_bases(path)[-1]  # what it has supersedes nothing
    newest = {key: offset for offset, (key, _) in whole.items() if key and offset < active}

    def compact() -> None:
        with virta.open(path) as log:
            log.compact()

    def check_compacted() -> None:
        check_topics(path)
        seen = contents(path)
        assert all(whole[offset] == record for offset, record in seen.items())
        kept = {
            o for o, (key, _) in whole.items() if not key or newest.get(key) == o or o >= active
        }
        assert kept <= set(seen), "compaction lost a record that stays"
        with virta.open(path) as log:
            assert log.verify().problems == []
            log.compact()
            assert log.verify().problems == []
            assert log.append("end") == len(whole)
        final = contents(path)
        assert {o for o in final if o < active} == {o for o in kept if o < active}

    def retain() -> None:
        with virta.open(path) as log:
            log.retain(max_bytes=9000)

    def check_retained() -> None:
        check_topics(path)
        bases = segment_bases(path)
        seen = contents(path)
        assert seen == {o: r for o, r in whole.items() if o >= bases[0]}, (
            "a hole, or too much removed"
        )
        with virta.open(path) as log:
            assert log.first_offset == bases[0]
            assert log.verify().problems == []
            log.retain(max_bytes=9000)
            assert log.bytes <= 9000
            assert log.append("end") == len(whole)

    runs = at_every_call(faults, start, path, compact, check_compacted, EACH_KIND_OF_DEATH)
    more = at_every_call(faults, start, path, retain, check_retained, EACH_KIND_OF_DEATH)
    print(f"{runs + more} deaths in compaction and retention")
    assert runs > 20
    assert more > 4


def death_in_indexing(faults, folder: Path) -> None:
    """A compressed log, switched on late, whose topic indexes are written by the next writer that opens it."""
    path = folder / "log"
    prepare(path, 4)
    for file in path.glob("*.ptix"):
        file.unlink()
    start = image_of(path)
    whole = contents(path)

    def work() -> None:
        with virta.open(path, compression="zstd") as log:
            for number in range(5):
                log.append_many([("new", "", bytes(3000)), ("new", "", b"%d" % number)])

    def check() -> None:
        check_topics(path)
        before = contents(path)
        assert before.items() >= whole.items()
        with virta.open(path) as log:
            end = log.append("end", "", b"end" * 200)
            assert log.verify().problems == []
            assert log.epoch == 0
            assert len(list(path.glob("*.ptix"))) == len(segment_bases(path)) - 1
        assert list(contents(path)) == list(range(end + 1))
        assert not list(path.glob(".*.ptix.*.tmp")), "a temporary file is left"
        check_topics(path)

    runs = at_every_call(faults, start, path, work, check, EACH_KIND_OF_DEATH)
    print(f"{runs} deaths in indexing")
    assert runs > 40


def death_in_commit(faults, folder: Path) -> None:
    path, notes = folder / "log", Notes(folder)
    start = prepare(path, 4)

    def work() -> None:
        notes.clear()
        with virta.open(path) as log, log.consumer("c", partitions=2) as consumer:
            for record in consumer:
                notes.say("trying", record.offset + 1)
                consumer.commit()
                notes.say("committed", record.offset + 1)

    def check() -> None:
        low = max(notes.about("committed"), default=0)
        high = max(notes.about("trying"), default=0)
        with virta.open(path) as log:
            infos = log.consumers()
            position = infos[0].position if infos else 0
            assert low <= position <= high or (position == 0 and low <= 1), (low, position, high)
            with log.consumer("c", partitions=2) as consumer:
                rest = {record.offset for record in consumer}
                consumer.commit()
                assert consumer.lag == 0
            assert set(range(high, 8)) <= rest, "records were skipped"
            assert not rest & set(range(low - 1)), "committed records came again"
            assert log.verify().problems == []

    runs = at_every_call(faults, start, path, work, check, EACH_KIND_OF_DEATH)
    print(f"{runs} deaths in commit")
    assert runs > 20


def torn_images(path: Path) -> list[Image]:
    """Logs whose next writer has something to recover or repair."""
    whole = prepare(path, 7)
    segments = sorted(name for name in whole if name.endswith(".puro"))
    sealed, active = segments[0], segments[-1]
    torn = {**whole, active: whole[active] + whole[active][64:900]}
    cut = {**whole, active: whole[active][:-100]}
    hole = bytearray(whole[sealed])
    hole[200:300] = bytes(100)
    header = bytearray(whole[sealed])
    header[30] ^= 4
    unsealed = {**whole, sealed: whole[sealed][:-90]}
    return [torn, cut, {**whole, sealed: bytes(hole)}, {**whole, sealed: bytes(header)}, unsealed]


def death_in_recovery(faults, folder: Path) -> None:
    path = folder / "log"
    runs = 0
    for start in torn_images(folder / "log"):

        def work() -> None:
            with virta.open(path) as log:
                log.repair()

        restore(start, path)
        work()
        expected = contents(path, on_gap="skip")

        def check(expected=expected) -> None:
            with virta.open(path) as log:
                log.repair()
                assert log.verify().problems == []
                assert log.append("end", "", b"end") >= 14, "a published offset was given again"
                assert log.verify().problems == []
            after = contents(path, on_gap="skip")
            assert after.popitem()[1] == (b"", b"end")
            assert after == expected, "dying in a repair cost more than the repair"

        runs += at_every_call(faults, start, path, work, check, EACH_KIND_OF_DEATH)
    print(f"{runs} deaths in recovery and repair")
    assert runs > 40


# --- failures --------------------------------------------------------------------------------------


def expect(kind, work):
    """The error `work` raises, which must be of `kind`."""
    try:
        work()
    except kind as exc:
        return exc
    raise AssertionError(f"no {kind.__name__}")


def files_of(path: Path) -> Image:
    """The segments without their headroom; the control page counts who waits."""
    return {name: data.rstrip(b"\0") for name, data in image_of(path).items() if name != "control"}


def full_disk(faults, folder: Path) -> None:
    """A write that is cut short and then refused: nothing is appended, later appends work."""
    path = folder / "log"
    for size in (10, 5000, 3_000_000):
        restore({}, path)
        with (
            virta.open(path, durability="none") as log,
            virta.open(path, durability="none") as other,
        ):
            log.append_many([("t", "", b"before")] * 3)
            follower = other.read(follow=True)
            assert [next(follower).offset for _ in range(3)] == [0, 1, 2]
            faults.arm(path, Kind.WRITE, 2, Action.FULL_DISK, errno.ENOSPC)
            assert log.append("t", "", b"fits") == 3
            before = files_of(path)
            for _ in range(2):
                error = expect(LogWriteError, lambda: log.append("t", "", bytes(size)))  # noqa: B023
                assert error.code == "log_disk_full", error.code
                assert "nothing was appended" in str(error)
                assert log.next_offset == 4
                assert files_of(path) == before
            assert next(follower).value == b"fits"
            faults.disarm()
            assert log.append("t", "", b"after") == 4
            assert other.append("t", "", b"other") == 5
            assert [next(follower).value for _ in range(2)] == [b"after", b"other"]
            follower.close()
            assert list(contents(path)) == list(range(6))
            assert log.verify().problems == []
    print("full disk done")


def refused_headroom(faults, folder: Path) -> None:
    """Zeros that the disk refuses or takes half of, and cannot be cut off again: the append itself is not affected."""
    path = folder / "log"
    for action in (Action.FAIL_ONCE, Action.SHORT_ONCE, Action.FULL_DISK):
        for kinds in (Kind.WRITE, Kind.WRITE | Kind.TRUNCATE):
            restore({}, path)
            with virta.open(path) as log:
                log.append("t", "", bytes(100_000))  # too large to have headroom behind it
                faults.arm(path, kinds, 1, action, errno.ENOSPC)
                if action == Action.FULL_DISK:
                    assert expect(LogWriteError, lambda: log.append("t")).code == "log_disk_full"
                    assert log.next_offset == 1
                    faults.disarm()
                assert log.append("t", "", b"one") == 1
                faults.disarm()
                assert log.append("t", "", b"two") == 2
                assert log.verify().problems == []
                assert log.recovered == []
            assert list(contents(path)) == [0, 1, 2]
    print("refused headroom done")


def file_size_limit(faults, folder: Path) -> None:
    """The real thing: the process may not write files larger than so many bytes."""
    path = folder / "log"
    with virta.open(path) as log:
        log.append("t", "", bytes(1000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
        error = expect(LogWriteError, lambda: log.append("t", "", bytes(9000)))
        assert error.code == "log_file_too_big", error.code
        assert log.append("t", "", bytes(1000)) == 1
        expect(LogWriteError, lambda: log.append_many([("t", "", bytes(900))] * 9))
        assert log.verify().problems == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert log.append_many([("t", "", bytes(900))] * 9) == 2
    assert list(contents(path)) == list(range(11))
    print("file size limit done")


def tiny_disk(faults, folder: Path) -> None:
    """A file system that is really full, met by appends, rollovers, consumers, compaction and recovery."""
    path = folder / "log"
    with virta.open(path, segment_bytes=65536) as log:
        acked = {}
        for number in range(100_000):
            try:
                acked[int(log.append("t", str(number % 5), b"%d" % number * 300))] = number
            except LogWriteError as exc:
                refused = exc
                break
        assert refused.code == "log_disk_full", refused.code
        # Whatever is asked of it now succeeds or says what is wrong; and it costs no record.
        for attempt in (log.compact, lambda: log.consumer("c").close(), log.repair, log.flush):
            try:
                attempt()
            except LogError as exc:
                print(type(exc).__name__, exc.code)
        seen = {r.offset: r.value for r in log.read(on_gap="raise")}
        newest = {number % 5: offset for offset, number in acked.items()}
        for offset, number in acked.items():
            if offset in seen:
                assert seen[offset] == b"%d" % number * 300
            else:
                assert newest[number % 5] > offset, "a record is missing"
        log.retain(max_bytes=100_000)
        at = log.next_offset
        assert log.append("t", "", b"after") == at
        assert log.verify().problems == []
    print("tiny disk done")


def failing_sync(faults, folder: Path) -> None:
    """fdatasync fails, once or for good: LogSyncError, a poisoned handle, and a fresh one that recovers."""
    path = folder / "log"
    for action in (Action.FAIL_ONCE, Action.FAIL_ON):
        for level in ("group", "fsync", "interval"):
            restore({}, path)
            log = virta.open(path, durability=level)
            other = virta.open(path, durability="none")
            log.append("t", "", b"safe", durability="group")
            faults.arm(path, Kind.SYNC, 1, action, errno.EIO)
            if level == "interval":
                log.append("t", "", b"doubtful")
                log._writer._interval.thread.join()  # its sync has failed, and so it ends
                expect(LogSyncError, lambda: log.append("t", "", b"doubtful"))  # noqa: B023
            else:
                error = expect(LogSyncError, lambda: log.append("t", "", b"doubtful"))  # noqa: B023
                assert "may be lost" in str(error)
            expect(LogSyncError, lambda: log.append("t", "", b"more", durability="none"))  # noqa: B023
            expect(LogSyncError, log.flush)
            reader = other.read(visibility="committed")
            assert next(reader).value == b"safe"
            reader.close()
            faults.disarm()
            expect(LogSyncError, lambda: log.append("t", "", b"still"))  # noqa: B023
            log.close()
            with virta.open(path) as fresh:
                at = fresh.next_offset
                assert fresh.append("t", "", b"fresh") == at
                assert fresh.durable_offset == at + 1
                assert fresh.verify().problems == []
            other.close()
    print("failing sync done")


def failing_sync_of_threads(faults, folder: Path) -> None:
    """The system reports a write-back error once: no other thread may take its own later sync for a success."""
    path = folder / "log"
    with virta.open(path, durability="group") as log:
        log.append("t")
        outcomes: list[str] = []
        barrier = threading.Barrier(6)

        def append(level: str) -> None:
            barrier.wait()
            try:
                log.append("t", "", b"x", durability=level)
                outcomes.append("acknowledged")
            except LogSyncError:
                outcomes.append("refused")

        faults.arm(path, Kind.SYNC, 1, Action.SLOW_FAIL, errno.EIO)
        threads = [
            threading.Thread(target=append, args=(level,)) for level in ("group", "fsync") * 3
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        faults.disarm()
        assert outcomes == ["refused"] * 6, outcomes
    print("failing sync of threads done")


def failing_rollover(faults, folder: Path) -> None:
    """Open, write, rename, sync refused during a rollover: a clear error, no partial files, and later appends work."""
    path = folder / "log"
    for kind in (Kind.OPEN, Kind.WRITE, Kind.RENAME, Kind.SYNC):
        for nth in range(1, 9):
            restore({}, path)
            log = virta.open(path, segment_bytes=4096, durability="none")
            log.append("t", "", bytes(3900))
            faults.arm(path, kind, nth, Action.FAIL_ONCE, errno.EIO)
            try:
                log.append("t", "", b"rolls" * 100)
                failed = False
            except (LogWriteError, LogSyncError):
                failed = True
            hit = faults.disarm() >= nth
            assert failed <= hit
            if isinstance_poisoned(log):
                log.close()
                log = virta.open(path, segment_bytes=4096, durability="none")
            at = log.next_offset
            assert at == (1 if failed else 2)
            assert log.append("t", "", b"more") == at
            assert log.verify().problems == []
            assert list(contents(path)) == list(range(at + 1))
            log.close()
    print("failing rollover done")


def isinstance_poisoned(log) -> bool:
    try:
        log.flush()
    except LogSyncError:
        return True
    return False


def every_call_fails_once(faults, folder: Path) -> None:
    """A long workload with one failure in it, at every call in turn: only our errors, nothing acknowledged is lost."""
    path, notes = folder / "log", Notes(folder)
    start = prepare(path, 4)

    def work() -> None:
        notes.clear()
        try:
            with virta.open(path) as log:
                day(log)
        except LogError as exc:
            print(exc.code)

    def day(log) -> None:
        for _ in range(4):
            attempt(lambda: notes.say("acked", int(log.append("n", "k", bytes(1300)))))
        attempt(lambda: log.consumer("c").close())
        with virta.open(path) as second:
            attempt(lambda: notes.say("acked", int(second.append("n", "", b"second"))))
        attempt(log.compact)
        attempt(lambda: log.retain(max_bytes=12_000))
        attempt(log.repair)
        attempt(lambda: notes.say("acked", int(log.append("n", "", b"last"))))

    def attempt(act) -> None:
        with suppress(LogError):
            act()

    def check() -> None:
        acked = notes.about("acked")
        assert len(set(acked)) == len(acked), "an offset was given twice"
        with virta.open(path) as log:
            first = log.first_offset
            end = log.append("end", "", b"end")
            assert log.verify().problems == [], log.verify().problems
            seen = {r.offset: r for r in log.read()}
        assert all(offset < end for offset in acked)
        for offset in acked:
            compacted = any(r.offset > offset and r.key == b"k" for r in seen.values())
            assert offset in seen or offset < first or compacted, f"{offset} is lost"

    runs = 0
    for error, every in ((errno.EIO, CHANGES | Kind.OPEN), (errno.ENOSPC, Kind.WRITE)):
        runs += at_every_call(faults, start, path, work, check, (Action.FAIL_ONCE,), every, error)
    runs += at_every_call(faults, start, path, work, check, (Action.SHORT_ONCE,), Kind.WRITE)
    print(f"{runs} failures")
    assert runs > 100


if __name__ == "__main__":
    logging.getLogger("virta.log").setLevel(logging.ERROR)
    # Small segments use their indexes, too.
    topic_lookup.TOPIC_DENSE_BYTES = topic_lookup.TOPIC_RUN_GAP_BYTES = 1
    place = Path(sys.argv[2])
    place.mkdir(exist_ok=True)
    needs_shim = sys.argv[1] not in {"tiny_disk", "file_size_limit"}
    globals()[sys.argv[1]](Faults() if needs_shim else None, place)
