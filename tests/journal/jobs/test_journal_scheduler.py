"""Which job is next across all domains, and when something happens next, after anything that can happen to jobs."""

from __future__ import annotations

import random

import pytest

from virta.errors import JournalError
from virta.journal.jobs.domain import DomainSettings
from virta.journal.jobs.job import DEAD, DELAYED, READY, WORKING
from virta.journal.jobs.lifecycle import Jobs

DOMAINS = [b"a", b"b", b"c"]
STEPS = 2_000


def in_state(rng, jobs, *states):
    """Return a job in one of the states at random; refused if there is none."""
    found = [job for job in jobs.all() if job.state in states]
    if not found:
        raise JournalError("no such job")
    return rng.choice(found)


def change(rng, jobs, now, step):
    """Do something at random to the jobs; some of it is refused."""
    uri = b"http://%s/%d" % (rng.choice(DOMAINS), rng.randrange(12))
    start, later = now + rng.choice([-5, 0, 0, 7]), now + rng.choice([3, 20])
    priority, settings = rng.randrange(4), DomainSettings(paused=rng.random() < 0.5)
    changes = [
        (8, lambda: jobs.push(uri, b"", step, now, priority=priority, start=start)),
        (2, lambda: jobs.push(uri, b"c", step, now, priority=priority, start=start)),
        (2, lambda: jobs.reserve(b"", now, until=later, count=rng.choice([1, 3]))),
        (2, lambda: jobs.reserve(rng.choice(DOMAINS), now, until=later)),
        (2, lambda: jobs.done(in_state(rng, jobs, WORKING), now)),
        (1, lambda: jobs.fail(in_state(rng, jobs, WORKING), "", now, delay=rng.choice([0, 5]))),
        (1, lambda: jobs.fail(in_state(rng, jobs, WORKING), "", now, dead=True)),
        (1, lambda: jobs.mark(in_state(rng, jobs, READY, DELAYED, WORKING), later, now)),
        (1, lambda: jobs.mark(in_state(rng, jobs, WORKING), now - 1, now)),
        (1, lambda: jobs.requeue(in_state(rng, jobs, DEAD), now)),
        (1, lambda: jobs.configure(rng.choice(DOMAINS), settings)),
        (1, lambda: jobs.kick(rng.choice(DOMAINS), 2, now)),
        (1, lambda: jobs.cancel(uri, now)),
    ]
    weights, calls = zip(*changes, strict=True)
    rng.choices(calls, weights)[0]()


@pytest.mark.parametrize("seed", range(5))
def test_the_best_job_of_all_domains_is_next(seed):
    """No offer and no alarm is ever missing, though most changes of a job need none."""
    rng, jobs, now = random.Random(seed), Jobs(), 1_000
    found = 0
    for step in range(STEPS):
        now += rng.choice([0, 0, 1, 5])
        try:
            change(rng, jobs, now, step)
        except JournalError:
            continue
        jobs.tick(now)
        everything = jobs.all()
        ready = [
            (job.priority, job.start, job.id)
            for job in everything
            if job.state == READY and not job.domain.settings.paused
        ]
        due = [job.start for job in everything if job.state == DELAYED]
        due += [job.worked_until for job in everything if job.state == WORKING]
        best = jobs.scheduler.head(b"")
        rank = None if best is None else (best.priority, best.start, best.id)

        assert rank == min(ready, default=None)
        assert jobs.scheduler.wake_up(b"") == min(due, default=None)
        found += rank is not None
    assert found > STEPS // 4
