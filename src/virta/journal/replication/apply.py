"""
Requests from other daemons: applied to one register each, in any order, and not passed on.

What they change was checked and got its final timestamp where a client asked for it. Requests that
daemons do not send are those of a client.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from virta.journal.protocol.messages import (
    COMMAND_KEY,
    DELETED,
    QUERY_KEY,
    WORKED_ON,
    Function,
    RefusedError,
    Reply,
    Request,
)
from virta.journal.replication.messages import JOB_KEY, decode_job, decode_mark
from virta.journal.sessions import PEER

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.engine import JournalEngine
    from virta.journal.sessions import Session

PEER_PREFIX = b"peer:"
PULL_PREFIX = b"pull:"


class PeerRequests:
    def __init__(self, engine: JournalEngine) -> None:
        self._engine = engine
        self._store = engine.store
        self.pull: Callable[[str], None] = lambda _: None  # fetch everything from a peer
        self.functions: dict[int, Callable[[Request, Session, int], Reply]] = {
            **engine.functions,
            Function.NOP: self._nop_of_peer,
            Function.SET: self._set,
            Function.GET: self._get,
            Function.DELETE: self._delete,
            Function.LINK: self._link,
            Function.PUSH: partial(engine.job_commands.push, tied=True),
        }
        engine.functions[Function.NOP] = self._nop
        engine.roles[PEER] = self.functions

    def _nop(self, request: Request, session: Session, now: int) -> Reply:
        """Do nothing, or make the connection the link to another daemon."""
        if request.key.startswith(PEER_PREFIX):
            session.link_to(request.key[len(PEER_PREFIX) :].decode(errors="replace"))
        return Reply(request.identifier, 0, now)

    def _nop_of_peer(self, request: Request, session: Session, now: int) -> Reply:
        if request.key.startswith(PULL_PREFIX):
            self.pull(request.key[len(PULL_PREFIX) :].decode(errors="replace"))
            return Reply(request.identifier, 0, now)
        return self._nop(request, session, now)

    def _set(self, request: Request, session: Session, now: int) -> Reply:
        engine = self._engine
        assert request.value is not None
        if request.key == JOB_KEY:
            copy = decode_job(request.value)
            jobs = engine.jobs
            jobs.merge(copy.uri, copy.finished, copy.finished_at, copy.jobs(jobs), now)
            return Reply(request.identifier, 0, request.timestamp)
        if request.key == COMMAND_KEY:
            return engine.admin.run(request, session, now)
        entry, _ = engine.store_value(request, session, now, copied=True)
        if request.key2:
            marked_at, until = decode_mark(request.key2)
            if (
                entry.keys[0] == request.key
                and entry.timestamp == request.timestamp
                and (entry.over or not entry.tombstone)
            ):
                self._store.mark_copy(entry, until, marked_at)
        return engine.reply_about(request, entry, now)

    def _delete(self, request: Request, session: Session, now: int) -> Reply:
        """Delete one key; the other daemon sends a request for each."""
        key = request.key
        removed = self._store.delete_copy(key, request.timestamp, now, owner=session)
        if removed:
            self._engine.listeners.changed([key], session, request.timestamp, None)
            self._engine.admin.removed([key])
        return Reply(request.identifier, DELETED if removed else 0, request.timestamp)

    def _link(self, request: Request, session: Session, now: int) -> Reply:
        """Link a key to a value, which may not have arrived yet."""
        engine, key = self._engine, request.key2
        engine.check_two_keys(request, "the additional key")
        if self._store.link_copy(request.key, key, request.timestamp, now):
            entry = self._store.live(key, now)
            kind = None if entry is None else entry.type
            engine.listeners.changed([key], session, request.timestamp, kind)
        return Reply(request.identifier, 0, request.timestamp)

    def _get(self, request: Request, session: Session, now: int) -> Reply:
        """Mark a version of a value; `ttl` is the version's timestamp."""
        entry = self._store.live(request.key, now) if request.query == QUERY_KEY else None
        if request.query == QUERY_KEY and entry is None:
            return self._mark_missing(request)
        if entry is None or request.timeout is None:
            return self._engine.functions[Function.GET](request, session, now)
        if request.flags & WORKED_ON and entry.worked_until > now:
            raise RefusedError("worked-on", timestamp=entry.timestamp)
        version, known = request.ttl or 0, entry.timestamp_of(request.key)
        own = request.key == entry.keys[0]
        # A key linked at the version's own timestamp will be that value's.
        if (known, own) < (version, True):
            raise RefusedError("not-yet", "that version has not arrived")
        entry.accessed = now
        if known == version:
            self._store.mark_copy(entry, request.timeout, request.timestamp)
        return self._engine.reader.value_reply(entry, request, now)

    def _mark_missing(self, request: Request) -> Reply:
        """Mark a value that has not arrived, or was removed again."""
        stored = self._store.stored(request.key)
        version = request.ttl or 0
        # A tombstone of the version's own timestamp is that of another value, unless this one expired.
        if stored is None or (stored.timestamp, bool(stored.expires)) < (version, True):
            raise RefusedError("not-yet", "the value has not arrived")
        if stored.over and stored.timestamp == version:
            self._store.mark_copy(stored, request.timeout or 0, request.timestamp)
        return Reply(request.identifier, 0, stored.timestamp)
