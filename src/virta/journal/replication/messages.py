"""
What daemons send each other, as requests: every change with its final timestamp, and whole states.

Invariant: each request writes one register (a key, or all that is known of a uri) with a total order
between writes, so that daemons which got the same requests, in any order and however often, have the
same state.

    SET, DELETE, LINK   of a key: the largest timestamp wins; at equal timestamps SET before DELETE before LINK;
                        the second key of a SET is the mark of that version: the later one wins
    GET with timeout    such a mark alone, of the version whose timestamp is the ttl
    SET virta:job       [uri, last finished command, when, jobs]: see `Jobs.merge`

`Export` returns all data of a daemon as such requests, page by page: a peer that starts, or was away for too
long to get each change, requests it and applies it like anything else that arrives.
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
from virta.journal.storage import records
from virta.journal.values.entries import OVER_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.journal.engine import JournalEngine
    from virta.journal.jobs.job import Job
    from virta.journal.jobs.lifecycle import Jobs
    from virta.journal.sessions import Session
    from virta.journal.values.entry import ValueEntry
    from virta.journal.values.store import Store

JOB_KEY = b"virta:job"
EXPORT_BYTES_MAX = 1024 * 1024  # of a page, which has at least one message
# A job has to fit one value together with its uri, domain and reason.
PAYLOAD_BYTES_MAX = 8 * 1024 * 1024 - 256 * 1024

_MARK = struct.Struct(">QQ")  # when it was made, until when
_Time = Annotated[int, Meta(ge=0)]
_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Stamp = Annotated[int, Meta(ge=0, le=STAMP_US_MAX)]


class JobState(Struct, array_like=True, frozen=True):
    """A job as `records.job_fields` writes it, checked."""

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

    def jobs(self, jobs: Jobs) -> list[Job]:
        fields = msgspec.structs.astuple
        return [records.job_of(jobs, self.uri, list(fields(state))) for state in self.states]


_decode = msgspec.msgpack.Decoder(JobCopy).decode


def decode_job(value: Value) -> JobCopy:
    """
    Return another daemon's state of a uri.

    Raises:
        RefusedError: it is not one.
    """
    try:
        return _decode(value.data)
    except msgspec.DecodeError as error:
        raise RefusedError("bad-settings", f"not the state of a job: {error}"[:200]) from error


def decode_mark(data: bytes) -> tuple[int, int]:
    """Return when the mark of a version was made, and until when it lasts."""
    if len(data) != _MARK.size:
        raise RefusedError("bad-query", f"a mark of {len(data)} bytes, not 16")
    marked_at, until = _MARK.unpack(data)
    return min(marked_at, STAMP_US_MAX), until


def job_message(jobs: Jobs, uri: bytes, now: int, *, persist: bool) -> Request:
    states = [records.job_fields(job) for job in jobs.entries(uri)]
    state = msgspec.msgpack.encode((uri, jobs.finished.last(uri), now, states))
    flags = OVERWRITE | (PERSIST if persist else 0)
    return Request(Function.SET, 0, flags, now, key=JOB_KEY, value=Value(Type.BUFFER, state))


def value_messages(store: Store, entry: ValueEntry) -> list[Request]:
    """Return a value and its further keys."""
    root = entry.keys[0]
    return [
        set_message(store, entry),
        *(link_message(root, key, when) for key, when in entry.links.items()),
    ]


def set_message(store: Store, entry: ValueEntry) -> Request:
    """Return a value with its mark: one sent by itself might arrive before its value."""
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
        value=store.value(entry),
        query=QUERY_RANGE if mark else QUERY_KEY,
    )


def link_message(root: bytes, key: bytes, timestamp: int) -> Request:
    return Request(Function.LINK, 0, 0, timestamp, key=root, key2=key, count=0, query=QUERY_RANGE)


def delete_message(key: bytes, timestamp: int) -> Request:
    return Request(Function.DELETE, 0, 0, timestamp, key=key)


class Export:
    """All data of a daemon, one page per call and connection."""

    def __init__(self, engine: JournalEngine) -> None:
        self._engine = engine
        self._exports: WeakKeyDictionary[Session, Iterator[Request]] = WeakKeyDictionary()

    def page(self, session: Session, now: int, *, again: bool) -> bytes:
        """Return the next requests, nothing after the last; `again` starts over."""
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
        store, jobs = self._engine.store, self._engine.jobs
        for entry in store.entries():
            if not entry.keys:
                continue  # removed since
            if entry.alias is not None:
                yield link_message(entry.alias, entry.keys[0], entry.timestamp)
            elif entry.tombstone and not (entry.over and entry.size < OVER_BYTES_MAX):
                yield delete_message(entry.keys[0], entry.timestamp)
            else:  # an expired value is sent whole, and expires when it arrives
                yield from value_messages(store, entry)
        for uri in jobs.uris():
            yield job_message(jobs, uri, now, persist=False)
