"""`virta journal`: jobs that failed, what is shown of them, and what can be done about them."""

from __future__ import annotations

import pytest

from virta.journal import Client


@pytest.fixture
def failed(shell):
    """Three dead jobs in two domains; the first has failed twice, with a traceback."""
    with Client(port=shell.port) as client:
        shell("configure", "a", "--max-attempts", "2", "--retry-delay", "0")
        for uri in ("http://a/1", "http://a/2", "http://b/1"):
            client.push(uri)
        (first,) = client.next("a").jobs
        client.fail(first.key, "first try", delay=0)
        for domain, count in (("a", 2), ("b", 1)):
            for job in client.next(domain, count=count).jobs:
                client.fail(job.key, f"broken {job.uri.decode()}", traceback="File x\n  line 1", dead=True)  # fmt: skip
    return shell


def uris(rows):
    return sorted(row["uri"] for row in rows)


def test_all_or_those_of_a_domain(failed):
    assert uris(failed.json("dead")) == ["http://a/1", "http://a/2", "http://b/1"]
    assert uris(failed.json("dead", "b")) == ["http://b/1"]
    assert len(failed.json("dead", "--limit", "2")) == 2
    assert "no dead jobs" in failed("dead", "c", code=3)
    assert "http://b/1 attempts=1 broken http://b/1" in failed("dead", "b")


def test_where_the_attempts_failed(failed):
    """The traceback, and of one uri every attempt with its reason."""
    shown = failed("dead", "--uri", "http://a/1", "--traceback").splitlines()

    assert "attempts=2 broken http://a/1" in shown[0]
    assert shown[1:3] == ["  File x", "    line 1"]
    assert [line.split()[1] for line in shown[3:]] == ["1", "2"]
    assert shown[3].endswith("first try")
    assert shown[4].endswith("broken http://a/1")
    assert "File x" not in failed("dead", "--uri", "http://a/1")
    assert failed.json("dead", "--uri", "http://a/1", "--traceback")[0]["failures"]


def test_back_to_work(failed):
    """One by its uri, then those of a domain; they are due at once and their attempts start again."""
    assert failed("dead", "--requeue", "--uri", "http://a/1") == "requeued 1"
    assert failed("dead", "a", "--requeue") == "requeued 1"
    assert uris(failed.json("dead")) == ["http://b/1"]
    (found,) = failed.json("next", "a", "--count", "5")
    assert uris(found["jobs"]) == ["http://a/1", "http://a/2"]


def test_forgotten(failed):
    assert failed("dead", "--drop", "--limit", "2") == "dropped 2"
    assert len(failed.json("dead")) == 1
    assert failed.json("dead", "--drop") == [{"dropped": 1}]
    failed("dead", code=3)
    assert failed.json("jobs") == []


def test_not_both(failed):
    assert "exclude each other" in failed("dead", "--drop", "--requeue", code=2)
    assert len(failed.json("dead")) == 3


def test_a_job_that_lives_is_not_shown_as_dead(shell):
    """Also when it is asked for by its uri."""
    shell("push", "http://a/1")

    assert "no dead jobs" in shell("dead", "--uri", "http://a/1", code=3)


def test_kick_needs_a_place(shell):
    shell("push", "http://a/1", "--delay", "600")
    shell("push", "http://a/2", "--delay", "600")

    assert "name a DOMAIN or a --uri" in shell("kick", code=2)
    assert shell("kick", "--uri", "http://a/2") == "kicked 1"
    (found,) = shell.json("next", "a", "--count", "5")
    assert uris(found["jobs"]) == ["http://a/2"]
    assert shell("kick", "a", "--limit", "0") == "kicked 0"
    assert shell("kick", "a") == "kicked 1"


def test_jobs_by_state_and_domain(failed):
    """A line a job: state, priority, when it is due, its uri and why it failed."""
    failed("push", "http://a/3", "--delay", "600", "--priority", "7")
    failed("push", "http://c/1", "--domain", "elsewhere")

    assert uris(failed.json("jobs", "--state", "delayed")) == ["http://a/3"]
    assert uris(failed.json("jobs", "elsewhere")) == ["http://c/1"]
    assert len(failed.json("jobs", "--limit", "3")) == 3
    state, priority, _day, _time, uri = failed("jobs", "a", "--state", "delayed").split()
    assert (state, priority, uri) == ("delayed", "7", "http://a/3")
    assert failed("jobs", "b").endswith("http://b/1 broken http://b/1")


def test_the_payload_of_a_job(shell):
    """From the option or from standard input, byte for byte."""
    shell("push", "http://a/1", "--payload", "text")
    shell("push", "http://a/2", "--payload", "-", input=b"\x00\xff")
    (found,) = shell.json("next", "a", "--count", "2")

    assert {job["uri"]: job["payload"] for job in found["jobs"]} == {
        "http://a/1": "text",
        "http://a/2": {"base64": "AP8="},
    }
