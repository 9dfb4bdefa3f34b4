"""
Blocks of the index of event ids (`virta.hub.resume.id_index`): sorted numbers for a range of offsets.

The newest block grows in memory. Older ones are in an unnamed temporary file next to the log, so that a long history
takes disk space instead of memory. Every `FENCE`-th number of each stays in memory, and a lookup reads `FENCE` numbers.
"""

from __future__ import annotations

import tempfile
import weakref
from array import array
from bisect import bisect_left
from itertools import count
from os import pread, pwrite
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SPAN_BITS = 20
SPAN_MAX = (1 << SPAN_BITS) - 1
HASH_MASK = (1 << 64) - 1 - SPAN_MAX

NUMBER_BYTES = 8
# One page of the disk.
FENCE = 512
# The file is rewritten when dropped blocks take more than this, and more than 50 % of it.
DROPPED_BYTES_MAX = 16 * 1024 * 1024


class Block:
    """The records of a range of offsets; each number is a hash and an offset from `first`."""

    __slots__ = ("_fences", "_file", "entries", "first", "next", "place", "records")

    def __init__(self, first: int, next_: int, entries: array[int]) -> None:
        self.first = first
        self.next = next_
        self.entries = entries  # empty once they are in the file
        self.records = len(entries)
        self.place = 0
        self._fences: array[int] = array("Q")
        self._file: BlockFile | None = None

    @property
    def stored(self) -> bool:
        """Whether the numbers are in the file."""
        return self._file is not None

    def offsets(self, hashed: int) -> Iterable[int]:
        """Yield the offsets of records with this hash, oldest first."""
        at = max(0, bisect_left(self._fences, hashed) - 1) * FENCE
        for start in count(at, FENCE):
            entries = self.entries if self._file is None else self._file.read(self, start)
            for entry in entries[bisect_left(entries, hashed) :]:
                if entry & HASH_MASK != hashed:
                    return
                yield self.first + (entry & SPAN_MAX)
            if self._file is None or start + FENCE >= self.records:
                return

    def store(self, file: BlockFile) -> None:
        """
        Move the numbers to the file.

        Raises:
            OSError: for instance, the disk is full; the numbers stay in memory.
        """
        self.place = file.append(self.entries.tobytes())
        self._fences = self.entries[::FENCE]
        self._file = file
        self.entries = array("Q")


class BlockFile:
    """The temporary file, created on demand."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._end = 0
        self._dropped = 0

    def append(self, data: bytes) -> int:
        """Append data; return its offset in the file."""
        file = self._open()
        place = self._end
        if pwrite(file.fileno(), data, place) != len(data):
            raise OSError(28, "the disk is full")
        self._end += len(data)
        return place

    def read(self, block: Block, start: int) -> array[int]:
        """Return up to `FENCE` numbers of a block, from `start` on."""
        number = min(FENCE, block.records - start)
        place = block.place + start * NUMBER_BYTES
        found = array("Q")
        found.frombytes(pread(self._open().fileno(), number * NUMBER_BYTES, place))
        return found

    def drop(self, block: Block, others: Iterable[Block]) -> None:
        """Drop a block; `others` are all that stay."""
        if not block.stored:
            return
        self._dropped += block.records * NUMBER_BYTES
        if self._dropped > max(DROPPED_BYTES_MAX, self._end // 2):
            self._rewrite([other for other in others if other.stored])

    def _rewrite(self, blocks: list[Block]) -> None:
        before = self._open()
        self._file, self._end, self._dropped = None, 0, 0
        for block in blocks:
            data = pread(before.fileno(), block.records * NUMBER_BYTES, block.place)
            block.place = self.append(data)
        before.close()

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        return self._file
