"""
The log as a Spark data source: `spark.read.format("virta")` and `spark.readStream.format("virta")`.

Planning happens once, in a Python process on the driver: offsets are fixed, then split by segment and byte range on
batch boundaries (virta.spark.source.splits). Executors decode a split's bytes straight to Arrow
(virta.spark.source.decode). A range of offsets always decodes to the same rows; with the offsets in Spark's
checkpoint that is the source's part of exactly-once.

Stream offsets are `{"epoch": e, "offset": n}`: n is the next offset to read, e changes when recovery drops published
offsets. Then the checkpoint no longer fits the log, and the query fails with that reason.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import BinaryType, StructType

from virta.errors import LogFormatError, VirtaError
from virta.spark.launch.worker_memory import prepare_memory
from virta.spark.matching.filter_set import FilterSet, document_of, joined, opened_set, small_set
from virta.spark.positions import StreamPosition
from virta.spark.schemas import EVENT, FILTER_ID, MATCH, RECORD, RESCUED, check_schema
from virta.spark.source.arrow import RECORD_COLUMNS, TEXT_COLUMNS, make_array
from virta.spark.source.decode import DecodedRows, ScanSpec, read_rows, report_skipped
from virta.spark.source.events import EventDecoder
from virta.spark.source.options import (
    OWN_PLAN,
    OptionError,
    ReadOptions,
    keep_options,
    read_options,
    table_options,
    with_kept_options,
)
from virta.spark.source.pushdown import Bounds, push
from virta.spark.source.sink import LogStreamWriter, LogWriter
from virta.spark.source.splits import Ends, Plan, Split
from virta.spark.versions import (
    HAS_READ_LIMITS,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    arrow_schema,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableMapping

    from pyspark.sql.datasource import Filter

logger = logging.getLogger("virta.spark")

PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class VirtaSource(DataSource):
    """The format `virta`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(dict(options))
        if (
            OWN_PLAN in self.options and "path" in self.options
        ):  # a table has its options in its schema
            self.options["end"] = end_now(self.options)

    @classmethod
    def name(cls) -> str:
        return "virta"

    def schema(self) -> StructType:
        options = read_options(table_options(self.options))
        found = MATCH if options.filters is not None else EVENT if options.events else RECORD
        return keep_options(found, self.options) if "provider" in self.options else found

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(with_kept_options(self.options, schema))
        if options.consumer is not None:
            raise OptionError(
                f"option consumer is {options.consumer!r}: only a stream has a position"
                " (spark.readStream)"
            )
        # Only in sessions with a plan per query (virta.spark.launch.plan_rule): others keep the plan of a query with
        # pushed conditions for all later queries on the loaded DataFrame. And Spark refuses such a reader while
        # push-down is off in the session, so only the process that pushes conditions gets one.
        pushing = options.pushdown and in_pushdown_worker()
        return (PushingReader if pushing else LogReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        options = read_options(with_kept_options(self.options, schema))
        return (LogStreamReader if HAS_READ_LIMITS else UnlimitedStreamReader)(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> LogWriter:  # noqa: FBT001
        options = with_kept_options(self.options, schema)
        return LogWriter(options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> LogStreamWriter:  # noqa: N802, FBT001
        return LogStreamWriter(dict(self.options), schema, overwrite=overwrite)


def end_now(given: MutableMapping[str, str]) -> str:
    """Return the option `end` with `latest` resolved: this object serves all queries on a DataFrame."""
    try:
        options = read_options(given)
        plan = make_plan(options)
    except VirtaError:
        return given.get("end", "latest")  # planning the query raises the error
    try:
        return str(resolve(options.end, plan.ends()))
    finally:
        plan.close()


def in_pushdown_worker() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return PUSHDOWN_WORKER in sys.modules or getattr(spec, "name", None) == PUSHDOWN_WORKER


@dataclass
class LogPartition(InputPartition):
    """The split of a task."""

    split: Split


class SplitDecoder:
    """Decodes splits to Arrow batches of the requested schema; pickled to the executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema, events=options.events, filters=options.filters is not None)
        self.scan = scan_spec(options)
        self.filters, self.on = options.filters, options.on
        # Executors on other machines do not see the file of a filter set.
        self.packed = None if self.filters is None else small_set(self.filters)
        self.schema = schema
        self.has_warned = False
        self.events: EventDecoder | None = None  # made on the executor
        self.record_names = [n for n in schema.names if n in RECORD_COLUMNS]
        self.text = [
            field.name
            for field in schema.fields
            if field.name in TEXT_COLUMNS and not isinstance(field.dataType, BinaryType)
        ]
        self.event_fields = {
            field.name: field.dataType
            for field in schema.fields
            if field.name not in RECORD_COLUMNS and field.name != FILTER_ID.name
        }

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        split = getattr(partition, "split", None)
        if split is None:  # Spark's placeholder for "no partitions"
            return
        schema = arrow_schema(self.schema)
        names = [*self.record_names]
        if (self.event_fields or self.filters) and "value" not in names:
            names.append("value")
        filters = None
        if self.filters is not None:
            packed = self.packed
            filters = opened_set(self.filters, None if packed is None else lambda: packed)
        prepare_memory()
        for rows in read_rows(self.scan, split, names, self.text):
            yield self.batch(rows, schema, filters)

    def batch(
        self, rows: DecodedRows, schema: pa.Schema, filters: FilterSet | None
    ) -> pa.RecordBatch:
        arrays: dict[str, pa.Array] = {}
        for name in self.record_names:
            column = rows.columns[RECORD_COLUMNS.index(name)]
            is_text = name in TEXT_COLUMNS and rows.is_text(name)
            arrays[name] = make_array(
                name, schema.field(name).type, rows.size, column, is_text=is_text
            )
        if self.event_fields:
            arrays.update(self.event_arrays(rows))
        if filters is not None:
            return self.matched(rows, arrays, schema, filters)
        return pa.RecordBatch.from_arrays([arrays[n] for n in schema.names], schema=schema)

    def matched(
        self, rows: DecodedRows, arrays: dict[str, pa.Array], schema: pa.Schema, filters: FilterSet
    ) -> pa.RecordBatch:
        """Return each row once per matching filter: decoding and matching in one process."""
        texts: Any = rows.columns[RECORD_COLUMNS.index("value")]
        if self.on == "data":
            texts = joined(map(document_of, value_slices(rows)))
        chosen, ids = filters.pairs(texts)
        taken = {name: array.take(chosen) for name, array in arrays.items()}
        taken[FILTER_ID.name] = ids
        return pa.RecordBatch.from_arrays([taken[n] for n in schema.names], schema=schema)

    def event_arrays(self, rows: DecodedRows) -> dict[str, pa.Array]:
        if self.events is None:
            self.events = EventDecoder(self.event_fields)
        buffers: Any = rows.columns[RECORD_COLUMNS.index("value")]
        found = self.events.decode(*buffers)
        self.report_misfits(self.events.misfits)
        return found

    def report_misfits(self, count: int) -> None:
        """Warn once a task about data that does not fit its type, unless the schema has `rescued`."""
        if count and not self.has_warned and RESCUED.name not in self.event_fields:
            self.has_warned = True
            logger.warning(
                "data of %d events does not fit its type and is null there: add the column"
                " `rescued string` to the schema for its text",
                count,
            )


def value_slices(rows: DecodedRows) -> Iterator[bytes]:
    """Yield the values of some rows, one by one."""
    buffers: Any = rows.columns[RECORD_COLUMNS.index("value")]
    bounds, data = memoryview(buffers[0]).cast("i").tolist(), buffers[1]
    for start, end in pairwise(bounds):
        yield data[start:end]


def scan_spec(options: ReadOptions) -> ScanSpec:
    return ScanSpec(
        root=options.path,
        topics=options.topics,
        time_from=options.time_from,
        time_to=options.time_to,
        skip_gaps=options.skip_gaps,
        skip_corruption=options.skip_corruption,
        problems=options.problems,
        rows_max=options.batch_rows,
    )


def make_plan(options: ReadOptions) -> Plan:
    return Plan(options.path, skip_corruption=options.skip_corruption, skip_gaps=options.skip_gaps)


def resolve(position: int | str, ends: Ends) -> int:
    if isinstance(position, int):
        return position
    return ends.first if position == "earliest" else ends.end


# Batch.


class LogReader(DataSourceReader):
    """A bounded read: the range is fixed when the query is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.decoder = SplitDecoder(options, schema)

    def partitions(self) -> list[InputPartition]:
        options = self.options
        plan = make_plan(options)
        try:
            ends = plan.ends()
            start = resolve(options.start, ends)
            stop = min(resolve(options.end, ends), ends.end)
            if start < ends.first and start < stop:
                plan.gap(start, ends.first)
            splits = plan.splits(
                max(start, ends.first),
                stop,
                time_from=self.decoder.scan.time_from,
                time_to=self.decoder.scan.time_to,
                split_bytes=options.split_bytes,
            )
            report_skipped(self.decoder.scan, plan, start, stop)
        finally:
            plan.close()
        return [LogPartition(split) for split in splits]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.decoder.read(partition)


class PushingReader(LogReader):
    """A bounded read that also applies the query's conditions on topic, offset and timestamp."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        options, scan = self.options, self.decoder.scan
        bounds = Bounds(scan.topics, 0, None, options.time_from, options.time_to)
        rest, bounds = push(filters, bounds)
        self.decoder.scan = replace(
            scan,
            topics=bounds.topics,
            time_from=bounds.time_from,
            time_to=bounds.time_to,
        )
        self.options = self.bounded(bounds)
        return rest

    def bounded(self, bounds: Bounds) -> ReadOptions:
        """Return options narrowed by the offsets in the query; such bounds are never a gap."""
        if not bounds.start and bounds.stop is None:
            return self.options
        plan = make_plan(self.options)
        try:
            ends = plan.ends()
        finally:
            plan.close()
        start = resolve(self.options.start, ends)
        stop = min(resolve(self.options.end, ends), ends.end)
        start = max(start, min(bounds.start, ends.end))
        stop = stop if bounds.stop is None else max(min(stop, bounds.stop), 0)
        return replace(self.options, start=start, end=max(stop, start))


# Stream.


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """An unbounded read; lives on the driver as long as the query."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.decoder = SplitDecoder(options, schema)
        self.plan: Plan | None = None
        self.target: int | None = None
        self.position: StreamPosition | None = None
        if options.consumer is not None:
            self.position = StreamPosition(options.path, options.consumer, options.topics)

    def __getstate__(self) -> dict[str, Any]:
        # Pickled to the executors for `read`, without the open log.
        return {**self.__dict__, "plan": None, "position": None}

    def planner(self) -> Plan:
        if self.plan is None:
            self.plan = make_plan(self.options)
        return self.plan

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        ends = self.planner().ends()
        start = resolve(self.options.start, ends)
        if start < ends.first:
            self.planner().gap(start, ends.first)
        return {"epoch": ends.epoch, "offset": max(start, ends.first)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        if self.options.max_records is not None:
            return ReadMaxRows(self.options.max_records)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        ends = self.planner().ends()
        self.check_epoch(start, ends)
        first = start["offset"]
        self.move_position(first)
        stop = self.available(ends)
        if stop <= first:
            return start
        if isinstance(limit, ReadMaxRows):
            stop = min(stop, first + limit.max_rows)
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if bytes_max is None and not isinstance(limit, ReadAllAvailable):
            bytes_max = self.options.max_bytes
        if bytes_max is not None:
            stop = self.planner().bytes_end(max(first, ends.first), stop, bytes_max)
        return {"epoch": ends.epoch, "offset": stop}

    def available(self, ends: Ends) -> int:
        stop = min(resolve(self.options.end, ends), ends.end)
        return stop if self.target is None else min(stop, self.target)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        ends = self.planner().ends()
        return {"epoch": ends.epoch, "offset": ends.end}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self.target = self.planner().ends().end

    def check_epoch(self, start: dict[str, int], ends: Ends) -> None:
        if start["epoch"] != ends.epoch or start["offset"] > ends.end:
            raise LogFormatError(
                f"the checkpoint is at offset {start['offset']} of epoch {start['epoch']}, the log"
                f" at {ends.end} of {ends.epoch}: it is another log, or recovery dropped offsets"
                " that were read. Start the query with a new checkpoint."
            )

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        plan = self.planner()
        first, stop = start["offset"], end["offset"]
        self.move_position(first)
        oldest = plan.ends().first
        if first < oldest and first < stop:
            plan.gap(first, min(oldest, stop))
            first = oldest
        options = self.options
        splits = plan.splits(
            first,
            stop,
            time_from=options.time_from,
            time_to=options.time_to,
            split_bytes=options.split_bytes,
        )
        report_skipped(self.decoder.scan, plan, first, stop)
        return [LogPartition(split) for split in splits]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.decoder.read(partition)

    def commit(self, end: dict[str, int]) -> None:
        """Store the position in the log as well, if the stream is a named consumer of it."""
        self.move_position(end["offset"])

    def move_position(self, offset: int) -> None:
        """
        Store where the next micro-batch begins.

        Spark asks for its end, or plans it, after the commit of the one before, also when it repeats one after a crash.
        """
        if self.position is not None:
            self.position.move(offset)

    def stop(self) -> None:
        if self.position is not None:
            self.position.close()
        if self.plan is not None:
            self.plan.close()
            self.plan = None


class UnlimitedStreamReader(LogStreamReader):
    """An unbounded read in Spark 4.1, which asks for the end without a start and a limit."""

    planned: int | None = None  # the end of the last micro-batch

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # noqa: N802
        if self.planned is not None:
            self.move_position(self.planned)  # Spark asks again after its commit
        ends = self.planner().ends()
        return {"epoch": ends.epoch, "offset": self.available(ends)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        self.check_epoch(start, self.planner().ends())
        self.planned = end["offset"]
        return super().partitions(start, end)
