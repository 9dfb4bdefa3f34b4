"""Jobs that fail: tried again ever later, dead in the end with the reason kept, and revived."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from journal_support import VIRTA, Clock, Disks, daemon, daemon_thread, eventually

from virta.errors import JournalError
from virta.journal import Client, Worker
from virta.journal.clients.aio import AsyncClient
from virta.journal.jobs.domain import ATTEMPTS_DEFAULT, BACK_OFF_S_MAX
from virta.journal.jobs.domain import DomainSettings as Settings
from virta.journal.jobs.failures import TRACEBACK_CHARS_MAX, last_failure, read_failures
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.embedded import Journal
from virta.journal.serving.http import Handler

S = 1_000_000


def test_by_default_a_failing_job_is_delayed_more_each_time_and_then_dead():
    """1,674 attempts in three seconds, and never dead, is what it was."""
    jobs, now, pauses = Jobs(), 0, []
    jobs.push(b"x", b"d", 1, 0)
    while jobs.dead(b"x") is None:
        assert not pauses or jobs.reserve(b"d", now - 1) == []
        (job,) = jobs.reserve(b"d", now)
        jobs.fail(job, "boom", now)
        pauses.append(job.start - now)
        now = max(job.start, now)
        assert len(pauses) <= ATTEMPTS_DEFAULT
    assert len(pauses) == ATTEMPTS_DEFAULT
    for attempt, pause in enumerate(pauses[:-1]):
        longest = min(2**attempt, BACK_OFF_S_MAX) * S
        assert 0.75 * longest <= pause <= longest
    assert now > 9 * 3600 * S  # an outage of a night is outlived


def test_jobs_that_failed_together_do_not_come_back_together():
    """The pauses of equal jobs differ."""
    jobs = Jobs()
    jobs.configure(b"d", Settings(retry_delay=100))
    for n in range(50):
        jobs.push(b"x%d" % n, b"d", 1, 0)
    taken = jobs.reserve(b"d", 0, count=50)
    for job in taken:
        jobs.fail(job, "boom", 0)
    starts = {job.start for job in taken}
    assert len(starts) == 50
    assert max(starts) - min(starts) > 15 * S


def test_a_job_that_kills_its_worker_is_dead_in_the_end(tmp_path):
    """No failure is reported, but expired deadlines count as attempts, also over restarts."""
    clock, disks = Clock(S), Disks()
    journal = Journal(tmp_path, clock=clock, open_disk=disks)
    journal.push("x://poison", domain="d")
    for attempt in range(ATTEMPTS_DEFAULT):
        (job,) = journal.next("d").jobs
        assert job.attempts == attempt
        disks.opened.close()  # the daemon is killed as well
        journal.engine.jobs.close()
        clock.now += 25 * 3600 * S
        journal = Journal(tmp_path, clock=clock, open_disk=disks)
    assert journal.next("d").jobs == []
    dead = journal.admin("show", uri="x://poison")
    assert (dead["state"], dead["attempts"]) == ("dead", ATTEMPTS_DEFAULT)
    assert dead["reason"] == "the work deadline passed"
    assert journal.admin("requeue", uri="x://poison") == {"requeued": 1}
    assert journal.next("d").jobs[0].attempts == 0
    journal.close()


def test_invalid_settings_are_refused():
    """0 means never dead, and at once; a pause longer than the longest is the longest."""
    assert "retry_delay_max" in Settings(retry_delay_max=-1).problem()
    assert "retry_delay_max" in Settings(retry_delay_max=86_401).problem()
    jobs = Jobs()
    jobs.configure(b"d", Settings(retry_delay=0, max_attempts=0))
    jobs.push(b"x", b"d", 1, 0)
    for _ in range(100):
        (job,) = jobs.reserve(b"d", 0)
        jobs.fail(job, "boom", 0)
    assert jobs.dead(b"x") is None
    jobs.configure(b"d", Settings(retry_delay=7200, max_attempts=0))
    (job,) = jobs.reserve(b"d", 0)
    jobs.fail(job, "boom", 0)
    assert 5400 * S <= job.start <= 7200 * S
    for bad in ({"max_attempts": 0}, {"retry_delay": -1}, {"retry_delay_max": float("nan")}):
        with pytest.raises(JournalError, match=next(iter(bad))):
            Worker(**bad)


def test_a_failing_handler_leaves_its_traceback_and_is_not_tried_at_once(tmp_path):
    """By default the daemon decides when it is tried again; a worker may say that it was the last time."""

    async def run():
        async with daemon(tmp_path) as server:
            client = await AsyncClient.connect(*server.address)
            attempts = []

            async def work(**options):
                worker, stop = Worker(*server.address, **options), asyncio.Event()

                @worker.handle("d")
                def handler_that_breaks(job):
                    attempts.append(job.attempts)
                    raise ValueError("boom \udcff" + "x" * 10_000)

                task = asyncio.create_task(worker.work(stop))
                await eventually(lambda: worker.failed == 1)
                stop.set()
                await task

            await client.push("x://a", domain="d")
            await work()
            shown = await client.admin("show", uri="x://a")
            assert (shown["state"], shown["attempts"]) == ("delayed", 1)
            assert shown["start"] > server.node.engine.clock() - 60 * S
            assert shown["reason"].startswith("ValueError: boom")
            await client.admin("kick", uri="x://a")
            await work(retry_delay=500, retry_delay_max=600)
            shown = await client.admin("show", uri="x://a")
            assert (
                shown["start"] > server.node.engine.clock() + 400 * S
            )  # up to a quarter less than 600
            await client.admin("kick", uri="x://a")
            await work(max_attempts=3)
            assert attempts == [0, 1, 2]
            await client.close()

    asyncio.run(run())
    with Journal(tmp_path) as journal:  # it is on disk
        (dead,) = journal.admin("list", state="dead")["jobs"]
        assert dead["reason"].startswith("ValueError: boom")
        assert len(dead["traceback"]) <= TRACEBACK_CHARS_MAX
        journal.admin("requeue", uri="x://a")
        key = journal.next("d").jobs[0].key
        journal.fail(key, "a" * 5000, traceback="first" + "é" * 9000 + "last", dead=True)
        dead = journal.admin("show", uri="x://a")
        assert (dead["state"], dead["reason"]) == ("dead", "a" * 1000)
        assert len(dead["traceback"]) == TRACEBACK_CHARS_MAX
        assert dead["traceback"].endswith("last")


def test_the_last_attempts_are_kept(tmp_path):
    """Ten of them with number, time and reason, over restarts; a requeued job counts from 1 again."""
    clock = Clock(S)
    with Journal(tmp_path, clock=clock) as journal:
        journal.push("x://a", domain="d")
        assert journal.admin("show", uri="x://a")["failures"] == []
        for attempt in range(1, 13):
            (job,) = journal.next("d").jobs
            clock.now += S
            marked = f"no. {attempt} \x1d1:1:x\x1e" + "y" * 500
            journal.fail(
                job.key, marked, delay=0, traceback=f"at \x1d2:2:{attempt}", dead=attempt == 12
            )
    with Journal(tmp_path, clock=clock) as journal:
        shown = journal.admin("show", uri="x://a")
        failures = shown["failures"]
        assert [one["attempt"] for one in failures] == list(range(3, 13))
        assert [one["ended"] for one in failures] == [S + n * S for n in range(3, 13)]
        assert {len(one["reason"]) for one in failures} == {200}
        assert failures[-1]["reason"].startswith("no. 12  1:1:x yyy")
        assert shown["reason"].startswith("no. 12  1:1:x yyy")
        assert shown["traceback"] == "at  2:2:12"
        (listed,) = journal.admin("list", state="dead")["jobs"]
        assert "failures" not in listed
        journal.admin("requeue", uri="x://a")
        journal.fail(journal.next("d").jobs[0].key, "again", delay=0)
        failures = journal.admin("show", uri="x://a")["failures"]
        assert [one["attempt"] for one in failures] == [*range(4, 13), 1]


def test_a_text_of_another_origin_has_no_attempts():
    """What a daemon from before the list stored, or anything else, is read as a reason and a traceback."""
    assert last_failure("boom\x1eat line 1") == ("boom", "at line 1")
    assert read_failures("boom\x1eat line 1") == []
    assert read_failures("boom\x1dnot:an:attempt\x1d5:1:slow") == [(1, 5, "slow")]


def test_the_traceback_says_where(tmp_path):
    """Shown by the command and over HTTP; `--exec` has what the command said instead."""
    with daemon_thread(tmp_path) as server:
        host, port = server.address

        def virta(*words):
            ran = subprocess.run(
                [VIRTA, "journal", *words, "--host", host, "--port", str(port)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        with Client(host, port) as client:
            client.push("x://a", domain="d")
            worker, stop = Worker(host, port, max_attempts=1), asyncio.Event()

            @worker.handle("d")
            async def handler_that_breaks(job):
                stop.set()
                raise ValueError("boom \x1b[31m")

            asyncio.run(asyncio.wait_for(worker.work(stop), 20))
            (dead,) = client.admin("list", state="dead")["jobs"]
            assert dead["reason"] == "ValueError: boom \x1b[31m"
            assert "in handler_that_breaks" in dead["traceback"]
            assert Path(__file__).name in dead["traceback"]
        text = virta("dead", "--traceback")
        assert "in handler_that_breaks" in text
        assert "\x1b" not in text
        assert "in handler_that_breaks" not in virta("dead")
        assert "attempt 1 " not in text
        assert "attempt 1 " in virta("dead", "--traceback", "--uri", "x://a")
        assert json.loads(virta("dead", "--json"))["traceback"] == dead["traceback"]
        virta("configure", "d", "--retry-delay", "5", "--retry-delay-max", "60")
        virta("dead", "--requeue")
        key = virta("next", "d").split("\t")[0]
        virta("fail", key, "--dead", "--reason", "never")
        assert json.loads(virta("dead", "--json"))["reason"] == "never"


def test_over_http(tmp_path):
    """`dead` and `traceback` of a failure, and the settings."""

    async def run():
        node = CommitLoop(tmp_path)
        await node.start()
        handler = Handler(node)

        async def api(method, path, body=None):
            response = await handler.handle(
                method, f"/journal{path}", "", b"" if body is None else json.dumps(body).encode()
            )
            return response.status, json.loads(response.body)

        await api("POST", "/jobs", {"uri": "x://a", "domain": "d"})
        _, found = await api("POST", "/jobs/next", {})
        failure = {
            "key": found["jobs"][0]["key"],
            "reason": "no",
            "traceback": "at a",
            "dead": True,
        }
        status, shown = await api("POST", "/jobs/fail", failure)
        assert (status, shown["state"], shown["reason"]) == (200, "dead", "no")
        assert shown["traceback"] == "at a"
        assert (await api("POST", "/jobs/requeue", {"uri": "x://a"}))[1] == {"requeued": 1}
        status, settings = await api("PATCH", "/jobs/domains/d", {"retry_delay_max": 5})
        assert (status, settings["retry_delay_max"], settings["max_attempts"]) == (200, 5, 25)
        await node.stop()

    asyncio.run(run())
