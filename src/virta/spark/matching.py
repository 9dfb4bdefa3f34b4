"""
Standing filters over DataFrames: `where` keeps the events a filter holds for, `match` tells which of
many hold for each.

Both give the answers of `filter.matches` and `virta.match.Matcher` on the same JSON. One filter becomes a
Column where that is exact (virta.spark.columns); everything else runs in the matcher itself, in Arrow
batches. A filter set is serialised once and broadcast as bytes; each Python worker builds its
matcher from them once and keeps it for all tasks that bring the same set.

Which JSON value a filter speaks about: of decoded events, the event, except that Koncorde's filters speak
of its `data`, as in the server; of plain records, the record's value.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import BinaryType, StringType, StructType

from virta.errors import VirtaError
from virta.filters import Filter, parse
from virta.match import Matcher
from virta.spark.columns import compile_filter
from virta.spark.schemas import FILTER_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pyspark.sql import DataFrame

FILTERS_MAX = 10_000_000
MATCHERS_MAX = 4  # filter sets kept per Python worker; the least recently used goes first
EVENT_MARKS = frozenset(("source", "id", "data"))  # columns that tell decoded events from records
NO_DOCUMENT = b"null"  # what a filter on `data` sees of an event that has none

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class MatchError(VirtaError):
    """Filters or columns that matching cannot work with."""

    default_code = "match_invalid"


def where(
    df: DataFrame,
    filter: Filter | str | Iterable[Filter],  # noqa: A002 - the word users have for it
    *,
    dialect: str = "query-string",
    on: str | None = None,
) -> DataFrame:
    """
    The rows for which the filter (of several: at least one) holds, with the columns of `df`.

    `on` is "event" or "data" when the JSON value to ask is not the usual one. Rows that are no events or
    no JSON are never kept.
    """
    if isinstance(filter, str):
        filter = parse(filter, dialect)  # noqa: A001
    filters = [filter] if isinstance(filter, Filter) else list(filter)
    rows = df.where(F.col("invalid").isNull()) if "invalid" in df.columns else df
    if len(filters) == 1 and is_decoded(df) and check_on(df, filters[0], on) == "event":
        column = compile_filter(filters[0], df.columns)
        if column is not None:
            return rows.where(column)
    need_value(df)
    shipped = {root: ship(df, part) for root, part in by_root(df, filters, on).items()}

    def keep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sets = {root: opened() for root, opened in shipped.items()}
        for batch in batches:
            kept = [False] * batch.num_rows
            for root, matcher in sets.items():
                hits = matcher.match(documents(batch.column("value"), root))
                kept = [k or bool(ids) for k, ids in zip(kept, hits, strict=True)]
            yield batch.filter(pa.array(kept, pa.bool_()))

    return rows.mapInArrow(keep, df.schema)


def by_root(
    df: DataFrame, filters: Iterable[Filter], on: str | None
) -> dict[str, dict[str, Filter]]:
    """The filters by the JSON value they speak about, each under its id."""
    parts: dict[str, dict[str, Filter]] = {}
    for filter_ in filters:
        parts.setdefault(check_on(df, filter_, on), {})[filter_.id] = filter_
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
    One row per event and filter that holds for it: the columns `keep` (all) and `filter_id`.

    `filters` are filters, known by their own `id`, or a mapping from names to filters.
    """
    named = dict(filters) if hasattr(filters, "items") else {f.id: f for f in filters}  # type: ignore[union-attr]
    if len(named) > FILTERS_MAX:
        raise MatchError(f"{len(named)} filters: at most {FILTERS_MAX}")
    need_value(df)
    roots = {check_on(df, filter_, on) for filter_ in named.values()} or {"event"}
    parts = [
        {n: f for n, f in named.items() if check_on(df, f, on) == root} for root in sorted(roots)
    ]
    found = [match_on(df, part, root, keep) for part, root in zip(parts, sorted(roots), strict=True)]
    result = found[0]
    for other in found[1:]:
        result = result.unionByName(other)
    return result


def match_on(
    df: DataFrame, filters: Mapping[str, Filter], on: str, keep: Iterable[str] | None
) -> DataFrame:
    names = list(df.columns if keep is None else keep)
    rows = df.where(F.col("invalid").isNull()) if "invalid" in df.columns else df
    rows = rows.select(*dict.fromkeys([*names, "value"]))
    schema = StructType([*(rows.schema[name] for name in names), FILTER_ID])
    shipped = ship(df, filters)

    def explode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        matcher = shipped()
        for batch in batches:
            yield explode_batch(batch, matcher, on, names)

    return rows.mapInArrow(explode, schema)


def explode_batch(
    batch: pa.RecordBatch, matcher: FilterSet, on: str, names: list[str]
) -> pa.RecordBatch:
    """Repeat each row for every filter that holds for it."""
    rows: list[int] = []
    ids: list[str] = []
    for i, found in enumerate(matcher.match(documents(batch.column("value"), on))):
        if found:
            rows += [i] * len(found)
            ids += found
    taken = batch.select(names).take(pa.array(rows, pa.int32()))
    return pa.RecordBatch.from_arrays(
        [*taken.columns, pa.array(ids, pa.string())], names=[*names, FILTER_ID.name]
    )


def check_on(df: DataFrame, filter_: Filter, on: str | None) -> str:
    if on is None:
        return "data" if is_decoded(df) and filter_.dialect == "koncorde" else "event"
    if on not in {"event", "data"}:
        raise MatchError(f"on is {on!r}: expected event or data")
    return on


def need_value(df: DataFrame) -> None:
    kind = df.schema["value"].dataType if "value" in df.columns else None
    if not isinstance(kind, BinaryType | StringType):
        raise MatchError(
            f"matching needs the event's JSON in the column 'value': there are {', '.join(df.columns)}"
        )


# On the executors.


def documents(column: pa.Array, on: str) -> list[bytes]:
    """The JSON text each row is asked by."""
    values = [v.encode() if isinstance(v, str) else v or b"" for v in column.to_pylist()]
    return values if on == "event" else [data_of(value) for value in values]


def data_of(value: bytes) -> bytes:
    try:
        return bytes(_members(value).get("data", NO_DOCUMENT))
    except (msgspec.DecodeError, RecursionError):
        return b""


class FilterSet:
    """A matcher that speaks in the caller's names for its filters."""

    def __init__(self, filters: Mapping[str, Filter]) -> None:
        self.matcher = Matcher()
        self.names: dict[Any, list[str]] = {}
        for name, filter_ in filters.items():
            # Equal filters share an id in the matcher; each name still gets its row.
            self.names.setdefault(self.matcher.add(filter_), []).append(name)

    def match(self, values: list[bytes]) -> list[list[str]]:
        """The names of the filters that hold for each value; none for what is no JSON."""
        names = self.names
        return [
            [name for found in ids for name in names[found]]
            for ids in self.matcher.match_many([v if is_json(v) else NO_DOCUMENT for v in values])
        ]


_sets: OrderedDict[str, FilterSet] = OrderedDict()


def opened_set(digest: str, packed: bytes) -> FilterSet:
    """The filter set of these bytes, built once per Python worker."""
    found = _sets.get(digest)
    if found is None:
        found = FilterSet(unpack(packed))
        _sets[digest] = found
        while len(_sets) > MATCHERS_MAX:
            _sets.popitem(last=False)
    _sets.move_to_end(digest)
    return found


def pack(filters: Mapping[str, Filter]) -> bytes:
    return pickle.dumps([(n, f.tree, f.dialect) for n, f in filters.items()], protocol=5)


def unpack(packed: bytes) -> dict[str, Filter]:
    return {n: Filter(tree, dialect=d) for n, tree, d in pickle.loads(packed)}  # noqa: S301 - our own bytes


def ship(df: DataFrame, filters: Mapping[str, Filter]) -> Callable[[], FilterSet]:
    """Send a filter set to the executors; the result opens it there."""
    packed = pack(filters)
    digest = hashlib.sha256(packed).hexdigest()
    broadcast = df.sparkSession.sparkContext.broadcast(packed)

    def opened() -> FilterSet:
        return opened_set(digest, broadcast.value)

    return opened


def is_json(value: bytes) -> bool:
    return bool(value)
