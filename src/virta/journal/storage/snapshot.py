"""
A snapshot: every persistent entry at some time at or after a point in the log.

    "VJS1"  then chunks:  u32 size  u32 crc32 of the payload  payload
    payload MessagePack [kind, items]: kind "values" or "jobs" with images, "finished" with
            [finished at, uri, timestamp], and last "end" with [next id, chunks before this one]

Invariant: a file under its final name is whole: it is written under another name, synced, renamed, and
the directory synced. It is taken in small steps between which the journal changes; images make that
harmless, as the log from the snapshot's point on is replayed over it.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from virta import files
from virta.errors import JournalError
from virta.journal.jobs.job import REMOVED
from virta.journal.storage import records as images

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from virta.journal.engine import JournalEngine

MAGIC = b"VJS1"
# About 3 ms of encoding between two steps.
STEP_ENTRIES = 2_000
# Values are large: a step also ends after this many bytes.
STEP_BYTES = 4 * 1024 * 1024
CHUNK_BYTES_MAX = 64 * 1024 * 1024
_CHUNK = struct.Struct(">II")
_encode = msgspec.msgpack.Encoder().encode


def write_snapshot(engine: JournalEngine, path: Path) -> Generator[None, None, None]:
    """
    Write a snapshot in steps; between any two the journal may go on working.

    When it ends the file is complete but not yet durable: sync it, then call `publish`.
    """
    with open(path, "wb", opener=files.open_file) as file:
        file.write(MAGIC)
        chunks = 0
        for payload in _snapshot_records(engine):
            _write_chunk(file, payload)
            chunks += 1
            yield
        _write_chunk(file, _encode(["end", [engine.jobs.next_id, chunks]]))


def publish(temporary: Path, final: Path) -> None:
    temporary.rename(final)
    files.sync_directory(final.parent)


def load_snapshot(engine: JournalEngine, path: Path, now: int) -> None:
    """
    Load a snapshot into an empty engine.

    Raises:
        JournalError: the file is not what was written; nothing may be served from it.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise _damaged(path, 0, "it does not start with VJS1")
        chunks = 0
        while True:
            kind, items = _read_chunk(file, path)
            if kind == "end":
                next_id, expected = items
                if expected != chunks:
                    raise _damaged(path, file.tell(), f"{chunks} chunks instead of {expected}")
                engine.jobs.saw_id(next_id - 1)
                return
            chunks += 1
            if kind == "values":
                for image in items:
                    images.restore_value(engine, image, now)
            elif kind == "jobs":
                images.restore_jobs(engine, items, now)
            else:
                for finished_at, uri, timestamp in items:
                    engine.jobs.finished.remember(uri, timestamp, finished_at)


def _snapshot_records(engine: JournalEngine) -> Iterator[bytes]:
    finishes = engine.jobs.finished.all()
    for at in range(0, len(finishes), STEP_ENTRIES):
        yield _encode(["finished", finishes[at : at + STEP_ENTRIES]])
    jobs = engine.jobs.all()
    for at in range(0, len(jobs), STEP_ENTRIES):
        kept = [j for j in jobs[at : at + STEP_ENTRIES] if j.persist and j.state != REMOVED]
        for job in kept:
            job.logged = True  # from now on its end has to be logged
        yield _encode(["jobs", [(job.uri, images.job_fields(job)) for job in kept]])
    chosen: list[Any] = []
    size = 0
    for entry in engine.store.entries():
        if not entry.persist or not entry.keys:
            continue
        entry.logged = True
        chosen.append(images.value_fields(entry, engine.store.value(entry)))
        size += entry.size
        if len(chosen) == STEP_ENTRIES or size > STEP_BYTES:
            yield _encode(["values", chosen])
            chosen, size = [], 0
    if chosen:
        yield _encode(["values", chosen])


def _write_chunk(file: BinaryIO, payload: bytes) -> None:
    file.write(_CHUNK.pack(len(payload), zlib.crc32(payload)) + payload)


def _read_chunk(file: BinaryIO, path: Path) -> tuple[str, list[Any]]:
    at = file.tell()
    head = file.read(_CHUNK.size)
    if len(head) < _CHUNK.size:
        raise _damaged(path, at, "it ends too early")
    size, crc = _CHUNK.unpack(head)
    if size > CHUNK_BYTES_MAX:
        raise _damaged(path, at, f"a chunk of {size} bytes")
    payload = file.read(size)
    if len(payload) < size or zlib.crc32(payload) != crc:
        raise _damaged(path, at, "a checksum does not fit")
    kind, items = msgspec.msgpack.decode(payload)
    return kind, items


def _damaged(path: Path, at: int, reason: str) -> JournalError:
    return JournalError(
        f"the snapshot {path} is damaged at byte {at}: {reason}; restore the directory from a copy",
        code="journal-damaged",
    )
