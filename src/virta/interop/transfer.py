"""
Between a log and Puro's files: import every generation, export the flat one.

An import appends in batches in file order. An export is complete or does not exist: it is written under a
temporary name, synced, then renamed. Offsets and times are the log's own and do not exist in Puro.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

from virta import files
from virta.errors import LogFormatError, LogWriteError
from virta.interop.puro import Crc, Generation, PuroReport, encode, puro_segments, read_puro

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from virta.log import Log
    from virta.log.log import Durability
    from virta.log.record import Record

BATCH_RECORDS_DEFAULT: Final = 1000
# A batch is in memory twice: as records, and encoded.
BATCH_BYTES: Final = 8 * 1024 * 1024
# Puro's lengths are 32 bits; its author wants segments below that.
EXPORT_SEGMENT_BYTES: Final = 1024 * 1024 * 1024
PROGRESS_RECORDS: Final = 1024


@dataclass
class ImportReport(PuroReport):
    first_offset: int | None = None
    next_offset: int | None = None


@dataclass
class ExportReport:
    records: int = 0
    bytes: int = 0
    files: list[str] = field(default_factory=list)


def import_puro(
    log: Log,
    path: str | os.PathLike[str],
    *,
    generation: Generation | None = None,
    crc: Crc | None = None,
    on_corruption: Literal["raise", "skip"] = "raise",
    spurious: bool = False,
    batch: int = BATCH_RECORDS_DEFAULT,
    durability: Durability | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """
    Append the records of a Puro file or directory to a log.

    What was read before damage is raised stays in the log; the report says how much that was.
    """
    report = ImportReport()
    total = sum(Path(name).stat().st_size for name in puro_segments(path))
    records = read_puro(
        path,
        generation=generation,
        crc=crc,
        on_corruption=on_corruption,
        spurious=spurious,
        report=report,
    )
    done = 0
    for chunk, size in _chunks(records, batch):
        appended = log.append_many(chunk, durability=durability)
        if report.first_offset is None:
            report.first_offset = appended.offset
        report.next_offset = appended.offset + appended.count
        done += size
        if progress:
            progress(min(done, total), total)
    if progress:
        progress(total, total)
    return report


def export_puro(
    log: Log,
    path: str | os.PathLike[str],
    *,
    crc: Crc = "plain",
    topics: Iterable[str | bytes] | str | bytes | None = None,
    start: Any = "earliest",
    end: Any = None,
    overwrite: bool = False,
    segment_bytes: int = EXPORT_SEGMENT_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """
    Write records of a log as flat Puro: into a file, or as `stream<N>.puro` into an existing directory.

    Raises:
        LogWriteError: the file is there already and `overwrite` is not set, or cannot be written.
    """
    place = Path(path)
    directory = place.is_dir()
    report = ExportReport()
    with log.read(topics, start=start, end=end) as reader:
        records = _with_progress(reader, log.first_offset, log.next_offset, progress)
        encoded = (encode(bytes(r.topic), bytes(r.key), r.value, crc) for r in records)
        if not directory:
            report.records = _write_file(place, encoded, report, overwrite=overwrite)
            return report
        rest = _Lookahead(encoded)
        number = 0
        while number == 0 or not rest.empty:
            target = place / f"stream{number}.puro"
            part = rest.take(segment_bytes, encode(b"\x00", b"", b"", crc))
            _write_file(target, part, report, overwrite=overwrite)
            number += 1
        report.records = rest.records
    return report


def export_lines(
    lines: Iterable[bytes], path: str | os.PathLike[str], *, overwrite: bool
) -> ExportReport:
    """Write ready-made lines to a file, whole or not at all."""
    report = ExportReport()
    report.records = _write_file(Path(path), lines, report, overwrite=overwrite)
    return report


def write_flat(stream: BinaryIO, records: Iterable[Record], crc: Crc = "plain") -> int:
    """Write records to a binary stream as flat Puro; returns how many."""
    count = 0
    for record in records:
        stream.write(encode(bytes(record.topic), bytes(record.key), record.value, crc))
        count += 1
    return count


class _Lookahead:
    """Encoded records, read one ahead, so that a tombstone is written only when more follows."""

    def __init__(self, encoded: Iterator[bytes]) -> None:
        self._encoded = encoded
        self._next = next(encoded, None)
        self.records = 0

    @property
    def empty(self) -> bool:
        return self._next is None

    def take(self, size_max: int, tombstone: bytes) -> Iterator[bytes]:
        """Records up to `size_max` bytes, at least one, and the tombstone when some are left."""
        size = 0
        while self._next is not None:
            if size and size + len(self._next) + len(tombstone) > size_max:
                yield tombstone
                return
            size += len(self._next)
            self.records += 1
            yield self._next
            self._next = next(self._encoded, None)


def _write_file(
    target: Path, parts: Iterable[bytes], report: ExportReport, *, overwrite: bool
) -> int:
    if target.exists() and not overwrite:
        raise LogWriteError(f"{target} exists already: choose another name or allow overwriting")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with open(temporary, "wb", opener=files.open_file) as stream:
            for part in parts:
                stream.write(part)
                count += 1
            report.bytes += stream.tell()
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
        files.sync_directory(target.parent)
    except OSError as error:
        raise LogWriteError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    report.files.append(str(target))
    return count


def _with_progress(
    records: Iterable[Record], first: int, last: int, progress: Callable[[int, int], None] | None
) -> Iterator[Record]:
    total = max(last - first, 1)
    for count, record in enumerate(records):
        if progress and count % PROGRESS_RECORDS == 0:
            progress(min(record.offset - first, total), total)
        yield record
    if progress:
        progress(total, total)


def _chunks(
    records: Iterable[Any], count_max: int
) -> Iterator[tuple[list[tuple[bytes, bytes, bytes]], int]]:
    """Records in batches of at most `count_max` and about BATCH_BYTES, each with its size."""
    chunk: list[tuple[bytes, bytes, bytes]] = []
    size = 0
    for record in records:
        if len(record.topic) == 1 and record.topic[0] < 0x20:
            raise LogFormatError(
                f"the record at byte {record.position} has the topic {record.topic!r}: the log keeps"
                " one-byte topics below 0x20 for itself"
            )
        chunk.append((record.topic, record.key, record.value))
        size += len(record.topic) + len(record.key) + len(record.value) + 5
        if len(chunk) >= count_max or size >= BATCH_BYTES:
            yield chunk, size
            chunk, size = [], 0
    if chunk:
        yield chunk, size
