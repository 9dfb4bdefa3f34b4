"""
The plain twin of native/arrow.c: the same functions, signatures and answers, for reference and for
machines without a compiler. `virta.spark.source.arrow` chooses; the tests run both on the same bytes.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from virta.log.format.codec import crc8, crc32c

HEADER_BYTES = 56
BATCH_BYTES_MAX = 64 * 1024 * 1024
TOPIC_BYTES_MAX = KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 10 * 1024 * 1024
FLAG_SEAL, FLAG_REPAIR = 1, 2

END, SHORT, SEAL, BAD_HEADER, BAD_PAYLOAD, BAD_RECORD, CHAIN, ZERO, FULL, STOP, REPAIR = range(11)

_FIXED = b"\x36\x01\x04\x00\x01"
_HEADER = struct.Struct("<6xHQQII8x4xIII")

Entry = tuple[int, int, int, int]
Column = bytes | tuple[bytes, bytes] | None


class Header(NamedTuple):
    flags: int
    base: int
    time: int
    span: int
    payload_len: int
    prev: int
    payload_crc: int
    header_crc: int

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.payload_len

    @property
    def chain(self) -> int:
        return -1 if self.flags & FLAG_REPAIR else self.header_crc


class Selection(NamedTuple):
    start: int
    stop: int
    time_from: int
    time_to: int
    topics: tuple[bytes, ...] | None


class MalformedError(Exception):
    """A record whose lengths do not add up; becomes BAD_RECORD."""


def parse_header(raw: bytes, salt: int, prev: int, following: int) -> tuple[int, Header | None]:
    """Status and header of the batch at the start of `raw`; `prev` < 0: the chain is not checked."""
    if len(raw) < HEADER_BYTES:
        return SHORT, None
    if raw[1:6] != _FIXED:
        return (BAD_HEADER if any(raw[:HEADER_BYTES]) else ZERO), None
    header = Header(*_HEADER.unpack_from(raw))
    if crc32c(raw[1:52], salt) != header.header_crc or crc8(raw[1:56]) != raw[0]:
        return BAD_HEADER, None
    if header.payload_len > BATCH_BYTES_MAX and not header.flags & FLAG_REPAIR:
        return BAD_HEADER, None
    if header.base != following or (prev >= 0 and header.prev != prev):
        return CHAIN, header
    return END, header


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
    """Whole batches to Arrow buffers; see arrow_decode in native/arrow.c."""
    selection = Selection(start, stop, time_from, time_to, topics)
    rows: list[tuple[bytes, int, int, bytes, bytes]] = []
    size, status, detail = 0, END, 0
    while pos < end:
        if following >= stop:
            status = STOP
            break
        if rows and (len(rows) >= rows_max or size >= bytes_max):
            status = FULL
            break
        status, header = parse_header(
            buf[pos : min(pos + HEADER_BYTES, end)], salt, prev, following
        )
        if status != END or header is None:
            detail = HEADER_BYTES if status == SHORT else 0
            break
        lost = header.flags & FLAG_REPAIR and following + header.span > start
        if lost and not through_repairs:  # gaps below the start were not requested
            status, detail = REPAIR, header.span
            break
        if end - pos < header.size:
            status, detail = SHORT, header.size
            break
        if header.flags & FLAG_SEAL:
            pos += header.size
            status = SEAL
            break
        status, found = decode_batch(buf[pos + HEADER_BYTES : pos + header.size], header, selection)
        if status != END:
            break
        rows += found
        size += sum(len(row[0]) + len(row[3]) + len(row[4]) for row in found)
        pos += header.size
        following += header.span
        prev = header.chain
    columns = tuple(make_column(rows, i) if want & (1 << i) else None for i in range(5))
    not_text = sum(
        1 << i for i in (0, 3, 4) if want & text & (1 << i) and not all_text(row[i] for row in rows)
    )
    return len(rows), columns, not_text, pos, prev, following, status, detail


def decode_batch(
    payload: bytes, header: Header, selection: Selection
) -> tuple[int, list[tuple[bytes, int, int, bytes, bytes]]]:
    """Return the selected rows of one batch; nothing is looked at in a batch that is outside as a whole."""
    start, stop, time_from, time_to, topics = selection
    if header.base + header.span <= start or header.base >= stop:
        return END, []
    if not time_from <= header.time < time_to:
        return END, []
    if crc32c(payload) != header.payload_crc:
        return BAD_PAYLOAD, []
    rows = []
    offset, pos = header.base, 0
    try:
        while pos < len(payload):
            topic, key, value, pos = parse_record(payload, pos)
            if len(topic) == 1 and topic[0] < 0x20:
                if topic != b"\x01":
                    return BAD_RECORD, []
                offset += varlong(value, 0, len(value))[0]
                continue
            if len(value) > VALUE_BYTES_MAX:
                return BAD_RECORD, []
            if start <= offset < stop and (topics is None or topic in topics):
                rows.append((topic, offset, header.time, key, value))
            offset += 1
    except MalformedError:
        return BAD_RECORD, []
    return (END, rows) if offset == header.base + header.span else (BAD_RECORD, [])


def parse_record(payload: bytes, pos: int) -> tuple[bytes, bytes, bytes, int]:
    total, pos = varlong(payload, pos + 1, len(payload))
    stop = pos + total
    if total < 2 or stop > len(payload):
        raise MalformedError
    size, pos = varlong(payload, pos, stop)
    topic = payload[pos : pos + size]
    pos += size
    if size > TOPIC_BYTES_MAX or pos > stop:
        raise MalformedError
    size, pos = varlong(payload, pos, stop)
    key = payload[pos : pos + size]
    pos += size
    if size > KEY_BYTES_MAX or pos > stop:
        raise MalformedError
    return topic, key, payload[pos:stop], stop


def varlong(buf: bytes, pos: int, end: int) -> tuple[int, int]:
    """At most four bytes: no length in a valid file needs more."""
    number = 0
    for shift in (0, 7, 14, 21):
        if pos >= end:
            break
        byte = buf[pos]
        pos += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, pos
    raise MalformedError


def make_column(rows: list[tuple[bytes, int, int, bytes, bytes]], index: int) -> Column:
    if index in {1, 2}:
        return struct.pack(f"<{len(rows)}q", *(row[index] for row in rows))
    ends, total = [0], 0
    for row in rows:
        total += len(row[index])  # type: ignore[arg-type]  # columns 0, 3 and 4 are bytes
        ends.append(total)
    data = b"".join(row[index] for row in rows)  # type: ignore[misc]
    return struct.pack(f"<{len(ends)}i", *ends), data


def all_text(values: object) -> bool:
    try:
        for value in values:  # type: ignore[attr-defined]
            value.decode()
    except UnicodeDecodeError:
        return False
    return True


def index(
    fd: int, pos: int, end: int, salt: int, prev: int, following: int, stop: int, step: int
) -> tuple[list[Entry], int, int, int, int, int, int]:
    """Return a sparse index of a segment's batches, from their headers; see arrow_index in native/arrow.c."""
    entries: list[Entry] = []
    noted, status, detail, last_time = -1, END, 0, 0
    while pos < end and following < stop:
        raw = os.pread(fd, min(HEADER_BYTES, end - pos), pos)
        status, header = parse_header(raw, salt, prev, following)
        if status != END or header is None:
            detail = HEADER_BYTES if status == SHORT else 0
            break
        if end - pos < header.size:
            status, detail = SHORT, header.size
            break
        if noted < 0 or pos - noted >= step:
            entries.append((pos, header.base, header.time, prev))
            noted = pos
        last_time = header.time
        pos += header.size
        following += header.span
        prev = header.chain
        if header.flags & FLAG_SEAL:
            status = SEAL
            break
    return entries, pos, prev, following, status, detail, last_time


def resync(buf: bytes, pos: int, salt: int, following: int) -> int:
    """Return the position of the next valid header whose base is at least `following`, or -1."""
    at = buf.find(_FIXED, max(pos, 0) + 1)
    while at >= 1:
        raw = bytes(buf[at - 1 : at - 1 + HEADER_BYTES])
        if len(raw) == HEADER_BYTES:
            base = int.from_bytes(raw[8:16], "little")
            if base >= following and parse_header(raw, salt, -1, base)[0] == END:
                return at - 1
        at = buf.find(_FIXED, at + 1)
    return -1
