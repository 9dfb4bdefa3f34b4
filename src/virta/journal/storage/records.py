"""
The records of the log and of snapshots: whole states of single entries, never deltas.

Invariant: replaying images over any older or newer state of the same entries, in log order, ends in the
state after the last image. So a snapshot can be written in steps while the journal works, and replaying a
record twice is harmless.

    topic   value (MessagePack array)
    value   keys, type, data, timestamp, created, modified, accessed, expires, ttl, worked until, tombstone
            (0 no, 1 yes, 2 of a value whose time is over, with the first bytes of it),
            when that was marked, when each further key was linked, what a linked key without value waits for
    gone    key
    mark    key, timestamp of the version, worked until, expires, when it was marked
    job     uri, last finished command (-1: none known), when it finished, entries: none, one, or what is
            worked on and what waits behind it
    ids     the first id that was not handed out yet, for sure

An entry of a job is: domain, id, priority, start, timestamp, created, payload type (-1: none), payload,
attempts, reason, dead, worked until (if dead: when it died), lease, revision, persist, and, if
there are any, the older commands it took the place of, each with its revision (a map).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from virta.journal.jobs.job import DEAD, Job
from virta.journal.protocol.messages import Value
from virta.journal.values.entry import ValueEntry
from virta.log.limits import KEY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.journal.engine import JournalEngine
    from virta.journal.jobs.lifecycle import Jobs

Record = tuple[str, bytes, bytes]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_OVER = 2  # a tombstone that still says what it was
_IMAGE_FIELDS = 15  # of a job; one that replaced others has a further field


def value_fields(entry: ValueEntry, value: Value) -> tuple[Any, ...]:
    return (
        entry.keys,
        value.type,
        value.data,
        entry.timestamp,
        entry.created,
        entry.modified,
        entry.accessed,
        entry.expires,
        entry.ttl,
        entry.worked_until,
        _OVER if entry.over else int(entry.tombstone),
        entry.marked_at,
        [entry.links[key] for key in entry.keys[1:]],
        entry.alias,
    )


def job_fields(job: Job) -> tuple[Any, ...]:
    payload = job.payload
    image = (
        job.domain.name,
        job.id,
        job.priority,
        job.start,
        job.timestamp,
        job.created,
        -1 if payload is None else payload.type,
        b"" if payload is None else payload.data,
        job.attempts,
        job.reason,
        job.state == DEAD,
        job.worked_until,
        job.lease,
        job.revision,
        job.persist,
    )
    return (*image, job.replaced) if job.replaced else image


def drain(engine: JournalEngine, now: int) -> list[Record]:
    """Return the images to log, in the order of the log."""
    records: list[Record] = []
    if engine.jobs.wants_log:
        records = [
            (
                "job",
                uri[:KEY_BYTES_MAX],
                _encode((uri, finished, now, list(map(job_fields, kept)))),
            )
            for uri, finished, kept in engine.jobs.changes()
        ]
        engine.jobs.drained()
    if not engine.store.unlogged:
        return records
    removed, whole, marked = engine.store.drain()
    records += [("gone", _record_key(key), _encode((key,))) for key in removed]
    for entry in whole:
        image = _encode(value_fields(entry, engine.store.value(entry)))
        records.append(("value", _record_key(entry.keys[0]), image))
    for entry in marked:
        key = entry.keys[0]
        mark = (key, entry.timestamp, entry.worked_until, entry.expires, entry.marked_at)
        records.append(("mark", _record_key(key), _encode(mark)))
    return records


def ids_record(first_free: int) -> Record:
    return ("ids", b"", _encode((first_free,)))


def apply(engine: JournalEngine, topic: str, image: bytes, now: int) -> None:
    """Apply one record of the log."""
    fields = _decode(image)
    if topic == "job":
        uri, finished, finished_at, entries = fields
        engine.jobs.restore_removed(uri, finished_at, finished)
        restore_jobs(engine, [(uri, entry) for entry in entries], now)
    elif topic == "value":
        restore_value(engine, fields, now)
    elif topic == "gone":
        engine.store.restore_removed(fields[0])
    elif topic == "mark":
        key, timestamp, worked_until, expires, marked_at = fields
        stored = engine.store.stored(key)
        if stored is not None and stored.timestamp == timestamp and not stored.tombstone:
            engine.store.restore_mark(stored, worked_until, marked_at, expires)
    elif topic == "ids":
        engine.jobs.saw_id(fields[0] - 1)


def restore_value(engine: JournalEngine, image: list[Any], now: int) -> None:
    keys, kind, data, timestamp, created, modified, accessed, expires, ttl = image[:9]
    worked, tombstone, marked_at, links, alias = image[9:]
    entry = ValueEntry(
        keys,
        timestamp,
        created,
        modified,
        alias=alias,
        accessed=accessed,
        expires=expires,
        ttl=ttl,
        worked_until=worked,
        marked_at=marked_at,
        persist=True,
        tombstone=bool(tombstone),
        over=tombstone == _OVER,
    )
    if links:
        entry.links = dict(zip(keys[1:], links, strict=True))
    engine.store.restore(entry, Value(kind, data), now)


def restore_jobs(
    engine: JournalEngine, images: Iterable[tuple[bytes, list[Any]]], now: int
) -> None:
    """Add jobs to those that are restored already; each image comes with the uri of its job."""
    jobs = engine.jobs
    restore = jobs.restore
    for uri, image in images:
        restore(job_of(jobs, uri, image), now, dead=image[10])


def job_of(jobs: Jobs, uri: bytes, image: list[Any]) -> Job:
    replaced = None
    if len(image) > _IMAGE_FIELDS:
        image, replaced = image[:_IMAGE_FIELDS], image[_IMAGE_FIELDS]
    (
        domain,
        job_id,
        priority,
        start,
        timestamp,
        created,
        payload_type,
        payload,
        attempts,
        reason,
        _,
        worked_until,
        lease,
        revision,
        persist,
    ) = image
    # Times that are the same are one number in memory, as they were before: 32 bytes each.
    job = Job(
        uri,
        jobs.scheduler.domain(domain),
        job_id,
        priority,
        timestamp if start == timestamp else start,
        timestamp,
        timestamp if created == timestamp else created,
        Value(payload_type, payload) if payload_type >= 0 else None,
        persist,
    )
    # Most jobs are new: half the arguments take half the time.
    if attempts or reason or worked_until or lease or revision:
        job.attempts, job.reason, job.worked_until = attempts, reason, worked_until
        job.lease, job.revision = lease, revision
    if replaced is not None:
        job.replaced = replaced
    return job


def _record_key(key: bytes) -> bytes:
    """Return the key of a log record, for people who read the log; the image has the whole key."""
    return key[:KEY_BYTES_MAX]
