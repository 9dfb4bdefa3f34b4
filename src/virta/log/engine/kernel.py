"""
The kernel and codec functions of this process: native where built, else plain Python (virta/native.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from virta import native
from virta.log.engine import plain_control, plain_kernel
from virta.log.format import checksums, codec, compression, topic_table
from virta.log.format.directory import CONTROL, CONTROL_BYTES, boot_id
from virta.log.record import Name, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_native = native.load("virta.log._native")

NATIVE: Final = _native is not None

encode: Callable[[Sequence[Sequence[object]]], bytearray]
walk: Callable[..., codec.Walked]
read: Callable[..., codec.Read]
crc8: Callable[..., int]
crc32c: Callable[..., int]
Kernel: Any
TopicTable: Any  # virta/log/format/topic_table.py
find_places: Callable[[int, int, int, int, bytes], bytes]
# Protect a writable map of a file that another process may truncate from SIGBUS: guard(map, fd) -> handle,
# unguard(handle) before the map is closed, guard_faults(handle). None without the native module: do not map then.
guard: Callable[..., int] | None = None
unguard: Callable[[int], None]
guard_faults: Callable[[int], int]

if _native is not None:
    _native.set_types(Record, Name)
    _native.set_decompress(compression.decompress)
    encode, walk, read = _native.encode, _native.walk, _native.read
    crc8, crc32c = _native.crc8, _native.crc32c
    Kernel, TopicTable = _native.Kernel, _native.TopicTable
    find_places = _native.find_places
    guard, unguard, guard_faults = _native.guard, _native.unguard, _native.guard_faults
else:
    encode, walk, read = codec.encode, codec.walk, codec.read
    crc8, crc32c = checksums.crc8, checksums.crc32c
    Kernel, TopicTable = plain_kernel.Kernel, topic_table.TopicTable
    find_places = topic_table.find_places

APPENDED, ATTENTION, ROLL, TIMEOUT = (
    plain_kernel.APPENDED,
    plain_kernel.ATTENTION,
    plain_kernel.ROLL,
    plain_kernel.TIMEOUT,
)
FOREIGN, OTHER_BOOT, CURRENT = (
    plain_control.FOREIGN,
    plain_control.OTHER_BOOT,
    plain_control.CURRENT,
)


class Snapshot(NamedTuple):
    """The control page: what is committed and what is durable; valid only when `state` is CURRENT."""

    state: int
    active: int
    end: int
    next: int
    last_crc: int
    last_time: int
    last_pos: int
    durable_base: int
    durable_pos: int
    durable_offset: int
    holder: int
    extent: int
    writing: int

    @property
    def current(self) -> bool:
        return self.state == CURRENT

    @property
    def file_size(self) -> int:
        """The size of the active segment's file: its end, or more with headroom."""
        return max(self.end, self.extent)


def open_read_only(directory: Path) -> Any:
    """Return a kernel that only reads the control page; None if there is none."""
    try:
        control_fd = os.open(directory / CONTROL, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(control_fd).st_size < CONTROL_BYTES:
            return None
        return Kernel(-1, -1, control_fd, boot_id(), False)
    finally:
        os.close(control_fd)
