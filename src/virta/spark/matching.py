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
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import BinaryType, StringType, StructType

from virta.errors import EventError, VirtaError
from virta.filters import Filter, parse
from virta.match import Compiled, Matcher
from virta.match import compile_filter as compile_for_index
from virta.spark.columns import compile_filter
from virta.spark.schemas import FILTER_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FILTERS_MAX = 10_000_000
MATCHERS_MAX = 4  # filter sets kept per Python worker; the least recently used goes first
EVENT_MARKS = frozenset(("source", "id", "data"))  # columns that tell decoded events from records

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
            kept = np.zeros(batch.num_rows, bool)
            for root, matcher in sets.items():
                kept |= matcher.hits(documents(batch.column("value"), root))
            yield batch.filter(pa.array(kept))

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
    named = dict(filters) if isinstance(filters, Mapping) else {f.id: f for f in filters}
    if len(named) > FILTERS_MAX:
        raise MatchError(f"{len(named)} filters: at most {FILTERS_MAX}")
    need_value(df)
    parts: dict[str, dict[str, Filter]] = {}
    for name, filter_ in named.items():
        parts.setdefault(check_on(df, filter_, on), {})[name] = filter_
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

    def explode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        matcher = shipped()
        for batch in batches:
            yield explode_batch(batch, matcher, on, names)

    return rows.mapInArrow(explode, schema)


def explode_batch(
    batch: pa.RecordBatch, matcher: FilterSet, on: str, names: list[str]
) -> pa.RecordBatch:
    """Repeat each row for every filter that holds for it."""
    rows, ids = matcher.pairs(documents(batch.column("value"), on))
    taken = batch.select(names).take(pa.array(rows, pa.int64()))
    return pa.RecordBatch.from_arrays([*taken.columns, ids], names=[*names, FILTER_ID.name])


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
    return values if on == "event" else [document_of(value) for value in values]


def document_of(value: bytes) -> bytes:
    """
    What Koncorde's filters see of an event: its data, with an `_id` if it brings none.

    The `_id` is the event's subject, else its id; an event without an object as data is the empty
    document with that `_id`. The server's subscriptions follow the same rule.
    """
    try:
        members = _members(value)
    except (msgspec.DecodeError, RecursionError):
        return b""
    data = bytes(members.get("data", b"")).strip()
    name = bytes(members.get("subject", b"")).strip()
    identity = name if name.startswith(b'"') else bytes(members.get("id", b"null")).strip()
    if not data.startswith(b"{"):
        return b'{"_id":%b}' % identity
    inner = data[1:-1].strip()
    # Of equal names the last wins in every JSON reader, so the data's own `_id` stays.
    return b'{"_id":%b%b%b}' % (identity, b"," if inner else b"", inner)


class FilterSet:
    """A matcher that speaks in the caller's names for its filters."""

    def __init__(self, filters: Iterable[tuple[str, Compiled]]) -> None:
        self.matcher = Matcher()
        # Equal filters share a number in the matcher; each of their names still gets its row.
        names: dict[int, list[str]] = {}
        for name, compiled in filters:
            number = self.matcher.number_of(self.matcher.add(compiled))
            assert number is not None
            names.setdefault(number, []).append(name)
        self.shared = any(len(found) > 1 for found in names.values())
        self.names = names
        self.order = np.zeros(max(names, default=0) + 1, np.int64)
        for i, number in enumerate(names):
            self.order[number] = i
        self.first = pa.array([found[0] for found in names.values()], pa.string())

    def numbers(self, values: list[bytes]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Row and filter number of every hit, by row; rows that are no JSON have none."""
        rows = np.arange(len(values))
        try:
            found, offsets = self.matcher.match_many(values, output="uint32")
        except EventError:
            good = [i for i, value in enumerate(values) if is_json(value)]
            rows = np.array(good, np.int64)
            found, offsets = self.matcher.match_many([values[i] for i in good], output="uint32")
        ends: Any = np.frombuffer(offsets, np.uint32).astype(np.int64)
        counts = ends[1:] - ends[:-1]
        return np.repeat(rows, counts), np.frombuffer(found, np.uint32)

    def pairs(self, values: list[bytes]) -> tuple[np.ndarray[Any, Any], pa.Array]:
        """Row and filter name of every hit."""
        rows, numbers = self.numbers(values)
        if not self.shared:
            return rows, self.first.take(pa.array(self.order[numbers]))
        names = [self.names[number] for number in numbers.tolist()]
        repeats = [len(found) for found in names]
        flat = [name for found in names for name in found]
        return np.repeat(rows, repeats), pa.array(flat, pa.string())

    def hits(self, values: list[bytes]) -> np.ndarray[Any, Any]:
        """For each value whether any filter holds."""
        held = np.zeros(len(values), bool)
        held[self.numbers(values)[0]] = True
        return held


_sets: OrderedDict[str, FilterSet] = OrderedDict()


def opened_set(digest: str, packed: bytes) -> FilterSet:
    """The filter set of these bytes, built once per Python worker."""
    found = _sets.get(digest)
    if found is None:
        found = FilterSet(pickle.loads(packed))  # noqa: S301 - bytes of our own driver
        _sets[digest] = found
        while len(_sets) > MATCHERS_MAX:
            _sets.popitem(last=False)
    _sets.move_to_end(digest)
    return found


def ship(df: DataFrame, filters: Mapping[str, Filter]) -> Callable[[], FilterSet]:
    """Send a filter set to the executors; the result opens it there."""
    packed = pickle.dumps([(n, compile_for_index(f)) for n, f in filters.items()], protocol=5)
    digest = hashlib.sha256(packed).hexdigest()
    broadcast = df.sparkSession.sparkContext.broadcast(packed)

    def opened() -> FilterSet:
        return opened_set(digest, broadcast.value)

    return opened


def is_json(value: bytes) -> bool:
    try:
        msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True
