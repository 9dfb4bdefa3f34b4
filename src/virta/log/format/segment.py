"""
Segments: one file of batches after a 64-byte header.

The header names the stream, the first offset, a salt that every batch header's CRC starts from, and the
segment before it. A segment is *active* (the highest base, appended to) or *sealed* (its last batch says so):
sealed segments are durable and change only by being replaced whole (compaction) or repaired.
"""

from __future__ import annotations

import os
import secrets
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from virta import files
from virta.clock import now_us, time_text
from virta.errors import LogCorruptionError, LogFormatError
from virta.log.engine import kernel
from virta.log.format.codec import REASONS, BatchHeader, Status
from virta.log.format.directory import segment_name
from virta.log.limits import CLOCK_AHEAD_S, READ_CHUNK_BYTES, SEGMENT_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLAG_COMPACTED: Final = 1
# Its seal was lost and written again: like a compacted segment's, it is not the batch that the next segment names.
FLAG_RESEALED: Final = 4
# Writers compress batches of it. Such a segment has version 2, so versions that cannot read it say so.
FLAG_ZSTD: Final = 8
FLAGS_UNLINKED: Final = FLAG_COMPACTED | FLAG_RESEALED
NO_SEGMENT: Final = (1 << 64) - 1
SECTOR_BYTES: Final = 512
_START: Final = b"\x3e\x01\x05\x00"
# version, flags, base, created, stream, salt, previous crc, previous base, epoch
_HEADER: Final = struct.Struct("<BHQQ16sIIQI")
assert _HEADER.size == 55


class SegmentHeader(NamedTuple):
    base: int
    created: int  # µs
    stream: bytes  # 16 bytes of the stream's uuid
    salt: int  # random per file: distinguishes generations of one base
    prev_crc: int  # header CRC of the last batch of the segment before
    prev_base: int  # NO_SEGMENT: this is the first
    epoch: int  # +1 whenever recovery had to drop published offsets
    flags: int = 0

    @property
    def generation(self) -> tuple[int, int, int]:
        """What changes when positions in the segment become invalid: by compaction, or by a loss of offsets."""
        return self.base, self.epoch, self.salt

    def pack(self) -> bytes:
        body = _START + _HEADER.pack(
            2 if self.flags & FLAG_ZSTD else 1,
            self.flags,
            self.base,
            self.created,
            self.stream,
            self.salt,
            self.prev_crc,
            self.prev_base,
            self.epoch,
        )
        body += kernel.crc32c(body).to_bytes(4, "little")
        return bytes((kernel.crc8(body),)) + body


def new_salt() -> int:
    return secrets.randbits(32)


def parse_header(data: bytes, path: Path) -> SegmentHeader:
    """
    Return the header in the first 64 bytes of a segment file.

    Raises:
        LogCorruptionError: it is damaged.
        LogFormatError: it is of a newer version.
    """
    base = int(path.name[:20])
    reason = None
    if len(data) < SEGMENT_HEADER_BYTES:
        reason = "short"
    elif not any(data):
        reason = "zero"
    elif (
        data[1:5] != _START
        or int.from_bytes(data[60:64], "little") != kernel.crc32c(data[1:60])
        or kernel.crc8(data[1:64]) != data[0]
    ):
        reason = "bad-header"
    elif data[5] not in {1, 2}:
        raise LogFormatError(
            f"{path} has segment version {data[5]}; this Virta reads versions 1 and 2: upgrade Virta",
            code="log_format_newer",
        )
    if reason is None:
        _, flags, at, created, stream, salt, crc, prev, epoch = _HEADER.unpack_from(data, 5)
        if at == base:
            return SegmentHeader(base, created, stream, salt, crc, prev, epoch, flags)
        reason = "bad-header"
    raise LogCorruptionError(
        f"{path}: segment header is damaged ({reason}), bytes 0 to {SEGMENT_HEADER_BYTES}",
        segment=str(path),
        byte_from=0,
        byte_to=SEGMENT_HEADER_BYTES,
        offset_from=base,
        offset_to=None,
        reason=reason,
    )


class Segment:
    """A segment file open for reading; its content is addressed by byte position."""

    partial = False  # whether only some bytes are there, of one that is kept elsewhere

    def __init__(self, directory: Path, base: int) -> None:
        self.path = directory / segment_name(base)
        self.base = base
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.header = parse_header(os.pread(self.fd, SEGMENT_HEADER_BYTES, 0), self.path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        # Closed with the last reference: another thread may still read it.
        if getattr(self, "fd", -1) >= 0:
            self.close()

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def replaced(self) -> bool:
        """Whether the name now belongs to another file, or to none."""
        try:
            return os.stat(self.path).st_ino != os.fstat(self.fd).st_ino
        except FileNotFoundError:
            return True

    def data_end(self, pos: int) -> int:
        """Return the position after the last byte from `pos` on that is not zero; `pos` if all is headroom."""
        end = self.size
        while end > pos:
            begin = max(pos, end - READ_CHUNK_BYTES)
            rest = os.pread(self.fd, end - begin, begin).rstrip(b"\0")
            if rest:
                return begin + len(rest)
            end = begin
        return pos

    def sectors_end(self, pos: int) -> int:
        """Return the same, rounded up to the end of its sector; `pos` if all is headroom."""
        used = self.data_end(pos)
        return pos if used == pos else min(-(-used // SECTOR_BYTES) * SECTOR_BYTES, self.size)

    def start(self) -> Position:
        """Return the position of the first batch."""
        header = self.header
        return Position(SEGMENT_HEADER_BYTES, header.prev_crc, header.base)


class Position(NamedTuple):
    """A position between two batches: byte, header CRC of the batch before (-1: unchecked), next offset."""

    pos: int
    prev: int
    next: int


class WalkEnd(NamedTuple):
    """Where and why a walk stopped; `detail` as the kernel gives it."""

    at: Position
    status: Status
    detail: int

    @property
    def reason(self) -> str:
        return REASONS.get(self.status, "")


class Walk:
    """
    Iterate over the batches of a segment from a position on, without decoding them.

    Yields lists of headers with absolute positions; afterwards `end` says where and why it stopped:
    END at `limit`, SEAL, or the first thing that is not a valid batch.
    """

    def __init__(
        self, segment: Segment, start: Position, limit: int, *, check_payload: bool = False
    ) -> None:
        self.segment = segment
        self.end = WalkEnd(start, Status.END, 0)
        self._limit = limit
        self._check = check_payload

    def __iter__(self) -> Iterator[list[BatchHeader]]:
        at, chunk = self.end.at, READ_CHUNK_BYTES
        salt = self.segment.header.salt
        status, detail = Status.END, 0
        while at.pos < self._limit:
            size = min(chunk, self._limit - at.pos)
            data = os.pread(self.segment.fd, size, at.pos)
            rows, used, prev, following, code, detail = kernel.walk(
                data, 0, len(data), salt, at.prev, at.next, self._check
            )
            shift = at.pos
            at = Position(shift + used, prev, following)
            status = Status(code)
            self.end = WalkEnd(at, status, detail)
            if rows:
                yield [BatchHeader(row[0] + shift, *row[1:]) for row in rows]
            if len(data) < size:  # the file is shorter than the limit
                status = Status.SHORT if status == Status.END else status
                break
            if status == Status.SHORT and at.pos + detail <= self._limit:
                chunk = max(READ_CHUNK_BYTES, detail)
            elif status != Status.END:
                break
        self.end = WalkEnd(at, status, detail)

    def run(self) -> WalkEnd:
        """Walk to the end and return it."""
        for _ in self:
            pass
        return self.end


def unwritten(segment: Segment, at: Position) -> bool:
    """
    Return whether there is only headroom at `at`, or the beginning of a batch whose rest was never written.

    Headroom is zero, and disks write whole sectors: such a batch extends beyond the last sector that has data.
    """
    cut = segment.sectors_end(at.pos)
    return cut == at.pos or Walk(segment, at, cut).run().status == Status.SHORT


def rewrite_header(segment: Segment, header: SegmentHeader) -> None:
    """Change flags or epoch in place; open readers keep the header they read."""
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        files.write_all(fd, header.pack(), 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    segment.header = header


def create_segment(directory: Path, header: SegmentHeader) -> None:
    """Create a segment with its header; after a crash it is complete or does not exist."""
    path = directory / segment_name(header.base)
    temporary = path.with_suffix(".new")
    fd = files.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        files.write_all(fd, header.pack(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
    files.sync_directory(directory)


def is_ahead(last_time: int) -> bool:
    """Return whether a time is so far in the future that a clock must be wrong."""
    return last_time > now_us() + CLOCK_AHEAD_S * 1e6


def describe_ahead(last_time: int) -> str:
    """Return a sentence that the newest record is from the future, with the consequence."""
    return (
        f"the newest record is stamped {time_text(last_time)}, but this machine's clock says"
        f" {time_text(now_us())}; one of the two clocks was"
        " wrong. Times never go back, so all records get that time until then (docs/log.md, Wrong clocks)"
    )
