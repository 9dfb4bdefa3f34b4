"""
The kernel in plain Python: for machines without a compiler, and the reference for native/log_kernel.h.

Same methods, same results, same control page, so that processes with and without the native kernel share a
directory. It cannot use futexes: it polls, and other processes notice its appends when they next check the page.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from virta import files
from virta.clock import now_us
from virta.log.engine.plain_control import CURRENT, Committed, ControlPage
from virta.log.format import codec
from virta.log.format.checksums import crc32c
from virta.log.limits import (
    BATCH_HEADER_BYTES,
    HEADROOM_BATCH_MAX,
    HEADROOM_MAX,
    HEADROOM_MIN,
    SEGMENT_HEADER_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

APPENDED, ATTENTION, ROLL, TIMEOUT = range(4)
SYNC_NONE, SYNC_GROUP, SYNC_FSYNC = range(3)

_POLL_S: Final = 0.001
_POLL_S_MAX: Final = 0.005
_LEADER_PATIENCE_S: Final = 1.0

Snapshot = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]


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
        self._page = ControlPage(control_fd, boot_id, writable=writable)
        self._wakes = 0
        self._write_mutex = threading.Lock()
        self._sync_mutex = threading.Lock()
        self._segment_fd = -1
        self._segment_base = (1 << 64) - 1
        self._salt = 0
        self._closed = False
        # Calls in progress and the owner of the write lock; the last one closes the files of a closed kernel.
        self._users = 0
        # Reentrant: a signal handler may close the log in the middle of `_enter`.
        self._users_mutex = threading.RLock()
        self._failed = 0
        self._stuck = False  # for this and the next see native/log_control.h
        self._own = (0, 0)
        self._headroom = HEADROOM_MIN
        self._extended = False

    def close(self) -> None:
        """Refuse further calls; calls in progress, also the caller's own, keep the files until they return."""
        with self._users_mutex:
            self._closed = True
            if self._users == 0:
                self._release()

    def abandon(self) -> None:
        """Close without the mutexes: in a forked child no other thread exists that could release them."""
        self._closed = True
        self._users = 0
        self._release()

    def _release(self) -> None:
        fds = (self._lock_fd, self._sync_fd, self._segment_fd)
        self._lock_fd = self._sync_fd = self._segment_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        self._page.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._release()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("kernel is closed")

    def _enter(self) -> None:
        with self._users_mutex:
            self._require_open()
            self._users += 1

    def _leave(self) -> None:
        with self._users_mutex:
            self._users -= 1
            if self._closed and self._users == 0:
                self._release()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def attach(self, segment_fd: int, base: int, salt: int) -> None:
        with self._in_use(), self._sync_mutex:
            old = self._segment_fd
            self._segment_fd, self._segment_base, self._salt = segment_fd, base, salt
            self._extended = False
            self._own = (0, 0)  # after a repair the same bytes may be written again
            if old >= 0:
                os.close(old)

    # --- the write lock ---

    def lock(self, timeout: float) -> bool:
        self._enter()
        got = False
        try:
            got = self._lock(timeout)
        finally:
            if not got:  # else unlock leaves: a close meanwhile must not release the lock
                self._leave()
        return got

    def _lock(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        if not self._write_mutex.acquire(timeout=max(timeout, 0)):
            return False
        got = False
        try:
            got = files.lock_until(self._lock_fd, deadline)
            if got:
                self._note_holder(os.getpid())
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
            self._note_holder(0)
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._write_mutex.release()
            self._leave()

    def _note_holder(self, pid: int) -> None:
        with suppress(OSError):  # the number is only informational
            self._page.holder = pid

    # --- the control page ---

    def snapshot(self) -> Snapshot:
        with self._in_use():
            valid, fields = self._page.committed()
            _, _, base, end, following, crc, _, last_time, last_pos, extent = fields
            offset, pos, durable_base = self._page.durable()
            committed = (valid, base, end, following, crc, last_time, last_pos)
            return (
                *committed,
                durable_base,
                pos,
                offset,
                self._page.holder,
                extent,
                self._page.writing,
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
        with self._in_use():
            self._page.publish(base, end, following, crc, last_time, last_pos, extent)

    def publish_durable(self, base: int, pos: int, offset: int) -> None:
        with self._in_use(), self._sync_mutex:
            # Not next to a leader: see native/log_kernel.h.
            patience = 0.0 if self._stuck else _LEADER_PATIENCE_S
            alone = files.lock_until(self._sync_fd, time.monotonic() + patience)
            self._stuck = not alone
            try:
                if alone or not self._page.durable_is_changing():
                    self._page.publish_durable(base, pos, offset)
            finally:
                if alone:
                    fcntl.flock(self._sync_fd, fcntl.LOCK_UN)

    def notified(self) -> int:
        with self._in_use():
            return (self._page.notify_word + self._wakes) & 0xFFFFFFFF

    def wait(self, seen: int, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        pause = _POLL_S
        while self.notified() == seen and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _POLL_S_MAX)
        return self.notified()

    def wake(self) -> None:
        self._require_open()
        self._wakes += 1

    def faults(self) -> int:
        """Return how often the control page was found truncated."""
        return self._page.faults

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
        with self._in_use():  # until it is synced, even if the kernel is closed meanwhile
            if not locked and not self.lock(timeout):
                return TIMEOUT, 0, 0, 0, 0, 0
            try:
                status, following, now, base, after = self._append_locked(
                    buf, count, (producer, sequence), flags, limit, payload_crc
                )
            finally:
                if not locked:
                    self.unlock()
            unsynced = 0
            if status == APPENDED and sync != SYNC_NONE:
                unsynced = 1 if locked else self._sync_to(base, after, sync)
            return status, following, now, base, after, unsynced

    def _append_locked(
        self,
        buf: bytearray,
        count: int,
        numbered: tuple[int, int],
        flags: int,
        limit: int,
        payload_crc: int,
    ) -> tuple[int, int, int, int, int]:
        valid, fields = self._page.committed()
        _, _, base, end, following, prev, _, last_time, last_pos, extent = fields
        if valid != CURRENT or base != self._segment_base or self._segment_fd < 0:
            return ATTENTION, 0, 0, 0, 0
        if not last_pos and end > SEGMENT_HEADER_BYTES:
            return ATTENTION, 0, 0, 0, 0  # the page was truncated in the middle
        size = max(end, extent)
        stat = os.fstat(self._segment_fd)
        if self._page.writing or stat.st_nlink == 0 or stat.st_size != size:
            return ATTENTION, 0, 0, 0, 0
        if end + len(buf) > limit and end > SEGMENT_HEADER_BYTES:
            return ROLL, 0, 0, 0, 0
        now = max(now_us(), last_time)
        crc = codec.fill_header(
            buf,
            salt=self._salt,
            base=following,
            time=now,
            count=count,
            prev=prev,
            producer=numbered[0],
            sequence=numbered[1],
            flags=flags,
            payload_crc=payload_crc,
        )
        after = end + len(buf)
        self._page.writing = 1
        ahead = len(buf) <= HEADROOM_BATCH_MAX and not flags & codec.FLAG_SEAL
        if ahead and after > size:
            size = self._extend(after, size, limit)
        self._write(buf, fields)
        if not flags & codec.FLAG_SEAL:
            self._page.publish(base, after, following + count, crc, now, end, size)
        elif size > after:
            # Not published, and `writing` stays set: see native/log_append.h.
            with suppress(OSError):
                os.ftruncate(self._segment_fd, after)
        return APPENDED, following, now, base, after

    def _sync_to(self, base: int, pos: int, sync: int) -> int:
        try:
            return int(not self._sync(base, pos, group=sync == SYNC_GROUP))
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
            self._page.publish(base, end, following, crc, last_time, last_pos)
            raise

    def trim(self) -> None:
        """Before closing, cut off the headroom that this kernel wrote, unless another process has the lock."""
        if not self._extended or self._failed or not self.lock(0):
            return
        try:
            valid, fields = self._page.committed()
            _, _, base, end, following, crc, _, last_time, last_pos, extent = fields
            if (
                valid != CURRENT
                or base != self._segment_base
                or self._page.writing
                or extent <= end
                or os.fstat(self._segment_fd).st_size != extent
            ):
                return
            self._page.writing = 1
            try:
                os.ftruncate(self._segment_fd, end)
            except OSError:
                self._page.writing = 0  # nothing changed
            else:
                self._page.publish(base, end, following, crc, last_time, last_pos)
        finally:
            self.unlock()

    def sync(self, base: int, pos: int, group: bool) -> bool:  # noqa: FBT001
        with self._in_use():
            return self._sync(base, pos, group=group)

    def _sync(self, base: int, pos: int, *, group: bool) -> bool:
        patience = time.monotonic() + _LEADER_PATIENCE_S
        while True:
            _, durable_pos, durable_base = self._page.durable()
            if group and (durable_base, durable_pos) >= (base, pos):
                return True
            with self._sync_mutex:
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
        valid, fields = self._page.committed()
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
        _, now = self._page.committed()
        # After a rollover or recovery meanwhile, that process publishes what is durable now.
        if publish and now[2] == base and now[3] >= end:
            self._page.publish_durable(base, end, following)
        return True
