"""
The ordinary PUSH, NEXT and DELETE of a job in one native call each, on the tables of `jobs`; and the images
of jobs for log and snapshot.

A shortcut gives the reply, or None where anything is out of the ordinary; then nothing has changed and
`Engine` goes the long way, which alone defines what is refused and how. So there is nothing here that
would not work without it, and `VIRTA_PLAIN=1` does without it.

Invariant: the tables are the same objects for as long as the engine lives; nobody may replace them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virta.journal.jobs.domain import Domain, Job, Settings, host_of
from virta.journal.protocol.kernel import native
from virta.journal.protocol.messages import Function

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.engine import Engine
    from virta.journal.protocol.messages import Reply, Request

    Shortcut = Callable[[tuple[Any, ...], Request, int], Reply | None]

SHORTCUTS: dict[int, Shortcut] = {}
if native is not None:
    native.set_job_types(Job, Domain, Settings, host_of)
    SHORTCUTS = {
        int(function): native.shortcut
        for function in (Function.PUSH, Function.NEXT, Function.DELETE)
    }


def job_records(engine: Engine, now: int) -> list[tuple[str, bytes, bytes]] | None:
    """What the log has to learn of jobs, as `images` would write it; None if that has to."""
    if native is None or not engine.shortcuts:
        return None
    records: list[tuple[str, bytes, bytes]] | None = native.job_records(engine.tables, now)
    return records


def jobs_chunk(jobs: list[Job]) -> bytes | None:
    """A chunk of a snapshot, as `snapshot` would write it; None if that has to."""
    if native is None:
        return None
    chunk: bytes | None = native.jobs_chunk(jobs)
    return chunk


def restored_jobs(engine: Engine, items: list[Any], at: int, now: int) -> int:
    """Take jobs of a snapshot that simply wait, from one on; the first that is for `images`."""
    if native is None or not engine.shortcuts:
        return at
    first: int = native.restore_jobs(engine.tables, items, at, now)
    return first


def tables_of(engine: Engine) -> tuple[Any, ...]:
    """What the shortcuts work on, in the order native/journal_domains.h names it."""
    jobs, schedule = engine.jobs, engine.jobs.schedule
    return (
        engine,
        jobs,
        schedule,
        *jobs.tables(),
        schedule.domains,
        schedule.offers,
        schedule.alarms,
        engine.store.by_key,
        jobs.totals_buffer,
    )
