"""
The keys of jobs in bytewise order, for ranges and patterns: each job's sort key and its uri.

Built by the first range query and updated from then on with the jobs that moved. Without range queries it
costs nothing; it is dropped when too many jobs moved since the last one.

Invariant: after `in_order` every key of a job that waits or is worked on is there, and no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.jobs.job import DEAD, REMOVED
from virta.journal.protocol.messages import RefusedError
from virta.journal.values.sorted_keys import SortedKeys

if TYPE_CHECKING:
    from virta.journal.jobs.job import Job
    from virta.journal.jobs.table import JobTable

# Ordering twice as many keys takes a quarter of a second; beyond that ranges with jobs in them are refused.
JOBS_ORDERED_MAX = 100_000
# Jobs that moved since the last query; beyond that it is cheaper to build the index again.
MOVED_MAX = 100_000


class JobKeys:
    def __init__(self, jobs: JobTable) -> None:
        self._jobs = jobs
        self._keys: SortedKeys | None = None
        self._known: dict[Job, bytes] = {}
        self._moved: dict[Job, None] = {}

    def in_order(self, lower: bytes = b"", upper: bytes | None = None) -> SortedKeys:
        """
        Return the keys from `lower` up to `upper` (None: all), and perhaps others.

        They are read-only, and valid until the next job moves.
        """
        count = len(self._jobs)
        if count > JOBS_ORDERED_MAX:
            self._drop()
            if self._jobs.any_key(lower, upper):
                raise RefusedError(
                    "too-large",
                    f"keys of jobs are in order up to {JOBS_ORDERED_MAX} of them, there are {count}: "
                    "ask for a range without any, or for a list of jobs",
                )
            return SortedKeys()
        if self._keys is None:
            live = [job for job in self._jobs.all() if job.state != DEAD]
            self._known = {job: job.key() for job in live}
            self._keys = SortedKeys([*self._known.values(), *(job.uri for job in live)])
            self._jobs.scheduler.watch(self._note)
            return self._keys
        for job in self._moved:
            self._renew(job, self._keys)
        self._moved.clear()
        return self._keys

    def _renew(self, job: Job, keys: SortedKeys) -> None:
        before = self._known.pop(job, None)
        if before is not None:
            keys.remove(before)
        if job.state not in (DEAD, REMOVED):
            self._known[job] = job.key()
            keys.add(self._known[job])
        if self._jobs.find(job.uri) is None:
            keys.remove(job.uri)
        else:
            keys.add(job.uri)

    def _note(self, job: Job) -> None:
        self._moved[job] = None
        if len(self._moved) > MOVED_MAX:
            self._drop()

    def _drop(self) -> None:
        self._keys = None
        self._known.clear()
        self._moved.clear()
        self._jobs.scheduler.unwatch(self._note)
