"""
The control page in plain Python: what is committed and what is durable; the reference for native/log_control.h.

Read and written with pread and pwrite, not mapped: accessing a mapped file that another process truncated would end
this one (SIGBUS). Each of the two parts has a sequence number that is odd while a process changes the part.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Final

from virta import files

CONTROL_BYTES: Final = 4096
CONTROL_MAGIC: Final = b"VIRTACT1"
FOREIGN, OTHER_BOOT, CURRENT = range(3)

_PAGE: Final = struct.Struct("<8sQQQQIIQQ")  # magic .. last_batch_pos, seqlock inside at 44
_DURABLE: Final = struct.Struct("<QQQ")  # offset, pos, base at 64
_SEQ, _DURABLE_AT, _DURABLE_WORD, _HOLDER, _DURABLE_SEQ, _NOTIFY = 44, 64, 88, 100, 104, 128
_WRITING, _EXTENT = 116, 120
_SEQLOCK_TRIES: Final = 200

Committed = tuple[bytes, int, int, int, int, int, int, int, int, int]  # _PAGE, then the extent


class ControlPage:
    """The control file of a log directory, open for one kernel."""

    def __init__(self, fd: int, boot_id: int, *, writable: bool) -> None:
        self._fd = os.dup(fd)
        self._boot_id = boot_id
        self._writable = writable
        self.faults = 0  # how often it was found truncated

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # --- what is committed ---

    def committed(self) -> tuple[int, Committed]:
        """Return FOREIGN, OTHER_BOOT or CURRENT, and the committed fields with the extent."""
        fields: Committed = (*_PAGE.unpack(bytes(_PAGE.size)), 0)
        for _ in range(_SEQLOCK_TRIES):
            before = self._get32(_SEQ)
            page = os.pread(self._open_fd(), CONTROL_BYTES, 0)
            if len(page) < CONTROL_BYTES:
                # Truncated: the rest of it is invalid for every process.
                self.faults += 1
                if self._writable:
                    self._put(0, bytes(8))
                    os.ftruncate(self._open_fd(), CONTROL_BYTES)
                return FOREIGN, fields
            extent = int.from_bytes(page[_EXTENT : _EXTENT + 8], "little")
            fields = (*_PAGE.unpack(page[: _PAGE.size]), extent)
            if not before & 1 and self._get32(_SEQ) == before:
                if fields[0] != CONTROL_MAGIC:
                    return FOREIGN, fields
                return (CURRENT if fields[1] == self._boot_id else OTHER_BOOT), fields
            time.sleep(0)
        return FOREIGN, fields

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
        """Publish the end of the active segment; nothing is being written to it any more."""
        if os.fstat(self._open_fd()).st_size < CONTROL_BYTES:
            # Truncated. Do this first: extending a file clears what was stored past its end.
            os.ftruncate(self._open_fd(), CONTROL_BYTES)
        seq = self._get32(_SEQ) | 1
        self._put32(_SEQ, seq)
        head = struct.pack("<8sQQQQI", CONTROL_MAGIC, self._boot_id, base, end, following, crc)
        self._put(0, head)
        self._put(48, struct.pack("<QQ", last_time, last_pos))
        self._put(_EXTENT, max(end, extent).to_bytes(8, "little"))
        self._put32(_SEQ, seq + 1)
        self.writing = 0
        self._put32(_NOTIFY, self.notify_word + 1)

    # --- what is durable ---

    def durable(self) -> tuple[int, int, int]:
        """Return the offset, the position and the segment up to which all is durable."""
        for _ in range(_SEQLOCK_TRIES):
            before = self._get32(_DURABLE_SEQ)
            offset, pos, base = _DURABLE.unpack(self._get(_DURABLE_AT, _DURABLE.size))
            if not before & 1 and self._get32(_DURABLE_SEQ) == before:
                return offset, pos, base
            time.sleep(0)
        return 0, 0, 0

    def durable_is_changing(self) -> bool:
        return bool(self._get32(_DURABLE_SEQ) & 1)

    def publish_durable(self, base: int, pos: int, offset: int) -> None:
        seq = self._get32(_DURABLE_SEQ) | 1
        self._put32(_DURABLE_SEQ, seq)
        self._put(_DURABLE_AT, _DURABLE.pack(offset, pos, base))
        self._put32(_DURABLE_SEQ, seq + 1)
        self._put32(_DURABLE_WORD, self._get32(_DURABLE_WORD) + 1)
        self._put32(_NOTIFY, self.notify_word + 1)

    # --- single words ---

    @property
    def notify_word(self) -> int:
        """Changes with every publish by any process."""
        return self._get32(_NOTIFY)

    @property
    def writing(self) -> int:
        """Whether an append is in progress, or was when its process died."""
        return self._get32(_WRITING)

    @writing.setter
    def writing(self, value: int) -> None:
        self._put32(_WRITING, value)

    @property
    def holder(self) -> int:
        """The process that has the write lock; informational."""
        return self._get32(_HOLDER)

    @holder.setter
    def holder(self, pid: int) -> None:
        self._put32(_HOLDER, pid)

    def _get32(self, at: int) -> int:
        return int.from_bytes(self._get(at, 4), "little")

    def _put32(self, at: int, value: int) -> None:
        self._put(at, (value & 0xFFFFFFFF).to_bytes(4, "little"))

    def _get(self, at: int, size: int) -> bytes:
        data = os.pread(self._open_fd(), size, at)
        if len(data) < size:
            self.faults += 1
            data = data.ljust(size, b"\0")
        return data

    def _put(self, at: int, data: bytes) -> None:
        files.write_all(self._open_fd(), data, at)

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise ValueError("kernel is closed")
        return self._fd
