"""Members that hang: stopped by a signal, in a handler that does not return, or in the middle of a change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import virta
from virta.log.consumers.positions import LockFile, Positions

DEADLINE_S = 30.0

MEMBER = """
import sys, virta
from virta.errors import ConsumerError
log = virta.open(sys.argv[1], durability="none")
consumer = log.consumer("g", lease=float(sys.argv[2]))
print("ready", flush=True)
for record in consumer.read(follow=True):
    print(record.offset, flush=True)
    if sys.stdin.readline() == "commit\\n":
        try:
            consumer.commit()
            print("committed", flush=True)
        except ConsumerError as exc:
            print(exc.code, exc, flush=True)
"""

# Stops itself while it has the changing byte, before and after it wrote, as the argument says.
STOPPED_IN_A_CHANGE = """
import os, signal, sys
from pathlib import Path
from virta.log.consumers import positions
from virta.log.consumers.positions import LockFile, Positions

directory, where, to = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = Positions(directory, "g")
calls = []

def stop_once():
    if not calls:
        calls.append(1)
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

def change(slots):
    if where == "before":
        stop_once()
    return {0: slots[0]._replace(sequence=slots[0].sequence + 1, next=max(slots[0].next, to))}

write = Positions._write
def slow_write(self, changes):
    write(self, changes)
    if where == "after":
        stop_once()
Positions._write = slow_write
store.change(LockFile(directory, "g"), change)
print("changed", flush=True)
"""


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", durability="none") as handle:
        yield handle


@contextmanager
def running(program, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def send(process, line):
    process.stdin.write(line + "\n")
    process.stdin.flush()


def read_until(consumer, count):
    """Offsets of the next `count` records, however long the others' leases take to run out."""
    found = []
    for record in consumer.read(follow=True, timeout=DEADLINE_S):
        found.append(record.offset)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("how", ["stopped", "handler"])
def test_a_hung_member_is_replaced_and_fenced(log, how):
    """Its partitions go to the living member whole; when it is back its commit is refused, and it takes part again."""
    log.append_many([("t", f"k{i % 23}", b"%d" % i) for i in range(200)])
    with running(MEMBER, log.path, 0.3) as member:
        assert member.stdout.readline() == "ready\n"
        first = int(member.stdout.readline())
        if how == "stopped":
            os.kill(member.pid, signal.SIGSTOP)
        with log.consumer("g", lease=0.3) as survivor:
            assert sorted(read_until(survivor, 200)) == list(range(200))
            assert survivor.partitions == tuple(range(16))
            assert (log.consumers()[0].members, log.consumers()[0].hung) == (1, 1)
            survivor.commit()
            assert survivor.lag == 0
            os.kill(member.pid, signal.SIGCONT)
            send(member, "commit")
            assert member.stdout.readline().startswith("consumer_lost consumer 'g': partitions [")
            assert first in range(200)
            assert log.consumers()[0].position == 200, "a fenced commit moved the position"
            # What comes now is shared by both.
            deadline = time.monotonic() + DEADLINE_S
            while len(survivor.partitions) > 8:
                assert time.monotonic() < deadline
                assert list(survivor.read(follow=True, timeout=0.1)) == []
            log.append_many([("t", f"k{i}", b"") for i in range(100)])
            assert int(member.stdout.readline()) >= 200


def test_a_new_member_joins_while_all_others_hang(log):
    """It gets all partitions, without any action of the hung members."""
    log.append_many([("t", f"k{i % 23}", b"%d" % i) for i in range(100)])
    with running(MEMBER, log.path, 0.3) as one, running(MEMBER, log.path, 0.3) as two:
        for member in (one, two):
            assert member.stdout.readline() == "ready\n"
            os.kill(member.pid, signal.SIGSTOP)
        with log.consumer("g", lease=0.3) as survivor:
            assert sorted(read_until(survivor, 100)) == list(range(100))
            survivor.commit()
            assert survivor.lag == 0


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("ends", ["continued", "killed"])
def test_stopped_in_the_middle_of_a_change(log, where, ends):
    """A stopped process that has the changing byte blocks no other; its late change is redone, not lost."""
    log.append_many([("t", "", b"%d" % i) for i in range(100)])
    log.consumer("g").close()
    with running(STOPPED_IN_A_CHANGE, log.path, where, 37) as stopped:
        assert stopped.stdout.readline() == "stopping\n"
        with log.consumer("g") as consumer:
            # It wrote before the others went on, or not at all yet: partition 0 starts accordingly.
            expected = [i for i in range(100) if i % 16 or i >= 37 or where == "before"]
            assert sorted(r.offset for r in consumer) == expected
            consumer.commit()
            assert consumer.lag == 0
            assert (log.path / "groups" / "g.grp.1").exists()
            assert log.consumers()[0].position == 100
            if ends == "continued":
                os.kill(stopped.pid, signal.SIGCONT)
                assert stopped.stdout.readline() == "changed\n"
            else:
                stopped.kill()
            stopped.wait()
            assert log.consumers()[0].position == 100, "a late change undid a commit"
            # No process is inside a change any more: there is one file again, and others open it.
            consumer.commit()
            names = sorted(os.listdir(log.path / "groups"))
            assert names == ["g.grp", "g.lock", "g.members"]
            log.append("t", "", b"last")
            assert [r.offset for r in consumer] == [100]
            consumer.commit()
    assert log.consumers()[0].position == 101


def test_killed_while_it_returns_to_one_file(log, monkeypatch):
    """A process that dies between the new file's name and the old file's end leaves one file that counts."""
    log.consumer("g", partitions=1).close()
    stays, dies = Positions(log.path, "g"), Positions(log.path, "g")

    def move(to):
        return lambda slots: {0: slots[0]._replace(sequence=slots[0].sequence + 1, next=to)}

    with LockFile(log.path, "g") as locks:
        dies._supersede()
        stays.change(locks, move(1))
        assert stays.chained
        dies.read()
        with monkeypatch.context() as killed:
            killed.setattr(type(log.path), "unlink", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                dies.collapse(locks)
        stays.change(locks, move(2))
        late = Positions(log.path, "g")
        assert [slot.next for slot in late.read()] == [2], (
            "a commit went to a file that is no longer read"
        )
        late.change(locks, move(3))
        assert [slot.next for slot in stays.read()] == [3]
        for each in (stays, dies, late):
            each.close()


def test_a_change_that_was_confirmed_is_merged(log):
    """Between the copy and the new file's name the stopped process may still finish: that change counts."""
    log.consumer("g", partitions=1).close()
    one, two = Positions(log.path, "g"), Positions(log.path, "g")
    stale = one._data()
    with LockFile(log.path, "g") as locks:
        moved = one.change(
            locks, lambda slots: {0: slots[0]._replace(sequence=slots[0].sequence + 1, next=7)}
        )
        assert moved[0].next == 7
        two._data = lambda: stale  # copied before that change
        two._supersede()
        del two._data
        for _ in range(2):  # before it was merged, and after
            assert [slot.next for slot in two.read()] == [7]
            assert [slot.next for slot in one.read()] == [7]
            two.change(locks, lambda _: {})
    one.close()
    two.close()
