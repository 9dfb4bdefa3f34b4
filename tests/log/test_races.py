"""Races that occur once in a thousand runs, forced: one operation between two steps of another."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import virta
from virta import errors
from virta.log.consumers import positions
from virta.log.engine import kernel, plain_kernel
from virta.log.engine.interval_sync import IntervalSync
from virta.log.format import directory, index, segment
from virta.log.record import datetime_of
from virta.log.upkeep import compaction

CRASH = Path(__file__).parent.parent / "crash"
sys.path.append(str(CRASH))

from crash_tools import fork, join  # noqa: E402


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as handle:
        yield handle


def fill(log, count, size=300):
    for number in range(count):
        log.append("t", f"k{number % 7}", b"%d" % number + bytes(size))


def once(monkeypatch, module, name, act, *, after=False):
    """Run `act` just before (or after) the next call of a function."""
    real = getattr(module, name)
    done = []

    def gate(*args, **options):
        if not done and not after:
            done.append(True)
            act()
        result = real(*args, **options)
        if not done:
            done.append(True)
            act()
        return result

    monkeypatch.setattr(module, name, gate)
    return done


# --- reading, while others append, roll over and remove --------------------------------------------


def test_verify_beside_a_writer(log, monkeypatch):
    """Records that are appended while the active segment is checked are no damage."""
    log.append("t", "", b"before")
    done = once(monkeypatch, kernel, "walk", lambda: log.append("t", "", b"meanwhile"), after=True)
    assert log.verify().problems == []
    assert done


def test_verify_in_the_middle_of_a_rollover(log, monkeypatch):
    """The next segment is there and not yet published: the one before has its seal, which counts."""
    log.append("t", "", bytes(3900))
    found = []
    done = once(monkeypatch, segment.files, "sync_directory", lambda: found.append(log.verify()))
    log.append("t", "", bytes(3900))
    assert done
    assert found[0].problems == []
    assert found[0].segments == 2


@pytest.mark.parametrize(
    "read_somehow",
    [
        lambda log: log.segments()[-1].next,
        lambda log: log.bytes,
        lambda log: log.verify().problems,
        lambda log: log.read(start=datetime_of(0)).position,
        lambda log: log.append_many([("t", "", b"x")], producer=(7, 1)).duplicate,
    ],
    ids=["segments", "bytes", "verify", "time", "producer"],
)
def test_retention_between_listing_and_opening(log, monkeypatch, read_somehow):
    """Segments that vanish between being listed and being opened were removed, which is no error."""
    fill(log, 60)
    for file in log.path.glob("*.pidx"):
        file.unlink()
    listed = directory.segment_bases

    def removed_meanwhile(path):
        bases = listed(path)
        for base in bases[:-2]:
            (path / directory.index_name(base)).unlink(missing_ok=True)
            (path / directory.segment_name(base)).unlink(missing_ok=True)
        return bases

    for module in ("seek", "engine.source", "upkeep.verify", "engine.producers"):
        monkeypatch.setattr(f"virta.log.{module}.segment_bases", removed_meanwhile)
    read_somehow(log)
    assert len(listed(log.path)) == 2


def test_a_reader_meets_retention_at_work(log, monkeypatch):
    """The segment behind the gap goes too, between being listed and being opened: the gap is only longer."""
    fill(log, 60)
    bases = directory.segment_bases(log.path)
    reader = log.read(on_gap="skip")
    assert next(reader).offset == 0
    listed = directory.segment_bases

    def remove(*doomed: int) -> None:
        for base in doomed:
            (log.path / directory.segment_name(base)).unlink(missing_ok=True)

    def removed_meanwhile(path):
        found = listed(path)
        remove(bases[2])
        return found

    remove(bases[1])
    monkeypatch.setattr("virta.log.engine.source.segment_bases", removed_meanwhile)
    assert [r.offset for r in reader] == [*range(1, bases[1]), *range(bases[3], 60)]


def test_a_rollover_while_a_time_is_looked_up(log, monkeypatch):
    """Records of a segment that is made during the search are found by the next read, not passed over."""
    log.append("t", "", b"old")
    later = log.segments()[0].last_time + 1
    real = directory.segment_bases

    def then_grow(path):
        bases = real(path)
        monkeypatch.setattr("virta.log.seek.segment_bases", real)
        log.append("t", "", bytes(3900))
        log.append("t", "", bytes(3900))
        return bases

    monkeypatch.setattr("virta.log.seek.segment_bases", then_grow)
    assert log.read(start=datetime_of(later)).position <= 1


# --- maintenance -----------------------------------------------------------------------------------


def test_indexes_are_not_written_during_maintenance(log):
    """A rollover during compaction writes no index; the next rollover writes it."""
    with directory.maintenance_lock(log.path):
        fill(log, 20)
        assert not list(log.path.glob("*.pidx"))
    fill(log, 20)
    sealed = len(directory.segment_bases(log.path)) - 1
    assert len(list(log.path.glob("*.pidx"))) == sealed


def test_compaction_before_the_index_is_there(log):
    """A producer's last batch is remembered when compaction runs between a rollover and its index."""
    log.append_many([("t", "k", b"v")], producer=(9, 4))
    fill(log, 40)
    for file in log.path.glob("*.pidx"):
        file.unlink()
    log.compact()
    with virta.open(log.path) as again:
        assert again.append_many([("t", "k", b"v")], producer=(9, 4)).duplicate


def test_a_producer_is_asked_while_a_segment_is_replaced(log, monkeypatch):
    """A producer is known at every step of replacing a segment and its index."""
    fill(log, 30)
    log.append_many([("t", "k0", b"v")], producer=(9, 4))
    active = log.segments()[-1].base
    while log.segments()[-1].base == active:
        fill(log, 1)
    answers = []
    real = os.rename

    def ask() -> None:
        with virta.open(log.path) as other:
            answers.append(other.append_many([("t", "k0", b"v")], producer=(9, 4)).duplicate)

    def rename(old, new) -> None:
        compacted = str(old).endswith(".compact")
        if compacted:
            ask()
        real(old, new)
        if compacted:
            ask()

    monkeypatch.setattr(compaction.os, "rename", rename)
    assert log.compact().segments == len(answers) // 2 > 1
    assert all(answers)


def test_compaction_between_two_appends_of_a_producer(log):
    """A producer's batches of other handles are known, even if compaction removed them in between."""
    log.append_many([("t", "k0", b"1")], producer=(9, 1))
    with virta.open(log.path, durability="none") as other:
        other.append_many([("t", "k0", b"2")], producer=(9, 2))
        fill(other, 60)
        other.compact()
    assert log.append_many([("t", "k0", b"2")], producer=(9, 2)).duplicate


def test_a_listing_that_fails_costs_no_append(log, monkeypatch):
    """Indexes are hints: no descriptors left to make one is no reason to fail an append that is done."""

    def full(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(index, "segment_bases", full)
    fill(log, 20)
    assert log.next_offset == 20


# --- forks -----------------------------------------------------------------------------------------


def in_a_child(work) -> None:
    """Run `work` in a forked child, which ends as a program does, with everything it inherited collected."""
    assert join(fork(work)) == 0


class Bystander:
    """A forked child that does nothing but live, with everything that was open when it was made."""

    def __enter__(self) -> Bystander:
        end, self._end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._end)
            os.read(end, 1)
            os._exit(0)
        os.close(end)
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._end)
        assert join(self._pid) == 0


def test_a_fork_during_maintenance(log):
    """A child forked during maintenance does not keep the maintenance lock."""
    with directory.maintenance_lock(log.path):
        bystander = Bystander().__enter__()
    with bystander, directory.maintenance_lock(log.path, wait=False) as alone:
        assert alone


def test_a_member_leaves_while_a_forked_child_lives(log):
    """Its partitions are free at once, not when the child ends."""
    fill(log, 20)
    leaving = log.consumer("g", lease=3600.0)
    with Bystander():
        leaving.close()
        with log.consumer("g", lease=3600.0) as next_one:
            assert len(next_one.partitions) == 16


def test_a_child_does_not_end_its_parents_membership(log):
    """A child that closes the consumer it inherited closes its own copy."""
    with log.consumer("g", lease=3600.0) as consumer:
        in_a_child(consumer.close)
        with log.consumer("g", lease=3600.0) as late:
            assert late.partitions == ()


def test_a_child_does_not_end_its_parents_pin(log):
    """A child that drops the pin it inherited, and one that lives on after its parent, change nothing about it."""
    fill(log, 60)
    with log.pin(5) as pin:
        in_a_child(pin.close)
        assert log.retain(max_bytes=0).first_offset <= 5


def test_a_child_cannot_use_its_parents_consumer(log):
    """Two processes that read as one member would each deliver everything."""
    fill(log, 20)
    with log.consumer("g") as consumer:

        def read() -> None:
            with pytest.raises(errors.LogClosedError, match="belongs to the process that made it"):
                list(consumer)

        in_a_child(read)
        assert len(list(consumer)) == 20


@contextmanager
def orphan_of_a_killed_process(act):
    """Let `act` make something in a process that then forks a child and is killed; the child lives on."""
    read_end, write_end = os.pipe()

    def make_and_die() -> None:
        made = act()
        ready, started = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(started, b".")  # the child has closed what it inherited
            signal.alarm(60)
            signal.pause()
        os.read(ready, 1)
        os.write(write_end, b"%d" % child)
        os.kill(os.getpid(), signal.SIGKILL)
        made.close()

    assert join(fork(make_and_die)) == -signal.SIGKILL
    os.close(write_end)
    child = int(os.read(read_end, 20))
    os.close(read_end)
    try:
        yield
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_pin_dies_with_its_holder_not_with_its_children(log):
    """The holder is killed while a child it forked lives on: the pin is ignored."""
    fill(log, 60)
    with orphan_of_a_killed_process(lambda: log.pin(5)):
        assert log.retain(max_bytes=0).first_offset > 5


def test_a_membership_dies_with_its_holder_not_with_its_children(log):
    """The member is killed while a child it forked lives on: its partitions are free at once."""
    fill(log, 20)
    with (
        orphan_of_a_killed_process(lambda: log.consumer("g", lease=3600.0)),
        log.consumer("g", lease=3600.0) as heir,
    ):
        assert len(heir.partitions) == 16


def test_two_threads_are_the_first_in_a_child(log, monkeypatch):
    """After a fork one thread reopens the log; another one that uses it meanwhile waits."""
    log.append("t")

    def work() -> None:
        opening, go_on = threading.Event(), threading.Event()
        real = log._connect

        def slowly() -> None:
            opening.set()
            go_on.wait(1)  # the other one comes by now, or it never would
            real()

        log._connect = slowly
        outcomes: list[object] = []

        def use() -> None:
            try:
                outcomes.append(int(log.append("t")))
            except errors.LogError as exc:
                outcomes.append(exc)

        first = threading.Thread(target=use)
        first.start()
        opening.wait()
        second = threading.Thread(target=use)
        second.start()
        while second.is_alive() and not log._connecting.locked():
            time.sleep(0)
        go_on.set()
        first.join()
        second.join()
        assert sorted(outcomes) == [1, 2], outcomes

    in_a_child(work)


def test_a_child_that_cannot_open_tries_again(log, monkeypatch):
    """The first use after a fork fails to open: the next use tries again and does not report a read-only log."""
    log.append("t")

    def work() -> None:
        real = log._connect

        def fail() -> None:
            log._connect = real
            raise errors.LogWriteError("no descriptors left")

        log._connect = fail
        with pytest.raises(errors.LogWriteError):
            log.append("t")
        assert log.append("t") == 1

    in_a_child(work)


# --- the collector, signals ------------------------------------------------------------------------


def test_a_dropped_log_is_closed_there_and_then(tmp_path):
    """No cycle keeps it for the collector, which might run in its own syncing thread."""
    gc.disable()
    try:
        log = virta.open(tmp_path / "log", durability="interval")
        log.append("t")
        syncing = log._writer._interval.thread
        dropped = weakref.ref(log)
        del log
        assert dropped() is None
        assert not syncing.is_alive()
    finally:
        gc.enable()


def test_a_log_that_is_collected_by_its_own_syncing_thread():
    """Closing from the syncing thread does not wait for that thread."""
    ended = threading.Event()
    holder: list[IntervalSync] = []
    ready = threading.Event()

    def flush() -> None:
        ready.wait()
        holder[0].stop()
        ended.set()

    holder.append(IntervalSync(flush))
    holder[0].need()
    ready.set()
    assert ended.wait(60)
    holder[0].thread.join(60)
    assert not holder[0].thread.is_alive()


@pytest.mark.parametrize("kind", ["native", "plain"])
def test_an_interrupt_while_waiting_for_the_lock(tmp_path, kind):
    """Ctrl-C while waiting for another writer: the lock is not kept, this process and others can append."""
    path = tmp_path / "log"
    virta.open(path).close()
    code = f"""
import fcntl, os, signal, threading, virta
log = virta.open({str(path)!r})
held = os.open({str(path / "writer.lock")!r}, os.O_RDWR)
fcntl.flock(held, fcntl.LOCK_EX)
waiting = threading.Event()
class Core:
    def __getattr__(self, name):
        return getattr(log._core, name)
    def lock(self, timeout):
        waiting.set()
        return log._core.lock(timeout)
def interrupt():
    waiting.wait()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    fcntl.flock(held, fcntl.LOCK_UN)
helper = threading.Thread(target=interrupt)
helper.start()
log._writer._core = Core()
try:
    with log._writer.locked():
        raise SystemExit("not interrupted")
except KeyboardInterrupt:
    pass
helper.join()
fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.flock(held, fcntl.LOCK_UN)
assert log.append("t") == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VIRTA_PLAIN": "1" if kind == "plain" else ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


class ClosedBehind:
    """A kernel whose log is closed right after an append, before anybody can ask for its sync."""

    def __init__(self, log) -> None:
        self._log, self._core = log, log._core

    def __getattr__(self, name: str):
        return getattr(self._core, name)

    def append(self, *args):
        done = self._core.append(*args)
        self._log.close()
        return done


def test_close_between_an_append_and_its_sync(tmp_path, either_kernel):
    """An append after which no thread would sync is synced at once, and no thread is left."""
    log = virta.open(tmp_path / "log", durability="interval")
    log._writer._core = ClosedBehind(log)
    before = threading.active_count()
    with pytest.raises(errors.LogClosedError):
        log.append("t")
    assert threading.active_count() == before


def open_files(path: Path) -> list[str]:
    """The files of a directory that this process has open."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            names.append(os.readlink(link))
    return [name for name in names if name.startswith(str(path))]


def test_close_while_a_segment_is_attached(tmp_path, either_kernel, monkeypatch):
    """A log that is closed in the middle of a rollover gives every descriptor back; the close does not wait."""
    log = virta.open(tmp_path / "log", segment_bytes=4096, durability="none")
    log.append("t", "", bytes(3900))
    once(monkeypatch, segment.files, "sync_directory", log.close)
    with pytest.raises(errors.LogClosedError) as caught:
        log.append("t", "", bytes(3900))
    # The error and its frames are still alive: what they refer to must not be what keeps a file open.
    assert caught.value.__cause__ is not None
    assert not open_files(log.path)


def test_close_by_the_thread_that_has_the_write_lock(tmp_path, either_kernel):
    """A close in a signal handler may run while its own thread has the lock: no wait, and unlocking closes the files."""
    log = virta.open(tmp_path / "log", durability="none")
    log.append("t", "", b"before")
    with log._writer.locked():
        log.close()
        assert open_files(log.path), "the owner of the lock still needs its files"
        with pytest.raises(errors.LogClosedError):
            log._writer.snapshot()
    assert not open_files(log.path)
    with virta.open(log.path) as again:
        assert again.append("t", "", b"after") == 1  # the lock is free


def test_a_close_during_an_append_leaves_it_synced(tmp_path, monkeypatch):
    """The plain kernel: an append that another thread's close overtakes is written, synced and answered."""
    monkeypatch.setattr(kernel, "Kernel", plain_kernel.Kernel)
    log = virta.open(tmp_path / "log", durability="fsync")
    closer = threading.Thread(target=log.close)
    synced = []

    def sync(fd, real=os.fdatasync):
        closer.start()
        closer.join(30)
        assert not closer.is_alive(), "the close waits for the append"
        synced.append(fd)
        real(fd)

    monkeypatch.setattr(plain_kernel.os, "fdatasync", sync)
    assert log.append("t", "", b"written") == 0
    monkeypatch.undo()
    assert len(synced) == 1
    assert not open_files(log.path)
    with virta.open(log.path) as again:
        assert [record.value for record in again.read()] == [b"written"]


class MovedBehind:
    """A kernel after whose append another process has the write lock and the active segment is a new one."""

    def __init__(self, log) -> None:
        self._core = log._core
        self.other = os.open(log.path / "writer.lock", os.O_RDWR)

    def __getattr__(self, name: str):
        return getattr(self._core, name)

    def append(self, *args):
        done = self._core.append(*args[:-1], 0)
        fcntl.flock(self.other, fcntl.LOCK_EX)
        return (*done[:-1], 1)

    def sync(self, *args):
        return False


def test_a_lock_timeout_means_that_nothing_was_written(tmp_path, either_kernel):
    """When the lock is kept only after the write, the error is another one: a repeat would be a second record."""
    with virta.open(tmp_path / "log", lock_timeout=0.05) as log:
        real = log._writer._core
        moved = log._writer._core = MovedBehind(log)
        with pytest.raises(errors.LogWriteError, match="are written, but may not be on") as caught:
            log.append("t", "", b"written")
        log._writer._core = real
        with pytest.raises(errors.LogLockTimeoutError):
            log.append("t", "", b"refused")
        with pytest.raises(errors.LogLockTimeoutError):
            log.append_many([("t", "", b"refused")], producer=(7, 1), lock_timeout=0.01)
        os.close(moved.other)
        assert caught.value.code == "log_not_synced"
        assert [r.value for r in log.read()] == [b"written"]


def test_json_values_wait_no_longer_than_others(tmp_path, either_kernel):
    """`lock_timeout` counts for records with dicts and lists as values as well."""
    with virta.open(tmp_path / "log", lock_timeout=1) as log:
        other = os.open(log.path / directory.WRITER_LOCK, os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(errors.LogLockTimeoutError, match=r"not free for 0\.01 s"):
                log.append_many([("t", "", {"a": 1})], lock_timeout=0.01)
        finally:
            os.close(other)


# --- what is durable -------------------------------------------------------------------------------


def test_what_is_durable_is_said_by_one_at_a_time(tmp_path, either_kernel):
    """A rollover does not write the durable position while a stopped leader is writing it."""
    with virta.open(tmp_path / "log", durability="none") as log:
        log.append("t")
        page = os.open(log.path / directory.CONTROL, os.O_RDWR)
        leader = os.open(log.path / directory.SYNC_LOCK, os.O_RDWR)
        try:
            fcntl.flock(leader, fcntl.LOCK_EX)
            os.pwrite(page, b"\1", 104)  # its sequence is odd: it is in the middle
            before = os.pread(page, 24, 64)
            log._core.publish_durable(7, 7, 7)
            assert os.pread(page, 24, 64) == before
            fcntl.flock(leader, fcntl.LOCK_UN)
        finally:
            os.close(page)
            os.close(leader)
        log.flush()
        assert log.durable_offset == 1


def test_a_leader_that_is_overtaken_by_a_rollover(tmp_path, monkeypatch):
    """A leader whose segment is sealed when its sync returns does not move the durable position back."""
    monkeypatch.setattr(kernel, "Kernel", plain_kernel.Kernel)
    with virta.open(tmp_path / "log", durability="none", segment_bytes=4096) as log:
        log.append("t", "", bytes(3900))
        with virta.open(log.path, durability="none") as other:
            monkeypatch.setattr(
                plain_kernel, "_LEADER_PATIENCE_S", 0
            )  # a rollover does not wait for it
            once(
                monkeypatch,
                plain_kernel.os,
                "fdatasync",
                lambda: other.append("t", "", bytes(3900)),
                after=True,
            )
            log.flush()
            assert log._writer.snapshot().durable_base == 1


def test_a_commit_does_not_keep_others_from_theirs(tmp_path, monkeypatch):
    """While one member waits for its disk, another one reads, takes over and commits."""
    with virta.open(tmp_path / "log", durability="group") as log:
        log.append("t")
        with log.consumer("g") as consumer, positions.LockFile(log.path, "g") as other:
            list(consumer)
            free = []
            real = os.fdatasync

            def check(fd: int) -> None:
                free.append(other.lock(positions.CHANGING_BYTE))
                other.unlock(positions.CHANGING_BYTE)
                real(fd)

            monkeypatch.setattr(positions.os, "fdatasync", check)
            consumer.commit()
            assert free == [True]


def test_what_was_synced_beside_a_leader_that_stands_still_is_durable(tmp_path, either_kernel):
    """A handle that waited too long for a leader syncs itself, and its durable offset covers that."""
    with virta.open(tmp_path / "log", durability="group") as log:
        before = log.append("t", "", b"published")
        with (tmp_path / "log" / directory.SYNC_LOCK).open() as leader:
            fcntl.flock(leader, fcntl.LOCK_EX)
            at = log.append("t", "", b"not published yet")

            assert log.durable_offset == at + 1 > before + 1
            with virta.open(tmp_path / "log") as other:
                assert other.durable_offset <= at, "the premise: it is not published"
