"""Two or three daemons with dropped, doubled and reordered messages, crashes and skewed clocks converge."""

from __future__ import annotations

import os
import random

import pytest
from journal_faulty import Faulty, check, copies_of
from msgspec.structs import replace

from virta.journal.jobs.job import Job
from virta.journal.jobs.lifecycle import Jobs
from virta.journal.replication.merge import COVERED_MAX, join, version

# VIRTA_SEEDS=20000 or VIRTA_SEEDS=5000-9000 for more.
FIRST, _, LAST = os.environ.get("VIRTA_SEEDS", "200").rpartition("-")
SEEDS = range(int(FIRST or 0), int(LAST))
SLICE = 100


def converge(seed):
    rng = random.Random(seed)
    faulty = Faulty(rng, rng.choice([2, 3]))
    for _ in range(rng.randrange(5, 120)):
        faulty.step()
    faulty.heal()
    return faulty.engines


@pytest.mark.parametrize("start", SEEDS[::SLICE])
def test_daemons_converge(start):
    """Whatever messages arrive and whichever daemon crashes, all daemons end with the same values, jobs and marks."""
    for seed in range(start, min(start + SLICE, SEEDS.stop)):
        first, *others = converge(seed)
        for engine in (first, *others):
            check(engine)
        for other in others:
            assert copies_of(first) == copies_of(other), f"seed {seed}"


def random_state(rng, jobs):
    """Any state of a few commands: waiting, worked on or dead, and what it took the place of."""
    command = rng.randrange(1, 5)
    lease = rng.choice([0, rng.randrange(1, 4)])
    return Job(
        b"http://h/1",
        jobs.scheduler.domain(b"h"),
        rng.randrange(1, 3),
        timestamp=command,
        attempts=rng.randrange(2),
        lease=lease,
        worked_until=9 if lease else rng.choice([0, 9]),
        revision=rng.randrange(3),
        replaced=rng.choice([None, {older: rng.randrange(1, 3) for older in range(1, command)}]),
    )


def known(found):
    finished, jobs, covered = found
    return finished, [version(job) for job in jobs], covered


@pytest.mark.parametrize("seed", range(20))
def test_joins(seed):
    """Order and repetition do not matter; joining again what came out, with all that went in, adds nothing."""
    rng = random.Random(seed)
    jobs = Jobs()
    for _ in range(100):
        states = [random_state(rng, jobs) for _ in range(rng.randrange(1, 7))]
        finished = rng.randrange(-1, 4)
        once = join(finished, states)
        doubled = rng.sample(states * 2, 2 * len(states))
        assert known(join(finished, doubled)) == known(once)
        if once.jobs:
            newest = once.jobs[-1]
            newest = replace(newest, replaced=once.covered or None)
            again = join(once.finished, [*once.jobs[:-1], newest, *states])
            assert known(again) == known(once)


def test_too_many_covered_commands_are_over():
    """What a command took the place of is bounded: the oldest are finished."""
    jobs = Jobs()
    place = jobs.scheduler.domain(b"h")
    covered = dict.fromkeys(range(1, COVERED_MAX + 3), 1)
    newest = Job(b"http://h/1", place, 1, timestamp=100, revision=1, replaced=covered)
    found = join(-1, [newest])

    assert found.finished == 2
    assert sorted(found.covered) == list(range(3, COVERED_MAX + 3))
