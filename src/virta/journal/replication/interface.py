"""
What the engine, the store and the job table report of their changes, for copies on other daemons.

`Replication` is for a journal without copies: nothing happens. `copies.Copies` is for one with them.
Neither the engine nor the tables ask which of the two they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.protocol.messages import VALUE_DATA_BYTES_MAX

if TYPE_CHECKING:
    from virta.journal.jobs.job import Job
    from virta.journal.protocol.messages import Request
    from virta.journal.values.entry import ValueEntry


class Replication:
    older_may_arrive = False  # older changes may still arrive from other daemons
    payload_bytes_max = VALUE_DATA_BYTES_MAX

    def value_changed(self, entry: ValueEntry) -> None:
        """Send a value as it is now."""

    def value_read(self, entry: ValueEntry, request: Request) -> None:
        """Send a value if reading it marked or touched it."""

    def value_moved(self, entry: ValueEntry) -> None:
        """Send a value that continues under its next key, because its own was removed."""

    def key_removed(self, key: bytes) -> None:
        """Send the deletion of a key."""

    def link_expired(self, key: bytes, timestamp: int) -> None:
        """Send the deletion of a linked key whose value expired."""

    def job_changed(self, job: Job, when: int | None = None) -> None:
        """Send the jobs of its uri; with `when` this state is later than the one before."""

    def uri_changed(self, uri: bytes) -> None:
        """Send the jobs and the last finished command of a uri."""

    def take(self, now: int) -> list[Request]:  # noqa: ARG002
        """Return once what has to be sent."""
        return []

    def put_back(self, outgoing: list[Request]) -> None:
        """Return requests that could not be spooled; `take` returns them again."""
