"""
Write the sealed segments of a log to a lake, in this process, without a JVM.

The log is read once. The rows of a table go to files in a draft directory, which the format then commits
(virta.spark.lake.formats). A killed compaction leaves a draft, which the next one removes.
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

import virta
from virta.log.format.damage import gap_error
from virta.spark.lake.columns import check_type, table_schema
from virta.spark.lake.directory import (
    DRAFT,
    EVENTS,
    FORMATS,
    TYPED_TOPICS_MAX,
    Lake,
    LakeError,
    only_writer,
    table_name,
)
from virta.spark.lake.formats import format_of
from virta.spark.lake.parquet import FILE_BYTES_MAX, TableWriter
from virta.spark.schemas import RECORD
from virta.spark.source.events import EventDecoder
from virta.spark.source.options import read_options
from virta.spark.source.source import LogReader
from virta.spark.versions import arrow_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql.types import DataType, StructType

    from virta.spark.lake.formats import TableFormat
    from virta.spark.lake.parquet import DataFile

BUFFER_BYTES_MAX = 256 * 1024 * 1024  # rows of all tables that are not in a file yet


@dataclass(frozen=True)
class LakeReport:
    """What one compaction did: offsets `first` to `next` (not included) are in the lake now."""

    first: int
    next: int
    records: int
    bytes: int
    files: int = 0


def sealed_end(log_path: str) -> tuple[str, int, int]:
    """Return the id of the log, its first offset, and the offset after its last sealed segment."""
    with virta.open(log_path, create=False, read_only=True) as log:
        sealed = [segment.next for segment in log.segments() if segment.sealed]
        return log.id, log.first_offset, max(sealed, default=log.first_offset)


def compact(
    log_path: str,
    path: str,
    *,
    format: str | None = None,  # noqa: A002 - the name of the command's option
    types: Mapping[str, str | DataType] | None = None,
    on_gap: str = "raise",
    file_bytes_max: int = FILE_BYTES_MAX,
) -> LakeReport:
    """
    Write the sealed segments that are not in the lake yet.

    Args:
        format: parquet (default), delta or iceberg; an existing lake has its own.
        types: the type of the data of topics, as DDL or a Spark type: each of them gets a table of its own. A topic
            keeps its type; one that gets a type later has its earlier records in the table `events`.
        on_gap: `skip` goes on when the log has lost offsets that the lake does not have.

    Raises:
        LogGapError: the log no longer has the offset the lake ends at, and `on_gap` is not skip.
        LakeError: the lake belongs to another log, has another format or other types, or is being written.
    """
    log_id, first, stop = sealed_end(log_path)
    root = Path(path)
    with only_writer(root):
        lake = with_types(opened(root, log_id, format), types or {})
        start = first if lake.next is None else lake.next
        if start < first and on_gap != "skip":
            raise gap_error(log_path, start, first)
        for stale in root.glob(f"{DRAFT}*"):
            shutil.rmtree(stale, ignore_errors=True)
        if stop <= start:
            return LakeReport(start, start, 0, 0)
        lake.save()  # types before tables: readers know what they find
        return write(lake, log_path, (start, max(start, first), stop), file_bytes_max)


def opened(root: Path, log_id: str, form: str | None) -> Lake:
    """Return the lake of a directory, or a new one."""
    lake = Lake.load(root) or Lake(root, form or "parquet", log_id)
    if form is not None and form not in FORMATS:
        raise LakeError(f"format {form!r}: expected {', '.join(FORMATS)}")
    if form is not None and form != lake.format:
        raise LakeError(f"{root} has format {lake.format}: use another directory for {form}")
    if lake.log is not None and lake.log != log_id:
        raise LakeError(f"{root} is the lake of log {lake.log}, not of {log_id}")
    return replace(lake, log=log_id)


def with_types(lake: Lake, types: Mapping[str, str | DataType]) -> Lake:
    """Return the lake with the types of topics added."""
    known, begin = dict(lake.types), dict(lake.typed_from)
    # A killed compaction may have committed the table `events` beyond the lake's end.
    committed = format_of(lake).committed(EVENTS) if types else None
    for topic, kind in types.items():
        found = check_type(kind, topic, lake.format)
        if topic not in known:
            begin[topic] = max(lake.next or 0, committed or 0)
        if known.setdefault(topic, found) != found:
            raise LakeError(
                f"{topic!r} has another type in {lake.path}: a topic keeps its type; what does not fit"
                " is in `rescued`. Use another directory for a new one"
            )
    if len(known) > TYPED_TOPICS_MAX:
        raise LakeError(f"{len(known)} topics with a type: at most {TYPED_TOPICS_MAX}")
    return replace(lake, types=known, typed_from=begin)


def write(
    lake: Lake, log_path: str, offsets: tuple[int, int, int], file_bytes_max: int
) -> LakeReport:
    """Write the offsets from the second to the third; the range begins at the first, before a gap."""
    start, readable, stop = offsets
    tables = format_of(lake)
    draft = lake.path / f"{DRAFT}{uuid.uuid4().hex}"
    writers = TableWriters(lake, tables, draft, file_bytes_max)
    for batch in records(log_path, readable, stop):
        writers.add(batch)
    written = writers.close()
    if lake.format == "parquet" or written:
        tables.commit(written, (start, stop), draft)
    shutil.rmtree(draft, ignore_errors=True)
    begin = start if lake.first is None else lake.first
    # Ranges tell themselves where they end.
    ends = {} if lake.format == "parquet" else {**lake.tables, **dict.fromkeys(written, stop)}
    replace(lake, first=begin, next=stop, tables=ends).save()
    made = [file for _, some in written.values() for file in some]
    rows, size = sum(file.rows for file in made), sum(file.bytes for file in made)
    return LakeReport(start, stop, rows, size, len(made))


def records(log_path: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Yield the records of an offset range as the Spark source decodes them."""
    options = read_options({"path": log_path, "start": str(start), "end": str(stop)})
    reader = LogReader(options, RECORD)
    for partition in reader.partitions():
        yield from reader.read(partition)


class TableWriters:
    """Distributes records to the writers of their tables, decoded with each table's type."""

    def __init__(self, lake: Lake, tables: TableFormat, draft: Path, file_bytes_max: int) -> None:
        self.lake, self.tables, self.draft = lake, tables, draft
        self.file_bytes_max = file_bytes_max
        self._open: dict[str, tuple[EventDecoder, TableWriter, pa.Schema, int]] = {}
        self._typed = pa.array(list(lake.types), pa.string())

    def add(self, batch: pa.RecordBatch) -> None:
        topics = batch.column("topic")
        is_typed = pc.is_in(topics, value_set=self._typed)
        self._write(EVENTS, None, batch.filter(pc.invert(is_typed)))
        for topic in pc.unique(topics.filter(is_typed)).to_pylist():
            self._write(table_name(topic), topic, batch.filter(pc.equal(topics, topic)))
        if sum(writer.buffered for _, writer, _, _ in self._open.values()) > BUFFER_BYTES_MAX:
            for _, writer, _, _ in self._open.values():
                writer.flush()

    def _write(self, table: str, topic: str | None, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if table not in self._open:
            self._open[table] = self._begin(table, topic)
        decoder, writer, schema, committed = self._open[table]
        # A killed compaction may have committed this table, and not the last one.
        batch = batch.filter(pc.greater_equal(batch.column("offset"), committed))
        if batch.num_rows:
            writer.add(decoded(batch, decoder, schema))

    def _begin(
        self, table: str, topic: str | None
    ) -> tuple[EventDecoder, TableWriter, pa.Schema, int]:
        columns: StructType = table_schema(self.lake, topic)
        fields = {f.name: f.dataType for f in columns.fields if f.name not in RECORD.names}
        schema = arrow_schema(columns)
        writer = TableWriter(
            self.draft / table,
            schema,
            bytes_max=self.file_bytes_max,
            has_day=self.tables.has_day,
        )
        begin = 0 if topic is None else self.lake.typed_from.get(topic, 0)
        committed = max(begin, self.tables.committed(table) or 0)
        return EventDecoder(fields), writer, schema, committed

    def close(self) -> dict[str, tuple[pa.Schema, list[DataFile]]]:
        """Return the files of each table that has new ones."""
        done = {name: (schema, w.close()) for name, (_, w, schema, _) in self._open.items()}
        return {name: found for name, found in done.items() if found[1]}


def decoded(batch: pa.RecordBatch, decoder: EventDecoder, schema: pa.Schema) -> pa.RecordBatch:
    """Return records with the columns of their events."""
    values = batch.column("value")
    if values.offset:  # the decoder reads buffers from their beginning
        values = pa.concat_arrays([values.slice(0, 0), values])
    _, ends, data = values.buffers()
    found = decoder.decode(memoryview(ends)[: 4 * (len(values) + 1)], data or b"")
    found |= {name: batch.column(name) for name in RECORD.names}
    return pa.RecordBatch.from_arrays([found[name] for name in schema.names], schema=schema)
