"""
Check a pipeline without Spark and without a file: everything that is wrong with it, each with its place.

`virta.spark.pipeline.file` turns places into lines of the TOML file.
"""

from __future__ import annotations

import re
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeGuard

from virta.errors import FilterError
from virta.event.times import parse_moment
from virta.filters import DIALECTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from virta.spark.pipeline.model import Aggregate, Dedupe, Pipeline, Sink, Source, Where
    from virta.spark.pipeline.toml_lines import Place

    Problems = Iterator[tuple[Place, str]]

FILTERS_MAX = 100_000
SINKS_MAX = 32

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
INTERVAL = re.compile(r"(\d+(?:\.\d+)?) ?(milliseconds?|seconds?|minutes?|hours?|days?|weeks?)")
SECONDS = {
    "millisecond": 0.001,
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 604_800,
}
QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`[^`]*`""")
TRIGGERS = ("available-now", "continuous")
REPEATS = ("drop", "dead-letter")
BATCH = "batch"  # names the directory that a parquet sink writes for a micro-batch
DAY = "day"  # of the append time; Parquet sinks add it when they partition by it
WINDOW_COLUMNS = ("start", "end")
# Options of the log as a source that have no key of their own in [source].
SOURCE_OPTIONS = ("end", "problems", "splitBytes", "batchRows")
DURABILITIES = ("none", "interval", "group", "fsync")
# The columns of an event; `virta.spark.schemas` has their types.
COLUMNS = (
    *("topic", "offset", "timestamp", "key", "value"),
    *("id", "source", "type", "specversion", "datacontenttype", "dataschema", "subject", "time"),
    *("extensions", "data", "data_binary"),
)
DEAD_COLUMNS = (*COLUMNS[:5], "reason")
# Stands for a table of the file that could not be read while the rest is checked; compared by identity.
UNREADABLE: Mapping[str, str] = MappingProxyType({})

# kind -> (needed keys, allowed keys beyond `kind`, `name` and `options`)
SINKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "channel": (("topic",), ("topic", "log", "type", "source", "key", "durability")),
    "parquet": (("path",), ("path", "partition_by")),
    "delta": (("path",), ("path", "partition_by")),
    "iceberg": (("table",), ("table", "partition_by")),
    "kafka": (("topic",), ("topic", "key")),
    "jdbc": (("url", "table"), ("url", "table", "keys")),
    "console": ((), ()),
}


def check(pipeline: Pipeline) -> Problems:
    """Yield everything wrong with a pipeline: (place, message)."""
    if not NAME.fullmatch(pipeline.name):
        message = f"name {pipeline.name!r}: use letters, digits, '.', '_', '-'"
        yield ("pipeline", "name"), message
    if pipeline.trigger not in TRIGGERS and not is_interval(pipeline.trigger):
        expected = f'{", ".join(TRIGGERS)} or an interval such as "10 seconds"'
        yield ("pipeline", "trigger"), f"trigger {pipeline.trigger!r}: expected {expected}"
    yield from check_source(pipeline.source)
    if pipeline.dedupe:
        yield from check_dedupe(pipeline.dedupe, pipeline)
    yield from check_filters(pipeline.filters)
    for name, sql in pipeline.columns.items():
        yield from check_sql(("columns", name), name, sql)
    if pipeline.aggregate:
        yield from check_aggregate(pipeline.aggregate, pipeline)
    yield from check_sinks(pipeline)


def check_source(source: Source) -> Problems:
    if source.format == "virta" and not source.log:
        yield ("source", "log"), 'source has no log: give log = "<directory>"'
    if source.format != "virta" and source.log:
        yield ("source", "log"), f"log does not go with format {source.format!r}"
    for name in ("on_gap", "on_corruption"):
        value = getattr(source, name)
        if value not in {"raise", "skip"}:
            yield ("source", name), f"{name} {value!r}: expected raise or skip"
    if source.start not in {"earliest", "latest"} and not source.start.isdecimal():
        message = f"start {source.start!r}: expected earliest, latest or an offset"
        yield ("source", "start"), message
    for name in ("start_time", "end_time"):
        value = getattr(source, name)
        if value is not None and not is_moment(value):
            expected = 'ISO 8601, "2026-01-31T12:00:00Z", or microseconds since 1970'
            yield ("source", name), f"{name} {value!r}: expected {expected}"
    for name in ("max_records_per_trigger", "max_bytes_per_trigger"):
        limit = getattr(source, name)
        if limit is not None and limit < 1:
            yield ("source", name), f"{name} {limit}: expected a number above 0"
    known = [name.lower() for name in SOURCE_OPTIONS]
    for name in source.options if source.format == "virta" else ():
        if name.lower() not in known:
            message = f"option {name!r}: expected {', '.join(SOURCE_OPTIONS)}"
            yield ("source", "options", name), message


def check_dedupe(dedupe: Dedupe, pipeline: Pipeline) -> Problems:
    yield from check_interval(("dedupe", "within"), dedupe.within)
    if not dedupe.by:
        yield ("dedupe", "by"), 'by is empty: expected columns, ["source", "id"]'
    for name in dedupe.by:
        yield from check_column(("dedupe", "by"), name, pipeline, own=False)
    if pipeline.aggregate is None:  # else the window's time counts
        yield from check_column(("dedupe", "time"), dedupe.time, pipeline)
    place = ("dedupe", "repeats")
    if dedupe.repeats not in REPEATS:
        yield place, f"repeats {dedupe.repeats!r}: expected {' or '.join(REPEATS)}"
    elif dedupe.repeats != "drop":
        if pipeline.dead_letter is None:
            yield place, "repeats go to the dead letters: give [dead_letter]"
        if pipeline.source.format != "virta":
            yield place, "repeats are found again in a log only"


def check_filters(filters: Sequence[Where]) -> Problems:
    if len(filters) > FILTERS_MAX:
        yield ("filter",), f"{len(filters)} filters: at most {FILTERS_MAX}"
        return
    for i, where in enumerate(filters):
        if where.dialect not in DIALECTS:
            message = f"dialect {where.dialect!r}: expected {', '.join(DIALECTS)}"
            yield ("filter", i, "dialect"), message
            continue
        try:
            where.parsed()
        except FilterError as error:
            yield ("filter", i, "match"), f"filter {where.match!r}: {error.message}"


def check_aggregate(aggregate: Aggregate, pipeline: Pipeline) -> Problems:
    if (aggregate.window is None) == (aggregate.session is None):
        yield ("aggregate",), "aggregate needs either window or session"
    if aggregate.slide is not None and aggregate.window is None:
        yield ("aggregate", "slide"), "slide goes with window only"
    for name in ("window", "slide", "session", "late"):
        value = getattr(aggregate, name)
        if value is not None:
            yield from check_interval(("aggregate", name), value)
    slide, window = aggregate.slide, aggregate.window
    lengths = [interval_seconds(text) for text in (slide, window) if is_interval(text)]
    if len(lengths) == 2 and lengths[0] > lengths[1]:
        message = f"slide {slide!r} is longer than the window: events would fall between"
        yield ("aggregate", "slide"), message
    for name in aggregate.by:
        yield from check_column(("aggregate", "by"), name, pipeline)
    yield from check_column(("aggregate", "time"), aggregate.time, pipeline)
    for name, sql in aggregate.aggregates.items():
        place = ("aggregate", "aggregates", name)
        yield from check_sql(place, name, sql)
        if name in {*WINDOW_COLUMNS, *aggregate.by}:
            yield place, f"{name} names two columns: start, end and those of by are there"
    if not aggregate.aggregates and aggregate.aggregates is not UNREADABLE:
        yield ("aggregate", "aggregates"), 'aggregates is empty: expected { n = "count(*)" }'
    if aggregate.mode not in {"append", "update", "complete"}:
        message = f"mode {aggregate.mode!r}: expected append, update, complete"
        yield ("aggregate", "mode"), message


def check_sinks(pipeline: Pipeline) -> Problems:
    if not 1 <= len(pipeline.sinks) <= SINKS_MAX:
        yield ("sink",), f"{len(pipeline.sinks)} sinks: expected 1 to {SINKS_MAX}"
    for i, sink in enumerate(pipeline.sinks):
        yield from check_sink(sink, ("sink", i), pipeline)
    if pipeline.dead_letter:
        yield from check_sink(pipeline.dead_letter, ("dead_letter",), pipeline)
    names = pipeline.sink_names()
    paths = [sink.path and pipeline.path(sink.path) for sink in pipeline.sinks]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield ("sink", i, "name"), f"two sinks are named {name!r}"
        if paths[i] and paths[i] in paths[:i]:
            yield ("sink", i, "path"), f"two sinks write to the path {pipeline.sinks[i].path!r}"


def check_sink(sink: Sink, place: Place, pipeline: Pipeline) -> Problems:
    if sink.kind in SINKS:
        yield from check_sink_keys(sink, place)
    else:
        yield (*place, "kind"), f"kind {sink.kind!r}: expected {', '.join(SINKS)}"
    if sink.durability is not None and sink.durability not in DURABILITIES:
        message = f"durability {sink.durability!r}: expected {', '.join(DURABILITIES)}"
        yield (*place, "durability"), message
    if sink.kind == "channel" and not sink.log and pipeline.source.format != "virta":
        yield place, "a channel sink needs log when the source is not a log"
    mode = pipeline.aggregate.mode if pipeline.aggregate else "append"
    if sink.kind in {"parquet", "delta", "iceberg"} and mode != "append":
        yield place, f"a {sink.kind} sink takes mode append only, not {mode}"
    if sink.topic in pipeline.source.topics and pipeline.writes_to_source(sink):
        message = (
            f"topic {sink.topic!r} is read by the source: the pipeline would read what it writes"
        )
        yield (*place, "topic"), message
    if sink.kind == "parquet" and place != ("dead_letter",) and BATCH in (results(pipeline) or ()):
        yield (
            place,
            f"a parquet sink has directories {BATCH}=…: give the column {BATCH!r} another name",
        )
    yield from check_sink_columns(sink, place, pipeline)


def check_sink_keys(sink: Sink, place: Place) -> Problems:
    """Yield keys that a kind of sink needs and lacks, and keys that it does not use."""
    needed, allowed = SINKS[sink.kind]
    for name in needed:
        if not getattr(sink, name):
            yield (*place, name), f"a {sink.kind} sink needs {name}"
    for spec in fields(sink):
        name = spec.name
        if name not in {"kind", "name", "options", *allowed} and getattr(sink, name):
            yield (*place, name), f"{name} does not go with a {sink.kind} sink"


def check_sink_columns(sink: Sink, place: Place, pipeline: Pipeline) -> Problems:
    """Yield columns that a sink names and does not get."""
    known: Sequence[str] | None = DEAD_COLUMNS if place == ("dead_letter",) else results(pipeline)
    if known is None:
        return
    by_day = [DAY] if "timestamp" in known else []
    for key, names, more in (
        ("key", (sink.key,) if sink.key else (), ()),
        ("keys", sink.keys, ()),
        ("partition_by", sink.partition_by, by_day),
    ):
        for name in names:
            if name not in {*known, *more}:
                columns = ", ".join([*known, *more])
                yield (*place, key), f"{key} names {name!r}, which is no column here: {columns}"


def results(pipeline: Pipeline) -> list[str] | None:
    """Return the columns that sinks get, None if only Spark can tell."""
    aggregate = pipeline.aggregate
    if aggregate:
        known = [*WINDOW_COLUMNS, *aggregate.by, *aggregate.aggregates]
        return None if aggregate.aggregates is UNREADABLE else known
    if pipeline.columns is UNREADABLE or pipeline.source.format != "virta":
        return None
    return [*COLUMNS, *pipeline.columns]


def check_column(place: Place, name: str, pipeline: Pipeline, *, own: bool = True) -> Problems:
    """Yield a column that is neither one of the event nor (`own`) of [columns]; other formats may have others."""
    known = [*COLUMNS, *(pipeline.columns if own else ())]
    if own and pipeline.columns is UNREADABLE:
        return
    if pipeline.source.format == "virta" and name.split(".", maxsplit=1)[0] not in known:
        yield place, f"{place[-1]} names {name!r}, which is no column: {', '.join(known)}"


def check_sql(place: Place, name: str, sql: str) -> Problems:
    """Yield an expression that is empty or whose quotes or brackets are not closed."""
    bare = QUOTED.sub("", sql)
    if not sql.strip() or bare.count("(") != bare.count(")") or set("\"'`") & set(bare):
        yield place, f"{name} is {sql!r}: expected a SQL expression, its quotes and brackets closed"


def is_moment(text: str) -> bool:
    try:
        parse_moment(text)
    except ValueError:
        return text.isdecimal()
    return True


def is_interval(text: str | None) -> TypeGuard[str]:
    return text is not None and bool(INTERVAL.fullmatch(text)) and interval_seconds(text) > 0


def check_interval(place: Place, value: str) -> Problems:
    if not is_interval(value):
        yield place, f'{place[-1]} {value!r}: expected an interval such as "10 minutes"'


def interval_seconds(interval: str) -> float:
    """Return the length of a checked interval: "10 minutes" is 600."""
    matched = INTERVAL.fullmatch(interval)
    assert matched is not None
    return float(matched[1]) * SECONDS[matched[2].removesuffix("s")]
