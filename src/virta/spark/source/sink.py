"""
Rows of a query appended to a log, exactly once.

    task: rows ──► message (small) or staged Arrow file (large)      driver: messages ──► append_many

Invariant: the rows of one micro-batch are appended by the driver with a producer id made of the
query's id and the micro-batch's number as its sequence. Both are in the header of the log's batch, under its
checksum, so the append and its mark are one write. When Spark runs a micro-batch again (restart, lost driver),
the log refuses the sequence it already has.

A micro-batch larger than the log's largest batch becomes several parts with one producer id each, so each is
refused separately; only then can a reader see a part of a micro-batch before the rest. A run that repeats it may have
its rows in another order, or other rows, so its parts would not be those of the first attempt. Therefore the first
attempt keeps its rows until all parts are appended (virta.spark.source.staging), and a repeat appends those.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, StringType, StructType

import virta
from virta import files
from virta.errors import LogNotFoundError, VirtaError
from virta.log.format.directory import read_meta
from virta.spark.launch.worker_memory import prepare_memory
from virta.spark.source.options import WRITE_OPTIONS, OptionError, by_name, required
from virta.spark.source.staging import (
    STAGING,
    Manifest,
    Staged,
    discard,
    find_manifest,
    sweep,
    write_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MESSAGE_BYTES_MAX = (
    256 * 1024
)  # larger ones go through a file: messages pass through the driver's JVM
APPEND_BYTES_MAX = 48 * 1024 * 1024  # below the log's largest batch (64 MiB), with overhead
RECORD_BYTES_MORE = 16  # overhead of a record in the log
Durability = Literal["none", "interval", "group", "fsync"]

Record = tuple[bytes, bytes, bytes]
Sizes = np.ndarray[Any, np.dtype[np.int64]]


class SinkError(VirtaError):
    """Rows that cannot become records."""

    default_code = "sink_invalid"


@dataclass(frozen=True)
class WriteOptions:
    path: str
    topic: str | None
    durability: Durability | None
    query: str | None
    sequence: int | None
    stream: str  # the id of the log: an executor that sees another one does not see the log


def write_options(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> WriteOptions:
    """Check options and columns on the driver, before a task starts; create the log if it does not exist."""
    given = by_name(options, WRITE_OPTIONS)
    if overwrite:
        raise OptionError('a log is only appended to: use .mode("append")')
    durability: Any = given.get("durability")
    if durability is not None and durability not in get_args(Durability):
        raise OptionError(
            f"option durability is {durability!r}: expected {', '.join(get_args(Durability))}"
        )
    sequence = given.get("sequence")
    if sequence is not None and not sequence.isdecimal():
        raise OptionError(f"option sequence is {sequence!r}: expected a whole number")
    if (sequence is None) != (given.get("queryId") is None):
        raise OptionError("options queryId and sequence belong together: give both or none")
    topic = given.get("topic")
    check_columns(schema, topic)
    path = required(given, "path", "the log's directory, as in .save(directory)")
    with virta.open(path) as log:
        stream = log.id
    return WriteOptions(
        path=path,
        topic=topic,
        durability=durability,
        query=given.get("queryId"),
        sequence=None if sequence is None else int(sequence),
        stream=stream,
    )


def check_columns(schema: StructType, topic: str | None) -> None:
    kinds = {field.name: field.dataType for field in schema.fields}
    if "value" not in kinds:
        raise SinkError(
            f"there is no column 'value' among {', '.join(kinds)}: a record is (topic, key, value);"
            " make one with virta.spark.to_events(df, ...) or to_json(struct(...)) AS value"
        )
    if "topic" not in kinds and topic is None:
        raise SinkError("no topic: give the option topic or a column of that name")
    for name, kind in kinds.items():
        if name in {"offset", "timestamp"}:
            continue  # columns of the source; the log assigns its own
        if name not in {"topic", "key", "value"}:
            raise SinkError(f"column {name!r} has no place in a record: select topic, key, value")
        if not isinstance(kind, BinaryType | StringType):
            raise SinkError(f"column {name!r} is {kind.simpleString()}: expected string or binary")


# On the executors.


def stage(options: WriteOptions, batches: Iterable[pa.RecordBatch]) -> Staged:
    """Store a task's rows until the driver commits them."""
    prepare_memory()
    context = TaskContext.get()
    partition = context.partitionId() if context else 0
    query = context.getLocalProperty("sql.streaming.queryId") if context else None
    kept = [trim(batch) for batch in batches]
    count = sum(batch.num_rows for batch in kept)
    if not kept:
        return Staged(partition, query, 0, None, None)
    if sum(batch.nbytes for batch in kept) <= MESSAGE_BYTES_MAX:
        sink = pa.BufferOutputStream()
        write_stream(sink, kept)
        return Staged(partition, query, count, sink.getvalue().to_pybytes(), None)
    check_sees_log(options)
    directory = Path(options.path) / STAGING
    files.make_inside(directory)
    path = directory / f"{uuid.uuid4().hex}.arrow"
    with open(path, "xb", opener=files.open_file) as file:
        write_stream(file, kept)
    return Staged(partition, query, count, None, str(path))


def check_sees_log(options: WriteOptions) -> None:
    """Raise SinkError unless this machine sees the log that the driver opened."""
    try:
        found = str(read_meta(Path(options.path)).stream)
    except LogNotFoundError:
        found = "none"
    if found != options.stream:
        raise SinkError(
            f"this executor does not see the log at {options.path} (it has {found} there, the driver"
            f" {options.stream}): a task with over {MESSAGE_BYTES_MAX} bytes of rows needs the log's"
            " directory; run the executor on the driver's machine, or use smaller partitions"
        )


def trim(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select([n for n in batch.schema.names if n in {"topic", "key", "value"}])


def write_stream(sink: pa.NativeFile, batches: list[pa.RecordBatch]) -> None:
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


# On the driver.


def publish(options: WriteOptions, messages: Iterable[Staged], sequence: int | None) -> None:
    """Append the rows of all tasks, in the order of partitions, unless the log has them already."""
    staged = sorted((m for m in messages if m.count), key=lambda m: m.partition)
    if not staged:
        return
    query = options.query or staged[0].query
    directory = Path(options.path) / STAGING
    with virta.open(options.path, create=False) as log:
        if query is None or sequence is None:
            for records in chunks(read_records(options, staged)):
                log.append_many(records, durability=options.durability)
        else:
            append_once(options, log, staged, (query, sequence))
    discard(staged)
    sweep(directory)


def append_once(
    options: WriteOptions, log: virta.Log, staged: list[Staged], batch: tuple[str, int]
) -> None:
    """Append a micro-batch (query, sequence) in parts, each at most once."""
    query, sequence = batch
    directory = Path(options.path) / STAGING
    manifest: Manifest | None = find_manifest(directory, producer_id(query, 0), sequence)
    is_repeat = manifest is not None
    parts = chunks(read_records(options, manifest.staged() if manifest else staged))
    first, second = next(parts), next(parts, None)
    if second is not None and manifest is None:
        manifest = write_manifest(directory, producer_id(query, 0), sequence, staged)
        parts = chunks(read_records(options, manifest.staged()))
        first, second = next(parts), next(parts)
    for part, records in enumerate(chain([first], [second] if second else [], parts)):
        producer = (producer_id(query, part), sequence)
        done = log.append_many(records, durability=options.durability, producer=producer)
        if done.duplicate and not is_repeat:
            break  # all parts are there: while one is missing, the manifest stays
    if manifest is not None:
        manifest.remove()


def producer_id(query: str, part: int) -> int:
    """Return 64 bits for a query and the part of a micro-batch; the log reserves 0 and 1."""
    digest = hashlib.sha256(f"{query}/{part}".encode()).digest()
    return int.from_bytes(digest[:8], "little") | 1 << 63


def read_records(
    options: WriteOptions, staged: Iterable[Staged]
) -> Iterator[tuple[list[Record], Sizes]]:
    """Yield the records of all tasks in batches, with the size of each record."""
    fallback = None if options.topic is None else options.topic.encode()
    for message in staged:
        source = pa.BufferReader(message.rows) if message.path is None else pa.OSFile(message.path)
        with source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                yield batch_records(batch, fallback)


def batch_records(batch: pa.RecordBatch, fallback: bytes | None) -> tuple[list[Record], Sizes]:
    given = [binary_column(batch, "topic", fallback)]
    given += [binary_column(batch, name, b"") for name in ("key", "value")]
    if given[0].null_count:
        raise SinkError("a row has no topic (null): give the option topic as a default")
    sizes = np.full(batch.num_rows, RECORD_BYTES_MORE, np.int64)
    for column in given:
        sizes += pc.binary_length(column).to_numpy(zero_copy_only=False)
    return list(zip(*(column.to_pylist() for column in given), strict=True)), sizes


def binary_column(batch: pa.RecordBatch, name: str, default: bytes | None) -> pa.Array:
    """Return a column as bytes, with the default where it has none."""
    if name not in batch.schema.names:
        return pa.repeat(pa.scalar(default, pa.binary()), batch.num_rows)
    column = batch.column(name).cast(pa.binary())
    return column.fill_null(default) if column.null_count and default is not None else column


def chunks(parts: Iterable[tuple[list[Record], Sizes]]) -> Iterator[list[Record]]:
    """
    Yield lists that fit in one batch of the log.

    The boundaries depend only on the records, not on the parts: a micro-batch that is run again is split equally.
    """
    chunk: list[Record] = []
    size = 0
    for records, sizes in parts:
        ends = np.cumsum(sizes)
        at = 0
        while at < len(records):
            before = int(ends[at - 1]) if at else 0
            fits = int(np.searchsorted(ends, before + APPEND_BYTES_MAX - size, side="right"))
            upto = max(fits, at if chunk else at + 1)
            chunk += records[at:upto]
            size += int(ends[upto - 1]) - before if upto > at else 0
            at = upto
            if at < len(records):
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


class LogWriter(DataSourceArrowWriter):
    """`df.write.format("virta")`: one atomic append; idempotent with queryId and sequence."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self.options = write_options(options, schema, overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return stage(self.options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        publish(self.options, staged_only(messages), self.options.sequence)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        discard(staged_only(messages))


class LogStreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("virta")`: one append per micro-batch, each once."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self.options = write_options(options, schema, overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return stage(self.options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        publish(self.options, staged_only(messages), batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        # Also called after a failed commit: what was appended stays, and a replay finds it.
        discard(staged_only(messages))


def staged_only(messages: Iterable[WriterCommitMessage | None]) -> list[Staged]:
    return [message for message in messages if isinstance(message, Staged)]
