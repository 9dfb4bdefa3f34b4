"""
Records and batches in plain Python: the reference for docs/format.md, equal in behaviour to native/log_batch.h.

Pure computation on buffers. `encode`, `walk` and `read` have the signatures and results of the native functions;
virta/log/engine/kernel.py chooses. Code that reads segments itself (Spark's decoder, verify) builds on `parse_header`,
`decode_batch` and `find_header`. Only whole, valid batches leave this module.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from virta.log.format import compression
from virta.log.format.checksums import Buffer, crc8, crc32c
from virta.log.limits import (
    BATCH_BYTES_MAX,
    BATCH_HEADER_BYTES,
    COMPRESS_BYTES_MIN,
    GAP_MAX,
    KEY_BYTES_MAX,
    TOPIC_BYTES_MAX,
    VALUE_BYTES_MAX,
)
from virta.log.record import Name, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    Row = tuple[int, int, int, int, int, int, int, int, int]
    Walked = tuple[Sequence[Row], int, int, int, int, int]
    Read = tuple[list[Record], int, int, int, int, int]

FLAG_SEAL: Final = 1
FLAG_REPAIR: Final = 2
FLAG_COMPRESSED: Final = 4
TOPIC_SEAL: Final = b"\x00"
TOPIC_GAP: Final = b"\x01"
TOPIC_COMPRESSED: Final = b"\x06"
# Control batches; and the producer of appends that asked for no idempotence.
PRODUCER_CONTROL: Final = 0
PRODUCER_ANONYMOUS: Final = 1

# version, flags, base, time, count, payload_len, producer, sequence, prev, payload_crc
_HEADER: Final = struct.Struct("<BHQQIIQIII")
# Bytes 1 to 5 of every batch header: record and topic length, topic, key length, version.
_HEADER_START: Final = b"\x36\x01\x04\x00\x01"
_ZEROS: Final = bytes(BATCH_HEADER_BYTES)


class Status(IntEnum):
    """Why walk() or read() stopped; the same numbers as `enum status` in native/log_format.h."""

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


# The statuses that are damage, as `Problem.reason` names them.
REASONS: Final = {
    Status.SHORT: "short",
    Status.BAD_HEADER: "bad-header",
    Status.BAD_PAYLOAD: "bad-payload",
    Status.BAD_RECORD: "bad-record",
    Status.CHAIN: "chain",
    Status.ZERO: "zero",
}


class BatchHeader(NamedTuple):
    """A batch as walk() reports it; `pos` is relative to the buffer given."""

    pos: int
    base: int
    span: int  # offsets it covers
    time: int
    payload_len: int
    producer: int
    sequence: int
    flags: int
    header_crc: int

    @property
    def payload_pos(self) -> int:
        return self.pos + BATCH_HEADER_BYTES

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.pos + BATCH_HEADER_BYTES + self.payload_len

    @property
    def chain(self) -> int:
        """What the next batch must have as `prev`; -1 after a repair: it is not checked."""
        return -1 if self.flags & FLAG_REPAIR else self.header_crc


class BadRecordError(ValueError):
    """Bytes that are no record, or offsets that do not add up to the batch's."""


# --- records ---------------------------------------------------------------------------------------


def encode_varlong(n: int) -> bytes:
    """Return `n` as unsigned LEB128, least significant group first."""
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def decode_varlong(buf: Buffer, pos: int, end: int | None = None) -> tuple[int, int]:
    """
    Return the number at `pos` and the position after it; at most four bytes, as the format allows.

    Raises:
        BadRecordError: it does not end within four bytes or before `end`.
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
    raise BadRecordError(f"varlong at byte {pos} does not end within four bytes")


def encode_record(topic: bytes, key: bytes, value: Buffer) -> bytes:
    """Return one record with its CRC-8. Limits are not checked: control records are made here too."""
    body = b"".join((encode_varlong(len(topic)), topic, encode_varlong(len(key)), key, value))
    rest = encode_varlong(len(body)) + body
    return bytes((crc8(rest),)) + rest


def gap_record(count: int) -> bytes:
    """Return a GAP record: `count` offsets have no record."""
    assert 0 < count <= GAP_MAX
    return encode_record(TOPIC_GAP, b"", encode_varlong(count))


def seal_record(following: int, size: int) -> bytes:
    """Return the record of a seal: the next segment's base, and the bytes of this one before the seal."""
    return encode_record(TOPIC_SEAL, b"", struct.pack("<QQ", following, size))


def parse_record(buf: Buffer, pos: int, end: int) -> tuple[bytes, int, int, int]:
    """
    Return (topic, position of the key, of the value, of the next record) of the record at `pos`.

    Raises:
        BadRecordError: its lengths do not fit, or topic or key is over its limit.
    """
    total, pos = decode_varlong(buf, pos + 1, end)
    after = pos + total
    if total < 2 or after > end:
        raise BadRecordError
    size, pos = decode_varlong(buf, pos, after)
    topic = bytes(buf[pos : pos + size])
    pos += size
    if size > TOPIC_BYTES_MAX or pos > after:
        raise BadRecordError
    size, pos = decode_varlong(buf, pos, after)
    if size > KEY_BYTES_MAX or pos + size > after:
        raise BadRecordError
    return topic, pos, pos + size, after


def decode_batch(
    buf: Buffer,
    batch: BatchHeader,
    start: int,
    stop: int,
    topics: AbstractSet[bytes] | None,
    verify: bool,  # noqa: FBT001
) -> list[Record]:
    """
    Return the user records of a batch with offsets `start` to `stop` (not included) and these topics.

    Raises:
        BadRecordError: bytes that are no record, a wrong record checksum (with `verify`), a control record other than
            a gap, or offsets that are not those of the header.
    """
    records: list[Record] = []
    pos, end, offset = batch.payload_pos, batch.end, batch.base
    if batch.flags & FLAG_COMPRESSED:
        buf, pos = expand_payload(buf, pos, end), 0
        end = len(buf)
    while pos < end:
        first = pos
        topic, key_pos, value_pos, pos = parse_record(buf, first, end)
        if verify and crc8(buf[first + 1 : pos]) != buf[first]:
            raise BadRecordError
        if len(topic) == 1 and topic[0] < 0x20:
            if topic != TOPIC_GAP:
                raise BadRecordError
            offset += decode_varlong(buf, value_pos, pos)[0]
            continue
        if pos - value_pos > VALUE_BYTES_MAX:
            raise BadRecordError
        if start <= offset < stop and (topics is None or topic in topics):
            key, value = Name(buf[key_pos:value_pos]), bytes(buf[value_pos:pos])
            records.append(Record(Name(topic), key, value, offset, batch.time))
        offset += 1
    if offset != batch.base + batch.span:
        raise BadRecordError
    return records


def expand_payload(buf: Buffer, pos: int, end: int) -> bytes:
    """
    Return the records of a compressed batch: its payload is one record with their size and a zstd frame.

    Raises:
        BadRecordError: it is not, or the frame is damaged.
    """
    topic, key_pos, value_pos, after = parse_record(buf, pos, end)
    if topic != TOPIC_COMPRESSED or key_pos != value_pos or after != end:
        raise BadRecordError
    if crc8(buf[pos + 1 : end]) != buf[pos]:
        raise BadRecordError
    size, value_pos = decode_varlong(buf, value_pos, end)
    if size > BATCH_BYTES_MAX:
        raise BadRecordError
    try:
        return compression.decompress(memoryview(buf)[value_pos:end], size)
    except compression.CompressionError as exc:
        raise BadRecordError from exc


def _field_bytes(item: object, *, text: bool) -> bytes | memoryview | None:
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
    Return 56 bytes left for the batch header, then the records.

    Raises:
        IndexError: the record with that index (its only argument) is not acceptable.
        OverflowError: with that record the batch grows over its limit.
    """
    out = bytearray(BATCH_HEADER_BYTES)
    for index, item in enumerate(records):
        if not isinstance(item, tuple | list) or len(item) != 3:
            raise IndexError(index)
        topic = _field_bytes(item[0], text=True)
        key = _field_bytes(item[1], text=True)
        value = _field_bytes(item[2], text=False)
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
    """A batch as `encode` returns it, and how many records are in it."""

    batch: bytearray
    records: int

    @classmethod
    def of(cls, pieces: Iterable[bytes], records: int) -> Encoded:
        """Return the batch of records that are encoded already; together they are within its limit."""
        return cls(bytearray().join((bytes(BATCH_HEADER_BYTES), *pieces)), records)


def compress_batch(batch: bytearray, crc: Callable[..., int] = crc8) -> bytearray | None:
    """Return a batch of `encode` with its records compressed, None if that saves nothing."""
    size = len(batch) - BATCH_HEADER_BYTES
    if size < COMPRESS_BYTES_MIN:
        return None
    frame = compression.compress(memoryview(batch)[BATCH_HEADER_BYTES:])
    value = encode_varlong(size) + frame
    head = encode_varlong(len(value) + 3) + b"\x01" + TOPIC_COMPRESSED + b"\x00"
    if 1 + len(head) + len(value) >= size:
        return None
    sum_ = crc(value, crc(head))
    return bytearray().join((bytes(BATCH_HEADER_BYTES), bytes((sum_,)), head, value))


# --- batches ---------------------------------------------------------------------------------------


def fill_header(
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
    crc: Callable[..., int] = crc32c,
) -> int:
    """Write the header into the 56 bytes at the front of `buf`; return its CRC-32C."""
    size = len(buf) - BATCH_HEADER_BYTES
    if payload_crc is None:
        payload_crc = crc(memoryview(buf)[BATCH_HEADER_BYTES:])
    buf[1:5] = _HEADER_START[:4]
    _HEADER.pack_into(
        buf, 5, 1, flags, base, time, count, size, producer, sequence, prev, payload_crc
    )
    header_crc = crc(bytes(buf[1:52]), salt)
    struct.pack_into("<I", buf, 52, header_crc)
    buf[0] = crc8(buf[1:BATCH_HEADER_BYTES])
    return header_crc


def parse_header(
    buf: Buffer, pos: int, end: int, salt: int, prev: int, next_offset: int
) -> tuple[Status, BatchHeader | None, int]:
    """
    Check the header at `pos`: (END, header, payload CRC), or the status that says what is wrong.

    `prev` is the header CRC of the batch before (-1: do not check it), `next_offset` the offset the batch must have.
    The payload may lie beyond `end`, and its CRC is not checked.
    """
    if end - pos < BATCH_HEADER_BYTES:
        return Status.SHORT, None, 0
    head = bytes(buf[pos : pos + BATCH_HEADER_BYTES])
    if head[1:6] != _HEADER_START:
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
    header = BatchHeader(pos, base, count, time, size, producer, sequence, flags, header_crc)
    return Status.END, header, payload_crc


def find_header(
    buf: bytes, pos: int, salt: int, base_min: int, base_max: int
) -> BatchHeader | None:
    """Return the first valid header at or after `pos` with a base in that range: where reading can continue after damage."""
    found = buf.find(_HEADER_START, pos + 1)
    while found > 0:
        base = int.from_bytes(buf[found + 7 : found + 15], "little")
        if base_min <= base <= base_max:
            header = parse_header(buf, found - 1, len(buf), salt, -1, base)[1]
            if header is not None:
                return header
        found = buf.find(_HEADER_START, found + 1)
    return None


def seal_next(buf: Buffer, batch: BatchHeader) -> int | None:
    """Return the base of the segment after a seal batch; None if its record is not a seal's."""
    payload = bytes(buf[batch.payload_pos : batch.end])
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
    """Return (batches, pos, prev, next, status, detail): every valid batch from `pos` on, without decoding."""
    batches: list[Row] = []
    while pos < end:
        status, batch, payload_crc = parse_header(buf, pos, end, salt, prev, next_offset)
        if batch is None:
            return batches, pos, prev, next_offset, status, BATCH_HEADER_BYTES * (status == 1)
        if batch.end > end:
            return batches, pos, prev, next_offset, Status.SHORT, batch.end - pos
        if check_payload and crc32c(buf[batch.payload_pos : batch.end]) != payload_crc:
            return batches, pos, prev, next_offset, Status.BAD_PAYLOAD, 0
        batches.append(batch)
        pos, prev, next_offset = batch.end, batch.chain, next_offset + batch.span
        if batch.flags & FLAG_SEAL:
            following = seal_next(buf, batch)
            if following is None:
                return batches, pos, prev, next_offset, Status.BAD_RECORD, 0
            return batches, pos, prev, next_offset, Status.SEAL, following
    return batches, pos, prev, next_offset, Status.END, 0


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
    """Return (records, pos, prev, next, status, detail): the records of whole batches from `pos` on."""
    records: list[Record] = []
    while pos < end:
        if next_offset >= stop:
            return records, pos, prev, next_offset, Status.STOP, 0
        if len(records) >= max_records:
            return records, pos, prev, next_offset, Status.FULL, 0
        status, batch, payload_crc = parse_header(buf, pos, end, salt, prev, next_offset)
        if batch is None:
            return records, pos, prev, next_offset, status, BATCH_HEADER_BYTES * (status == 1)
        if batch.end > end:
            return records, pos, prev, next_offset, Status.SHORT, batch.end - pos
        repair = batch.flags & FLAG_REPAIR
        lost = repair and next_offset + batch.span > max(start, next_offset)
        if lost and not through_repairs:  # gaps below the start were not requested
            return records, pos, prev, next_offset, Status.REPAIR, batch.span
        if crc32c(buf[batch.payload_pos : batch.end]) != payload_crc:
            return records, pos, prev, next_offset, Status.BAD_PAYLOAD, 0
        following = None
        if batch.flags & FLAG_SEAL:
            following = seal_next(buf, batch)
            if following is None:
                return records, pos, prev, next_offset, Status.BAD_RECORD, 0
        elif not repair and (next_offset + batch.span > start or verify):
            try:
                records += decode_batch(buf, batch, start, stop, topics, verify)
            except BadRecordError:
                return records, pos, prev, next_offset, Status.BAD_RECORD, 0
        pos, prev, next_offset = batch.end, batch.chain, next_offset + batch.span
        if following is not None:
            return records, pos, prev, next_offset, Status.SEAL, following
    return records, pos, prev, next_offset, Status.END, 0
