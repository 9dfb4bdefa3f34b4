"""
The interfaces to copies on other daemons. These base classes do nothing: they serve a daemon without copies.

The engine, the store and the job table report changes to a `Replication`; `copies.Copies` collects them. The commit
loop passes them to a `PeerLinks`; `peers.Peers` sends them. No caller needs to know whether there are copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.protocol.messages import VALUE_DATA_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Ticket:
    """A batch of changes being sent: how many peers have all of it, and callbacks for when they do."""

    def __init__(self) -> None:
        self._copies = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def arrived(self) -> None:
        """Count one more peer that has everything, and run the callbacks that wait for it."""
        self._copies += 1
        ready = [callback for copies, callback in self._waiting if copies <= self._copies]
        self._waiting = [item for item in self._waiting if item[0] > self._copies]
        for callback in ready:
            callback()

    def when(self, copies: int, callback: Callable[[], None]) -> None:
        if copies <= self._copies:
            callback()
        else:
            self._waiting.append((copies, callback))

    def forget(self, callback: Callable[[], None]) -> int:
        """Drop a callback after its timeout; return how many peers have the batch."""
        self._waiting = [item for item in self._waiting if item[1] is not callback]
        return self._copies


class PeerLinks:
    spools = False  # every change waits until it is in the spools of the peers
    copies = 1  # daemons that have a persistent SET or PUSH before it is acknowledged
    copies_timeout = 0.0

    def __init__(self) -> None:
        self.backlog = Ticket()  # what a process before this one left in the spools

    async def start(self, applied: Callable[[], None]) -> None:
        """Begin; `applied` is called whenever something was pulled, so that it is kept before more is."""

    async def stop(self) -> None:
        """End within a bounded time; what was not sent stays in the spools."""

    def replicate(self, requests: list[Request]) -> Ticket:  # noqa: ARG002
        """Keep changes for every peer; what must survive is on disk when this returns."""
        return self.backlog
