"""A batch on its way into the log: as it was encoded, and compressed if the log asks for it."""

from __future__ import annotations

from typing import NamedTuple

from virta.log.engine import kernel
from virta.log.format.codec import FLAG_COMPRESSED, compress_batch


class AppendBatch(NamedTuple):
    """An encoded batch, and the same compressed if that is smaller."""

    plain: bytearray
    packed: bytearray | None

    @classmethod
    def of(cls, buf: bytearray, *, compressing: bool) -> AppendBatch:
        """Compress an encoded batch if its segment asks for it; call it without the write lock."""
        return cls(buf, compress_batch(buf, kernel.crc8) if compressing else None)

    def form(self, *, compressing: bool) -> tuple[bytearray, int]:
        """Return the bytes to append to a segment that is compressed or not, and their flags."""
        if self.packed is None or not compressing:
            return self.plain, 0
        return self.packed, FLAG_COMPRESSED
