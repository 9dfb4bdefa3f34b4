"""
Leases that survive a crash: a memory-mapped table of the jobs that are worked on.

    at    bytes
    0     4    "VJL1", then 4 of zero
    8     8    time of the clock when it was last read, µs, 0: unknown
    16    4    CRC-32 of those 8 bytes, then 12 of zero
    32n   8    id of the job, 0: the slot is free
          8    lease, the id of the attempt
          8    worked until, µs
          4    attempts before this one
          4    CRC-32 of the 28 bytes before
    (little-endian)

A reserve costs a store into memory, neither a record in the log nor a system call, and is there after
`kill -9` because the kernel has the page. No reply waits for the disk: a power cut may lose the leases of the
last half minute, and those jobs are then reserved again early.

A mapped file that another process truncates would end the daemon (SIGBUS). So it is guarded; where the
native module is not built, the table is in memory and written to the file by `pwrite`.

Invariants: a slot counts only if its CRC fits and the job it names is in the log with as many attempts
behind it; so a slot of an attempt whose end is in the log has no effect. A slot is freed only after the end of
the attempt is in the log: before that, the acknowledgement was not sent.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.log.engine import kernel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from virta.journal.jobs.job import Job

log = logging.getLogger("virta.journal")

MAGIC = b"VJL1"
SLOT_BYTES = 32
SLOTS_MIN = 1024
CLOCK_AT = 8
_SLOT = struct.Struct("<QQQI")
_SUM = struct.Struct("<I")
_CLOCK = struct.Struct("<QI")
_FREE = bytes(8)


class LeaseSlot(NamedTuple):
    job_id: int
    lease: int
    worked_until: int
    attempts: int


class LeaseTable:
    """`load` the slots of the previous process, then `begin` a new file with those that are still valid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | bytearray | None = None
        self._guard: int | None = None
        self._faults = 0
        self._descriptor = -1
        self._slots = 0
        self._free: list[int] = []
        self._ended: list[Job] = []
        self.leaving: list[Job] = []  # whose end is on its way to the log
        self.clock = 0  # last time of the clock in the previous process, 0: unknown
        self.clock_read = 0  # its time in this process, to note after the next commit

    def load(self) -> Iterator[LeaseSlot]:
        """Yield the slots of the file; one that was being written when the process died is skipped."""
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
                yield LeaseSlot(*_SLOT.unpack(body))

    def begin(self, jobs: Iterable[Job]) -> None:
        """Write a new file with the jobs that are worked on; the old one stays until that is complete."""
        self.close()
        working = list(jobs)
        self._slots = max(SLOTS_MIN, 2 * len(working))
        temporary = self._path.with_suffix(".tmp")
        self._descriptor = files.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._map = self._mapped()
        self._store(0, MAGIC)
        self.note_clock(self.clock)  # keep the old time until what depends on it is on disk
        self._free = list(range(self._slots - 1, 0, -1))
        for job in working:
            job.slot = 0
            self.put(job)
        temporary.rename(self._path)

    def put(self, job: Job) -> None:
        """Store a new lease, or a new deadline of one."""
        slot = job.slot
        if not slot:
            if not self._free and not self._grow():
                return
            slot = job.slot = self._free.pop()
        body = _SLOT.pack(job.id, job.lease, job.worked_until, job.attempts)
        self._store(slot * SLOT_BYTES, body + _SUM.pack(zlib.crc32(body)))

    def note_clock(self, now: int) -> None:
        """Store the clock's time, so that the next process can detect that it went back."""
        if self._map is not None:
            body = now.to_bytes(8, "little")
            self._store(CLOCK_AT, body + _SUM.pack(zlib.crc32(body)))

    def end(self, job: Job) -> None:
        """End a lease; its slot is freed when the log has the end."""
        self._ended.append(job)

    def drained(self) -> None:
        """Note that what ended up to now is in records on their way to the log."""
        if self._ended:
            self.leaving += self._ended
            self._ended = []

    def free_ended(self) -> None:
        """Free the slots of leases whose end is in the log now."""
        leaving, self.leaving = self.leaving, []
        if self._map is None:
            return
        self._check_file()
        for job in leaving:
            slot = job.slot
            if slot and not job.lease:
                job.slot = 0
                self._store(slot * SLOT_BYTES, _FREE)
                self._free.append(slot)

    def close(self) -> None:
        if self._map is not None:
            self._unmap()
            os.close(self._descriptor)

    def _store(self, at: int, data: bytes) -> None:
        assert self._map is not None
        self._map[at : at + len(data)] = data
        if isinstance(self._map, bytearray):
            os.pwrite(self._descriptor, data, at)

    def _check_file(self) -> None:
        """Warn if the file was truncated; the contents of the map are lost, those in memory are not."""
        if isinstance(self._map, bytearray):
            if os.fstat(self._descriptor).st_size < len(self._map):
                log.warning(
                    "journal_leases_truncated %s by another process; written again", self._path
                )
                os.pwrite(self._descriptor, self._map, 0)
            return
        faults = kernel.guard_faults(self._guard) if self._guard is not None else 0
        if faults > self._faults:
            self._faults = faults
            log.warning(
                "journal_leases_truncated %s by another process; jobs worked on now may be handed out again"
                " if this daemon is killed before they end",
                self._path,
            )
            self._store(0, MAGIC)

    def _grow(self) -> bool:
        """Double the slots; False if the disk is full, then a crash loses the leases beyond."""
        before = self._slots
        self._slots *= 2
        try:
            os.posix_fallocate(self._descriptor, 0, self._slots * SLOT_BYTES)
        except OSError as error:
            self._slots = before
            log.warning("journal_leases_full slots=%d %s", before, error)
            return False
        self._unmap()
        self._map = self._mapped()
        self._free = list(range(self._slots - 1, before - 1, -1))
        return True

    def _mapped(self) -> mmap.mmap | bytearray:
        """Resize the file; allocate space first, because a hole would fail later on a full disk."""
        size = self._slots * SLOT_BYTES
        os.posix_fallocate(self._descriptor, 0, size)
        if kernel.guard is None:
            return bytearray(os.pread(self._descriptor, size, 0))
        mapped = mmap.mmap(self._descriptor, size)
        self._guard = kernel.guard(mapped, self._descriptor)
        self._faults = 0
        return mapped

    def _unmap(self) -> None:
        if self._guard is not None:
            kernel.unguard(self._guard)
            self._guard = None
        if isinstance(self._map, mmap.mmap):
            self._map.close()
        self._map = None


def _clock_of(data: bytes) -> int:
    if len(data) < SLOT_BYTES:
        return 0
    clock, checksum = _CLOCK.unpack_from(data, CLOCK_AT)
    fits: bool = checksum == zlib.crc32(data[CLOCK_AT : CLOCK_AT + 8])
    return int(clock) if fits else 0
