"""
GET in all its forms: one key, a range, a regular expression, a cursor.

Invariant: reading and marking is one step; a reply never exceeds PAIRS_MAX pairs or, but for a single
pair, REPLY_BYTES_MAX bytes, and passes over no more than SCAN_KEYS_MAX keys. What is left out can be
asked for with the cursor of the reply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.jobs.job import HELD, Job
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
    from virta.journal.engine import Engine
    from virta.journal.sessions import Session
    from virta.journal.values.entry import Entry

PAIR_OVERHEAD_BYTES = 64  # sizes, type and details


class Reading:
    def __init__(self, engine: Engine) -> None:
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
        if session.peer is not None:
            return self._mark_early(request)  # of jobs daemons speak otherwise
        self._jobs.tick(now)
        job = self._jobs.find(request.key)
        if job is None:
            raise RefusedError("does-not-exist")
        return self._get_job(job, request, session, now)

    def _mark_early(self, request: Request) -> Reply:
        """Another daemon's mark of a value that is on its way, or gone again."""
        stored = self._store.stored(request.key)
        version = request.ttl or 0
        # At the version's own moment a tombstone is that of another value, unless this one was over.
        if stored is None or (stored.timestamp, bool(stored.expires)) < (version, True):
            raise RefusedError("not-yet", "the value has not arrived")
        if stored.over and stored.timestamp == version:
            self._store.mark_told(stored, request.timeout or 0, request.timestamp)
        return Reply(request.identifier, 0, stored.timestamp)

    def _get_one(self, entry: Entry, request: Request, session: Session, now: int) -> Reply:
        if request.flags & WORKED_ON and entry.worked_until > now:
            raise RefusedError("worked-on", timestamp=entry.timestamp)
        if request.flags & LISTEN:
            self._engine.watch.listen(session, [request.key])
        self._mark_and_touch(entry, request, session, now)
        pair = self._pair(b"", entry, request.flags, now)
        flags = (PERSIST if entry.persist else 0) | (request.flags & DATA)
        flags |= WORKED_ON if entry.worked_until > now else 0
        flags |= LOCKED if entry.locked(now) else 0
        return Reply(request.identifier, flags, entry.timestamp, entry.expires or None, pair=pair)

    def _get_job(self, job: Job, request: Request, session: Session, now: int) -> Reply:
        """A job is the value `uri` under its two keys; a timeout extends, gives back or claims it."""
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
        found: list[tuple[bytes, Entry | Job]] = []
        size = looked = 0
        last = query.last
        before: bytes | None = None  # a key may be that of a value and a uri
        cursor: bytes | None = None
        self._jobs.tick(now)
        sources = (self._store, self._job_keys.in_order(*query.span()))
        for key, wanted in query.keys(*sources):
            if looked == SCAN_KEYS_MAX:
                cursor = query.cursor(last, key, *sources)
                break
            entry = self._readable(key, flags, now) if wanted and key != before else None
            before = key
            if entry is None:
                last = key
                looked += 1
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
                self._mark_and_touch(entry, request, session, now)
        marked = request.timeout is not None and request.timeout > now and found
        return Reply(
            request.identifier,
            (flags & DATA) | (WORKED_ON if marked else 0),
            now,
            query=request.query,
            pairs=[self._pair(key, entry, flags, now) for key, entry in found],
            cursor=cursor,
        )

    def _readable(self, key: bytes, flags: int, now: int) -> Entry | Job | None:
        """What is to be in the reply; never a value whose time is over, without burying it here, as
        the keys are being walked."""
        entry = self._store.stored(key)
        if entry is None or entry.tombstone or (entry.expires and entry.expires <= now):
            job = self._jobs.find(key)
            return None if job is None or (flags & WORKED_ON and job.lease) else job
        if flags & WORKED_ON and entry.worked_until > now:
            return None
        return entry

    def _mark_job(self, job: Job, request: Request, now: int) -> None:
        """Claim, extend or give back; one that waits behind another is only looked at."""
        if request.timeout is not None and job.state != HELD:
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

    def _mark_and_touch(self, entry: Entry, request: Request, session: Session, now: int) -> None:
        entry.accessed = now
        if request.timeout is not None:
            if session.peer is not None:
                version, known = request.ttl or 0, entry.moment(request.key)
                own = request.key == entry.keys[0]
                # A key that was linked at the version's own moment will be that value's.
                if (known, own) < (version, True):
                    raise RefusedError("not-yet", "that version has not arrived")
                if known == version:
                    self._store.mark_told(entry, request.timeout, request.timestamp)
                return
            self._store.mark(entry, request.timeout, now)
        if request.flags & TOUCH:
            self._store.touch(entry, entry.ttl if request.ttl is None else request.ttl, now)
        self._engine.tell_read(entry, request)

    def _pair(self, key: bytes, entry: Entry | Job, flags: int, now: int) -> Pair:
        if isinstance(entry, Job):
            text = Value(Type.STRING, entry.uri if flags & DATA else b"")
            return Pair(key, text, entry.details(entry.uri) if flags & DETAILS else None)
        value = self._store.value(entry) if flags & DATA else Value(entry.type, b"")
        return Pair(key, value, entry.details(now) if flags & DETAILS else None)
