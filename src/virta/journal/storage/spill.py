"""
Data of values that do not fit in memory: a scratch file, read with one pread.

The log has these bytes too; this file only saves searching it. The file has no name, so a crash
leaves nothing behind. Invariant: freed space is reused before the file grows, so it stays within twice
the largest amount of data that was spilled at one time.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Space is handed out in powers of two, so that a freed piece fits the next of its kind.
PIECE_BYTES_MIN = 256


class FileSpill:
    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, prefix="spill-")  # noqa: SIM115
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._pieces: dict[int, int] = {}  # handle (position) -> size of the data

    @property
    def size(self) -> int:
        """Return the bytes of the file, free pieces included."""
        return self._end

    def put(self, data: bytes) -> int:
        size = _piece_bytes(len(data))
        free = self._free.get(size)
        if free:
            position = free.pop()
        else:
            position = self._end
            self._end += size
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], position + written)
        self._pieces[position] = len(data)
        return position

    def get(self, handle: int) -> bytes:
        size = self._pieces[handle]
        data = os.pread(self._file.fileno(), size, handle)
        assert len(data) == size
        return data

    def drop(self, handle: int) -> None:
        size = self._pieces.pop(handle)
        self._free.setdefault(_piece_bytes(size), []).append(handle)

    def close(self) -> None:
        self._file.close()


def _piece_bytes(size: int) -> int:
    return max(PIECE_BYTES_MIN, 1 << (size - 1).bit_length()) if size else PIECE_BYTES_MIN
