"""
The kernel in plain Python: the twin of native/log.c for machines without a compiler, and its reference.

Same methods, same results, same control page, so that processes with and without the native kernel share a
directory. What it cannot do is sleep on a futex: it polls, and it wakes nobody (others look again by themselves).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from typing import Final

from virta.log import codec
from virta.log.limits import BATCH_HEADER_BYTES, SEGMENT_HEADER_BYTES

CONTROL_BYTES: Final = 4096
CONTROL_MAGIC: Final = b"VIRTACT1"
APPENDED, ATTENTION, ROLL, TIMEOUT = range(4)
FOREIGN, OTHER_BOOT, CURRENT = range(3)

_PAGE: Final = struct.Struct("<8sQQQQIIQQ")  # magic .. last_batch_pos, seqlock inside at 44
_DURABLE: Final = struct.Struct("<QQQ")  # offset, pos, base at 64
_SEQ, _DURABLE_AT, _DURABLE_WORD, _HOLDER, _DURABLE_SEQ, _NOTIFY = 44, 64, 88, 100, 104, 128
_SEQLOCK_TRIES: Final = 200
_POLL_S: Final = 0.001
_LEADER_PATIENCE_S: Final = 1.0

Snapshot = tuple[int, int, int, int, int, int, int, int, int, int, int]


class Kernel:
    """One process's hold on one log directory: lock files, control page, active segment."""

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
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._page = mmap.mmap(control_fd, CONTROL_BYTES, access=access)
        self._write_mutex = threading.Lock()
        self._sync_mutex = threading.Lock()
        self._segment_fd = -1
        self._segment_base = (1 << 64) - 1
        self._salt = 0
        self._closed = False
        self._failed = 0

    def close(self) -> None:
        if self._closed:
            return
        with self._write_mutex, self._sync_mutex:
            self.abandon()

    def abandon(self) -> None:
        """Close at once; after a fork, in the child, where nobody is inside whatever the mutexes say."""
        if self._closed:
            return
        self._closed = True
        for fd in (self._lock_fd, self._sync_fd, self._segment_fd):
            if fd >= 0:
                os.close(fd)
        self._page.close()

    def attach(self, segment_fd: int, base: int, salt: int) -> None:
        with self._sync_mutex:
            old = self._segment_fd
            self._segment_fd, self._segment_base, self._salt = segment_fd, base, salt
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
        pause = 0.00002
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._write_mutex.release()
                    return False
                time.sleep(pause)
                pause = min(pause * 2, 0.001)
            else:
                self._put32(_HOLDER, os.getpid())
                return True

    def unlock(self) -> None:
        self._put32(_HOLDER, 0)
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        self._write_mutex.release()

    # --- the control page ---

    def snapshot(self) -> Snapshot:
        self._check()
        valid, fields = self._committed()
        _, base, end, following, crc, _, last_time, last_pos = (fields[0], *fields[2:])
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
        )

    def publish(
        self, base: int, end: int, following: int, crc: int, last_time: int, last_pos: int
    ) -> None:
        seq = self._get32(_SEQ) | 1
        self._put32(_SEQ, seq)
        head = struct.pack("<8sQQQQI", CONTROL_MAGIC, self._boot_id, base, end, following, crc)
        self._page[0:44] = head
        self._page[48:64] = struct.pack("<QQ", last_time, last_pos)
        self._put32(_SEQ, seq + 1)
        self._put32(_NOTIFY, self._get32(_NOTIFY) + 1)

    def publish_durable(self, base: int, pos: int, offset: int) -> None:
        seq = self._get32(_DURABLE_SEQ) | 1
        self._put32(_DURABLE_SEQ, seq)
        self._page[_DURABLE_AT : _DURABLE_AT + 24] = _DURABLE.pack(offset, pos, base)
        self._put32(_DURABLE_SEQ, seq + 1)
        self._put32(_DURABLE_WORD, self._get32(_DURABLE_WORD) + 1)
        self._put32(_NOTIFY, self._get32(_NOTIFY) + 1)

    def notified(self) -> int:
        self._check()
        return self._get32(_NOTIFY)

    def wait(self, seen: int, timeout: float) -> int:
        deadline = time.monotonic() + min(timeout, 0.1)
        while not self._closed and (word := self._get32(_NOTIFY)) == seen:
            if time.monotonic() >= deadline:
                return word
            time.sleep(_POLL_S)
        return self.notified()

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
        held: bool,  # noqa: FBT001
    ) -> tuple[int, int, int, int, int]:
        payload_crc = codec.crc32c(memoryview(buf)[BATCH_HEADER_BYTES:])
        if not held and not self.lock(timeout):
            return TIMEOUT, 0, 0, 0, 0
        try:
            valid, fields = self._committed()
            _, _, base, end, following, prev, _, last_time, _ = fields
            if valid != CURRENT or base != self._segment_base or self._segment_fd < 0:
                return ATTENTION, 0, 0, 0, 0
            stat = os.fstat(self._segment_fd)
            if stat.st_nlink == 0 or stat.st_size != end:
                return ATTENTION, 0, 0, 0, 0
            if end + len(buf) > limit and end > SEGMENT_HEADER_BYTES:
                return ROLL, 0, 0, 0, 0
            now = max(time.time_ns() // 1000, last_time)
            crc = codec.seal_header(
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
            self._write(buf, end)
            after = end + len(buf)
            # A seal is not published: see native/log.c.
            if not flags & codec.FLAG_SEAL:
                self.publish(base, after, following + count, crc, now, end)
            return APPENDED, following, now, base, after
        finally:
            if not held:
                self.unlock()

    def _write(self, buf: bytearray, pos: int) -> None:
        done = 0
        view = memoryview(buf)
        try:
            while done < len(buf):
                done += os.pwrite(self._segment_fd, view[done:], pos + done)
        except OSError:
            os.ftruncate(self._segment_fd, pos)
            raise

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
                    if not group or time.monotonic() > patience:
                        return self._sync_segment(publish=False)
                else:
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
            self._failed = exc.errno or errno.EIO  # the system tells it once: see native/log.c
            raise
        if publish:
            self.publish_durable(base, end, following)
        return True

    # --- details ---

    def _check(self) -> None:
        if self._closed:
            raise ValueError("kernel is closed")

    def _get32(self, at: int) -> int:
        return int.from_bytes(self._page[at : at + 4], "little")

    def _put32(self, at: int, value: int) -> None:
        self._page[at : at + 4] = (value & 0xFFFFFFFF).to_bytes(4, "little")

    def _committed(self) -> tuple[int, tuple[bytes, int, int, int, int, int, int, int, int]]:
        fields = _PAGE.unpack(bytes(_PAGE.size))
        for _ in range(_SEQLOCK_TRIES):
            before = self._get32(_SEQ)
            fields = _PAGE.unpack(self._page[: _PAGE.size])
            if not before & 1 and self._get32(_SEQ) == before:
                if fields[0] != CONTROL_MAGIC:
                    return FOREIGN, fields
                return (CURRENT if fields[1] == self._boot_id else OTHER_BOOT), fields
            time.sleep(0)
        return FOREIGN, fields

    def _durable(self) -> tuple[int, int, int]:
        for _ in range(_SEQLOCK_TRIES):
            before = self._get32(_DURABLE_SEQ)
            offset, pos, base = _DURABLE.unpack(self._page[_DURABLE_AT : _DURABLE_AT + 24])
            if not before & 1 and self._get32(_DURABLE_SEQ) == before:
                return offset, pos, base
            time.sleep(0)
        return 0, 0, 0
