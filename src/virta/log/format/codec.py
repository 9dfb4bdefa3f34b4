"""
Records and batches in plain Python: the reference for docs/format.md and the twin of native/log_batch.h.

Pure computation on buffers. `encode`, `walk` and `read` have the same signatures and results as the native
ones; virta/log/engine/kernel.py picks. Only whole, valid batches ever leave this module.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from virta.log.limits import (
    BATCH_BYTES_MAX,
    BATCH_HEADER_BYTES,
    GAP_MAX,
    KEY_BYTES_MAX,
    TOPIC_BYTES_MAX,
    VALUE_BYTES_MAX,
)
from virta.log.record import Name, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    Row = tuple[int, int, int, int, int, int, int, int, int]
    Walked = tuple[Sequence[Row], int, int, int, int, int]
    Read = tuple[list[Record], int, int, int, int, int]

Buffer = bytes | bytearray | memoryview

FLAG_SEAL: Final = 1
FLAG_REPAIR: Final = 2
TOPIC_SEAL: Final = b"\x00"
TOPIC_GAP: Final = b"\x01"
# Control batches; and the producer of appends that asked for no idempotence.
PRODUCER_CONTROL: Final = 0
PRODUCER_ANONYMOUS: Final = 1

# version, flags, base, time, count, payload_len, producer, sequence, prev, payload_crc
_HEADER: Final = struct.Struct("<BHQQIIQIII")
_HEADER_START: Final = b"\x36\x01\x04\x00"
_ZEROS: Final = bytes(BATCH_HEADER_BYTES)


class Status(IntEnum):
    """Why walk() or read() stopped; the same numbers as `enum status` in native/log_batch.h."""

    END = 0
    SHORT = 1
    SEAL = 2
    BAD_HEADER = 3
    BAD_PAYLOAD = 4
    BAD_RECORD = 5
    CHAIN = 6
    ZERO = 7
    FULL = 8
    STOP = 9
    REPAIR = 10


REASONS: Final = {
    Status.SHORT: "short",
    Status.BAD_HEADER: "bad-header",
    Status.BAD_PAYLOAD: "bad-payload",
    Status.BAD_RECORD: "bad-record",
    Status.CHAIN: "chain",
    Status.ZERO: "zero",
}


class Batch(NamedTuple):
    """One batch header as walk() reports it; `pos` is relative to the buffer given."""

    pos: int
    base: int
    span: int  # offsets it covers
    time: int
    payload_len: int
    producer: int
    sequence: int
    flags: int
    header_crc: int


# --- checksums -------------------------------------------------------------------------------------


def _crc8_table() -> bytes:
    table = bytearray(256)
    for i in range(256):
        c = i
        for _ in range(8):
            c = ((c << 1) ^ 0x31) & 0xFF if c & 0x80 else c << 1
        table[i] = c
    return bytes(table)


def _crc32c_table() -> list[int]:
    table = []
    for i in range(256):
        c = i
        for _ in range(8):
            c = (c >> 1) ^ 0x82F63B78 if c & 1 else c >> 1
        table.append(c)
    return table


_CRC8: Final = _crc8_table()
_CRC32C: Final = _crc32c_table()
_CRC32C_BACK: Final = {entry >> 24: index for index, entry in enumerate(_CRC32C)}


def crc8(data: Buffer, crc: int = 0) -> int:
    """CRC-8, polynomial 0x31, initial value 0, not reflected: check of b"123456789" is 0xA2."""
    table = _CRC8
    for byte in data:
        crc = table[crc ^ byte]
    return crc


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C (Castagnoli), continued from `crc`: check of b"123456789" is 0xE3069283."""
    table = _CRC32C
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc32c_seed(data: Buffer, crc: int) -> int:
    """The seed that makes crc32c(data, seed) == crc: how a lost salt is found again."""
    crc ^= 0xFFFFFFFF
    for byte in reversed(bytes(data)):
        index = _CRC32C_BACK[crc >> 24]
        crc = ((crc ^ _CRC32C[index]) << 8 & 0xFFFFFFFF) | (index ^ byte)
    return crc ^ 0xFFFFFFFF


# --- records ---------------------------------------------------------------------------------------


def encode_varlong(n: int) -> bytes:
    """Unsigned LEB128, least significant group first."""
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def decode_varlong(buf: Buffer, pos: int, end: int | None = None) -> tuple[int, int]:
    """
    The number at `pos` and the position after it; at most four bytes, as the format allows.

    Raises:
        ValueError: it does not end within four bytes or before `end`.
    """
    end = len(buf) if end is None else end
    n = shift = 0
    while shift < 28 and pos < end:
        byte = buf[pos]
        pos += 1
        n |= (byte & 0x7F) << shift
        if byte < 0x80:
            return n, pos
        shift += 7
    raise ValueError(f"varlong at byte {pos} does not end within four bytes")


def encode_record(topic: bytes, key: bytes, value: Buffer) -> bytes:
    """One record with its CRC-8; checks no limits (control records come through here)."""
    body = b"".join((encode_varlong(len(topic)), topic, encode_varlong(len(key)), key, value))
    rest = encode_varlong(len(body)) + body
    return bytes((crc8(rest),)) + rest


def gap_record(count: int) -> bytes:
    """A GAP record: `count` offsets have no record."""
    assert 0 < count <= GAP_MAX
    return encode_record(TOPIC_GAP, b"", encode_varlong(count))


def _field(item: object, *, text: bool) -> bytes | memoryview | None:
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        try:
            return item.encode() if text else None
        except UnicodeEncodeError:
            return None
    try:
        return memoryview(item).cast("B")  # type: ignore[arg-type]
    except TypeError:
        return None


def encode(records: Sequence[Sequence[object]]) -> bytearray:
    """
    56 bytes left for the batch header, then the records.

    Raises:
        IndexError: the record with that index (its only argument) is not acceptable.
        OverflowError: with that record the batch grows over its limit.
    """
    out = bytearray(BATCH_HEADER_BYTES)
    for index, item in enumerate(records):
        if not isinstance(item, tuple | list) or len(item) != 3:
            raise IndexError(index)
        topic = _field(item[0], text=True)
        key = _field(item[1], text=True)
        value = _field(item[2], text=False)
        if (
            topic is None
            or key is None
            or value is None
            or len(topic) > TOPIC_BYTES_MAX
            or len(key) > KEY_BYTES_MAX
            or len(value) > VALUE_BYTES_MAX
            or (len(topic) == 1 and topic[0] < 0x20)
        ):
            raise IndexError(index)
        out += encode_record(bytes(topic), bytes(key), value)
        if len(out) > BATCH_HEADER_BYTES + BATCH_BYTES_MAX:
            raise OverflowError(index)
    return out


class Encoded(NamedTuple):
    """A batch as `encode` makes it, and how many records are in it."""

    batch: bytearray
    records: int

    @classmethod
    def of(cls, pieces: Iterable[bytes], records: int) -> Encoded:
        """The batch of records that are encoded already; the pieces stay within the batch's limit."""
        return cls(bytearray().join((bytes(BATCH_HEADER_BYTES), *pieces)), records)


# --- batches ---------------------------------------------------------------------------------------


def seal_header(
    buf: bytearray,
    *,
    salt: int,
    base: int,
    time: int,
    count: int,
    prev: int,
    producer: int = PRODUCER_CONTROL,
    sequence: int = 0,
    flags: int = 0,
    payload_crc: int | None = None,
    crc: object = None,
) -> int:
    """Fill in the 56 bytes at the front of `buf`; returns the header's CRC-32C."""
    sum32 = crc if callable(crc) else crc32c
    payload_len = len(buf) - BATCH_HEADER_BYTES
    if payload_crc is None:
        payload_crc = sum32(memoryview(buf)[BATCH_HEADER_BYTES:])
    buf[1:5] = _HEADER_START
    _HEADER.pack_into(
        buf, 5, 1, flags, base, time, count, payload_len, producer, sequence, prev, payload_crc
    )
    header_crc: int = sum32(bytes(buf[1:52]), salt)
    struct.pack_into("<I", buf, 52, header_crc)
    buf[0] = crc8(buf[1:BATCH_HEADER_BYTES])
    return header_crc


def parse_header(
    buf: Buffer, pos: int, end: int, salt: int, prev: int, next_offset: int
) -> tuple[Status, Batch | None, int]:
    """The header at `pos`, checked; its payload CRC comes third."""
    if end - pos < BATCH_HEADER_BYTES:
        return Status.SHORT, None, 0
    head = bytes(buf[pos : pos + BATCH_HEADER_BYTES])
    if head[1:5] != _HEADER_START or head[5] != 1:
        return (Status.ZERO if head == _ZEROS else Status.BAD_HEADER), None, 0
    header_crc = int.from_bytes(head[52:56], "little")
    if crc32c(head[1:52], salt) != header_crc or crc8(head[1:]) != head[0]:
        return Status.BAD_HEADER, None, 0
    _, flags, base, time, count, size, producer, sequence, link, payload_crc = _HEADER.unpack_from(
        head, 5
    )
    if size > BATCH_BYTES_MAX and not flags & FLAG_REPAIR:
        return Status.BAD_HEADER, None, 0
    if base != next_offset or (prev >= 0 and link != prev):
        return Status.CHAIN, None, 0
    batch = Batch(pos, base, count, time, size, producer, sequence, flags, header_crc)
    return Status.END, batch, payload_crc


def _seal_next(buf: Buffer, batch: Batch) -> int | None:
    start = batch.pos + BATCH_HEADER_BYTES
    payload = bytes(buf[start : start + batch.payload_len])
    if len(payload) != 21 or payload[2:5] != b"\x01\x00\x00":
        return None
    return int.from_bytes(payload[5:13], "little")


def walk(
    buf: Buffer,
    pos: int,
    end: int,
    salt: int,
    prev: int,
    next_offset: int,
    check_payload: bool,  # noqa: FBT001
) -> Walked:
    """Every valid batch from `pos` on, without decoding: (batches, pos, prev, next, status, detail)."""
    batches: list[Row] = []
    while pos < end:
        status, batch, payload_crc = parse_header(buf, pos, end, salt, prev, next_offset)
        if batch is None:
            return batches, pos, prev, next_offset, status, BATCH_HEADER_BYTES * (status == 1)
        body = pos + BATCH_HEADER_BYTES
        after = body + batch.payload_len
        if after > end:
            return batches, pos, prev, next_offset, Status.SHORT, after - pos
        if check_payload and crc32c(buf[body:after]) != payload_crc:
            return batches, pos, prev, next_offset, Status.BAD_PAYLOAD, 0
        batches.append(batch)
        pos = after
        next_offset += batch.span
        prev = -1 if batch.flags & FLAG_REPAIR else batch.header_crc
        if batch.flags & FLAG_SEAL:
            following = _seal_next(buf, batch)
            if following is None:
                return batches, pos, prev, next_offset, Status.BAD_RECORD, 0
            return batches, pos, prev, next_offset, Status.SEAL, following
    return batches, pos, prev, next_offset, Status.END, 0


class _BadRecordError(ValueError):
    pass


def decode_batch(
    buf: Buffer,
    batch: Batch,
    start: int,
    stop: int,
    topics: AbstractSet[bytes] | None,
    verify: bool,  # noqa: FBT001
) -> list[Record]:
    records: list[Record] = []
    pos = batch.pos + BATCH_HEADER_BYTES
    end = pos + batch.payload_len
    offset = batch.base
    while pos < end:
        first = pos
        total, pos = decode_varlong(buf, pos + 1, end)
        after = pos + total
        if total < 2 or after > end:
            raise _BadRecordError
        size, pos = decode_varlong(buf, pos, after)
        topic = bytes(buf[pos : pos + size])
        pos += size
        if size > TOPIC_BYTES_MAX or pos > after:
            raise _BadRecordError
        size, pos = decode_varlong(buf, pos, after)
        if size > KEY_BYTES_MAX or pos + size > after:
            raise _BadRecordError
        value_pos = pos + size
        if verify and crc8(buf[first + 1 : after]) != buf[first]:
            raise _BadRecordError
        if len(topic) == 1 and topic[0] < 0x20:
            if topic != TOPIC_GAP:
                raise _BadRecordError
            offset += decode_varlong(buf, value_pos, after)[0]
        else:
            if after - value_pos > VALUE_BYTES_MAX:
                raise _BadRecordError
            if start <= offset < stop and (topics is None or topic in topics):
                key = Name(buf[pos:value_pos])
                value = bytes(buf[value_pos:after])
                records.append(Record(Name(topic), key, value, offset, batch.time))
            offset += 1
        pos = after
    if offset != batch.base + batch.span:
        raise _BadRecordError
    return records


def read(
    buf: Buffer,
    pos: int,
    end: int,
    salt: int,
    prev: int,
    next_offset: int,
    start: int,
    stop: int,
    topics: AbstractSet[bytes] | None,
    verify: bool,  # noqa: FBT001
    through_repairs: bool,  # noqa: FBT001
    max_records: int,
) -> Read:
    """Decode whole batches from `pos` on: (records, pos, prev, next, status, detail)."""
    records: list[Record] = []
    while pos < end:
        if next_offset >= stop:
            return records, pos, prev, next_offset, Status.STOP, 0
        if len(records) >= max_records:
            return records, pos, prev, next_offset, Status.FULL, 0
        status, batch, payload_crc = parse_header(buf, pos, end, salt, prev, next_offset)
        if batch is None:
            return records, pos, prev, next_offset, status, BATCH_HEADER_BYTES * (status == 1)
        body = pos + BATCH_HEADER_BYTES
        after = body + batch.payload_len
        if after > end:
            return records, pos, prev, next_offset, Status.SHORT, after - pos
        lost = batch.flags & FLAG_REPAIR and next_offset + batch.span > max(start, next_offset)
        if lost and not through_repairs:  # gaps below the start were not requested
            return records, pos, prev, next_offset, Status.REPAIR, batch.span
        if crc32c(buf[body:after]) != payload_crc:
            return records, pos, prev, next_offset, Status.BAD_PAYLOAD, 0
        following = None
        if batch.flags & FLAG_SEAL:
            following = _seal_next(buf, batch)
            if following is None:
                return records, pos, prev, next_offset, Status.BAD_RECORD, 0
        elif not batch.flags & FLAG_REPAIR and (next_offset + batch.span > start or verify):
            try:
                records += decode_batch(buf, batch, start, stop, topics, verify)
            except ValueError:
                return records, pos, prev, next_offset, Status.BAD_RECORD, 0
        pos = after
        next_offset += batch.span
        prev = -1 if batch.flags & FLAG_REPAIR else batch.header_crc
        if following is not None:
            return records, pos, prev, next_offset, Status.SEAL, following
    return records, pos, prev, next_offset, Status.END, 0
