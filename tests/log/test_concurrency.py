"""Many writers and readers at once, in processes and threads, native and plain: one dense, ordered log for all."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import virta
from virta.errors import LogClosedError
from virta.log.engine import kernel

CRASH = Path(__file__).parent.parent / "crash"
sys.path.append(str(CRASH))

from crash_tools import children, fork, join  # noqa: E402

PRODUCERS = 4
RECORDS = 100_000
SIZES = (1, 7, 1000, 40, 3, 250)
STAMP = struct.Struct("<HIII")  # producer, sequence, index in its batch, records in the batch


def produce(path: Path, producer: int, records: int, durability: str = "none") -> None:
    """Append `records` numbered records in batches of mixed size."""
    sequence = turn = 0
    with virta.open(path, durability=durability, lock_timeout=60) as log:
        while sequence < records:
            size = min(SIZES[(turn + producer) % len(SIZES)], records - sequence)
            batch = [
                (f"p{producer}", str(i % 5), STAMP.pack(producer, sequence + i, i, size))
                for i in range(size)
            ]
            log.append_many(batch)
            sequence, turn = sequence + size, turn + 1


class Check:
    """Feed it records in the order of reading; it objects to anything out of order."""

    def __init__(self) -> None:
        self.offset = 0
        self.next: Counter[int] = Counter()
        self._batch: tuple[int, int, int] | None = None

    def __call__(self, record) -> None:
        assert record.offset == self.offset, "offsets are not dense"
        self.offset += 1
        producer, sequence, index, size = STAMP.unpack(record.value)
        assert sequence == self.next[producer], "a producer's order was not kept"
        self.next[producer] += 1
        batch = (producer, sequence - index, record.offset - index)
        assert self._batch in (None, batch), "a batch is not contiguous"
        assert (index == 0) == (self._batch is None)
        self._batch = None if index == size - 1 else batch


@pytest.mark.slow
def test_four_producers_and_a_follower(tmp_path):
    """4 processes of 100k records: dense, batches whole, order per producer; a follower sees all exactly once."""
    path = tmp_path / "log"
    total = PRODUCERS * RECORDS
    with virta.open(path, durability="none", segment_bytes=4 << 20) as log, children() as pids:
        pids.extend(fork(produce, path, number, RECORDS) for number in range(PRODUCERS))
        follower = Check()
        for batch in log.read(follow=True, timeout=30).batches():
            for record in batch:
                follower(record)
            if follower.offset >= total:
                break
        assert [join(pid) for pid in pids] == [0] * PRODUCERS
        assert follower.next == dict.fromkeys(range(PRODUCERS), RECORDS)
        assert log.next_offset == total
        again = Check()
        for record in log.read():
            again(record)
        assert again.next == follower.next
        assert len(log.segments()) > 2
        assert log.verify().problems == []


@pytest.mark.slow
def test_group_commit_of_many_processes(tmp_path):
    """Twelve processes, one durable record at a time: whatever is acknowledged is durable by then."""
    path = tmp_path / "log"
    virta.open(path).close()

    def work(number: int) -> None:
        with virta.open(path, durability="group") as log:
            for sequence in range(60):
                at = log.append("t", "", STAMP.pack(number, sequence, 0, 1))
                assert log.durable_offset > at

    with children() as pids:
        pids.extend(fork(work, number) for number in range(12))
        assert [join(pid) for pid in pids] == [0] * 12
    with virta.open(path) as log:
        check = Check()
        for record in log.read():
            check(record)
        assert check.next == dict.fromkeys(range(12), 60)


@pytest.mark.parametrize("durability", ["none", "group"])
def test_threads_share_a_handle(tmp_path, either_kernel, durability):
    """Eight threads on one handle, following in one of them: the same promises as for processes."""
    path = tmp_path / "log"
    count = 400 if durability == "none" else 60
    failures: list[BaseException] = []
    with virta.open(path, durability=durability, segment_bytes=65536) as log:

        def work(number: int) -> None:
            try:
                for sequence in range(0, count, 2):
                    batch = [STAMP.pack(number, sequence + i, i, 2) for i in range(2)]
                    log.append_many([("t", "", value) for value in batch])
            except BaseException as exc:  # noqa: BLE001
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        check = Check()
        for record in log.read(follow=True, timeout=20):
            check(record)
            if check.offset == 8 * count:
                break
        for thread in threads:
            thread.join()
        assert not failures
        assert check.next == dict.fromkeys(range(8), count)
        assert log.verify().problems == []


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {crash!r}]
from pathlib import Path
from test_concurrency import Check, kernel, produce, virta
assert kernel.NATIVE is {native}
path, number, others, records = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
produce(path, number, records, "group")
check = Check()
with virta.open(path) as log:
    for record in log.read(follow=True, timeout=60):
        check(record)
        if check.offset == others * records:
            break
assert check.next == dict.fromkeys(range(others), records), check.next
"""


@pytest.mark.slow
def test_native_and_plain_together(tmp_path):
    """Processes with and without the native kernel on one directory: every one reads the same whole log."""
    if not kernel.NATIVE:
        pytest.skip("the native kernel is not built")
    path = tmp_path / "log"
    virta.open(path, segment_bytes=65536).close()
    running = []
    for number in range(4):
        code = SCRIPT.format(tests=str(Path(__file__).parent), crash=str(CRASH), native=number < 2)
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", code, str(path), str(number), "4", "3000"],
                env={**os.environ, "VIRTA_PLAIN": "" if number < 2 else "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    with virta.open(path) as log:
        assert log.verify().problems == []


# --- fork ------------------------------------------------------------------------------------------


def test_fork_with_an_open_log(tmp_path):
    """A handle that was open before a fork works in parent and child, which exclude each other as ever."""
    path = tmp_path / "log"
    with virta.open(path, durability="interval", segment_bytes=65536) as log:
        log.append("t", "", STAMP.pack(9, 0, 0, 1), durability="group")

        def work(number: int) -> None:
            for sequence in range(300):
                log.append("t", "", STAMP.pack(number, sequence, 0, 1), durability="none")
            log.flush()

        with children() as pids:
            pids.extend(fork(work, number) for number in range(3))
            work(3)
            assert [join(pid) for pid in pids] == [0] * 3
        check = Check()
        for record in log.read():
            check(record)
        assert check.next == {9: 1} | dict.fromkeys(range(4), 300)
        assert log.verify().problems == []


@pytest.mark.parametrize("plain", ["", "1"], ids=["native", "plain"])
def test_a_lock_dies_with_its_holder_not_with_its_children(tmp_path, plain):
    """A process is killed while it has the write lock and a child it forked lives on: others can write at once."""
    path = tmp_path / "log"
    virta.open(path).close()
    code = f"""
import os, signal, sys, threading, virta
log = virta.open({str(path)!r}, durability="interval")
log.append("t")
locked = threading.Event()
def lock():
    with log._writer.locked():
        locked.set()
        threading.Event().wait()
threading.Thread(target=lock, daemon=True).start()
locked.wait()
child = os.fork()
if child == 0:
    os.close(1)
    signal.alarm(60)
    signal.pause()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VIRTA_PLAIN": plain},
        capture_output=False,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    child = int(done.stdout)
    try:
        with virta.open(path, lock_timeout=5) as log:
            assert log.append("t") == 1
        os.kill(child, 0)  # and it is still there
    finally:
        os.kill(child, signal.SIGKILL)


# --- closing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_", range(5))
def test_close_while_others_follow_and_append(tmp_path, either_kernel, round_):
    """Closing a handle that threads append to and follow: they end with LogClosedError, the log is whole."""
    path = tmp_path / "log"
    log = virta.open(path, durability=("none", "group")[round_ % 2], segment_bytes=4096)
    ends: list[BaseException] = []
    busy = threading.Semaphore(0)
    acknowledged: list[int] = []

    def append() -> None:
        try:
            while True:
                acknowledged.append(int(log.append("t", "", bytes(300))))
                busy.release()
        except BaseException as exc:  # noqa: BLE001
            ends.append(exc)

    def follow() -> None:
        try:
            for _ in log.read(follow=True):
                busy.release()
        except BaseException as exc:  # noqa: BLE001
            ends.append(exc)

    threads = [threading.Thread(target=work) for work in (append, append, append, follow, follow)]
    for thread in threads:
        thread.start()
    for _ in range(100 + 37 * round_):
        busy.acquire()
    log.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [type(end) for end in ends] == [LogClosedError] * 5, ends
    with virta.open(path) as log:
        offsets = {record.offset for record in log.read()}
        assert set(acknowledged) <= offsets
        assert log.verify().problems == []
        assert log.append("t") == len(offsets)


class _ClearedLate(threading.Event):
    """An event whose `clear` takes until it has been set once more."""

    def __init__(self) -> None:
        super().__init__()
        self._clearing, self._set_again = threading.Event(), threading.Event()

    def set(self) -> None:
        super().set()
        if self._clearing.is_set():
            self._set_again.set()

    def clear(self) -> None:
        self._clearing.set()
        assert self._set_again.wait(60)
        super().clear()

    def wait_for_clear(self) -> None:
        assert self._clearing.wait(60)


def test_close_during_an_interval_sync(tmp_path):
    """The log is closed after the syncing thread checked for a stop and before it waits for work."""
    log = virta.open(tmp_path / "log", durability="interval")
    log.append("t", "", b"1")
    syncing = log._writer._interval
    before, late = syncing._wanted, _ClearedLate()
    syncing._wanted = late
    late.set()
    before.set()  # it waits at the one or at the other
    late.wait_for_clear()

    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(30)

    assert not closing.is_alive(), "the log cannot be closed"
    assert not syncing.thread.is_alive()


def test_threads_that_append_first_share_the_syncing_thread(tmp_path):
    """However many are the first to ask for `interval` at once, close leaves no thread behind."""

    def syncing_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "virta-log-sync"}

    others = syncing_threads()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(30):
            log = virta.open(tmp_path / str(number), durability="interval")
            start = threading.Barrier(4)

            def first(log=log, start=start) -> None:
                start.wait()
                log.append("t", "", b"1")

            threads = [threading.Thread(target=first) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            log.close()
    finally:
        sys.setswitchinterval(interval)

    assert syncing_threads() <= others
