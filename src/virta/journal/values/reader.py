"""
GET in all its forms: one key, a range, a regular expression, a cursor.

Invariant: reading and marking is one step; a reply never exceeds PAIRS_MAX pairs or, except for a single
pair, REPLY_BYTES_MAX bytes, and skips no more than SCAN_KEYS_MAX keys. The cursor of the reply asks for
the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.jobs.job import WAITING_BEHIND, Job
from virta.journal.jobs.key_index import JobKeys
from virta.journal.protocol.messages import (
    DATA,
    DETAILS,
    LISTEN,
    LOCKED,
    PAIRS_MAX,
    PERSIST,
    QUERY_CURSOR,
    QUERY_KEY,
    QUERY_RANGE,
    REPLY_BYTES_MAX,
    TOUCH,
    WORKED_ON,
    Pair,
    RefusedError,
    Reply,
    Request,
    Type,
    Value,
)
from virta.journal.values.queries import SCAN_KEYS_MAX, Query, parse_cursor

if TYPE_CHECKING:
    from virta.journal.engine import JournalEngine
    from virta.journal.sessions import Session
    from virta.journal.values.entry import ValueEntry

PAIR_OVERHEAD_BYTES = 64  # sizes, type and details


class ValueReader:
    def __init__(self, engine: JournalEngine) -> None:
        self._engine = engine
        self._store = engine.store
        self._jobs = engine.jobs
        self._job_keys = JobKeys(engine.jobs)

    def get(self, request: Request, session: Session, now: int) -> Reply:
        if request.query != QUERY_KEY:
            return self._get_many(request, session, now)
        entry = self._store.live(request.key, now)
        if entry is not None:
            return self._get_one(entry, request, session, now)
        self._jobs.tick(now)
        job = self._jobs.find(request.key)
        if job is None:
            raise RefusedError("does-not-exist")
        return self._get_job(job, request, session, now)

    def _get_one(self, entry: ValueEntry, request: Request, session: Session, now: int) -> Reply:
        if request.flags & WORKED_ON and entry.worked_until > now:
            raise RefusedError("worked-on", timestamp=entry.timestamp)
        if request.flags & LISTEN:
            self._engine.watch.listen(session, [request.key])
        self._mark_and_touch(entry, request, now)
        return self.value_reply(entry, request, now)

    def value_reply(self, entry: ValueEntry, request: Request, now: int) -> Reply:
        """Return the reply to a GET of one key."""
        pair = self._pair(b"", entry, request.flags, now)
        flags = (PERSIST if entry.persist else 0) | (request.flags & DATA)
        flags |= WORKED_ON if entry.worked_until > now else 0
        flags |= LOCKED if entry.locked(now) else 0
        return Reply(request.identifier, flags, entry.timestamp, entry.expires or None, pair=pair)

    def _get_job(self, job: Job, request: Request, session: Session, now: int) -> Reply:
        """Read a job: the value `uri` under its two keys; a timeout extends, returns or reserves it."""
        if request.flags & WORKED_ON and job.lease:
            raise RefusedError("worked-on", timestamp=job.timestamp)
        if request.flags & LISTEN:
            self._engine.watch.listen(session, [request.key])
        if request.timeout is not None:
            if job.uri != request.key and job.fenced:
                raise RefusedError("does-not-exist")
            self._jobs.mark(job, request.timeout, now)
        data = job.uri if request.flags & DATA else b""
        details = job.details(job.uri) if request.flags & DETAILS else None
        flags = (PERSIST if job.persist else 0) | (request.flags & DATA)
        flags |= WORKED_ON if job.lease else 0
        pair = Pair(b"", Value(Type.STRING, data), details)
        return Reply(request.identifier, flags, job.timestamp, pair=pair)

    def _get_many(self, request: Request, session: Session, now: int) -> Reply:
        query = self._query(request)
        flags = request.flags = request.flags | query.flags
        limit = min(query.count or PAIRS_MAX, PAIRS_MAX)
        found: list[tuple[bytes, ValueEntry | Job]] = []
        size = skipped = 0
        last = query.last
        before: bytes | None = None  # a key may be that of a value and a uri
        cursor: bytes | None = None
        self._jobs.tick(now)
        sources = (self._store.keys, self._job_keys.in_order(*query.span()))
        for key, wanted in query.keys(*sources):
            if skipped == SCAN_KEYS_MAX:
                cursor = query.cursor(last, key, *sources)
                break
            entry = self._readable(key, flags, now) if wanted and key != before else None
            before = key
            if entry is None:
                last = key
                skipped += 1
                continue
            cost = len(key) + PAIR_OVERHEAD_BYTES
            if flags & DATA:
                cost += len(entry.uri) if isinstance(entry, Job) else entry.size
            if len(found) == limit or (found and size + cost > REPLY_BYTES_MAX):
                cursor = query.cursor(last, key, *sources)
                break
            size += cost
            last = key
            found.append((key, entry))
        if flags & LISTEN:
            self._engine.watch.listen(session, [key for key, _ in found])
        for _, entry in found:
            if isinstance(entry, Job):
                self._mark_job(entry, request, now)
            else:
                self._mark_and_touch(entry, request, now)
        marked = request.timeout is not None and request.timeout > now and found
        return Reply(
            request.identifier,
            (flags & DATA) | (WORKED_ON if marked else 0),
            now,
            query=request.query,
            pairs=[self._pair(key, entry, flags, now) for key, entry in found],
            cursor=cursor,
        )

    def _readable(self, key: bytes, flags: int, now: int) -> ValueEntry | Job | None:
        """Return what belongs in the reply. Expired values are skipped, not deleted: the keys are being read."""
        entry = self._store.stored(key)
        if entry is None or entry.tombstone or (entry.expires and entry.expires <= now):
            job = self._jobs.find(key)
            return None if job is None or (flags & WORKED_ON and job.lease) else job
        if flags & WORKED_ON and entry.worked_until > now:
            return None
        return entry

    def _mark_job(self, job: Job, request: Request, now: int) -> None:
        """Reserve, extend or return a job; one that waits behind another is only read."""
        if request.timeout is not None and job.state != WAITING_BEHIND:
            self._jobs.mark(job, request.timeout, now)

    def _query(self, request: Request) -> Query:
        flags = request.flags & (DATA | WORKED_ON | DETAILS | TOUCH)
        if request.query == QUERY_CURSOR:
            query = parse_cursor(request.key)
            if request.count is not None:
                query.count = request.count
            return query
        lower, bound = (
            (request.key, request.key2) if request.query == QUERY_RANGE else (b"", request.key)
        )
        return Query(request.query, bound, lower, request.count or 0, flags, after=False)

    def _mark_and_touch(self, entry: ValueEntry, request: Request, now: int) -> None:
        entry.accessed = now
        if request.timeout is not None:
            self._store.mark(entry, request.timeout, now)
        if request.flags & TOUCH:
            self._store.touch(entry, entry.ttl if request.ttl is None else request.ttl, now)
        self._engine.replication.value_read(entry, request)

    def _pair(self, key: bytes, entry: ValueEntry | Job, flags: int, now: int) -> Pair:
        if isinstance(entry, Job):
            text = Value(Type.STRING, entry.uri if flags & DATA else b"")
            return Pair(key, text, entry.details(entry.uri) if flags & DETAILS else None)
        value = self._store.value(entry) if flags & DATA else Value(entry.type, b"")
        return Pair(key, value, entry.details(now) if flags & DETAILS else None)
