"""
Notifications about the keys of jobs: pushes and ends, as with any value.

A job is a value (its uri) under two keys. The uri changes with each newer command and is removed when
the job is done, cancelled or dead; the sort key is also removed when the job is reserved or moved, as it
has another one then. Heartbeats change nothing, as with marks of values.

Invariant: `_seen` has every key with listeners, and the command it led to in their last notification.
Without listeners, moving jobs cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.protocol.messages import Type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.journal.jobs.job import Job
    from virta.journal.jobs.table import JobTable
    from virta.journal.sessions import Listeners, Session


class JobWatch:
    def __init__(self, jobs: JobTable, listeners: Listeners) -> None:
        self._jobs = jobs
        self._listeners = listeners
        self._seen: dict[bytes, tuple[bytes, int]] = {}  # uri, and command or -1: no job
        self._by_uri: dict[bytes, set[bytes]] = {}
        self._watching = False
        self.moved: dict[bytes, None] = {}  # uris of which something may have changed

    def __len__(self) -> int:
        """Return how many keys are watched."""
        return len(self._seen)

    def listen(self, session: Session, keys: list[bytes]) -> None:
        """Notify a connection of changes by others; refuse all keys if they are too many."""
        self._listeners.check(session, keys)
        if session.notify is not None:
            self._listeners.listen(session, keys)
            self._add(keys)

    def forget(self, session: Session) -> None:
        """Forget a connection that was closed."""
        keys = session.keys.copy()
        self._listeners.forget(session)
        self._drop(key for key in keys if not self._listeners.has(key))

    def _add(self, keys: list[bytes]) -> None:
        """Watch keys, whether they are keys of jobs now or become some later."""
        for key in keys:
            if key in self._seen:
                continue
            job = self._jobs.find(key)
            uri, command = (key, -1) if job is None else (job.uri, job.timestamp)
            self._seen[key] = uri, command
            self._by_uri.setdefault(uri, set()).add(key)
        if self._seen and not self._watching:
            self._watching = True
            self._jobs.scheduler.watch(self._note)

    def _note(self, job: Job) -> None:
        if job.uri in self._by_uri:
            self.moved[job.uri] = None

    def notify(self, origin: Session | None, now: int) -> None:
        """Send what changed since the last call to all listeners except the origin."""
        moved, self.moved = self.moved, {}
        for uri in moved:
            for key in self._by_uri.get(uri, ()):
                job = self._jobs.find(key)
                command = -1 if job is None else job.timestamp
                if command != self._seen[key][1]:
                    self._seen[key] = uri, command
                    kind = None if job is None else int(Type.STRING)
                    self._listeners.changed([key], origin, now if job is None else command, kind)

    def _drop(self, keys: Iterable[bytes]) -> None:
        """Stop watching keys without listeners."""
        for key in keys:
            uri, _ = self._seen.pop(key, (b"", 0))
            listened = self._by_uri.get(uri)
            if listened is not None:
                listened.discard(key)
                if not listened:
                    del self._by_uri[uri]
        if self._watching and not self._seen:
            self._watching = False
            self._jobs.scheduler.unwatch(self._note)
