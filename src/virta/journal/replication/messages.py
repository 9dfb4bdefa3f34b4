"""
What daemons tell each other, as requests: every change with its final timestamp, and whole states.

Invariant: each request writes one register (a key, or all that is known of a uri) with a total order
between writes, so that daemons which have heard the same requests, in any order and however often, hold
the same.

    SET, DELETE, LINK   of a key: the largest timestamp wins; at one moment SET before DELETE before LINK;
                        the second key of a SET is the mark of that version: the later one wins
    GET with timeout    such a mark alone, of the version whose timestamp is the ttl
    SET virta:job       [uri, last finished command, when, states]: see `Jobs.merge`

`export` is everything a daemon knows, in the same words, page by page: a peer that starts, or was away for too
long to be told of each change, asks for it and applies it like anything else that arrives.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Meta, Struct

from virta.journal.jobs.job import ATTEMPTS_MAX
from virta.journal.protocol.codec import encode_request
from virta.journal.protocol.messages import (
    OVERWRITE,
    PERSIST,
    QUERY_KEY,
    QUERY_RANGE,
    Function,
    RefusedError,
    Request,
    Type,
    Value,
)
from virta.journal.protocol.rules import STAMP_US_MAX
from virta.journal.replication.merge import COVERED_MAX
from virta.journal.storage import records as images
from virta.journal.values.entries import OVER_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.journal.engine import Engine
    from virta.journal.sessions import Session
    from virta.journal.values.entry import Entry

JOB_KEY = b"virta:job"
EXPORT_BYTES_MAX = 1024 * 1024  # of a page, beyond which only one message goes
# A job has to fit one value together with its uri, domain and reason.
COPIED_PAYLOAD_BYTES_MAX = 8 * 1024 * 1024 - 256 * 1024

_MARK = struct.Struct(">QQ")  # when it was made, until when
_Time = Annotated[int, Meta(ge=0)]
_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Stamp = Annotated[int, Meta(ge=0, le=STAMP_US_MAX)]


class JobState(Struct, array_like=True, frozen=True):
    """A job as `images.job_image` writes it, checked."""

    domain: Annotated[bytes, Meta(min_length=1)]
    id: _Id
    priority: Annotated[int, Meta(ge=0, le=255)]
    start: _Time
    timestamp: _Stamp
    created: _Time
    payload_type: Annotated[int, Meta(ge=-1, le=5)]
    payload: bytes
    attempts: Annotated[int, Meta(ge=0, le=ATTEMPTS_MAX)]
    reason: str
    dead: bool
    worked_until: _Time
    lease: _Id
    revision: _Stamp
    persist: bool
    covered: Annotated[dict[_Stamp, _Stamp], Meta(max_length=COVERED_MAX)] | None = None


class JobCopy(Struct, array_like=True, frozen=True):
    uri: Annotated[bytes, Meta(min_length=1)]
    finished: Annotated[int, Meta(ge=-1)]
    finished_at: _Time
    states: Annotated[list[JobState], Meta(max_length=2)]


_decode = msgspec.msgpack.Decoder(JobCopy).decode


class Copies:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._exports: WeakKeyDictionary[Session, Iterator[Request]] = WeakKeyDictionary()

    # Sending.

    def of_jobs(self, now: int) -> list[Request]:
        """What happened to jobs since the last call."""
        return [self._job(uri, now, persist) for uri, persist in self._engine.jobs.take_unsent()]

    def of_value(self, entry: Entry) -> list[Request]:
        """A value with its further keys."""
        root = entry.keys[0]
        links = [self.as_link(root, key, when) for key, when in entry.links.items()]
        return [self.as_set(entry), *links]

    def as_set(self, entry: Entry) -> Request:
        """With its mark: one that came by itself might come before, and what it is about never."""
        mark = _MARK.pack(entry.marked_at, entry.worked_until) if entry.marked_at else b""
        return Request(
            Function.SET,
            0,
            OVERWRITE | (PERSIST if entry.persist else 0),
            entry.timestamp,
            entry.expires or None,
            entry.ttl or None,
            count=0 if mark else None,
            key=entry.keys[0],
            key2=mark,
            value=self._engine.store.value(entry),
            query=QUERY_RANGE if mark else QUERY_KEY,
        )

    def as_link(self, root: bytes, key: bytes, timestamp: int) -> Request:
        return Request(
            Function.LINK, 0, 0, timestamp, key=root, key2=key, count=0, query=QUERY_RANGE
        )

    def _job(self, uri: bytes, now: int, persist: bool) -> Request:  # noqa: FBT001
        jobs = self._engine.jobs
        states = [images.job_image(job) for job in jobs.entries(uri)]
        state = msgspec.msgpack.encode((uri, jobs.finished.last(uri), now, states))
        flags = OVERWRITE | (PERSIST if persist else 0)
        return Request(Function.SET, 0, flags, now, key=JOB_KEY, value=Value(Type.BUFFER, state))

    # Receiving.

    def merge_mark(self, request: Request) -> None:
        """The mark that came with a SET, if that version is the one that stands."""
        if len(request.key2) != _MARK.size:
            raise RefusedError("bad-query", f"a mark of {len(request.key2)} bytes, not 16")
        marked_at, until = _MARK.unpack(request.key2)
        marked_at = min(marked_at, STAMP_US_MAX)
        entry = self._engine.store.stored(request.key)
        if (
            entry is not None
            and entry.keys[0] == request.key
            and entry.timestamp == request.timestamp
            and (entry.over or not entry.tombstone)
        ):
            self._engine.store.mark_told(entry, until, marked_at)

    def merge_job(self, value: Value, now: int) -> None:
        """
        Take in another daemon's state of a uri.

        Raises:
            RefusedError: it is not one.
        """
        try:
            copy = _decode(value.data)
        except msgspec.DecodeError as error:
            raise RefusedError("bad-settings", f"not the state of a job: {error}"[:200]) from error
        jobs = self._engine.jobs
        states = [
            images.job_of(jobs, copy.uri, list(msgspec.structs.astuple(state)))
            for state in copy.states
        ]
        jobs.merge(copy.uri, copy.finished, copy.finished_at, states, now)

    # Catching up.

    def export(self, session: Session, now: int, *, again: bool) -> bytes:
        """The next requests of everything there is; nothing when that was all. `again` starts over."""
        if again or session not in self._exports:
            self._exports[session] = self._everything(now)
        page: list[bytes] = []
        size = 0
        for request in self._exports[session]:
            page.append(encode_request(request))
            size += len(page[-1])
            if size > EXPORT_BYTES_MAX:
                break
        if not page:
            del self._exports[session]
        return b"".join(page)

    def _everything(self, now: int) -> Iterator[Request]:
        store = self._engine.store
        for entry in store.entries():
            if not entry.keys:
                continue  # gone since
            if entry.alias is not None:
                yield self.as_link(entry.alias, entry.keys[0], entry.timestamp)
            elif entry.over and entry.size < OVER_BYTES_MAX:
                yield from self.of_value(entry)  # whole, and over as soon as it arrives
            elif entry.tombstone:
                yield Request(Function.DELETE, 0, 0, entry.timestamp, key=entry.keys[0])
            else:
                yield from self.of_value(entry)
        for uri in self._engine.jobs.uris():
            yield self._job(uri, now, persist=False)
