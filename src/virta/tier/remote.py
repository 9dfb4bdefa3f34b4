"""
A segment in object storage, read by byte range: what a machine needs that reads a part of it and has no cache.

`open_ranges` writes the segment's header and the wanted bytes at their own positions into a file without a name, so that code
for local segments reads it unchanged; the rest of the file is a hole.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from virta import files
from virta.errors import TierError
from virta.log.format.directory import segment_name
from virta.log.format.segment import Segment
from virta.log.limits import SEGMENT_HEADER_BYTES
from virta.tier.store import TierStore

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ranges are in memory while they are written to the file; one of them may be larger.
RANGES_BYTES_MAX: Final = 8 * 1024 * 1024


class RemotePart(NamedTuple):
    """An object with the bytes `start` to `end` of a segment."""

    name: str
    start: int
    end: int


class RemoteSegment(NamedTuple):
    """A segment in a store: which object has which bytes. Small and picklable, without credentials."""

    url: str
    base: int
    salt: int
    parts: tuple[RemotePart, ...]

    @property
    def size(self) -> int:
        return self.parts[-1].end

    def header(self) -> bytes:
        """Return the first 64 bytes."""
        return self._read(TierStore(self.url), [(0, SEGMENT_HEADER_BYTES)])[0]

    def open(self, pos: int, end: int) -> Segment:
        """Return the segment with its header and the bytes `pos` to `end` only, as `open_ranges`."""
        return self.open_ranges([(pos, end)], TierStore(self.url))

    def open_ranges(self, ranges: list[tuple[int, int]], store: TierStore) -> Segment:
        """
        Return the segment with its header and these bytes, in order; other bytes are zeros.

        Raises:
            TierError: the store cannot be reached, or the objects were removed since (`tier_object_missing`).
        """
        folder = Path(tempfile.gettempdir(), f"virta-segment-{uuid.uuid4().hex}")
        files.make_directory(folder)
        path = folder / segment_name(self.base)
        try:
            fd = files.open_file(path, os.O_WRONLY | os.O_CREAT)
            try:
                for some in _groups([(0, SEGMENT_HEADER_BYTES), *ranges]):
                    for (pos, _), data in zip(some, self._read(store, some), strict=True):
                        files.write_all(fd, data, pos)
                os.truncate(fd, self.size)
            finally:
                os.close(fd)
            segment = Segment(folder, self.base)
            segment.partial = True
            return segment
        finally:
            # The open file is enough.
            path.unlink(missing_ok=True)
            folder.rmdir()

    def _read(self, store: TierStore, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range; they may be in several objects."""
        pieces: list[list[bytes]] = [[] for _ in ranges]
        for part in self.parts:
            wanted = [
                (number, max(pos, part.start) - part.start, min(end, part.end) - part.start)
                for number, (pos, end) in enumerate(ranges)
                if part.start < end and part.end > pos
            ]
            if wanted:
                found = store.read_ranges(part.name, [(pos, end) for _, pos, end in wanted])
                for (number, _, _), data in zip(wanted, found, strict=True):
                    pieces[number].append(data)
        read = [b"".join(some) for some in pieces]
        for (pos, end), data in zip(ranges, read, strict=True):
            if len(data) != end - pos:
                raise TierError(
                    f"{self.url}: bytes {pos} to {end} of the segment at offset {self.base} are not all there",
                    code="tier_corrupt",
                )
        return read


def _groups(ranges: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the ranges in lists of about RANGES_BYTES_MAX."""
    group: list[tuple[int, int]] = []
    size = 0
    for pos, end in ranges:
        group.append((pos, end))
        size += end - pos
        if size >= RANGES_BYTES_MAX:
            yield group
            group, size = [], 0
    if group:
        yield group
