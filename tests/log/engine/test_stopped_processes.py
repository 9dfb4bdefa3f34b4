"""A process that is stopped while it has a lock of the log: readers continue, whichever lock it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

import virta
from virta import errors
from virta.log.engine.kernel import Snapshot

pytestmark = pytest.mark.usefixtures("either_kernel")

# Waiting out the holder for each record takes a second a record: more than the deadline.
RECORDS = 60
DEADLINE_S = 40.0

HOLDER = """
import fcntl, os, signal, sys
lock = open(sys.argv[1], "r+b")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextmanager
def stopped_holder(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "locked\n"
        assert os.waitpid(process.pid, os.WUNTRACED)[1] & 0xFF == 0x7F  # it is stopped
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def in_time(work):
    """Run `work` in a thread; fail when it has not ended by the deadline."""
    result = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert result, "it waits for the stopped process again and again"
    return result[0]


@pytest.mark.parametrize("reading", ["follower", "consumer"])
def test_durable_readers_wait_once_for_a_stopped_sync(tmp_path, reading):
    """Records come one by one, each needs a sync: a reader waits out the holder of sync.lock once, not each time."""
    path = tmp_path / "log"
    with virta.open(path) as log, virta.open(path, durability="none") as writer:
        writer.append("t", "k", b"first")
        with stopped_holder(path / "sync.lock"):
            if reading == "consumer":
                consumer = log.consumer("c")
                records = consumer.read(follow=True)
            else:
                records = log.read(follow=True)

            def one_by_one():
                seen = []
                for number in range(RECORDS):
                    seen.append(next(records).offset)
                    if reading == "consumer":
                        consumer.commit()
                    writer.append("t", "k", b"%d" % number)
                return seen

            assert in_time(one_by_one) == list(range(RECORDS))


def test_durable_appends_wait_once_for_a_stopped_sync(tmp_path):
    """The same for a writer: also through rollovers, which publish what is durable."""
    with virta.open(tmp_path / "log", segment_bytes=4096) as log:
        log.append("t", "k", b"first")
        with stopped_holder(tmp_path / "log" / "sync.lock"):
            assert in_time(lambda: [int(log.append("t", "k", bytes(1000))) for _ in range(RECORDS)])
            assert len(log.segments()) > 10
            assert log.durable_offset == RECORDS + 1
        # The holder has ended: the durable position is published again.
        log.append("t", "k", b"last")
        with virta.open(tmp_path / "log", read_only=True) as other:
            assert other.durable_offset == RECORDS + 2


def test_a_segment_that_is_attached_again_is_synced_again(tmp_path):
    """What was synced beside the holder says nothing of bytes that a repair lets be written once more."""
    with virta.open(tmp_path / "log") as log:
        log.append("t", "k", b"first")
        with stopped_holder(tmp_path / "log" / "sync.lock"):
            log.append("t", "k", b"synced beside the holder")
            core, end = log._core, Snapshot(*log._core.snapshot()).end
            reading, writing = os.pipe()
            os.close(reading)
            core.attach(writing, 0, 0)
            with pytest.raises(OSError, match="Invalid argument"):  # a pipe cannot be synced
                core.sync(0, end, True)


def test_readers_need_no_write_lock(tmp_path):
    """A stopped writer blocks other writers only, not readers: neither open handles nor new read-only ones."""
    path = tmp_path / "log"
    with (
        virta.open(path, lock_timeout=0.05) as log,
        virta.open(path, read_only=True) as looker,
    ):
        log.append_many([("t", f"k{i}", b"") for i in range(50)])
        follower, consumer = log.read(follow=True), log.consumer("c")
        with stopped_holder(path / "writer.lock"):
            with pytest.raises(errors.LogLockTimeoutError):
                log.append("t", "k", b"")
            assert in_time(lambda: [next(follower).offset for _ in range(50)]) == list(range(50))
            assert in_time(lambda: len(list(consumer))) == 50
            consumer.commit()
            assert consumer.lag == 0
            assert in_time(lambda: len(list(looker.read()))) == 50
            with virta.open(path, read_only=True) as fresh:
                assert in_time(lambda: len(list(fresh.read()))) == 50
            with virta.open(path, lock_timeout=0.05) as fresh, fresh.consumer("d") as another:
                assert in_time(lambda: len(list(another))) == 50
                with pytest.raises(errors.LogLockTimeoutError):
                    fresh.append("t", "k", b"")
        consumer.close()
        assert log.append("t", "k", b"") == 50


def test_a_log_that_needs_recovery_is_not_opened_without_the_lock(tmp_path):
    """Without a control page the end may need recovery: a writable handle waits, then names the lock's holder."""
    path = tmp_path / "log"
    with virta.open(path) as log:
        log.append("t", "k", b"")
    (path / "control").unlink()
    with (
        stopped_holder(path / "writer.lock"),
        pytest.raises(errors.LogLockTimeoutError, match=r"was not free for 0\.05 s"),
    ):
        virta.open(path, lock_timeout=0.05)


@pytest.mark.parametrize("value", [b"bytes", {"as": "JSON"}], ids=["bytes", "json"])
def test_an_append_waits_as_long_as_it_was_asked_to(tmp_path, value):
    """`lock_timeout` of an append counts, not that of the log, whatever the values are."""
    path = tmp_path / "log"
    with (
        virta.open(path, lock_timeout=10 * DEADLINE_S) as log,
        stopped_holder(path / "writer.lock"),
    ):

        def append():
            try:
                log.append_many([("t", "", value)], lock_timeout=0.05)
            except errors.LogLockTimeoutError as error:
                return error

        assert "0.05 s" in str(in_time(append))
