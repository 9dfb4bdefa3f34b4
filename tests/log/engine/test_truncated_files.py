"""Files that another process truncates while they are in use: a clear error or a repair, never the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

import virta
from virta import errors
from virta.log.engine import kernel

DEADLINE_S = 30.0

# Reads, follows, writes or consumes as stdin says, and answers each line with one on stdout.
ROLE = """
import faulthandler, sys, virta
from virta.errors import LogError
role, path = sys.argv[1:]
faulthandler.enable()  # before the log is opened: a fault of ours must not reach it
log = virta.open(path, durability="none", read_only=role in ("reader", "follower"))
records = log.read(follow=True) if role == "follower" else None
consumer = log.consumer("c") if role == "consumer" else None
print("ready", flush=True)
for line in sys.stdin:
    try:
        if role == "writer":
            said = int(log.append("t", "k", b"more"))
        elif role == "reader":
            said = sum(1 for _ in log.read())
        elif role == "follower":
            said = next(records, None).offset
        else:
            said = sum(1 for _ in consumer)
            consumer.commit()
    except (LogError, AttributeError) as exc:
        said = "ended" if isinstance(exc, AttributeError) else f"{exc.code} {exc}"
    print(said, flush=True)
"""


@contextmanager
def running(*command, **options):
    process = subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def ask(process):
    process.stdin.write("go\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, f"it ended with {process.wait()}"
    return answer.strip()


@pytest.mark.parametrize("plain", [False, True], ids=["native", "plain"])
@pytest.mark.parametrize("size", [0, 40, 100])
def test_a_truncated_control_page_is_rebuilt(tmp_path, size, plain):
    """Reader, follower, writer and consumer processes, and a writer here: none dies, nothing is lost."""
    if not plain and not kernel.NATIVE:
        pytest.skip("the native kernel is not built")
    path = tmp_path / "log"
    environment = {**os.environ, "VIRTA_PLAIN": "1" if plain else "0"}
    with virta.open(path, durability="none") as log:
        log.append("t", "k", b"first")
        roles = ("reader", "follower", "writer", "consumer")
        with (
            running(sys.executable, "-c", ROLE, roles[0], path, env=environment) as reader,
            running(sys.executable, "-c", ROLE, roles[1], path, env=environment) as follower,
            running(sys.executable, "-c", ROLE, roles[2], path, env=environment) as writer,
            running(sys.executable, "-c", ROLE, roles[3], path, env=environment) as consumer,
        ):
            for process in (reader, follower, writer, consumer):
                assert process.stdout.readline() == "ready\n"
            assert ask(follower) == "0"
            end = 1
            for _ in range(3):
                os.truncate(path / "control", size)
                assert ask(reader) == str(end), "before anybody has made the page again"
                os.truncate(path / "control", size)
                assert ask(writer) == str(end)
                os.truncate(path / "control", size)
                assert ask(follower) == str(end)
                os.truncate(path / "control", size)
                assert int(ask(consumer)) > 0
                os.truncate(path / "control", size)
                assert log.append("t", "k", b"here") == end + 1
                assert ask(follower) == str(end + 1)
                end += 2
                assert ask(reader) == str(end)
        assert log.verify().problems == []
        assert [r.offset for r in log.read()] == list(range(end))
    assert (path / "control").stat().st_size == 4096
    with virta.open(path) as log:
        assert log.append("t", "k", b"last") == end
        assert log.recovered == []


@pytest.mark.parametrize("role", ["reader", "follower", "writer", "consumer"])
def test_a_truncated_segment_is_an_error_that_names_it(tmp_path, role):
    """The active segment is cut to nothing under each of them: they live and say which file."""
    path = tmp_path / "log"
    with virta.open(path, durability="none") as log:
        for _ in range(12):
            log.append("t", "k", bytes(300_000))
    with running(sys.executable, "-c", ROLE, role, path) as process:
        assert process.stdout.readline() == "ready\n"
        if role in ("reader", "follower", "writer"):
            assert not ask(process).startswith("log_")
        os.truncate(path / "00000000000000000000.puro", 0)
        # A follower has the rest of its chunk in memory.
        answers = [ask(process) for _ in range(6 if role == "follower" else 2)]
        said = [answer for answer in answers if "00000000000000000000.puro" in answer]
        assert said, answers
        if role != "follower":  # whose iteration an error ends
            assert said == answers
        assert process.poll() is None


def test_a_truncated_index_is_not_needed(tmp_path):
    """An index is a hint: readers continue without it."""
    with virta.open(tmp_path / "log", durability="none", segment_bytes=4096) as log:
        for i in range(100):
            log.append("t", "k", b"%d" % i + bytes(80))
        reader = log.read()
        next(reader)
        for index in (tmp_path / "log").glob("*.pidx"):
            os.truncate(index, 0)
        assert len(list(reader)) == 99
        assert [r.offset for r in log.read(start=50)] == list(range(50, 100))


def test_a_truncated_position_file_is_an_error_that_names_it(tmp_path):
    """Its consumer says so; other consumers and readers are not harmed."""
    with virta.open(tmp_path / "log", durability="none") as log:
        log.append("t", "k", b"")
        with log.consumer("hurt") as hurt, log.consumer("well") as well:
            os.truncate(tmp_path / "log" / "groups" / "hurt.grp", 0)
            with pytest.raises(errors.ConsumerError, match=r"hurt\.grp"):
                hurt.commit()
            with pytest.raises(errors.ConsumerError, match=r"hurt\.grp"):
                log.consumer("hurt")
            assert len(list(well)) == 1
            well.commit()
        assert len(list(log.read())) == 1


def test_a_fault_elsewhere_is_still_fatal(tmp_path):
    """Only our own files are guarded: another mapping that is cut ends the process as it did before."""
    program = (
        "import mmap, os, sys, virta\n"
        "virta.open(sys.argv[1])\n"
        "file = open(sys.argv[1] + '/other', 'w+b')\n"
        "file.truncate(4096)\n"
        "page = mmap.mmap(file.fileno(), 4096)\n"
        "file.truncate(0)\n"
        "page[0]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "log"], check=False, timeout=DEADLINE_S
    )
    assert done.returncode == -signal.SIGBUS
