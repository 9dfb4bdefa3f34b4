"""The worker loop: done, failed, given back; heartbeats; graceful stop; wake-up without polling."""

from __future__ import annotations

import asyncio

import pytest
from journal_support import daemon, until

from virta.cli.journal_jobs import run_command
from virta.errors import JournalError
from virta.journal import AsyncClient, Worker, commands
from virta.journal import worker as worker_module
from virta.journal.daemon import JournalServer
from virta.journal.domain import WORKING
from virta.journal.node import Node


def test_done_failed_and_dead(tmp_path):
    """A handler that returns ends the job, one that raises has it tried again until it is dead."""

    async def run():
        async with (
            daemon(tmp_path) as server,
            await AsyncClient.connect(*server.address) as client,
        ):
            await client.admin("configure", domain="h", settings={"max_attempts": 3})
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
    assert reason == "ValueError: no good"
    assert (left, worker.done, worker.failed) == (1, 1, 3)


def test_heartbeat_keeps_a_long_job():
    """A handler that takes longer than the deadline keeps its job, which is done once."""

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            await client.call(commands.push("http://h/slow"))
            worker = Worker(*server.address, work_for=0.3)
            began = []

            @worker.handle()
            async def handle(job):
                began.append(job)
                await asyncio.sleep(0.9)

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            await until(lambda: worker.done)
            stop.set()
            await task
            return len(began), len(server.node.engine.jobs)

    assert asyncio.run(run()) == (1, 0)


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


def test_graceful_stop_finishes_or_gives_back():
    """Told to stop, a worker finishes what it can in time and gives the rest back at once."""

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            await client.call(commands.push("http://h/quick"))
            await client.call(commands.push("http://h/endless"))
            worker = Worker(*server.address, concurrency=2, grace=0.3)
            started = []

            @worker.handle()
            async def handle(job):
                started.append(job)
                await asyncio.sleep(0.05 if job.uri.endswith(b"quick") else 60)

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            await until(lambda: len(started) == 2)
            stop.set()
            await task
            (job,) = server.node.engine.jobs.all()
            return worker.done, job.uri, job.state == WORKING, job.attempts

    assert asyncio.run(run()) == (1, b"http://h/endless", False, 0)


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
