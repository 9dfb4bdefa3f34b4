"""Two or three daemons with dropped, doubled and reordered messages, crashes and skewed clocks converge."""

from __future__ import annotations

import os
import random

import pytest
from journal_faulty import Faulty, check, copies_of

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
    """Whatever messages go through and whoever crashes, all daemons end with the same values, jobs and marks."""
    for seed in range(start, min(start + SLICE, SEEDS.stop)):
        first, *others = converge(seed)
        for engine in (first, *others):
            check(engine)
        for other in others:
            assert copies_of(first) == copies_of(other), f"seed {seed}"
