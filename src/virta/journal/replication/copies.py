"""
The changes that other daemons have to get, as requests with final timestamps.

Invariant: nothing in here came from another daemon (a full mesh: what arrives is not passed on).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.protocol.messages import TOUCH
from virta.journal.replication import messages
from virta.journal.replication.interface import Replication

if TYPE_CHECKING:
    from virta.journal.engine import JournalEngine
    from virta.journal.jobs.job import Job
    from virta.journal.protocol.messages import Request
    from virta.journal.values.entry import ValueEntry


class Copies(Replication):
    older_may_arrive = True
    payload_bytes_max = messages.PAYLOAD_BYTES_MAX

    def __init__(self, engine: JournalEngine) -> None:
        self._engine = engine
        self._outgoing: list[Request] = []
        self._moved: list[ValueEntry] = []
        self._uris: dict[bytes, None] = {}

    def value_changed(self, entry: ValueEntry) -> None:
        self._outgoing += messages.value_messages(self._engine.store, entry)
        self._send_moved()

    def value_read(self, entry: ValueEntry, request: Request) -> None:
        if request.timeout is not None or request.flags & TOUCH:
            self.value_changed(entry)

    def value_moved(self, entry: ValueEntry) -> None:
        self._moved.append(entry)

    def key_removed(self, key: bytes) -> None:
        stored = self._engine.store.stored(key)
        if stored is not None:
            self._outgoing.append(messages.delete_message(key, stored.timestamp_of(key)))
        self._send_moved()

    def _send_moved(self) -> None:
        moved, self._moved = self._moved, []
        for entry in moved:
            if entry.keys:
                self._outgoing += messages.value_messages(self._engine.store, entry)

    def link_expired(self, key: bytes, timestamp: int) -> None:
        self._outgoing.append(messages.delete_message(key, timestamp))

    def job_changed(self, job: Job, when: int | None = None) -> None:
        if when is not None:
            job.revision = max(job.revision + 1, when)
        self._uris[job.uri] = None

    def uri_changed(self, uri: bytes) -> None:
        self._uris[uri] = None

    def take(self, now: int) -> list[Request]:
        jobs = self._engine.jobs
        outgoing, self._outgoing = self._outgoing, []
        for uri in self._uris:
            outgoing.append(messages.job_message(jobs, uri, now, persist=jobs.is_unlogged(uri)))
        self._uris.clear()
        return outgoing

    def put_back(self, outgoing: list[Request]) -> None:
        self._outgoing[:0] = outgoing
