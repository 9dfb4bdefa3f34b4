"""
The kernel in plain Python: for machines without a compiler, and the reference for native/log_kernel.h.

Same methods, same results, same control page, so that processes with and without the native kernel share a
directory. It cannot use futexes: it polls, and other processes notice its appends when they next check the page.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from contextlib import suppress
from typing import Final

from virta import files
from virta.clock import now_us
from virta.log.format import codec
from virta.log.format.checksums import crc32c
from virta.log.limits import (
    BATCH_HEADER_BYTES,
    HEADROOM_BATCH_MAX,
    HEADROOM_MAX,
    HEADROOM_MIN,
    SEGMENT_HEADER_BYTES,
)

CONTROL_BYTES: Final = 4096
CONTROL_MAGIC: Final = b"VIRTACT1"
APPENDED, ATTENTION, ROLL, TIMEOUT = range(4)
FOREIGN, OTHER_BOOT, CURRENT = range(3)
SYNC_NONE, SYNC_GROUP, SYNC_FSYNC = range(3)

_PAGE: Final = struct.Struct("<8sQQQQIIQQ")  # magic .. last_batch_pos, seqlock inside at 44
_DURABLE: Final = struct.Struct("<QQQ")  # offset, pos, base at 64
_SEQ, _DURABLE_AT, _DURABLE_WORD, _HOLDER, _DURABLE_SEQ, _NOTIFY = 44, 64, 88, 100, 104, 128
_WRITING, _EXTENT = 116, 120
_SEQLOCK_TRIES: Final = 200
_POLL_S: Final = 0.001
_POLL_S_MAX: Final = 0.005
_LEADER_PATIENCE_S: Final = 1.0

Snapshot = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
Committed = tuple[bytes, int, int, int, int, int, int, int, int, int]  # _PAGE, then the extent


class _Page:
    """The control file, which stays open while any thread uses it, even if another closes the kernel."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *exc: object) -> None:
        """Do nothing: the reference keeps the file open."""

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


class Kernel:
    """One process's handle on a log directory: lock files, control page, active segment."""

    def __init__(
        self,
        lock_fd: int,
        sync_fd: int,
        control_fd: int,
        boot_id: int,
        writable: bool,  # noqa: FBT001
    ) -> None:
        self._lock_fd = lock_fd
        self._sync_fd = sync_fd
        self._boot_id = boot_id
        self._writable = writable
        # Not mapped: accessing a mapped file that another process truncated would end this one (SIGBUS).
        self._page: _Page | None = _Page(control_fd)
        self._faults = self._wakes = 0
        self._write_mutex = threading.Lock()
        self._sync_mutex = threading.Lock()
        self._segment_fd = -1
        self._segment_base = (1 << 64) - 1
        self._salt = 0
        self._closed = False
        self._failed = 0
        self._stuck = False  # for this and the next see native/log_control.h
        self._own = (0, 0)
        self._headroom = HEADROOM_MIN
        self._extended = False

    def close(self) -> None:
        if self._closed:
            return
        with self._write_mutex, self._sync_mutex:
            self.abandon()

    def abandon(self) -> None:
        """Close without the mutexes: in a forked child no other thread exists that could release them."""
        if self._closed:
            return
        self._closed = True
        for fd in (self._lock_fd, self._sync_fd, self._segment_fd):
            if fd >= 0:
                os.close(fd)
        self._page = None

    def attach(self, segment_fd: int, base: int, salt: int) -> None:
        with self._sync_mutex:
            old = self._segment_fd
            self._segment_fd, self._segment_base, self._salt = segment_fd, base, salt
            self._extended = False
            self._own = (0, 0)  # after a repair the same bytes may be written again
        if old >= 0:
            os.close(old)

    # --- the write lock ---

    def lock(self, timeout: float) -> bool:
        self._check()
        deadline = time.monotonic() + timeout
        if not self._write_mutex.acquire(timeout=max(timeout, 0)):
            return False
        if self._closed:
            self._write_mutex.release()
            self._check()
        got = False
        try:
            got = files.lock_until(self._lock_fd, deadline)
            if got:
                self._put_holder(os.getpid())
        except BaseException:  # interrupted: no caller would unlock
            got = False
            raise
        finally:
            if not got:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
                self._write_mutex.release()
        return got

    def unlock(self) -> None:
        try:
            self._put_holder(0)
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._write_mutex.release()

    # --- the control page ---

    def snapshot(self) -> Snapshot:
        self._check()
        valid, fields = self._committed()
        _, _, base, end, following, crc, _, last_time, last_pos, extent = fields
        offset, pos, durable_base = self._durable()
        holder = self._get32(_HOLDER)
        return (
            valid,
            base,
            end,
            following,
            crc,
            last_time,
            last_pos,
            durable_base,
            pos,
            offset,
            holder,
            extent,
            self._get32(_WRITING),
        )

    def publish(
        self,
        base: int,
        end: int,
        following: int,
        crc: int,
        last_time: int,
        last_pos: int,
        extent: int = 0,
    ) -> None:
        with self._control() as fd:
            if os.fstat(fd).st_size < CONTROL_BYTES:
                # Truncated. Do this first: extending a file clears what was stored past its end.
                os.ftruncate(fd, CONTROL_BYTES)
        seq = self._get32(_SEQ) | 1
        self._put32(_SEQ, seq)
        head = struct.pack("<8sQQQQI", CONTROL_MAGIC, self._boot_id, base, end, following, crc)
        self._put(0, head)
        self._put(48, struct.pack("<QQ", last_time, last_pos))
        self._put(_EXTENT, max(end, extent).to_bytes(8, "little"))
        self._put32(_SEQ, seq + 1)
        self._put32(_WRITING, 0)
        self._put32(_NOTIFY, self._get32(_NOTIFY) + 1)

    def publish_durable(self, base: int, pos: int, offset: int) -> None:
        with self._sync_mutex:
            self._check()
            # Not next to a leader: see native/log_kernel.h.
            patience = 0.0 if self._stuck else _LEADER_PATIENCE_S
            alone = files.lock_until(self._sync_fd, time.monotonic() + patience)
            self._stuck = not alone
            try:
                if alone or not self._get32(_DURABLE_SEQ) & 1:
                    self._publish_durable(base, pos, offset)
            finally:
                if alone:
                    fcntl.flock(self._sync_fd, fcntl.LOCK_UN)

    def _publish_durable(self, base: int, pos: int, offset: int) -> None:
        seq = self._get32(_DURABLE_SEQ) | 1
        self._put32(_DURABLE_SEQ, seq)
        self._put(_DURABLE_AT, _DURABLE.pack(offset, pos, base))
        self._put32(_DURABLE_SEQ, seq + 1)
        self._put32(_DURABLE_WORD, self._get32(_DURABLE_WORD) + 1)
        self._put32(_NOTIFY, self._get32(_NOTIFY) + 1)

    def notified(self) -> int:
        self._check()
        return (self._get32(_NOTIFY) + self._wakes) & 0xFFFFFFFF

    def wait(self, seen: int, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        pause = _POLL_S
        while self.notified() == seen and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _POLL_S_MAX)
        return self.notified()

    def wake(self) -> None:
        self._check()
        self._wakes += 1

    # --- append and sync ---

    def append(
        self,
        buf: bytearray,
        count: int,
        producer: int,
        sequence: int,
        flags: int,
        limit: int,
        timeout: float,
        locked: bool,  # noqa: FBT001
        sync: int,
    ) -> tuple[int, int, int, int, int, int]:
        payload_crc = crc32c(memoryview(buf)[BATCH_HEADER_BYTES:])
        if not locked and not self.lock(timeout):
            return TIMEOUT, 0, 0, 0, 0, 0
        try:
            valid, fields = self._committed()
            _, _, base, end, following, prev, _, last_time, last_pos, extent = fields
            if valid != CURRENT or base != self._segment_base or self._segment_fd < 0:
                return ATTENTION, 0, 0, 0, 0, 0
            if not last_pos and end > SEGMENT_HEADER_BYTES:
                return ATTENTION, 0, 0, 0, 0, 0  # the page was truncated in the middle
            size = max(end, extent)
            stat = os.fstat(self._segment_fd)
            if self._get32(_WRITING) or stat.st_nlink == 0 or stat.st_size != size:
                return ATTENTION, 0, 0, 0, 0, 0
            if end + len(buf) > limit and end > SEGMENT_HEADER_BYTES:
                return ROLL, 0, 0, 0, 0, 0
            now = max(now_us(), last_time)
            crc = codec.fill_header(
                buf,
                salt=self._salt,
                base=following,
                time=now,
                count=count,
                prev=prev,
                producer=producer,
                sequence=sequence,
                flags=flags,
                payload_crc=payload_crc,
            )
            after = end + len(buf)
            self._put32(_WRITING, 1)
            ahead = len(buf) <= HEADROOM_BATCH_MAX and not flags & codec.FLAG_SEAL
            if ahead and after > size:
                size = self._extend(after, size, limit)
            self._write(buf, fields)
            if not flags & codec.FLAG_SEAL:
                self.publish(base, after, following + count, crc, now, end, size)
            elif size > after:
                # Not published, and `writing` stays set: see native/log_append.h.
                with suppress(OSError):
                    os.ftruncate(self._segment_fd, after)
        finally:
            if not locked:
                self.unlock()
        unsynced = 0
        if sync != SYNC_NONE:
            unsynced = 1 if locked else self._sync_to(base, after, sync)
        return APPENDED, following, now, base, after, unsynced

    def _sync_to(self, base: int, pos: int, sync: int) -> int:
        try:
            return int(not self.sync(base, pos, sync == SYNC_GROUP))
        except OSError as exc:
            return -(exc.errno or errno.EIO)

    def _extend(self, after: int, size: int, limit: int) -> int:
        """Write zeros to beyond `after`; return the file's size. It is no error if the disk refuses them."""
        to = min((after + self._headroom + 4095) & ~4095, limit)
        if to <= max(size, after):
            return size
        try:
            files.write_all(self._segment_fd, bytes(to - size), size)
        except OSError:
            with suppress(OSError):  # else the next append finds a wrong size
                os.ftruncate(self._segment_fd, size)
            self._headroom = HEADROOM_MIN
            return size
        self._headroom = min(self._headroom * 2, HEADROOM_MAX)
        self._extended = True
        return to

    def _write(self, buf: bytearray, page: Committed) -> None:
        _, _, base, end, following, crc, _, last_time, last_pos, _ = page
        try:
            files.write_all(self._segment_fd, buf, end)
        except OSError:
            # If this fails `writing` stays set, and the next owner of the lock inspects the file.
            os.ftruncate(self._segment_fd, end)
            self.publish(base, end, following, crc, last_time, last_pos)
            raise

    def trim(self) -> None:
        """Before closing, cut off the headroom that this kernel wrote, unless another process has the lock."""
        if not self._extended or self._failed or not self.lock(0):
            return
        try:
            valid, fields = self._committed()
            _, _, base, end, following, crc, _, last_time, last_pos, extent = fields
            if (
                valid != CURRENT
                or base != self._segment_base
                or self._get32(_WRITING)
                or extent <= end
                or os.fstat(self._segment_fd).st_size != extent
            ):
                return
            self._put32(_WRITING, 1)
            try:
                os.ftruncate(self._segment_fd, end)
            except OSError:
                self._put32(_WRITING, 0)  # nothing changed
            else:
                self.publish(base, end, following, crc, last_time, last_pos)
        finally:
            self.unlock()

    def sync(self, base: int, pos: int, group: bool) -> bool:  # noqa: FBT001
        patience = time.monotonic() + _LEADER_PATIENCE_S
        while True:
            self._check()
            _, durable_pos, durable_base = self._durable()
            if group and (durable_base, durable_pos) >= (base, pos):
                return True
            with self._sync_mutex:
                self._check()
                try:
                    fcntl.flock(self._sync_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    stuck = self._stuck or time.monotonic() > patience
                    if group and stuck:
                        self._stuck = True
                        if self._own >= (base, pos):
                            return True
                    if not group or stuck:
                        return self._sync_segment(publish=False)
                else:
                    self._stuck = False
                    try:
                        return self._sync_segment(publish=True)
                    finally:
                        fcntl.flock(self._sync_fd, fcntl.LOCK_UN)
            time.sleep(_POLL_S)

    def _sync_segment(self, *, publish: bool) -> bool:
        valid, fields = self._committed()
        _, _, base, end, following, *_ = fields
        if valid != CURRENT or base != self._segment_base or self._segment_fd < 0:
            return False
        if self._failed:
            raise OSError(self._failed, os.strerror(self._failed))
        try:
            os.fdatasync(self._segment_fd)
        except OSError as exc:
            self._failed = exc.errno or errno.EIO  # the system reports it once
            raise
        self._own = (base, end)
        _, now = self._committed()
        # After a rollover or recovery meanwhile, that process publishes what is durable now.
        if publish and now[2] == base and now[3] >= end:
            self._publish_durable(base, end, following)
        return True

    # --- details ---

    def _check(self) -> None:
        if self._closed:
            raise ValueError("kernel is closed")

    def faults(self) -> int:
        """Return how often the control page was found truncated."""
        return self._faults

    def _get(self, at: int, size: int) -> bytes:
        with self._control() as fd:
            data = os.pread(fd, size, at)
        if len(data) < size:
            self._faults += 1
            data = data.ljust(size, b"\0")
        return data

    def _put(self, at: int, data: bytes) -> None:
        with self._control() as fd:
            files.write_all(fd, data, at)

    def _control(self) -> _Page:
        page = self._page
        if page is None:
            raise ValueError("kernel is closed")
        return page

    def _put_holder(self, pid: int) -> None:
        with suppress(OSError):  # the number is only informational
            self._put32(_HOLDER, pid)

    def _get32(self, at: int) -> int:
        return int.from_bytes(self._get(at, 4), "little")

    def _put32(self, at: int, value: int) -> None:
        self._put(at, (value & 0xFFFFFFFF).to_bytes(4, "little"))

    def _committed(self) -> tuple[int, Committed]:
        fields: Committed = (*_PAGE.unpack(bytes(_PAGE.size)), 0)
        for _ in range(_SEQLOCK_TRIES):
            before = self._get32(_SEQ)
            with self._control() as fd:
                page = os.pread(fd, CONTROL_BYTES, 0)
            if len(page) < CONTROL_BYTES:
                # Truncated: the rest of it is invalid for every process.
                self._faults += 1
                if self._writable:
                    self._put(0, bytes(8))
                    with self._control() as fd:
                        os.ftruncate(fd, CONTROL_BYTES)
                return FOREIGN, fields
            extent = int.from_bytes(page[_EXTENT : _EXTENT + 8], "little")
            fields = (*_PAGE.unpack(page[: _PAGE.size]), extent)
            if not before & 1 and self._get32(_SEQ) == before:
                if fields[0] != CONTROL_MAGIC:
                    return FOREIGN, fields
                return (CURRENT if fields[1] == self._boot_id else OTHER_BOOT), fields
            time.sleep(0)
        return FOREIGN, fields

    def _durable(self) -> tuple[int, int, int]:
        for _ in range(_SEQLOCK_TRIES):
            before = self._get32(_DURABLE_SEQ)
            offset, pos, base = _DURABLE.unpack(self._get(_DURABLE_AT, _DURABLE.size))
            if not before & 1 and self._get32(_DURABLE_SEQ) == before:
                return offset, pos, base
            time.sleep(0)
        return 0, 0, 0
