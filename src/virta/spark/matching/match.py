"""
Filters over DataFrames: `where` keeps the events that match a filter, `match` returns which of many filters match.

Both give the same results as `filter.matches` and `virta.match.Matcher` on the same JSON. One filter becomes a
Column where that is exact (virta.spark.matching.columns); everything else runs in the matcher, in Arrow batches. A
filter set is compiled once and sent as bytes; the Python workers of a machine share the index made of it
(virta.spark.matching.filter_set) and keep it for all tasks with the same set.

Filters apply to the event in decoded events (Koncorde's filters to its `data`, as in the server), and to the value in
plain records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import BinaryType, StringType, StructType

from virta.filters import Filter, parse
from virta.filters.tree import conditions
from virta.spark.launch.worker_memory import prepare_memory
from virta.spark.matching.columns import compile_filter
from virta.spark.matching.filter_set import (
    FilterSet,
    MatchError,
    opened_set,
    pack,
    texts_of,
    write_packed,
)
from virta.spark.schemas import EVENT, FILTER_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import Column

FILTERS_MAX = 10_000_000
EVENT_MARKS = frozenset(
    ("source", "id", "data")
)  # columns that decoded events have and records do not


def where(
    df: DataFrame,
    filter: Filter | str | Iterable[Filter],  # noqa: A002 - part of the public API
    *,
    dialect: str = "query-string",
    on: str | None = None,
    keep_invalid: bool = False,
    decoded: bool | None = None,
) -> DataFrame:
    """
    Return the rows that match the filter (of several: at least one), with the columns of `df`.

    `on`, "event" or "data", overrides the JSON value that filters apply to. Rows that are not events or not JSON
    are dropped; with `keep_invalid` those that have a reason in the column `invalid` stay. `decoded` says whether the
    rows are decoded events; by default they are if they have the columns source, id and data.
    """
    if isinstance(filter, str):
        filter = parse(filter, dialect)  # noqa: A001
    filters = [filter] if isinstance(filter, Filter) else list(filter)
    marked = "invalid" in df.columns
    keep_invalid = keep_invalid and marked
    rows = df.where(F.col("invalid").isNull()) if marked and not keep_invalid else df
    events = is_decoded(df) if decoded is None else decoded
    column = as_column(filters, on, df.columns) if events else None
    if column is not None:
        return rows.where(column | F.col("invalid").isNotNull() if keep_invalid else column)
    need_value(df)
    roots = by_root({one.id: one for one in filters}, on, decoded=events)
    shipped = {root: ship(df, part) for root, part in roots.items()}

    def keep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sets = {root: opened() for root, opened in shipped.items()}
        for batch in batches:
            kept = np.zeros(batch.num_rows, bool)
            for root, matcher in sets.items():
                ids = events and matcher.sees_ids
                kept |= matcher.hits(texts_of(batch.column("value"), root, text_ids=ids))
            if keep_invalid:
                kept |= np.asarray(batch.column("invalid").is_valid())
            yield batch.filter(pa.array(kept))

    return rows.mapInArrow(keep, df.schema)


def as_column(filters: list[Filter], on: str | None, names: Iterable[str]) -> Column | None:
    """Return the filters as a Column over decoded events with these columns, None if the matcher must run them."""
    if len(filters) != 1 or root_of(filters[0], on, decoded=True) != "event":
        return None
    return compile_filter(filters[0], list(names))


def columns_of(filters: list[Filter]) -> set[str]:
    """Return the columns of decoded events that `where` reads for these filters."""
    if as_column(filters, None, EVENT.names) is None:
        return {"value"}
    return {str(condition.path[0]) for condition in conditions(filters[0].tree)}


def by_root(
    named: Mapping[str, Filter], on: str | None, *, decoded: bool
) -> dict[str, dict[str, Filter]]:
    """Return the filters by the JSON value they apply to, each under its name."""
    parts: dict[str, dict[str, Filter]] = {}
    for name, filter_ in named.items():
        parts.setdefault(root_of(filter_, on, decoded=decoded), {})[name] = filter_
    return parts


def is_decoded(df: DataFrame) -> bool:
    return set(df.columns) >= EVENT_MARKS


def match(
    df: DataFrame,
    filters: Iterable[Filter] | Mapping[str, Filter],
    *,
    on: str | None = None,
    keep: Iterable[str] | None = None,
) -> DataFrame:
    """
    Return one row per event and matching filter: the columns `keep` (all) and `filter_id`.

    `filters` are filters, known by their own `id`, or a mapping from names to filters.
    """
    named = dict(filters) if isinstance(filters, Mapping) else {f.id: f for f in filters}
    if len(named) > FILTERS_MAX:
        raise MatchError(f"{len(named)} filters: at most {FILTERS_MAX}")
    need_value(df)
    parts = by_root(named, on, decoded=is_decoded(df))
    found = [match_on(df, part, root, keep) for root, part in (parts or {"event": {}}).items()]
    return reduce(DataFrame.unionByName, found)


def match_on(
    df: DataFrame, filters: Mapping[str, Filter], on: str, keep: Iterable[str] | None
) -> DataFrame:
    names = list(df.columns if keep is None else keep)
    rows = df.where(F.col("invalid").isNull()) if "invalid" in df.columns else df
    rows = rows.select(*dict.fromkeys([*names, "value"]))
    schema = StructType([*(rows.schema[name] for name in names), FILTER_ID])
    shipped = ship(df, filters)
    events = is_decoded(df)

    def explode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        matcher = shipped()
        for batch in batches:
            ids = events and matcher.sees_ids
            rows, found = matcher.pairs(texts_of(batch.column("value"), on, text_ids=ids))
            yield exploded(batch, rows, found, names)

    return rows.mapInArrow(explode, schema)


def exploded(
    batch: pa.RecordBatch, rows: pa.Array, ids: pa.Array, names: list[str]
) -> pa.RecordBatch:
    """Return each row once per matching filter."""
    taken = batch.select(names).take(rows)
    return pa.RecordBatch.from_arrays([*taken.columns, ids], names=[*names, FILTER_ID.name])


def root_of(filter_: Filter, on: str | None, *, decoded: bool) -> str:
    """Return which JSON value a filter applies to, "event" or "data"."""
    if on is None:
        return "data" if decoded and filter_.dialect == "koncorde" else "event"
    if on not in {"event", "data"}:
        raise MatchError(f"on is {on!r}: expected event or data")
    return on


def need_value(df: DataFrame) -> None:
    kind = df.schema["value"].dataType if "value" in df.columns else None
    if not isinstance(kind, BinaryType | StringType):
        raise MatchError(
            f"matching needs the event's JSON in the column 'value': there are {', '.join(df.columns)}"
        )


def ship(df: DataFrame, filters: Mapping[str, Filter]) -> Callable[[], FilterSet]:
    """Send a filter set to the executors; return a function that opens it there."""
    packed = pack(filters)
    path = write_packed(packed, hashlib.sha256(packed).hexdigest())
    # For machines without access to the file; others never fetch it.
    broadcast = df.sparkSession.sparkContext.broadcast(packed.to_pybytes())

    def opened() -> FilterSet:
        found = opened_set(path, lambda: broadcast.value)
        prepare_memory()
        return found

    return opened
