"""
The plain engine of `virta.spark.source.arrow`: the functions of native/arrow.c, on the log's own codec.

For machines without a compiler, and the reference that the tests compare the native engine with.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from virta.log.engine.kernel import crc32c
from virta.log.format import codec
from virta.log.format.codec import FLAG_REPAIR, FLAG_SEAL, Status
from virta.log.limits import BATCH_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.log.record import Record

Entry = tuple[int, int, int]
Column = bytes | tuple[bytes, bytes] | None

RECORD_FIELDS = ("topic", "offset", "timestamp", "key", "value")


def decode(
    buf: bytes,
    pos: int,
    end: int,
    salt: int,
    prev: int,
    following: int,
    start: int,
    stop: int,
    time_from: int,
    time_to: int,
    topics: tuple[bytes, ...] | None,
    want: int,
    text: int,
    through_repairs: bool,  # noqa: FBT001
    rows_max: int,
    bytes_max: int,
) -> tuple[int, tuple[Column, ...], int, int, int, int, int, int]:
    """Decode whole batches to Arrow buffers; arrow_decode in native/arrow.c documents the result."""
    wanted = None if topics is None else frozenset(topics)
    rows: list[Record] = []
    size, status, detail = 0, Status.END, 0
    while pos < end:
        if following >= stop:
            status = Status.STOP
            break
        if rows and (len(rows) >= rows_max or size >= bytes_max):
            status = Status.FULL
            break
        status, batch, payload_crc = codec.parse_header(buf, pos, end, salt, prev, following)
        if batch is None:
            detail = BATCH_HEADER_BYTES if status == Status.SHORT else 0
            break
        is_repair = bool(batch.flags & FLAG_REPAIR)
        if is_repair and not through_repairs and following + batch.span > start:
            status, detail = Status.REPAIR, batch.span
            break
        if batch.end > end:
            status, detail = Status.SHORT, batch.end - pos
            break
        if batch.flags & FLAG_SEAL:
            pos, status = batch.end, Status.SEAL
            break
        overlaps = following + batch.span > start and time_from <= batch.time < time_to
        if overlaps and not is_repair:
            if crc32c(buf[batch.payload_pos : batch.end]) != payload_crc:
                status = Status.BAD_PAYLOAD
                break
            try:
                found = codec.decode_batch(buf, batch, start, stop, wanted, False)
            except codec.BadRecordError:
                status = Status.BAD_RECORD
                break
            rows += found
            size += sum(len(row.topic) + len(row.key) + len(row.value) for row in found)
        pos = batch.end
        following += batch.span
        prev = batch.chain
    columns = tuple(make_column(rows, i) if want & (1 << i) else None for i in range(5))
    not_text = sum(
        1 << i
        for i in (0, 3, 4)
        if want & text & (1 << i) and not all_text(getattr(row, RECORD_FIELDS[i]) for row in rows)
    )
    return len(rows), columns, not_text, pos, prev, following, status, detail


def make_column(rows: list[Record], index: int) -> Column:
    values = [getattr(row, RECORD_FIELDS[index]) for row in rows]
    if index in {1, 2}:
        return struct.pack(f"<{len(rows)}q", *values)
    ends, total = [0], 0
    for value in values:
        total += len(value)
        ends.append(total)
    return struct.pack(f"<{len(ends)}i", *ends), b"".join(values)


def all_text(values: Iterable[bytes]) -> bool:
    try:
        for value in values:
            str(value, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def index(
    fd: int, pos: int, end: int, salt: int, prev: int, following: int, stop: int, step: int
) -> tuple[list[Entry], int, int, int, int, int, int]:
    """Return a sparse index of a segment's batches; arrow_index in native/arrow.c documents the result."""
    entries: list[Entry] = []
    noted, status, detail, last_time = -1, Status.END, 0, 0
    while pos < end and following < stop:
        raw = os.pread(fd, min(BATCH_HEADER_BYTES, end - pos), pos)
        status, batch, _ = codec.parse_header(raw, 0, len(raw), salt, prev, following)
        if batch is None:
            detail = BATCH_HEADER_BYTES if status == Status.SHORT else 0
            break
        if end - pos < batch.end:
            status, detail = Status.SHORT, batch.end
            break
        if noted < 0 or pos - noted >= step:
            entries.append((pos, batch.base, batch.time))
            noted = pos
        last_time = batch.time
        pos += batch.end
        following += batch.span
        prev = batch.chain
        if batch.flags & FLAG_SEAL:
            status = Status.SEAL
            break
    return entries, pos, prev, following, status, detail, last_time
