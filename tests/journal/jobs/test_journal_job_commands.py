"""PUSH and DELETE of jobs: what is refused, and the limit of jobs."""

from __future__ import annotations

import pytest
from journal_support import Clock

from virta.journal.engine import JournalEngine
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, RefusedError, Request
from virta.journal.serving.embedded import Journal
from virta.journal.sessions import Session

T0 = 1_700_000_000_000_000


URI = b"http://h/1"


def push(uri=URI, **fields):
    return Request(Function.PUSH, key=uri, count=0, query=m.QUERY_RANGE, **fields)


def test_a_push_needs_a_uri():
    """Without one it is refused, even if the domain is given."""
    reply = JournalEngine(Clock(T0)).handle(push(b"", key2=b"d"), Session())

    assert reply.error == "key-missing"


def test_an_attempt_is_over_at_its_deadline():
    """A DELETE at the deadline itself acknowledges nothing, whether or not any request came since."""
    clock = Clock(T0)
    engine, session = JournalEngine(clock), Session()
    engine.handle(push(), session)
    key = engine.handle(Request(Function.NEXT, timeout=T0 + 5), session).pairs[0].key
    clock.now = T0 + 5

    reply = engine.handle(Request(Function.DELETE, key=key), session)

    assert reply.error == "does-not-exist"
    assert engine.handle(Request(Function.NEXT), session).pairs


def test_the_limit_of_jobs(tmp_path):
    """A job more than allowed is refused; one that replaces another is not."""
    with Journal(tmp_path, jobs_max=2) as journal:
        for number in (1, 2, 2):
            journal.push(f"http://h/{number}")
        with pytest.raises(RefusedError, match="out-of-memory"):
            journal.push("http://h/3")
