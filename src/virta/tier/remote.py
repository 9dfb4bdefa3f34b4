"""
A segment in object storage, read by byte range: what a machine needs that reads a part of it and has no cache.

`open` writes the segment's header and the wanted bytes at their own positions into a file without a name, so that code
for local segments reads it unchanged; the rest of the file is a hole.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path
from typing import NamedTuple

from virta import files
from virta.errors import TierError
from virta.log.format.directory import segment_name
from virta.log.format.segment import Segment
from virta.log.limits import SEGMENT_HEADER_BYTES
from virta.tier.store import TierStore


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
        return self._read(TierStore(self.url), 0, SEGMENT_HEADER_BYTES)

    def open(self, pos: int, end: int) -> Segment:
        """
        Return the segment with its header and the bytes `pos` to `end`; other bytes are zeros.

        Raises:
            TierError: the store cannot be reached, or the objects were removed since (`tier_object_missing`).
        """
        store = TierStore(self.url)
        folder = Path(tempfile.gettempdir(), f"virta-segment-{uuid.uuid4().hex}")
        files.make_directory(folder)
        path = folder / segment_name(self.base)
        try:
            fd = files.open_file(path, os.O_WRONLY | os.O_CREAT)
            try:
                files.write_all(fd, self._read(store, 0, SEGMENT_HEADER_BYTES), 0)
                files.write_all(fd, self._read(store, pos, end), pos)
            finally:
                os.close(fd)
            return Segment(folder, self.base)
        finally:
            # The open file is enough.
            path.unlink(missing_ok=True)
            folder.rmdir()

    def _read(self, store: TierStore, pos: int, end: int) -> bytes:
        pieces = [
            store.read_range(
                part.name, max(pos, part.start) - part.start, min(end, part.end) - part.start
            )
            for part in self.parts
            if part.start < end and part.end > pos
        ]
        data = b"".join(pieces)
        if len(data) != end - pos:
            raise TierError(
                f"{self.url}: bytes {pos} to {end} of the segment at offset {self.base} are not all there",
                code="tier_corrupt",
            )
        return data
