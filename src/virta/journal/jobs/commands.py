"""
PUSH, NEXT and the DELETE of a job.

Invariant: a request is refused before anything of it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.jobs.job import parse_key
from virta.journal.protocol.messages import (
    DATA,
    DELETED,
    DETAILS,
    LISTEN,
    OVERWRITE,
    PERSIST,
    REPLY_BYTES_MAX,
    WORKED_ON,
    Pair,
    RefusedError,
    Reply,
    Request,
    Type,
    Value,
)

if TYPE_CHECKING:
    from virta.journal.engine import JournalEngine
    from virta.journal.sessions import Session

NEXT_JOBS_MAX = 1_000
STRING = int(Type.STRING)


class JobCommands:
    def __init__(self, engine: JournalEngine) -> None:
        self._engine = engine
        self._jobs = engine.jobs

    def push(self, request: Request, session: Session, now: int, *, tied: bool = False) -> Reply:  # noqa: ARG002
        """Push a job; with `tied` for another daemon, see `Jobs.push`."""
        persist = bool(request.flags & PERSIST)
        payload = request.value
        limit = self._engine.replication.payload_bytes_max
        if payload and len(payload.data) > limit:
            raise RefusedError("too-large", f"copied payloads: {limit} bytes")
        if request.timeout is None:
            request.timeout = now
        applied = self._jobs.push(
            request.key,
            request.key2,
            request.timestamp,
            now,
            priority=request.count or 0,
            start=request.timeout,
            payload=payload,
            persist=persist,
            tied=tied,
        )
        timestamp = request.timestamp if applied else self._jobs.last_command(request.key)
        return Reply(request.identifier, PERSIST if persist else 0, timestamp)

    def next(self, request: Request, session: Session, now: int) -> Reply:
        if not self._engine.primary:
            raise RefusedError("not-primary")
        wanted = 1 if request.count is None else request.count or NEXT_JOBS_MAX
        flags = request.flags
        remove = bool(flags & OVERWRITE)
        jobs = self._jobs.reserve(
            request.key,
            now,
            until=request.timeout,
            count=min(wanted, NEXT_JOBS_MAX),
            remove=remove,
            payload_bytes=REPLY_BYTES_MAX // 2 if flags & DATA else None,
        )
        if jobs:
            pairs: list[Pair] = []
            for job in jobs:
                details = job.details(job.uri) if flags & DETAILS else None
                pairs.append(Pair(job.key(), Value(STRING, job.uri), details))
                if flags & DATA and job.payload is not None:
                    details = job.details(job.payload.data) if flags & DETAILS else None
                    pairs.append(Pair(b"", job.payload, details))
            if remove:
                return Reply(request.identifier, DATA, now, pairs=pairs)
            deadline = min([job.worked_until for job in jobs])
            return Reply(request.identifier, DATA | WORKED_ON, now, deadline, pairs=pairs)
        announced = self._jobs.wake_up(request.key, now)
        if request.flags & LISTEN:
            self._engine.listeners.await_work(session, request.key.lower(), announced)
        return Reply(request.identifier, 0, now, announced, pairs=[])

    def end(self, request: Request, now: int) -> Reply | None:
        """Finish a job by its key, or cancel it by its uri; None if the key belongs to no job."""
        key = request.key
        job = self._jobs.find(key)
        if job is not None and job.lease and job.worked_until <= now:
            self._jobs.tick(now)  # that attempt is over, and with it its key
            job = self._jobs.find(key)
        if job is None:
            if parse_key(key) is not None and self._engine.store.stored(key) is None:
                raise RefusedError("does-not-exist", timestamp=now)
            return None
        if job.uri != key and job.fenced:
            raise RefusedError("does-not-exist", timestamp=now)
        if job.uri == key:
            if request.timestamp < job.timestamp:
                return Reply(request.identifier, 0, job.timestamp)
            self._jobs.cancel(key, now)
        else:
            self._jobs.done(job, now)
        return Reply(request.identifier, DELETED, request.timestamp)
