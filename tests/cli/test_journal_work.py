"""`virta journal work --exec`: one shell command per job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select

import pytest
from journal_support import daemon, eventually

from virta.cli.journal import work as journal_work
from virta.cli.journal.work import run_command
from virta.errors import JournalError
from virta.journal import AsyncClient, Worker
from virta.journal.protocol import commands
from virta.journal.protocol.commands import Lease


@pytest.mark.parametrize(
    ("command", "state", "reason"),
    [
        ("exit 0", None, None),
        ("exit 3", "dead", "exit code 3"),
        ("echo no luck >&2; exit 1", "dead", "exit code 1: no luck"),
        ("kill -9 $$", "dead", "exit code -9"),
        ("head -c 9000 /dev/zero | tr '\\0' x >&2; exit 1", "dead", "x" * 400),
        ("no-such-command-here", "dead", "exit code 127"),
        ('test "$(cat)" = payload && test $VIRTA_JOB_ATTEMPTS = 0', None, None),
    ],
)
def test_commands_that_work(command, state, reason, tmp_path):
    """`work --exec`: exit code 0 is done; another, a signal or no command is a failure with its reason."""

    async def run():
        async with (
            daemon(tmp_path) as server,
            await AsyncClient.connect(*server.address) as client,
        ):
            await client.admin("configure", domain="h", settings={"max_attempts": 1})
            await client.call(commands.push("http://h/1", payload="payload"))
            worker = Worker(*server.address)
            stop = asyncio.Event()

            @worker.handle("h")
            async def handle(job):
                try:
                    await run_command(command, job)
                finally:
                    stop.set()

            await worker.work(stop)
            return (await client.admin("list"))["jobs"]

    jobs = asyncio.run(run())
    assert [job["state"] for job in jobs] == ([] if state is None else [state])
    assert reason is None or reason in jobs[0]["reason"]


def job_with(payload=None):
    return Lease(b"h:000:0:1", b"http://h/1", payload, 0.0, 0)


def alive(pid):
    """Whether that process runs; one that is only just being taken out of the table does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_command_that_takes_too_long(tmp_path, monkeypatch):
    """After --timeout it is ended with everything it started, also if it ignores the signal; that is a failure."""
    monkeypatch.setattr(journal_work, "TERM_S_MAX", 0.2)
    out = tmp_path / "pids"
    command = f"trap '' TERM; (trap '' TERM; sleep 50) & echo $$ $! > {out}; wait"
    timeout = asyncio.timeout
    given = {}

    def remembered(seconds):
        given[seconds] = timeout(seconds)
        return given[seconds]

    async def run():
        monkeypatch.setattr(asyncio, "timeout", remembered)
        task = asyncio.create_task(run_command(command, job_with(), timeout=600))
        await eventually(lambda: 600 in given and out.exists() and out.read_text().endswith("\n"))
        given[600].reschedule(0)  # they are over
        await task

    with pytest.raises(JournalError, match="longer than 600 seconds"):
        asyncio.run(run())
    assert not any(alive(pid) for pid in out.read_text().split())


def test_a_command_of_a_worker_that_stops(tmp_path):
    """It is ended with everything it started before its job is given back."""
    out = tmp_path / "pid"

    async def run():
        task = asyncio.create_task(run_command(f"sleep 50 & echo $! > {out}; wait", job_with()))
        await eventually(lambda: out.exists() and out.read_text().endswith("\n"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(run())
    assert not alive(out.read_text().strip())


def test_a_command_of_a_worker_that_stops_as_it_starts(tmp_path, monkeypatch):
    """Nothing of it is left, however early it was cancelled."""
    monkeypatch.setattr(journal_work, "GROUP_CHECKS", 10)  # where no process reaps
    out = tmp_path / "pids"

    async def run(turns):
        task = asyncio.create_task(run_command(f"sleep 50 & echo $! >> {out}; wait", job_with()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for turns in range(8):
        asyncio.run(run(turns))

    pids = out.read_text().split() if out.exists() else []
    assert not any(alive(pid) for pid in pids)


def test_a_command_of_a_worker_that_stops_as_it_ends(monkeypatch):
    """Being cancelled is not forgotten, though what the command said ends at the same time."""

    async def run():
        received, ended = asyncio.Event(), asyncio.Event()

        async def listen(_):
            await received.wait()

        def timeout_at(seconds, timeout=asyncio.timeout):
            if seconds == 600.0:
                ended.set()
            return timeout(seconds)

        monkeypatch.setattr(journal_work._Stderr, "copy", listen)
        monkeypatch.setattr(journal_work, "STDERR_S_MAX", 600.0)
        monkeypatch.setattr(asyncio, "timeout", timeout_at)
        task = asyncio.create_task(run_command("exit 0", job_with()))
        await asyncio.wait_for(ended.wait(), 10)
        received.set()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        return task.cancelled()

    assert asyncio.run(run())


@pytest.mark.parametrize("end", ["exit 1", "kill -9 $$"])
def test_a_command_that_fails_leaves_nothing_behind(end, tmp_path):
    """What it put into the background would go on while the job is tried again: it is ended with it."""
    out = tmp_path / "pid"
    with pytest.raises(JournalError, match="exit code"):
        asyncio.run(run_command(f"sleep 50 & echo $! > {out}; {end}", job_with()))

    assert not alive(out.read_text().strip())


def test_a_command_that_leaves_something_behind(tmp_path):
    """What it put into the background is not waited for, though it could still complain and read."""
    out = tmp_path / "pid"
    asyncio.run(run_command(f"sleep 600 <&0 & echo $! > {out}", job_with(b"x" * 1_000_000)))

    pid = out.read_text().strip()
    assert alive(pid)
    os.kill(int(pid), 9)


def test_the_last_output_of_a_command_is_passed_on(monkeypatch):
    """Also by a worker that had no turn from its start until there was no time left to wait for it."""
    monkeypatch.setattr(journal_work, "STDERR_S_MAX", 0.0)
    start = journal_work._start

    async def start_to_end(*given):
        process = await start(*given)
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(process.pid)
            select.select([ended], [], [])
            os.close(ended)
        return process

    monkeypatch.setattr(journal_work, "_start", start_to_end)
    for _ in range(5):
        with pytest.raises(JournalError, match="exit code 1: no luck"):
            asyncio.run(run_command("echo no luck >&2; exit 1", job_with()))


@pytest.mark.parametrize(
    ("payload", "received"),
    [(True, "true"), (1.5, "1.5"), (None, ""), ("\udcff", "\udcff"), (b"\0\xff", "\0\udcff")],
)
def test_input_of_a_command(payload, received, tmp_path):
    """A payload comes as it was pushed, whatever its type."""
    out = tmp_path / "out"
    asyncio.run(run_command(f"cat > {out}", job_with(payload)))

    assert out.read_bytes().decode(errors="surrogateescape") == received


def test_the_output_of_a_command_is_passed_on(capfd):
    """What a command writes to stderr is seen as it comes, also if it ends well."""
    asyncio.run(run_command("echo hello >&2; echo out", job_with()))

    assert capfd.readouterr() == ("out\n", "hello\n")
