"""
Read a log into a DataFrame, with bounds as arguments.

`read` and `read_stream` are the data source with its options as arguments. Bounds given here are planned: splits
outside them are never opened, in streams and in any session. Conditions on the DataFrame cannot guarantee that
(virta.spark.launch.plan_rule).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from virta.spark.launch.session import session
from virta.spark.matching.filter_set import write_set

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from pyspark.sql import DataFrame, SparkSession

    from virta.filters import Filter
    from virta.match import Compiled

ARGUMENTS = {
    "events": "events",
    "start": "start",
    "end": "end",
    "since": "startTime",
    "until": "endTime",
    "on_gap": "onGap",
    "on_corruption": "onCorruption",
    "problems": "problems",
    "split_bytes": "splitBytes",
    "max_records": "maxRecordsPerTrigger",
    "max_bytes": "maxBytesPerTrigger",
    "consumer": "consumer",
}


def read(
    path: str | PathLike[str],
    *,
    topics: Iterable[str] | None = None,
    columns: str | None = None,
    spark: SparkSession | None = None,
    **bounds: Any,
) -> DataFrame:
    """
    Return the records (with `events=True`: the events) of a log, bounded by offsets, times and topics.

    Args:
        path: the log's directory.
        topics: only these.
        columns: a schema as DDL: fewer columns are read faster.
        spark: the session; the process's own by default.
        bounds: start, end (offsets), since, until (datetimes), on_gap, on_corruption, problems,
            split_bytes, events.
    """
    reader = (spark or session()).read.format("virta").options(**options(topics, bounds))
    if columns is not None:
        reader = reader.schema(columns)
    return reader.load(str(path))


def read_stream(
    path: str | PathLike[str],
    *,
    topics: Iterable[str] | None = None,
    columns: str | None = None,
    spark: SparkSession | None = None,
    **bounds: Any,
) -> DataFrame:
    """
    Return the records of a log as a stream; arguments as for `read`.

    `max_records` and `max_bytes` bound a micro-batch; `consumer` names the stream in the log, which then knows its
    position and lag.
    """
    reader = (spark or session()).readStream.format("virta").options(**options(topics, bounds))
    if columns is not None:
        reader = reader.schema(columns)
    return reader.load(str(path))


def match_log(
    path: str | PathLike[str],
    filters: Iterable[Filter | Compiled] | Mapping[str, Filter | Compiled],
    *,
    on: str = "event",
    directory: str | None = None,
    topics: Iterable[str] | None = None,
    columns: str | None = None,
    spark: SparkSession | None = None,
    **bounds: Any,
) -> DataFrame:
    """
    Match the records of a log, with decoding and matching in one process: faster than `match`.

    Args:
        on: "event" applies filters to the record's value, "data" to the event's data.
        directory: where the filter set is written; by default a temporary directory of this user. A set of up to
            8 MiB is sent to executors that do not see it; a larger one needs a directory that they see.
        columns: a schema as DDL of record columns and `filter_id`.
    """
    named = dict(filters) if isinstance(filters, Mapping) else {f.id: f for f in filters}
    given = {**options(topics, bounds), "filters": write_set(named, directory), "on": on}
    reader = (spark or session()).read.format("virta").options(**given)
    if columns is not None:
        reader = reader.schema(columns)
    return reader.load(str(path))


def options(topics: Iterable[str] | None, bounds: Mapping[str, Any]) -> dict[str, str]:
    given = {} if topics is None else {"topics": ",".join(topics)}
    for name, value in bounds.items():
        if name not in ARGUMENTS:
            raise TypeError(f"unknown argument {name!r}: choose from {', '.join(ARGUMENTS)}")
        if value is not None:
            given[ARGUMENTS[name]] = text(value)
    return given


def text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, datetime) else str(value)
