"""The journal's figures at `/metrics`: everything is counted once, by both engines, and labels are bounded."""

from __future__ import annotations

import re

import pytest

from virta.journal import Client
from virta.journal.jobs import job as job_module
from virta.journal.jobs import table
from virta.journal.jobs.lifecycle import Jobs
from virta.server.metrics import JOURNAL_TOTALS

LINE = re.compile(r"(?m)^(virta_journal_\w+)(\{.*\})? (\S+)")


def scraped(server):
    answer = server.request("GET", "/metrics")
    assert answer.status == 200
    found = LINE.findall(answer.body.decode())
    return {name + labels: float(value) for name, labels, value in found}


@pytest.mark.parametrize("half", ["native", "plain"])
def test_what_happened_is_counted(start, half):
    """Pushes, handouts, acks, failures, deaths; states, connections and commits as they are."""
    environ = {"VIRTA_PLAIN": "1"} if half == "plain" else {}
    with start(environ=environ) as server, Client("127.0.0.1", server.journal_port) as client:
        before = scraped(server)
        assert before['virta_journal_jobs{state="ready"}'] == 0
        assert before["virta_journal_connections"] == 1
        assert before["virta_journal_failed"] == 0
        for n in range(6):
            client.push(f"http://h/{n}")
        client.push("http://h/0", payload="replaced")
        client.push("http://h/later", delay=1000)
        jobs = client.next("h", count=4).jobs
        client.done(jobs[0].key)
        client.fail(jobs[1].key, "once", delay=1000)
        client.fail(jobs[2].key, "for good", dead=True)
        client.set("k", 1)
        after = scraped(server)
        states = {
            name: after[f'virta_journal_jobs{{state="{name}"}}']
            for name in job_module.STATE_NAMES[:5]
        }
        assert states == {"delayed": 2, "ready": 2, "held": 0, "working": 1, "dead": 1}
        totals = [after[f"virta_journal_{name}_total"] for name, _ in JOURNAL_TOTALS]
        assert totals == [8, 4, 1, 2, 0, 1]
        assert client.admin("stats")["totals"] == dict(zip(table.TOTAL_NAMES, totals, strict=True))
        assert after["virta_journal_keys"] == 1
        assert after["virta_journal_oldest_ready_seconds"] > 0
        assert (
            after["virta_journal_commit_seconds_count"]
            > before["virta_journal_commit_seconds_count"]
        )
        assert after["virta_journal_commit_seconds_sum"] > 0
        assert after["virta_journal_requests_total"] == 13
        assert after["virta_journal_disk_bytes"] > 0
        # However many domains there are, there are not more lines.
        for n in range(200):
            client.push(f"http://host-{n}/")
        many = scraped(server)
        assert many.keys() == after.keys()
        assert many["virta_journal_domains"] == 201


def test_no_journal_no_figures(start):
    """A server without a journal has no such metrics."""
    with start("--journal-port", "none") as server:
        assert scraped(server) == {}


def test_totals_have_their_names():
    """One list of names in the journal, one of metrics: in the same order."""
    assert len(JOURNAL_TOTALS) == len(table.TOTAL_NAMES)


def test_the_oldest_that_is_ready(monkeypatch):
    """Not what is delayed or worked on; bounded, and then by what each domain would hand out."""
    jobs = Jobs()
    assert jobs.oldest_ready(100) == 0
    jobs.push(b"later", b"d", 1, 0, start=1_000)
    jobs.push(b"a", b"d", 1, 0, start=10)
    jobs.push(b"b", b"e", 1, 0, start=5, priority=9)
    jobs.tick(100)
    assert jobs.oldest_ready(100) == 95
    (job,) = jobs.reserve(b"e", 100)
    assert jobs.oldest_ready(100) == 90
    jobs.done(job, 100)
    monkeypatch.setattr(table, "OLDEST_JOBS_MAX", 1)
    assert jobs.oldest_ready(100) == 90
    assert jobs.oldest_ready(0) == 0  # a clock that was set back
