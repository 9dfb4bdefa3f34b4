"""
The state of one uri that all daemons agree on, in whatever order they receive changes: a join of states.

The state of a uri is
- `finished`: this command and every older one is over;
- per newer command its state with the largest `version`, a total order over everything a state says;
- of commands that are out of sight (below) only the revision, in `covered`.

What is shown follows from that alone: the newest command, and an older one only while it is worked on. An
older one that is not worked on stays out of sight, unless a state with a larger revision says that it is worked
on. All commands older than one that is worked on are over; so are the oldest that are covered, when there are
too many.

Invariant: the larger `finished` and, per command, the larger version are joins: order, repetition and
grouping do not matter. Concluding that a command is over may depend on the order of arrival, but only adds to
the state, as does every change a daemon makes; and a daemon that concludes it sends that to all others. So
daemons that have received the same states have the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.journal.jobs.job import Job
    from virta.journal.protocol.messages import Value

# Commands out of sight whose revision is remembered; beyond that the oldest is over.
COVERED_MAX = 16


class Known(NamedTuple):
    finished: int
    jobs: list[Job]  # what is worked on, and what waits behind it or is dead
    covered: dict[int, int]  # command: revision


def join(finished: int, states: Iterable[Job]) -> Known:
    """Return the join of all these; of two equal states the first one is kept."""
    best: dict[int, Job] = {}
    covered: dict[int, int] = {}
    for state in states:
        _cover(covered, {t: r for t, r in (state.replaced or {}).items() if t < state.timestamp})
        before = best.get(state.timestamp)
        if before is None or version(state) > version(before):
            best[state.timestamp] = state
    worked = [
        job.timestamp
        for job in best.values()
        if job.lease and covered.get(job.timestamp, -1) < job.revision
    ]
    last_worked = max(worked, default=-1)
    newest = max(best, default=-1)
    shown = {newest, last_worked}
    out_of_sight = {t: job.revision for t, job in best.items() if t not in shown}
    finished = max([finished, *(t for t in (*best, *covered) if t < last_worked)])
    _cover(covered, out_of_sight)
    covered = {t: revision for t, revision in covered.items() if t > finished and t not in shown}
    finished, covered = bounded(finished, covered)
    jobs = [best[t] for t in sorted(shown) if t > finished and t in best]
    return Known(finished, jobs, covered)


def covering(job: Job, *older: Job) -> dict[int, int]:
    """Return the commands that are out of sight once `job` is newer than these."""
    covered: dict[int, int] = {}
    for each in (job, *older):
        _cover(covered, each.replaced or {})
    _cover(covered, {each.timestamp: each.revision for each in older})
    return covered


def bounded(finished: int, covered: dict[int, int]) -> tuple[int, dict[int, int]]:
    """Limit the covered commands: the oldest beyond COVERED_MAX are over."""
    if len(covered) <= COVERED_MAX:
        return finished, covered
    kept = sorted(covered)[-COVERED_MAX:]
    finished = max(finished, *(t for t in covered if t < kept[0]))
    return finished, {t: covered[t] for t in kept}


def _cover(covered: dict[int, int], more: dict[int, int]) -> None:
    """Add commands with a revision; one without has no later state to compare with."""
    for timestamp, revision in more.items():
        if revision:
            covered[timestamp] = max(covered.get(timestamp, 0), revision)


def order(command: tuple[int, int, Value | None]) -> tuple[int, int, int, bytes]:
    """Return the rank of a command: of two with one timestamp the larger wins."""
    priority, start, payload = command
    return (
        priority,
        start,
        -1 if payload is None else payload.type,
        payload.data if payload else b"",
    )


def version(job: Job) -> tuple[object, ...]:
    """
    Return the rank of a state of one command, over all fields that can differ.

    At one revision a state that is not worked on is the later one: `covered` has only the revision.
    """
    return (
        job.revision,
        not job.lease,
        job.worked_until and not job.lease,  # dead
        job.attempts,
        job.lease,
        job.worked_until,
        *order((job.priority, job.start, job.payload)),
        job.domain.name,
        job.reason,
        job.persist,
        job.created,
        job.id,
    )
