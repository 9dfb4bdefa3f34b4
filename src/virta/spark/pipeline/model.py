"""
A pipeline: source → dedupe → filters → columns → aggregate → sinks, as a value.

Written as TOML (`virta.spark.pipeline.file`) or made in Python; both give the same frozen dataclasses.
Everything that can be wrong without Spark is found by `check` before Spark starts, all at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence  # noqa: TC003 - the types are read at run time
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard

from virta.errors import FilterError, VirtaError
from virta.event.times import parse_moment
from virta.filters import DIALECTS, Filter, parse
from virta.spark.pipeline.toml_lines import Place, line_of

FILTERS_MAX = 100_000
SINKS_MAX = 32

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
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TRIGGERS = ("available-now", "continuous")
REPEATS = ("drop", "dead-letter")
DAY = "day"  # of the append time; Parquet sinks add it where they partition by it
WINDOW_COLUMNS = ("start", "end")
# Options of the log as a source that a pipeline's own keys do not say.
SOURCE_OPTIONS = ("end", "problems", "splitBytes", "batchRows")
DURABILITIES = ("none", "interval", "group", "fsync")
# What an event of a log has; `virta.spark.schemas` has the types.
COLUMNS = (
    *("topic", "offset", "timestamp", "key", "value"),
    *("id", "source", "type", "specversion", "datacontenttype", "dataschema", "subject", "time"),
    *("extensions", "data", "data_binary"),
)


DEAD_COLUMNS = (*COLUMNS[:5], "reason")

# Placeholder for names that could not be read while the rest of a pipeline is checked; compared by identity.
UNREADABLE: Mapping[str, str] = MappingProxyType({})


class PipelineError(VirtaError):
    """A pipeline that cannot run; `problems` has every reason, each with its place."""

    default_code = "pipeline_invalid"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class Source:
    """Where events come from: a log directory, or another format of Spark's (kafka) by options."""

    log: str | None = None
    topics: tuple[str, ...] = ()
    start: str = "earliest"
    start_time: str | None = None
    end_time: str | None = None
    on_gap: str = "raise"
    on_corruption: str = "raise"
    max_records_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    format: str = "virta"
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Dedupe:
    """Drop repeats of `by` within a time."""

    by: tuple[str, ...] = ("source", "id")
    within: str = "10 minutes"
    time: str = "timestamp"
    repeats: str = "drop"


@dataclass(frozen=True)
class Where:
    """A filter; an event goes on when one of the pipeline's filters holds."""

    match: str
    dialect: str = "query-string"
    name: str | None = None

    def parsed(self) -> Filter:
        return parse(self.match, self.dialect)


@dataclass(frozen=True)
class Aggregate:
    """Windows (`window`, `slide`) or sessions (`session`) with named SQL expressions."""

    aggregates: Mapping[str, str]
    window: str | None = None
    slide: str | None = None
    session: str | None = None
    by: tuple[str, ...] = ()
    late: str = "10 minutes"
    time: str = "timestamp"
    mode: str = "append"


@dataclass(frozen=True)
class Sink:
    """Where results go; what each kind needs is in SINKS."""

    kind: str
    name: str | None = None
    topic: str | None = None
    log: str | None = None
    type: str | None = None
    source: str | None = None
    key: str | None = None
    durability: str | None = None
    path: str | None = None
    partition_by: tuple[str, ...] = ()
    url: str | None = None
    table: str | None = None
    keys: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


# kind -> (needed keys, allowed keys beyond `kind`, `name` and `options`)
SINKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "channel": (("topic",), ("topic", "log", "type", "source", "key", "durability")),
    "parquet": (("path",), ("path", "partition_by")),
    "kafka": (("topic",), ("topic", "key")),
    "jdbc": (("url", "table"), ("url", "table", "keys")),
    "console": ((), ()),
}


@dataclass(frozen=True)
class Spark:
    """Where and how the pipeline runs, unless the command line says otherwise."""

    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    py_files: tuple[str, ...] = ()
    archives: str | None = None


@dataclass(frozen=True)
class Pipeline:
    """A whole pipeline; `directory` is what relative paths in it are relative to."""

    name: str
    source: Source
    sinks: tuple[Sink, ...]
    description: str = ""
    checkpoint: str | None = None
    trigger: str = "available-now"
    dedupe: Dedupe | None = None
    filters: tuple[Where, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    aggregate: Aggregate | None = None
    dead_letter: Sink | None = None
    spark: Spark = field(default_factory=Spark)
    directory: str = field(default=".", compare=False)
    file: str = field(default="", compare=False, repr=False)
    lines: Mapping[Place, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = [message for _, message in check(self)]
        if problems:
            raise PipelineError(problems)

    def spot(self, *place: str | int) -> str:
        """`file:line: ` of a place of the file, for messages; nothing for a pipeline made in Python."""
        return f"{self.file}:{line_of(self.lines, place)}: " if self.file else ""

    def path(self, name: str) -> str:
        """Return a path of the pipeline, absolute; URIs stay as they are."""
        return name if "://" in name else str((Path(self.directory) / name).resolve())

    def checkpoint_path(self) -> str:
        return self.path(self.checkpoint or f".virta/pipelines/{self.name}")


# Checks that need no file: they name places, `load` turns those into lines.


def check(pipeline: Pipeline) -> list[tuple[Place, str]]:
    """Everything wrong with a pipeline: (place, message)."""
    found: list[tuple[Place, str]] = []
    if not NAME.fullmatch(pipeline.name):
        found.append(
            (("pipeline", "name"), f"name {pipeline.name!r}: use letters, digits, '.', '_', '-'")
        )
    if pipeline.trigger not in TRIGGERS and check_interval((), pipeline.trigger):
        expected = f'{", ".join(TRIGGERS)} or an interval such as "10 seconds"'
        found.append(
            (("pipeline", "trigger"), f"trigger {pipeline.trigger!r}: expected {expected}")
        )
    found += check_source(pipeline.source)
    if pipeline.dedupe:
        found += check_dedupe(pipeline.dedupe, pipeline)
    found += check_filters(pipeline.filters)
    for name, sql in pipeline.columns.items():
        found += check_sql(("columns", name), name, sql)
    if pipeline.aggregate:
        found += check_aggregate(pipeline.aggregate, pipeline)
    found += check_sinks(pipeline)
    return found


def check_source(source: Source) -> list[tuple[Place, str]]:
    found: list[tuple[Place, str]] = []
    if source.format == "virta" and not source.log:
        found.append((("source", "log"), 'source has no log: give log = "<directory>"'))
    if source.format != "virta" and source.log:
        found.append((("source", "log"), f"log does not go with format {source.format!r}"))
    for name in ("on_gap", "on_corruption"):
        value = getattr(source, name)
        if value not in {"raise", "skip"}:
            found.append((("source", name), f"{name} {value!r}: expected raise or skip"))
    if source.start not in {"earliest", "latest"} and not source.start.isdecimal():
        found.append(
            (("source", "start"), f"start {source.start!r}: expected earliest, latest or an offset")
        )
    for name in ("start_time", "end_time"):
        value = getattr(source, name)
        if value is not None and not is_moment(value):
            expected = 'ISO 8601, "2026-01-31T12:00:00Z", or microseconds since 1970'
            found.append((("source", name), f"{name} {value!r}: expected {expected}"))
    for name in ("max_records_per_trigger", "max_bytes_per_trigger"):
        limit = getattr(source, name)
        if limit is not None and limit < 1:
            found.append((("source", name), f"{name} {limit}: expected a number above 0"))
    known = [name.lower() for name in SOURCE_OPTIONS]
    for name in source.options if source.format == "virta" else ():
        if name.lower() not in known:
            expected = ", ".join(SOURCE_OPTIONS)
            found.append((("source", "options", name), f"option {name!r}: expected {expected}"))
    return found


def check_dedupe(dedupe: Dedupe, pipeline: Pipeline) -> list[tuple[Place, str]]:
    found = check_interval(("dedupe", "within"), dedupe.within)
    if not dedupe.by:
        found.append((("dedupe", "by"), 'by is empty: expected columns, ["source", "id"]'))
    for name in dedupe.by:
        found += check_column(("dedupe", "by"), name, pipeline, own=False)
    if pipeline.aggregate is None:  # else the window's time counts
        found += check_column(("dedupe", "time"), dedupe.time, pipeline)
    if dedupe.repeats not in REPEATS:
        expected = " or ".join(REPEATS)
        found.append((("dedupe", "repeats"), f"repeats {dedupe.repeats!r}: expected {expected}"))
    elif dedupe.repeats != "drop":
        place = ("dedupe", "repeats")
        if pipeline.dead_letter is None:
            found.append((place, "repeats go to the dead letters: give [dead_letter]"))
        if pipeline.source.format != "virta":
            found.append((place, "repeats are found again in a log only"))
    return found


def check_filters(filters: Sequence[Where]) -> list[tuple[Place, str]]:
    found: list[tuple[Place, str]] = []
    if len(filters) > FILTERS_MAX:
        found.append((("filter",), f"{len(filters)} filters: at most {FILTERS_MAX}"))
        return found
    for i, where in enumerate(filters):
        if where.dialect not in DIALECTS:
            found.append(
                (
                    ("filter", i, "dialect"),
                    f"dialect {where.dialect!r}: expected {', '.join(DIALECTS)}",
                )
            )
            continue
        try:
            where.parsed()
        except FilterError as error:
            found.append((("filter", i, "match"), f"filter {where.match!r}: {error.message}"))
    return found


def check_aggregate(aggregate: Aggregate, pipeline: Pipeline) -> list[tuple[Place, str]]:
    found: list[tuple[Place, str]] = []
    if (aggregate.window is None) == (aggregate.session is None):
        found.append((("aggregate",), "aggregate needs either window or session"))
    if aggregate.slide is not None and aggregate.window is None:
        found.append((("aggregate", "slide"), "slide goes with window only"))
    for name in ("window", "slide", "session", "late"):
        value = getattr(aggregate, name)
        if value is not None:
            found += check_interval(("aggregate", name), value)
    slide, window = aggregate.slide, aggregate.window
    lengths = [interval_seconds(text) for text in (slide, window) if is_interval(text)]
    if len(lengths) == 2 and lengths[0] > lengths[1]:
        text = f"slide {slide!r} is longer than the window: events would fall between"
        found.append((("aggregate", "slide"), text))
    for name in aggregate.by:
        found += check_column(("aggregate", "by"), name, pipeline)
    found += check_column(("aggregate", "time"), aggregate.time, pipeline)
    for name, sql in aggregate.aggregates.items():
        found += check_sql(("aggregate", "aggregates", name), name, sql)
        if name in {*WINDOW_COLUMNS, *aggregate.by}:
            place = ("aggregate", "aggregates", name)
            found.append((place, f"{name} names two columns: start, end and those of by are there"))
    if not aggregate.aggregates and aggregate.aggregates is not UNREADABLE:
        found.append(
            (("aggregate", "aggregates"), 'aggregates is empty: expected { n = "count(*)" }')
        )
    if aggregate.mode not in {"append", "update", "complete"}:
        found.append(
            (("aggregate", "mode"), f"mode {aggregate.mode!r}: expected append, update, complete")
        )
    return found


def check_sinks(pipeline: Pipeline) -> list[tuple[Place, str]]:
    found: list[tuple[Place, str]] = []
    if not 1 <= len(pipeline.sinks) <= SINKS_MAX:
        found.append((("sink",), f"{len(pipeline.sinks)} sinks: expected 1 to {SINKS_MAX}"))
    for i, sink in enumerate(pipeline.sinks):
        found += check_sink(sink, ("sink", i), pipeline)
    if pipeline.dead_letter:
        found += check_sink(pipeline.dead_letter, ("dead_letter",), pipeline)
    names = sink_names(pipeline)
    for i, name in enumerate(names):
        if name in names[:i]:
            found.append((("sink", i, "name"), f"two sinks are named {name!r}"))
    return found


def check_sink(sink: Sink, place: Place, pipeline: Pipeline) -> list[tuple[Place, str]]:
    found: list[tuple[Place, str]] = []
    if sink.kind in SINKS:
        found += check_sink_keys(sink, place)
    else:
        found.append(((*place, "kind"), f"kind {sink.kind!r}: expected {', '.join(SINKS)}"))
    if sink.durability is not None and sink.durability not in DURABILITIES:
        expected = ", ".join(DURABILITIES)
        found.append(
            ((*place, "durability"), f"durability {sink.durability!r}: expected {expected}")
        )
    if sink.kind == "channel" and not sink.log and pipeline.source.format != "virta":
        found.append((place, "a channel sink needs log when the source is not a log"))
    mode = pipeline.aggregate.mode if pipeline.aggregate else "append"
    if sink.kind == "parquet" and mode != "append":
        found.append((place, f"a parquet sink takes mode append only, not {mode}"))
    if sink.topic in pipeline.source.topics and is_own(sink, pipeline):
        text = f"topic {sink.topic!r} is read by the source: the pipeline would read what it writes"
        found.append(((*place, "topic"), text))
    return found + check_sink_columns(sink, place, pipeline)


def check_sink_keys(sink: Sink, place: Place) -> list[tuple[Place, str]]:
    """Report keys that a kind of sink needs and lacks, and keys that it does not use."""
    needed, allowed = SINKS[sink.kind]
    found: list[tuple[Place, str]] = [
        ((*place, name), f"a {sink.kind} sink needs {name}")
        for name in needed
        if not getattr(sink, name)
    ]
    for spec in fields(Sink):
        name = spec.name
        if name not in {"kind", "name", "options", *allowed} and getattr(sink, name):
            found.append(((*place, name), f"{name} does not go with a {sink.kind} sink"))
    return found


def check_sink_columns(sink: Sink, place: Place, pipeline: Pipeline) -> list[tuple[Place, str]]:
    """Return columns that a sink names must be among those it gets."""
    known: Sequence[str] | None = DEAD_COLUMNS if place == ("dead_letter",) else results(pipeline)
    if known is None:
        return []
    found: list[tuple[Place, str]] = []
    by_day = [DAY] if "timestamp" in known else []
    for key, names, more in (
        ("key", (sink.key,) if sink.key else (), ()),
        ("keys", sink.keys, ()),
        ("partition_by", sink.partition_by, by_day),
    ):
        for name in names:
            if name not in {*known, *more}:
                text = (
                    f"{key} names {name!r}, which is no column here: {', '.join([*known, *more])}"
                )
                found.append(((*place, key), text))
    return found


def results(pipeline: Pipeline) -> list[str] | None:
    """Return the columns that sinks get; None when only Spark can tell."""
    aggregate = pipeline.aggregate
    if aggregate:
        known = [*WINDOW_COLUMNS, *aggregate.by, *aggregate.aggregates]
        return None if aggregate.aggregates is UNREADABLE else known
    if pipeline.columns is UNREADABLE or pipeline.source.format != "virta":
        return None
    return [*COLUMNS, *pipeline.columns]


def is_own(sink: Sink, pipeline: Pipeline) -> bool:
    """True for a channel of the log that the pipeline reads."""
    source = pipeline.source
    if sink.kind != "channel" or source.format != "virta" or not source.log:
        return False
    return sink.log is None or pipeline.path(sink.log) == pipeline.path(source.log)


def own_topics(pipeline: Pipeline) -> list[str]:
    """Return what the pipeline itself writes to the log it reads: no input of its own."""
    sinks = [*pipeline.sinks, *([pipeline.dead_letter] if pipeline.dead_letter else [])]
    return [sink.topic for sink in sinks if sink.topic and is_own(sink, pipeline)]


def check_column(
    place: Place, name: str, pipeline: Pipeline, *, own: bool = True
) -> list[tuple[Place, str]]:
    """Return a column there must be: of the event, or (`own`) one of [columns]; other formats may have others."""
    known = [*COLUMNS, *(pipeline.columns if own else ())]
    if own and pipeline.columns is UNREADABLE:
        return []
    if pipeline.source.format != "virta" or name.split(".", maxsplit=1)[0] in known:
        return []
    return [(place, f"{place[-1]} names {name!r}, which is no column: {', '.join(known)}")]


def check_sql(place: Place, name: str, sql: str) -> list[tuple[Place, str]]:
    """Return what can be seen without Spark: that it is there, and that quotes and brackets are closed."""
    bare = QUOTED.sub("", sql)
    if sql.strip() and bare.count("(") == bare.count(")") and not set("\"'`") & set(bare):
        return []
    return [
        (place, f"{name} is {sql!r}: expected a SQL expression, its quotes and brackets closed")
    ]


def is_moment(text: str) -> bool:
    try:
        parse_moment(text)
    except ValueError:
        return text.isdecimal()
    return True


def is_interval(text: str | None) -> TypeGuard[str]:
    return text is not None and bool(INTERVAL.fullmatch(text)) and interval_seconds(text) > 0


def check_interval(place: Place, value: str) -> list[tuple[Place, str]]:
    if is_interval(value):
        return []
    name = place[-1] if place else ""
    return [(place, f'{name} {value!r}: expected an interval such as "10 minutes"')]


def interval_seconds(interval: str) -> float:
    """Return the length of a checked interval: "10 minutes" is 600."""
    matched = INTERVAL.fullmatch(interval)
    assert matched is not None
    return float(matched[1]) * SECONDS[matched[2].removesuffix("s")]


def sink_names(pipeline: Pipeline) -> list[str]:
    """Return the name of each sink: its own, or its kind and place. Checkpoints are kept under it."""
    return [sink.name or f"{sink.kind}-{i}" for i, sink in enumerate(pipeline.sinks)]
