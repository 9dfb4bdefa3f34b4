"""
Who works on what, kept where a crash does not reach: a memory-mapped table of slots.

    at    bytes
    0     4    "VJL1", then 4 of zero
    8     8    what the clock said when it was last looked at, µs, 0: unknown
    16    4    CRC-32 of those 8 bytes, then 12 of zero
    32n   8    id of the job, 0: the slot is free
          8    lease, the id of the attempt
          8    worked until, µs
          4    attempts before this one
          4    CRC-32 of the 28 bytes before
    (little-endian)

A reserve costs a store into memory, neither a record in the log nor a system call, and is there after
`kill -9` because the kernel has the page. Nobody waits for the disk: a power cut may forget the marks
of the last half minute, and those jobs are then visible early.

Invariants: a slot counts only if its CRC fits and the job it names is in the log with as many attempts
behind it; so a slot of an attempt whose end the log knows marks nothing. A slot is freed only after the
log knows that the attempt ended: an acknowledgement that nobody was told of did not happen.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.journal.kernel import native

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from virta.journal.domain import Job

log = logging.getLogger("virta.journal")

MAGIC = b"VJL1"
SLOT_BYTES = 32
SLOTS_MIN = 1024
CLOCK_AT = 8
_SLOT = struct.Struct("<QQQI")
_SUM = struct.Struct("<I")
_CLOCK = struct.Struct("<QI")
_FREE = bytes(8)


class Lease(NamedTuple):
    job_id: int
    lease: int
    worked_until: int
    attempts: int


class Leases:
    """`load` what a process before this one left, then `begin` anew with what of it still holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._descriptor = -1
        self._slots = 0
        self._free: list[int] = []
        self._ended: list[Job] = []
        self.leaving: list[Job] = []  # whose end is on its way to the log
        self.clock = 0  # what the clock said last in the process before this one, 0: unknown

    def load(self) -> Iterator[Lease]:
        """What is in the file; a slot that was being written when the process died is passed over."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        if not data.startswith(MAGIC):
            return
        self.clock = _clock_of(data)
        for at in range(SLOT_BYTES, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
            if data[at : at + 8] == _FREE:
                continue
            body = data[at : at + _SLOT.size]
            if _SUM.unpack_from(data, at + _SLOT.size)[0] == zlib.crc32(body):
                yield Lease(*_SLOT.unpack(body))

    def begin(self, jobs: Iterable[Job]) -> None:
        """A new file with the jobs that are worked on; the old one stays until it is whole."""
        self.close()
        working = list(jobs)
        self._slots = max(SLOTS_MIN, 2 * len(working))
        temporary = self._path.with_suffix(".tmp")
        self._descriptor = files.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._map = self._mapped()
        self._map[: len(MAGIC)] = MAGIC
        self.note_clock(self.clock)  # until what depends on it is on disk
        self._free = list(range(self._slots - 1, 0, -1))
        for job in working:
            job.slot = 0
            self.put(job)
        temporary.rename(self._path)

    def put(self, job: Job) -> None:
        """Somebody works on the job, from now on or for longer than was said."""
        slot = job.slot
        if not slot:
            if not self._free and not self._grow():
                return
            slot = job.slot = self._free.pop()
        assert self._map is not None
        body = _SLOT.pack(job.id, job.lease, job.worked_until, job.attempts)
        at = slot * SLOT_BYTES
        self._map[at : at + SLOT_BYTES] = body + _SUM.pack(zlib.crc32(body))

    def note_clock(self, now: int) -> None:
        """Keep what the clock says, so that the next process knows if it went back."""
        if self._map is not None:
            body = now.to_bytes(8, "little")
            self._map[CLOCK_AT : CLOCK_AT + _CLOCK.size] = body + _SUM.pack(zlib.crc32(body))

    def drop(self, job: Job) -> None:
        """Nobody works on it any more; the slot is kept until the log knows, too."""
        self._ended.append(job)

    def drained(self) -> None:
        """What ended up to now is in the images that go to the log."""
        if self._ended:
            self.leaving += self._ended
            self._ended = []

    def settled(self) -> None:
        """Those images are in the log."""
        leaving, self.leaving = self.leaving, []
        if self._map is None:
            return
        if native is not None:
            native.free_slots(self._map, self._free, leaving)
            return
        for job in leaving:
            slot = job.slot
            if slot and not job.lease:
                job.slot = 0
                at = slot * SLOT_BYTES
                self._map[at : at + 8] = _FREE
                self._free.append(slot)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            os.close(self._descriptor)
            self._map = None

    def _grow(self) -> bool:
        """Twice the slots; False if the disk has no room, then a crash forgets the marks beyond."""
        before, old = self._slots, self._map
        self._slots *= 2
        try:
            self._map = self._mapped()
        except OSError as error:
            self._slots = before
            log.warning("journal_leases_full slots=%d %s", before, error)
            return False
        if old is not None:
            old.close()
        self._free = list(range(self._slots - 1, before - 1, -1))
        return True

    def _mapped(self) -> mmap.mmap:
        """The file in its new size; space is claimed first, as a hole on a full disk would kill us."""
        size = self._slots * SLOT_BYTES
        os.posix_fallocate(self._descriptor, 0, size)
        return mmap.mmap(self._descriptor, size)


def _clock_of(data: bytes) -> int:
    if len(data) < SLOT_BYTES:
        return 0
    clock, checksum = _CLOCK.unpack_from(data, CLOCK_AT)
    fits: bool = checksum == zlib.crc32(data[CLOCK_AT : CLOCK_AT + 8])
    return int(clock) if fits else 0
