"""The worker loop: done, failed, given back; heartbeats; graceful stop; wake-up without polling."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
import time
from functools import partial

import pytest
from journal_support import Clock, daemon, until

from virta.cli import journal_work
from virta.cli.journal_work import run_command
from virta.errors import JournalError
from virta.journal import AsyncClient, Worker, commands
from virta.journal import worker as worker_module
from virta.journal.commands import Lease
from virta.journal.daemon import JournalServer
from virta.journal.domain import TRACEBACK_MARK, WORKING
from virta.journal.messages import Function
from virta.journal.node import Node


def test_done_failed_and_dead(tmp_path):
    """A handler that returns ends the job, one that raises has it tried again until it is dead."""

    async def run():
        async with (
            daemon(tmp_path) as server,
            await AsyncClient.connect(*server.address) as client,
        ):
            settings = {"max_attempts": 3, "retry_delay": 0}
            await client.admin("configure", domain="h", settings=settings)
            await client.call(commands.push("http://h/good", payload="p"))
            await client.call(commands.push("http://h/bad"))
            worker = Worker(*server.address, concurrency=2)
            seen = []

            @worker.handle("h")
            def handle(job):
                seen.append((job.uri, job.payload, job.attempts))
                if job.uri.endswith(b"bad"):
                    raise ValueError("no good")

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            jobs = server.node.engine.jobs
            await until(lambda: jobs.dead(b"http://h/bad") is not None)
            stop.set()
            await task
            return seen, jobs.dead(b"http://h/bad").reason, len(jobs), worker

    seen, reason, left, worker = asyncio.run(run())
    assert sorted(seen) == [
        (b"http://h/bad", None, 0),
        (b"http://h/bad", None, 1),
        (b"http://h/bad", None, 2),
        (b"http://h/good", "p", 0),
    ]
    reason, _, traceback = reason.partition(TRACEBACK_MARK)
    assert reason == "ValueError: no good"
    assert 'raise ValueError("no good")' in traceback
    assert (left, worker.done, worker.failed) == (1, 1, 3)


def test_heartbeat_keeps_a_long_job(monkeypatch):
    """A handler that takes longer than the deadline keeps its job, which is done once."""
    clock = Clock(time.time_ns() // 1000)
    monkeypatch.setattr(commands, "system_clock", clock)
    extend = commands.extend
    beats = []

    def extended(key, seconds):
        beats.append(clock.now)
        return extend(key, seconds)

    monkeypatch.setattr(commands, "extend", extended)

    async def run():
        async with (
            daemon(clock=clock) as server,
            await AsyncClient.connect(*server.address) as client,
        ):
            await client.call(commands.push("http://h/slow"))
            worker = Worker(*server.address, work_for=0.03)
            began, go_on = [], asyncio.Event()

            @worker.handle()
            async def handle(job):
                began.append(job)
                await go_on.wait()

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            await until(lambda: began)
            jobs = server.node.engine.jobs
            for _ in range(9):  # three times as long as the deadline, a third of it at a time
                (job,) = jobs.all()
                before = job.worked_until
                clock.now += 10_000
                await until(lambda: [j.worked_until > before for j in jobs.all()] == [True])  # noqa: B023
            go_on.set()
            await until(lambda: worker.done)
            stop.set()
            await task
            return len(began), len(jobs), len(beats) >= 9

    assert asyncio.run(run()) == (1, 0, True)


def test_new_work_wakes_an_idle_worker(monkeypatch):
    """A job pushed while the worker waits is announced to it; it does not poll."""
    monkeypatch.setattr(worker_module, "IDLE_S_MAX", 600.0)

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            worker = Worker(*server.address)

            @worker.handle("h")
            async def handle(job):
                pass

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            await until(lambda: server.node.engine.listeners.awaited)
            await client.call(commands.push("http://h/x"))
            await until(lambda: worker.done)
            stop.set()
            await task

    asyncio.run(run())


def test_new_work_wakes_a_worker_with_free_places(monkeypatch):
    """Also one that is at work hears of a job at once, as long as it has a place for it."""
    monkeypatch.setattr(worker_module, "IDLE_S_MAX", 600.0)

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            worker = Worker(*server.address, concurrency=2)
            began, go_on = [], asyncio.Event()

            @worker.handle()
            async def handle(job):
                began.append(job.uri)
                await go_on.wait()

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            for number in (1, 2):
                await client.call(commands.push(f"http://h/{number}"))
                await until(lambda: len(began) == number)  # noqa: B023
            go_on.set()
            stop.set()
            await task
            return worker.done

    assert asyncio.run(run()) == 2


def test_graceful_stop_finishes_or_gives_back():
    """Told to stop, a worker finishes what it can in time and gives the rest back at once."""

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            await client.call(commands.push("http://h/quick"))
            await client.call(commands.push("http://h/endless"))
            worker = Worker(*server.address, concurrency=2, grace=600)
            started, go_on = [], asyncio.Event()

            @worker.handle()
            async def handle(job):
                started.append(job)
                await (go_on if job.uri.endswith(b"quick") else asyncio.Event()).wait()

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            await until(lambda: len(started) == 2)
            stop.set()
            go_on.set()
            await until(lambda: worker.done)
            worker._hurry.set()
            await asyncio.wait_for(task, 10)
            (job,) = server.node.engine.jobs.all()
            return worker.done, job.uri, job.state == WORKING, job.attempts

    assert asyncio.run(run()) == (1, b"http://h/endless", False, 0)


def test_told_to_stop_while_a_job_is_on_its_way(monkeypatch):
    """A job that was asked for before the worker was told to stop is done, not left to its deadline."""
    stop = asyncio.Event()
    call = AsyncClient.call

    async def slow_call(self, command):
        if command.request.function == Function.NEXT:
            stop.set()
            await asyncio.sleep(0.05)
        return await call(self, command)

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            await client.call(commands.push("http://h/1"))
            monkeypatch.setattr(AsyncClient, "call", slow_call)
            worker = Worker(*server.address)
            worker.handle()(lambda _: None)
            await asyncio.wait_for(worker.work(stop), 10)
            return worker.done, len(server.node.engine.jobs)

    assert asyncio.run(run()) == (1, 0)


@pytest.mark.parametrize("others", [0, 1])
def test_a_job_on_its_way_when_the_worker_ends(others, monkeypatch):
    """Handed out when the grace is over, it is given back, not begun, and nothing goes on behind the end."""
    coming, come = asyncio.Event(), asyncio.Event()
    call = AsyncClient.call

    async def slow_call(self, command):
        result = await call(self, command)
        if command.request.function == Function.NEXT and any(
            job.uri.endswith(b"last") for job in result.jobs
        ):
            coming.set()
            await come.wait()
        return result

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            monkeypatch.setattr(AsyncClient, "call", slow_call)
            worker = Worker(*server.address, grace=0)
            began = []

            @worker.handle()
            async def handle(job):
                began.append(job.uri)
                await asyncio.Event().wait()

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            for number in range(others):
                await client.call(commands.push(f"http://h/{number}"))
                await until(lambda: len(began) > number)  # noqa: B023
            await client.call(commands.push("http://h/last"))
            await asyncio.wait_for(coming.wait(), 10)
            stop.set()
            await until(lambda: worker._over)
            come.set()
            await asyncio.wait_for(task, 10)
            states = [job.state == WORKING for job in server.node.engine.jobs.all()]
            return states, len(began), worker._running

    assert asyncio.run(run()) == ([False] * (others + 1), others, set())


def test_a_worker_that_ends_in_the_moment_of_taking_a_job(monkeypatch):
    """A job whose handler did not even begin is given back."""
    take = Worker._take

    async def take_and_end(self, client):
        again = await take(self, client)
        if self._running:
            working.cancel()
        return again

    async def run():
        nonlocal working
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            await client.call(commands.push("http://h/1"))
            monkeypatch.setattr(Worker, "_take", take_and_end)
            worker = Worker(*server.address)
            go_on = threading.Event()
            worker.handle()(lambda _: go_on.wait())
            working = asyncio.create_task(worker.work(asyncio.Event()))
            await asyncio.wait({working}, timeout=10)
            go_on.set()
            (job,) = server.node.engine.jobs.all()
            return working.cancelled(), job.state == WORKING, job.attempts

    working = None
    assert asyncio.run(run()) == (True, False, 0)


def test_concurrency_is_bounded():
    """Never more handlers at a time than asked for, and all jobs get done."""

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            await asyncio.gather(*(client.call(commands.push(f"http://h/{i}")) for i in range(40)))
            worker = Worker(*server.address, concurrency=5)
            running, most = set(), [0]

            @worker.handle()
            async def handle(job):
                running.add(job.uri)
                most[0] = max(most[0], len(running))
                await asyncio.sleep(0.002)
                running.discard(job.uri)

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            await until(lambda: worker.done == 40)
            stop.set()
            await task
            return most[0]

    assert asyncio.run(run()) == 5


def test_a_daemon_that_restarts(tmp_path):
    """The worker reconnects and goes on."""

    async def run():
        worker = None
        done = []
        stop = asyncio.Event()
        task = None
        port = 0
        for round_ in range(2):
            server = JournalServer(port=port, node=Node(tmp_path))
            await server.start()
            port = server.address[1]
            if worker is None:
                worker = Worker(*server.address)

                @worker.handle()
                async def handle(job):
                    done.append(job.uri)

                task = asyncio.create_task(worker.work(stop))
            async with await AsyncClient.connect(*server.address) as client:
                await client.call(commands.push(f"http://h/{round_}"))
                expected = round_ + 1
                await until(lambda: worker.done == expected)  # noqa: B023
            await server.stop()
        stop.set()
        await asyncio.wait_for(task, 10)
        return done

    assert asyncio.run(run()) == [b"http://h/0", b"http://h/1"]


def test_a_handler_outlives_the_daemon(tmp_path):
    """A daemon that restarts while a job is worked on hears that it is done; it is not done again."""

    async def run():
        server = JournalServer(port=0, node=Node(tmp_path))
        await server.start()
        worker = Worker(*server.address, work_for=30)
        began, ended, go_on = [], [], asyncio.Event()

        @worker.handle()
        async def handle(job):
            began.append(job.uri)
            await go_on.wait()
            ended.append(job.uri)

        stop = asyncio.Event()
        task = asyncio.create_task(worker.work(stop))
        async with await AsyncClient.connect(*server.address) as client:
            await client.call(commands.push("http://h/1"))
        await until(lambda: began)
        await server.stop()
        again = JournalServer(port=server.address[1], node=Node(tmp_path))
        go_on.set()
        await until(lambda: ended)
        stop.set()  # the grace is long enough for the report, too
        await again.start()
        await asyncio.wait_for(task, 10)
        left = len(again.node.engine.jobs)
        await again.stop()
        return began, left, worker.done

    assert asyncio.run(run()) == ([b"http://h/1"], 0, 1)


async def done_by(worker, uris, *, settings=None):
    """Push, and work until all of them are done or dead; what became of those that are left."""
    async with daemon() as server, await AsyncClient.connect(*server.address) as client:
        worker._port = server.address[1]
        await client.admin("configure", domain="h", settings=settings or {})
        for uri in uris:
            await client.call(commands.push(uri))
        stop = asyncio.Event()
        task = asyncio.create_task(worker.work(stop))
        await until(lambda: worker.done + worker.failed == len(uris))
        stop.set()
        await task
        return (await client.admin("list"))["jobs"]


def test_what_a_handler_returns_to_be_awaited_is_awaited():
    """A job is done when its work is, however the coroutine was wrapped."""
    done = []

    async def fetch(prefix, job):
        await asyncio.sleep(0)
        done.append(prefix + job.uri)

    worker = Worker()
    worker.handle("h")(lambda job: fetch(b"a ", job))
    worker.handle("g")(partial(fetch, b"b "))

    assert asyncio.run(done_by(worker, ["http://h/1", "http://g/1"])) == []
    assert sorted(done) == [b"a http://h/1", b"b http://g/1"]


def test_as_many_threads_as_places():
    """Plain functions run as many at a time as the worker has places, however few cores there are."""
    meeting = threading.Barrier(40, timeout=10)
    worker = Worker(concurrency=40)
    worker.handle()(lambda _: meeting.wait() * 0)

    assert asyncio.run(done_by(worker, [f"http://h/{number}" for number in range(40)])) == []
    assert worker.done == 40


def test_the_handler_of_the_domain_does_its_jobs():
    """The handler for everything does what no other is for, whichever was registered first."""
    seen = []
    worker = Worker()
    worker.handle()(lambda job: seen.append((b"any", job.uri)))
    worker.handle("H")(lambda job: seen.append((b"h", job.uri)))

    assert asyncio.run(done_by(worker, ["http://h/1", "http://g/1"])) == []
    assert sorted(seen) == [(b"any", b"http://g/1"), (b"h", b"http://h/1")]


def test_domains_take_turns():
    """A domain that always has work does not keep a worker from another one."""
    order = []
    worker = Worker(concurrency=1)
    for domain in ("a", "b"):
        worker.handle(domain)(lambda job: order.append(job.uri[7:8]))
    uris = [f"http://{domain}/{number}" for domain in "ab" for number in range(6)]

    asyncio.run(done_by(worker, uris))
    assert b"b" in order[:3]
    assert b"a" in order[:3]


def exits(_):
    sys.exit(3)


def odd(_):
    raise ValueError("half a pair: \udcff")


def ends(_):
    raise StopIteration


async def cancels(_):
    raise asyncio.CancelledError


async def exits_in_the_loop(_):
    sys.exit(4)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (exits, "SystemExit: 3"),
        (exits_in_the_loop, "SystemExit: 4"),
        (odd, "ValueError: half a pair: ?"),
        (ends, "RuntimeError: the handler raised StopIteration()"),
        (cancels, "CancelledError: "),
    ],
)
def test_whatever_a_handler_raises_is_its_failure(handler, reason):
    """Ways to end that are no ordinary exception end neither the worker nor the job."""
    worker = Worker()
    worker.handle()(handler)

    (job,) = asyncio.run(done_by(worker, ["http://h/1"], settings={"max_attempts": 1}))
    assert (job["state"], job["reason"]) == ("dead", reason)


def test_a_stuck_thread_does_not_keep_the_worker():
    """After the grace, or at once if told twice, the job is given back and the worker ends."""

    async def run(grace):
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            await client.call(commands.push("http://h/1"))
            worker = Worker(*server.address, grace=grace)
            stuck, began = threading.Event(), threading.Event()

            @worker.handle()
            def handle(_):
                began.set()
                stuck.wait()

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            await until(began.is_set)
            stop.set()
            await asyncio.sleep(0)
            if grace:
                worker._hurry.set()
            await asyncio.wait_for(task, 5)
            stuck.set()
            (job,) = server.node.engine.jobs.all()
            return job.state == WORKING, job.attempts

    assert asyncio.run(run(0)) == (False, 0)
    assert asyncio.run(run(600)) == (False, 0)


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"work_for": 0}, {"grace": -1}])
def test_settings_that_cannot_be(wrong):
    """A worker without places, or that beats without pause, is refused with the value."""
    (name,) = wrong
    with pytest.raises(JournalError, match=f"{name} {wrong[name]} of a worker"):
        Worker(**wrong)


def test_wrong_use():
    """No handler, or two for one domain, is an error that says so."""
    worker = Worker()
    with pytest.raises(JournalError, match="without handlers"):
        asyncio.run(worker.work(asyncio.Event()))
    worker.handle("d")(print)
    with pytest.raises(JournalError, match="already"):
        worker.handle("d")(print)


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
    """After --timeout it is ended with everything it started, also if it will not hear of it; that is a failure."""
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
        while not (600 in given and out.exists() and out.read_text().endswith("\n")):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
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
        await until(lambda: out.exists() and out.read_text().endswith("\n"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(run())
    assert not alive(out.read_text().strip())


def test_a_command_of_a_worker_that_stops_as_it_starts(tmp_path, monkeypatch):
    """Nothing of it is left, however early it was cancelled."""
    monkeypatch.setattr(journal_work, "GONE_LOOKS", 10)  # where nobody reaps
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
    """Being cancelled is not forgotten, though what the command said ends in the same moment."""

    async def run():
        heard, ended = asyncio.Event(), asyncio.Event()

        async def listen(_):
            await heard.wait()

        def timeout_at(seconds, timeout=asyncio.timeout):
            if seconds == 600.0:
                ended.set()
            return timeout(seconds)

        monkeypatch.setattr(journal_work._Stderr, "listen", listen)
        monkeypatch.setattr(journal_work, "SAID_S_MAX", 600.0)
        monkeypatch.setattr(asyncio, "timeout", timeout_at)
        task = asyncio.create_task(run_command("exit 0", job_with()))
        await asyncio.wait_for(ended.wait(), 10)
        heard.set()
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


def test_what_a_command_said_last_is_heard(monkeypatch):
    """Also by a worker that had no turn from its start until there was no time left to wait for it."""
    monkeypatch.setattr(journal_work, "SAID_S_MAX", 0.0)
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
    ("payload", "heard"),
    [(True, "true"), (1.5, "1.5"), (None, ""), ("\udcff", "\udcff"), (b"\0\xff", "\0\udcff")],
)
def test_input_of_a_command(payload, heard, tmp_path):
    """A payload comes as it was pushed, whatever its type."""
    out = tmp_path / "out"
    asyncio.run(run_command(f"cat > {out}", job_with(payload)))

    assert out.read_bytes().decode(errors="surrogateescape") == heard


def test_what_a_command_says_is_heard(capfd):
    """What a command writes to stderr is seen as it comes, also if it ends well."""
    asyncio.run(run_command("echo hello >&2; echo out", job_with()))

    assert capfd.readouterr() == ("out\n", "hello\n")
