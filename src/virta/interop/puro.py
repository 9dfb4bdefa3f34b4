"""
Puro's files: read all three generations, write the first, move records to and from a log.

A record is `crc8 | totalLength | topicLength | topic | keyLength | key | value` (lengths are varlongs,
totalLength counts what follows it). Generations differ in what is around the records:

    flat      nothing: records one after the other (the seed's format)
    block6    each send is a block: start record (topic 02, value = signal), records, end record (topic 03,
              value = int32 big-endian distance from the start record to the end record)
    block10   the same, and the start record repeats that distance after the signal

A block counts once its signal byte is 1. A record of topic 00 is the tombstone that ends a segment; a stream is a
directory of `stream<N>.puro`, read in order of N, and N + 1 counts only when N has its tombstone.

The CRC is `plain` (CRC-8 over everything after it, as the seed says) or `puro` (what its repository computes: the
fields' CRCs folded into one another, with a table that has eight wrong entries). It is chosen once per segment:
accepting either for every record would halve the protection.

Invariants: no record of an unfinished or damaged block is delivered; limits are checked before anything is
allocated; damage is raised, or with on_corruption="skip" listed, with file and byte range, never passed over in silence.
A block's start record alone may have a wrong CRC: Puro's own writer leaves stale ones behind.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self

from virta.errors import LogCorruptionError, LogNotFoundError
from virta.log.engine.kernel import crc8
from virta.log.format.codec import decode_varlong, encode_varlong
from virta.log.limits import KEY_BYTES_MAX, TOPIC_BYTES_MAX, VALUE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from types import TracebackType

    from virta.log.format.checksums import Buffer

Generation = Literal["flat", "block6", "block10"]
Crc = Literal["plain", "puro"]

# Both names at their largest, with two-byte lengths, and the largest value.
TOTAL_LENGTH_MAX: Final = VALUE_BYTES_MAX + TOPIC_BYTES_MAX + KEY_BYTES_MAX + 4
READ_BYTES: Final = 1024 * 1024
# Records whose checksums vote on which CRC a segment has.
CRC_SAMPLE_RECORDS: Final = 64

TOMBSTONE: Final = b"\x00"
FILLER: Final = b"\x01"
BLOCK_START: Final = b"\x02"
BLOCK_END: Final = b"\x03"
BLOCK_END_BYTES: Final = 9
SEGMENT_NAME: Final = re.compile(r"stream(0|[1-9][0-9]*)\.puro")

_TABLE_ERRORS: Final = {
    74: 0xE2, 89: 0xF2, 109: 0xF3, 126: 0xE3, 137: 0xF0, 154: 0xDE, 174: 0xDF, 189: 0xF1,
}  # fmt: skip
_PURO_TABLE: Final = bytes(_TABLE_ERRORS.get(i, crc8(bytes((i,)))) for i in range(256))


class PuroRecord(NamedTuple):
    """A data record and the byte of its file it starts at."""

    topic: bytes
    key: bytes
    value: bytes
    position: int


class PuroRange(NamedTuple):
    """Bytes of a file that were not delivered, and why."""

    path: str
    byte_from: int
    byte_to: int
    reason: str


@dataclass
class PuroReport:
    """What reading found; filled in while the records are read."""

    segments: int = 0
    records: int = 0
    bytes: int = 0
    generation: Generation | None = None
    crc: Crc | None = None
    incomplete: list[PuroRange] = field(default_factory=list)
    """Blocks whose writer never finished: Puro does not show them either."""
    damaged: list[PuroRange] = field(default_factory=list)
    spurious: list[str] = field(default_factory=list)
    """Segments after one that has no tombstone; not read unless asked."""


# Encoding.


def crc_puro(fields: Iterable[Buffer]) -> int:
    """The repository's checksum: each field's CRC fed, as one byte, into the CRC of those before it."""
    state = -1
    for data in fields:
        crc = 0
        for byte in data:
            crc = _PURO_TABLE[crc ^ byte]
        state = crc if state < 0 else _PURO_TABLE[state ^ crc]
    return state


def encode(topic: bytes, key: bytes, value: bytes, crc: Crc = "plain") -> bytes:
    """One record of the flat format."""
    names = (encode_varlong(len(topic)), topic, encode_varlong(len(key)), key, value)
    fields = (encode_varlong(sum(map(len, names))), *names)
    rest = b"".join(fields)
    return bytes((crc8(rest) if crc == "plain" else crc_puro(fields),)) + rest


# Reading.


class _DamageError(Exception):
    def __init__(self, reason: str, byte_from: int, byte_to: int, why: str) -> None:
        super().__init__(why)
        self.reason = reason
        self.byte_from = byte_from
        self.byte_to = byte_to


class _Entry(NamedTuple):
    """Any record, with what its checksum is taken over."""

    position: int
    end: int
    crc: int
    fields: tuple[bytes, ...]

    @property
    def topic(self) -> bytes:
        return self.fields[2]

    @property
    def value(self) -> bytes:
        return self.fields[5]

    def is_control(self, topic: bytes, *sizes: int) -> bool:
        return self.topic == topic and not self.fields[4] and len(self.value) in sizes

    def matches(self, crc: Crc) -> bool:
        if crc == "puro":
            return crc_puro(self.fields) == self.crc
        return crc8(b"".join(self.fields)) == self.crc


class PuroSegment:
    """
    One Puro file. Iterate `records()`; afterwards `sealed` says whether it ended with a tombstone.

    `generation` and `crc` are detected from the file unless given.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        generation: Generation | None = None,
        crc: Crc | None = None,
        on_corruption: Literal["raise", "skip"] = "raise",
        report: PuroReport | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.sealed = False
        self.report = report or PuroReport()
        self._skip = on_corruption == "skip"
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115  (closed by close())
        except FileNotFoundError as error:
            raise LogNotFoundError(f"no Puro segment at {self.path}") from error
        self.size = os.fstat(self._file.fileno()).st_size
        self._buffer = b""
        self._base = 0
        self.generation: Generation = generation or self._detect_generation()
        self.crc: Crc = crc or self._detect_crc()
        self.report.generation, self.report.crc = self.generation, self.crc
        self.report.segments += 1
        self.report.bytes += self.size

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def records(self) -> Iterator[PuroRecord]:
        """
        Every committed data record, in order.

        Raises:
            LogCorruptionError: at damage, unless the segment was opened with on_corruption="skip".
        """
        position = 0
        while position < self.size and not self.sealed:
            try:
                if self.generation == "flat":
                    position = yield from self._flat_record(position)
                else:
                    position = yield from self._block(position)
            except _DamageError as damage:
                position = self._damaged(damage)
        if self.sealed and position < self.size:
            self._damaged(_DamageError("chain", position, self.size, "bytes after the tombstone"))

    def _flat_record(self, position: int) -> Generator[PuroRecord, None, int]:
        entry = self._entry(position)
        if not entry.matches(self.crc):
            raise _DamageError("bad-record", position, entry.end, "the record fails its checksum")
        if entry.is_control(TOMBSTONE, 0):
            self.sealed = True
        else:
            yield self._deliver(entry)
        return entry.end

    def _block(self, position: int) -> Generator[PuroRecord, None, int]:
        head = self._entry(position)
        if head.is_control(TOMBSTONE, 0) and head.matches(self.crc):
            self.sealed = True
            return head.end
        width = 1 if self.generation == "block6" else 5
        if not head.is_control(BLOCK_START, width) or head.value[0] > 1:
            raise _DamageError("bad-header", position, self.size, "no block starts here")
        if head.value[0] == 0:
            return self._pass_incomplete(head)
        try:
            end = self._find_end(head)
        except _DamageError as damage:
            raise _DamageError(damage.reason, position, self.size, str(damage)) from damage
        try:
            # Two walks: the whole block is checked before any of it is delivered.
            self._check_block(head, end)
        except _DamageError as damage:
            # The whole block is lost; its end is known, so reading continues after it.
            raise _DamageError(damage.reason, position, end.end, str(damage)) from damage
        for entry in self._entries(head.end, end.position):
            if entry.topic != FILLER:
                yield self._deliver(entry)
        return end.end

    def _check_block(self, head: _Entry, end: _Entry) -> None:
        for entry in self._entries(head.end, end.position):
            if not entry.matches(self.crc):
                raise _DamageError(
                    "bad-record", entry.position, entry.end,
                    f"the record at byte {entry.position} fails its checksum",
                )  # fmt: skip
            if entry.topic in {TOMBSTONE, BLOCK_START, BLOCK_END}:
                raise _DamageError(
                    "chain", entry.position, entry.end,
                    f"the record at byte {entry.position} is a control record inside a block",
                )  # fmt: skip
        if not end.matches(self.crc):
            raise _DamageError("bad-record", end.position, end.end, "its end fails its checksum")

    def _find_end(self, head: _Entry) -> _Entry:
        """Walk from a block's start to its end record and compare the lengths they name."""
        start = head.position
        named = int.from_bytes(head.value[1:], "big") if self.generation == "block10" else None
        if named is not None:
            if named < head.end - start:
                raise _DamageError("bad-header", start, self.size, f"a block of {named} bytes")
            if start + named + BLOCK_END_BYTES > self.size:
                raise _DamageError("short", start, self.size, "the file ends inside a block")
            entry = self._entry(start + named)
        else:
            entry = next(
                (e for e in self._entries(head.end, self.size) if e.is_control(BLOCK_END, 4)), head
            )
        if entry is head:
            raise _DamageError("short", start, self.size, "the block has no end record")
        if (
            not entry.is_control(BLOCK_END, 4)
            or int.from_bytes(entry.value, "big") != entry.position - start
        ):
            raise _DamageError("chain", start, self.size, "the block's end does not name its start")
        return entry

    def _pass_incomplete(self, head: _Entry) -> int:
        """Return the end of a block with a low signal, and report the block."""
        try:
            end = self._find_end(head).end
        except _DamageError:
            end = self.size
        self.report.incomplete.append(PuroRange(self.path, head.position, end, "low-signal"))
        return end

    def _deliver(self, entry: _Entry) -> PuroRecord:
        self.report.records += 1
        return PuroRecord(entry.topic, entry.fields[4], entry.value, entry.position)

    def _damaged(self, damage: _DamageError) -> int:
        """Raise, or report the range and return where reading continues."""
        self.report.damaged.append(
            PuroRange(self.path, damage.byte_from, damage.byte_to, damage.reason)
        )
        if not self._skip:
            raise LogCorruptionError(
                f"{self.path}: bytes {damage.byte_from} to {damage.byte_to} are damaged: {damage}",
                segment=self.path,
                byte_from=damage.byte_from,
                byte_to=damage.byte_to,
                offset_from=self.report.records,
                offset_to=None,
                reason=damage.reason,
            ) from damage
        return damage.byte_to

    # Bytes.

    def _window(self, position: int, size: int) -> int:
        """Read `size` bytes from `position` into the buffer; return where they start in it."""
        at = position - self._base
        if at < 0 or at + size > len(self._buffer):
            self._file.seek(position)
            self._buffer = self._file.read(max(size, READ_BYTES))
            self._base, at = position, 0
            if len(self._buffer) < size:
                raise _DamageError(
                    "short", position, self.size, "the file shrank while it was read"
                )
        return at

    def _entry(self, position: int) -> _Entry:
        """Return the record at `position`; its lengths and limits are checked, its CRC is not."""
        head = min(5, self.size - position)
        at = self._window(position, head)
        try:
            total, after_total = decode_varlong(self._buffer, at + 1, at + head)
        except ValueError as error:
            reason = "short" if head < 5 else "bad-record"
            raise _DamageError(reason, position, self.size, "a length that does not end") from error
        end = position + (after_total - at) + total
        if not 2 <= total <= TOTAL_LENGTH_MAX:
            zero = not any(self._buffer[at : at + 64])
            raise _DamageError(
                "zero" if zero else "bad-record", position, self.size,
                f"a record of {total} bytes, the limits are 2 and {TOTAL_LENGTH_MAX}",
            )  # fmt: skip
        if end > self.size:
            raise _DamageError("short", position, self.size, "the file ends inside a record")
        at = self._window(position, end - position)
        return self._fields(position, at, at + end - position)

    def _fields(self, position: int, at: int, stop: int) -> _Entry:
        buf = self._buffer
        try:
            _, topic_length_at = decode_varlong(buf, at + 1, stop)
            topic_size, topic_at = decode_varlong(buf, topic_length_at, stop)
            key_length_at = topic_at + topic_size
            key_size, key_at = decode_varlong(buf, key_length_at, stop)
        except ValueError as error:
            raise _DamageError(
                "bad-record", position, self.size, "lengths that do not fit"
            ) from error
        value_at = key_at + key_size
        if value_at > stop:
            raise _DamageError("bad-record", position, self.size, "lengths that do not fit")
        for name, size, limit in (
            ("topic", topic_size, TOPIC_BYTES_MAX),
            ("key", key_size, KEY_BYTES_MAX),
            ("value", stop - value_at, VALUE_BYTES_MAX),
        ):
            if size > limit:
                raise _DamageError(
                    "bad-record",
                    position,
                    self.size,
                    f"a {name} of {size} bytes, the limit is {limit}",
                )
        fields = (
            buf[at + 1 : topic_length_at], buf[topic_length_at:topic_at], buf[topic_at:key_length_at],
            buf[key_length_at:key_at], buf[key_at:value_at], buf[value_at:stop],
        )  # fmt: skip
        return _Entry(position, position + stop - at, buf[at], fields)

    def _entries(self, position: int, stop: int) -> Iterator[_Entry]:
        while position < stop:
            entry = self._entry(position)
            if entry.end > stop:
                raise _DamageError(
                    "chain", position, self.size, "a record reaches out of its block"
                )
            yield entry
            position = entry.end

    def _detect_generation(self) -> Generation:
        try:
            first = self._entry(0) if self.size else None
        except _DamageError:
            first = None
        if first and first.is_control(BLOCK_START, 1):
            return "block6"
        return "block10" if first and first.is_control(BLOCK_START, 5) else "flat"

    def _detect_crc(self) -> Crc:
        """Detect the CRC by the first records, without block starts, whose CRC may be stale."""
        votes = {"plain": 0, "puro": 0}
        try:
            for count, entry in enumerate(self._entries(0, self.size)):
                if entry.topic != BLOCK_START:
                    votes["plain"] += entry.matches("plain")
                    votes["puro"] += entry.matches("puro")
                if count >= CRC_SAMPLE_RECORDS:
                    break
        except _DamageError:
            pass  # reported when the records are read
        if votes["plain"] == votes["puro"]:
            return "plain" if self.generation == "flat" else "puro"
        return "plain" if votes["plain"] > votes["puro"] else "puro"


def read_puro(
    path: str | os.PathLike[str],
    *,
    generation: Generation | None = None,
    crc: Crc | None = None,
    on_corruption: Literal["raise", "skip"] = "raise",
    spurious: bool = False,
    report: PuroReport | None = None,
) -> Iterator[PuroRecord]:
    """
    Yield the records of a Puro file, or of a directory of segments.

    Raises:
        LogNotFoundError: there is no such file, or no segment in the directory.
        LogCorruptionError: damage, or a segment missing between two others.
    """
    report = report or PuroReport()
    skip: Literal["raise", "skip"] = on_corruption
    paths = puro_segments(path)
    sealed = True
    for index, segment_path in enumerate(paths):
        if not sealed and not spurious:
            report.spurious.extend(paths[index:])
            return
        if index:
            _check_follows(paths[index - 1], segment_path, report, skip=skip == "skip")
        with PuroSegment(
            segment_path, generation=generation, crc=crc, on_corruption=skip, report=report
        ) as segment:
            yield from segment.records()
            sealed = segment.sealed


def puro_segments(path: str | os.PathLike[str]) -> list[str]:
    """Return the files to read, in order: the file itself, or a directory's `stream<N>.puro`."""
    place = Path(path)
    if not place.is_dir():
        if not place.exists():
            raise LogNotFoundError(f"no Puro file or directory at {place}")
        return [str(place)]
    found = [(int(m[1]), str(p)) for p in place.iterdir() if (m := SEGMENT_NAME.fullmatch(p.name))]
    if not found:
        raise LogNotFoundError(f"no stream<N>.puro in directory {place}")
    return [name for _, name in sorted(found)]


def _check_follows(before: str, after: str, report: PuroReport, *, skip: bool) -> None:
    numbers = [int(m[1]) for p in (before, after) if (m := SEGMENT_NAME.fullmatch(Path(p).name))]
    if len(numbers) != 2 or numbers[1] == numbers[0] + 1:
        return
    missing = str(Path(before).with_name(f"stream{numbers[0] + 1}.puro"))
    report.damaged.append(PuroRange(missing, 0, 0, "missing"))
    if not skip:
        raise LogCorruptionError(
            f"{missing} is missing: {before} ends with a tombstone and the next segment is {after}",
            segment=missing,
            byte_from=0,
            byte_to=0,
            offset_from=report.records,
            offset_to=None,
            reason="missing",
        )
