"""The worker loop: done, failed, given back; heartbeats; graceful stop; wake-up without polling."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from functools import partial

import pytest
from journal_support import Clock, daemon, eventually, turns

from virta.errors import JournalError
from virta.journal import AsyncClient, Worker
from virta.journal.clients import worker as worker_module
from virta.journal.jobs.failures import TRACEBACK_MARK
from virta.journal.jobs.job import WORKING
from virta.journal.protocol import commands
from virta.journal.protocol.messages import Function
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.tcp import JournalServer


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
            await eventually(lambda: jobs.dead(b"http://h/bad") is not None)
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
    monkeypatch.setattr(commands, "now_us", clock)
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
            await eventually(lambda: began)
            jobs = server.node.engine.jobs
            for _ in range(9):  # three times as long as the deadline, a third of it at a time
                (job,) = jobs.all()
                before = job.worked_until
                clock.now += 10_000
                await eventually(lambda: [j.worked_until > before for j in jobs.all()] == [True])  # noqa: B023
            go_on.set()
            await eventually(lambda: worker.done)
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
            await eventually(lambda: server.node.engine.listeners.awaited)
            await client.call(commands.push("http://h/x"))
            await eventually(lambda: worker.done)
            stop.set()
            await task

    asyncio.run(run())


def test_new_work_wakes_a_worker_with_free_places(monkeypatch):
    """A worker that is busy gets a job at once, too, while it may run more."""
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
                await eventually(lambda: len(began) == number)  # noqa: B023
            go_on.set()
            stop.set()
            await task
            return worker.done

    assert asyncio.run(run()) == 2


def test_graceful_stop_finishes_or_gives_back():
    """A stopping worker finishes what it can in time and gives the rest back at once."""

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
            await eventually(lambda: len(started) == 2)
            stop.set()
            go_on.set()
            await eventually(lambda: worker.done)
            worker.hurry()
            await asyncio.wait_for(task, 10)
            (job,) = server.node.engine.jobs.all()
            return worker.done, job.uri, job.state == WORKING, job.attempts

    assert asyncio.run(run()) == (1, b"http://h/endless", False, 0)


def test_a_stop_while_a_job_is_on_its_way(monkeypatch):
    """A job that was requested before the stop is done, not left to its deadline."""
    stop = asyncio.Event()
    call = AsyncClient.call

    async def slow_call(self, command):
        if command.request.function == Function.NEXT:
            stop.set()
            await turns()
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
                await eventually(lambda: len(began) > number)  # noqa: B023
            await client.call(commands.push("http://h/last"))
            await asyncio.wait_for(coming.wait(), 10)
            stop.set()
            await eventually(lambda: worker.stopping)
            come.set()
            await asyncio.wait_for(task, 10)
            states = [job.state == WORKING for job in server.node.engine.jobs.all()]
            return states, len(began), worker.running

    assert asyncio.run(run()) == ([False] * (others + 1), others, 0)


def test_a_worker_that_ends_while_it_reserves_a_job():
    """A job whose handler did not even begin is given back."""

    async def run():
        async with daemon() as server, await AsyncClient.connect(*server.address) as client:
            await client.call(commands.push("http://h/1"))
            worker = Worker(*server.address)
            go_on = threading.Event()
            worker.handle()(lambda _: go_on.wait())
            working = asyncio.create_task(worker.work(asyncio.Event()))

            def end_once():
                if worker.running and not working.cancelling():
                    working.cancel()

            def make_task(loop, coroutine, **options):
                """Cancel the worker between the task of a job and its first step."""
                loop.call_soon(end_once)
                return asyncio.Task(coroutine, loop=loop, **options)

            asyncio.get_running_loop().set_task_factory(make_task)
            await asyncio.wait({working}, timeout=10)
            go_on.set()
            (job,) = server.node.engine.jobs.all()
            return working.cancelled(), job.state == WORKING, job.attempts

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
                await turns()
                running.discard(job.uri)

            stop = asyncio.Event()
            task = asyncio.create_task(worker.work(stop))
            await eventually(lambda: worker.done == 40)
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
            server = JournalServer(port=port, node=CommitLoop(tmp_path))
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
                await eventually(lambda: worker.done == expected)  # noqa: B023
            await server.stop()
        stop.set()
        await asyncio.wait_for(task, 10)
        return done

    assert asyncio.run(run()) == [b"http://h/0", b"http://h/1"]


def test_a_handler_outlives_the_daemon(tmp_path):
    """A daemon that restarts while a job is worked on gets the report; the job is not done again."""

    async def run():
        server = JournalServer(port=0, node=CommitLoop(tmp_path))
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
        await eventually(lambda: began)
        await server.stop()
        again = JournalServer(port=server.address[1], node=CommitLoop(tmp_path))
        go_on.set()
        await eventually(lambda: ended)
        stop.set()  # the grace is long enough for the report, too
        await again.start()
        await asyncio.wait_for(task, 10)
        left = len(again.node.engine.jobs)
        await again.stop()
        return began, left, worker.done

    assert asyncio.run(run()) == ([b"http://h/1"], 0, 1)


async def done_by(handlers, uris, *, settings=None, **options):
    """Push, and work until all of them are done or dead; what became of those that are left, and how many are done."""
    async with daemon() as server, await AsyncClient.connect(*server.address) as client:
        worker = Worker(*server.address, **options)
        for domain, handler in handlers.items():
            worker.handle(domain)(handler)
        await client.admin("configure", domain="h", settings=settings or {})
        for uri in uris:
            await client.call(commands.push(uri))
        stop = asyncio.Event()
        task = asyncio.create_task(worker.work(stop))
        await eventually(lambda: worker.done + worker.failed == len(uris))
        stop.set()
        await task
        return (await client.admin("list"))["jobs"], worker.done


def test_what_a_handler_returns_to_be_awaited_is_awaited():
    """A job is done when its work is, however the coroutine was wrapped."""
    done = []

    async def fetch(prefix, job):
        await asyncio.sleep(0)
        done.append(prefix + job.uri)

    handlers = {"h": lambda job: fetch(b"a ", job), "g": partial(fetch, b"b ")}

    assert asyncio.run(done_by(handlers, ["http://h/1", "http://g/1"])) == ([], 2)
    assert sorted(done) == [b"a http://h/1", b"b http://g/1"]


def test_as_many_threads_as_places():
    """Plain functions run as many at a time as the worker has places, however few cores there are."""
    meeting = threading.Barrier(40, timeout=10)
    handlers = {"": lambda _: meeting.wait() * 0}
    uris = [f"http://h/{number}" for number in range(40)]

    assert asyncio.run(done_by(handlers, uris, concurrency=40)) == ([], 40)


def test_the_handler_of_the_domain_does_its_jobs():
    """The handler for everything does what no other is for, whichever was registered first."""
    seen = []
    handlers = {
        "": lambda job: seen.append((b"any", job.uri)),
        "H": lambda job: seen.append((b"h", job.uri)),
    }

    assert asyncio.run(done_by(handlers, ["http://h/1", "http://g/1"])) == ([], 2)
    assert sorted(seen) == [(b"any", b"http://g/1"), (b"h", b"http://h/1")]


def test_domains_take_turns():
    """A domain that always has work does not keep a worker from another one."""
    order = []
    handlers = dict.fromkeys("ab", lambda job: order.append(job.uri[7:8]))
    uris = [f"http://{domain}/{number}" for domain in "ab" for number in range(6)]

    asyncio.run(done_by(handlers, uris, concurrency=1))
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
    running = done_by({"": handler}, ["http://h/1"], settings={"max_attempts": 1})
    (job,), _ = asyncio.run(running)
    assert (job["state"], job["reason"]) == ("dead", reason)


def test_a_stuck_thread_does_not_keep_the_worker():
    """After the grace, or at once after a second signal, the job is given back and the worker ends."""

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
            await eventually(began.is_set)
            stop.set()
            await asyncio.sleep(0)
            if grace:
                worker.hurry()
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
