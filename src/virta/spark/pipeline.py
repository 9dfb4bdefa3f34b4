"""
A pipeline: source → dedupe → filters → columns → aggregate → sinks, as a value.

Written as TOML or made in Python; both give the same frozen dataclasses. Everything that can be wrong
without Spark is found by `load` before Spark starts, all at once, each with the line it stands on.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence  # noqa: TC003 - the types are read at run time
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from virta.errors import FilterError, VirtaError
from virta.filters import DIALECTS, Filter, parse
from virta.spark.toml_lines import Place, find_lines, line_of

FILE_BYTES_MAX = 1024 * 1024
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
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TRIGGERS = ("available-now", "continuous")


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
    options: Mapping[str, str] = field(default_factory=dict)


# kind -> (needed keys, allowed keys beyond `kind`, `name` and `options`)
SINKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "channel": (("topic",), ("topic", "log", "type", "source", "key", "durability")),
    "parquet": (("path",), ("path", "partition_by")),
    "kafka": (("topic",), ("topic", "key")),
    "jdbc": (("url", "table"), ("url", "table")),
    "console": ((), ()),
}


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
    directory: str = field(default=".", compare=False)

    def __post_init__(self) -> None:
        problems = [message for _, message in check(self)]
        if problems:
            raise PipelineError(problems)

    def path(self, name: str) -> str:
        """A path of the pipeline, absolute; URIs stay as they are."""
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
    if pipeline.trigger not in TRIGGERS and not INTERVAL.fullmatch(pipeline.trigger):
        expected = f'{", ".join(TRIGGERS)} or an interval such as "10 seconds"'
        found.append(
            (("pipeline", "trigger"), f"trigger {pipeline.trigger!r}: expected {expected}")
        )
    found += check_source(pipeline.source)
    if pipeline.dedupe:
        found += check_interval(("dedupe", "within"), pipeline.dedupe.within)
    found += check_filters(pipeline.filters)
    if pipeline.aggregate:
        found += check_aggregate(pipeline.aggregate)
    found += check_sinks(pipeline)
    return found


def check_source(source: Source) -> list[tuple[Place, str]]:
    found: list[tuple[Place, str]] = []
    if source.format == "virta" and not source.log:
        found.append((("source",), 'source has no log: give log = "<directory>"'))
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
    for name in ("max_records_per_trigger", "max_bytes_per_trigger"):
        limit = getattr(source, name)
        if limit is not None and limit < 1:
            found.append((("source", name), f"{name} {limit}: expected a number above 0"))
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


def check_aggregate(aggregate: Aggregate) -> list[tuple[Place, str]]:
    found: list[tuple[Place, str]] = []
    if (aggregate.window is None) == (aggregate.session is None):
        found.append((("aggregate",), "aggregate needs either window or session"))
    if aggregate.slide is not None and aggregate.window is None:
        found.append((("aggregate", "slide"), "slide goes with window only"))
    for name in ("window", "slide", "session", "late"):
        value = getattr(aggregate, name)
        if value is not None:
            found += check_interval(("aggregate", name), value)
    if not aggregate.aggregates:
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
    if sink.kind not in SINKS:
        return [((*place, "kind"), f"kind {sink.kind!r}: expected {', '.join(SINKS)}")]
    needed, allowed = SINKS[sink.kind]
    found: list[tuple[Place, str]] = [
        (place, f"a {sink.kind} sink needs {name}") for name in needed if not getattr(sink, name)
    ]
    for spec in fields(Sink):
        name = spec.name
        if name not in {"kind", "name", "options", *allowed} and getattr(sink, name):
            found.append(((*place, name), f"{name} does not go with a {sink.kind} sink"))
    if sink.kind == "channel" and not sink.log and pipeline.source.format != "virta":
        found.append((place, "a channel sink needs log when the source is not a log"))
    mode = pipeline.aggregate.mode if pipeline.aggregate else "append"
    if sink.kind == "parquet" and mode != "append":
        found.append((place, f"a parquet sink takes mode append only, not {mode}"))
    return found


def check_interval(place: Place, value: str) -> list[tuple[Place, str]]:
    if INTERVAL.fullmatch(value):
        return []
    return [(place, f'{place[-1]} {value!r}: expected an interval such as "10 minutes"')]


def interval_seconds(interval: str) -> float:
    """The length of a checked interval: "10 minutes" is 600."""
    matched = INTERVAL.fullmatch(interval)
    assert matched is not None
    return float(matched[1]) * SECONDS[matched[2].removesuffix("s")]


def sink_names(pipeline: Pipeline) -> list[str]:
    """The name of each sink: its own, or its kind and place. Checkpoints are kept under it."""
    return [sink.name or f"{sink.kind}-{i}" for i, sink in enumerate(pipeline.sinks)]


# TOML.

TABLES: dict[str, Any] = {
    "source": Source,
    "dedupe": Dedupe,
    "filter": Where,
    "aggregate": Aggregate,
    "sink": Sink,
    "dead_letter": Sink,
}
HEAD = {"name": str, "description": str, "checkpoint": str, "trigger": str}


def load(path: str | Path) -> Pipeline:
    """
    Read and check a pipeline file.

    Raises:
        PipelineError: its `problems` are `file:line: message`, in the order of lines.
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as exc:
        raise PipelineError([f"{file}: cannot be read: {exc.strerror}"]) from exc
    if len(raw) > FILE_BYTES_MAX:
        raise PipelineError([f"{file}: {len(raw)} bytes, at most {FILE_BYTES_MAX}"])
    return loads(raw.decode("utf-8", "replace"), str(file), str(file.parent))


def loads(text: str, name: str = "<pipeline>", directory: str = ".") -> Pipeline:
    """As `load`, from a text."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        where = re.search(r"line (\d+)", str(exc))
        line = where[1] if where else text.count("\n") + 1  # "at end of document"
        raise PipelineError([f"{name}:{line}: {exc}"]) from exc
    lines = find_lines(text)
    problems: list[tuple[Place, str]] = []
    values = read_document(document, problems)
    if not problems:
        # Made past its own check: here the problems need their lines.
        draft = object.__new__(Pipeline)
        for spec in fields(Pipeline):
            object.__setattr__(draft, spec.name, values.get(spec.name, default_of(spec)))
        problems = check(draft)
    if problems:
        found = sorted({(line_of(lines, place), message) for place, message in problems})
        raise PipelineError([f"{name}:{line}: {message}" for line, message in found])
    return Pipeline(**values, directory=directory)


def default_of(spec: Field[Any]) -> Any:
    if spec.default is not MISSING:
        return spec.default
    return spec.default_factory() if spec.default_factory is not MISSING else None


def read_document(document: dict[str, Any], problems: list[tuple[Place, str]]) -> dict[str, Any]:
    """The arguments of Pipeline; shape errors go to `problems`."""
    known = {"pipeline", "columns", *TABLES}
    problems += [
        ((name,), f"unknown table {name!r}: choose from {', '.join(sorted(known))}")
        for name in document.keys() - known
    ]
    head = document.get("pipeline", {})
    values: dict[str, Any] = {}
    if not isinstance(head, dict) or "name" not in head:
        problems.append((("pipeline",), 'there is no pipeline name: [pipeline] name = "…"'))
        head = {}
    for key, value in head.items():
        if key not in HEAD:
            problems.append(
                (("pipeline", key), f"unknown key {key!r}: choose from {', '.join(HEAD)}")
            )
        elif not isinstance(value, str):
            problems.append((("pipeline", key), f"{key} is {value!r}: expected a string"))
        else:
            values[key] = value
    values["columns"] = read_texts(document.get("columns", {}), ("columns",), problems)
    for name in ("source", "dedupe", "aggregate", "dead_letter"):
        if name in document:
            values[name] = read_table(TABLES[name], document[name], (name,), problems)
    if "source" not in document:
        problems.append(((), "there is no [source]"))
    for name, plural in (("filter", "filters"), ("sink", "sinks")):
        tables = document.get(name, [])
        if not isinstance(tables, list):
            problems.append(((name,), f"write [[{name}]] (two brackets): there may be several"))
            continue
        values[plural] = tuple(
            read_table(TABLES[name], table, (name, i), problems) for i, table in enumerate(tables)
        )
    return values


def read_table(kind: Any, table: Any, place: Place, problems: list[tuple[Place, str]]) -> Any:
    """A dataclass of `kind` from a TOML table; None when it has problems."""
    if not isinstance(table, dict):
        problems.append((place, f"{place[0]} is {table!r}: expected a table"))
        return None
    hints = get_type_hints(kind)
    before = len(problems)
    problems += [
        ((*place, key), f"unknown key {key!r}: choose from {', '.join(hints)}")
        for key in table.keys() - hints.keys()
    ]
    problems += [
        (place, f"{place[0]} has no {spec.name}")
        for spec in fields(kind)
        if spec.name not in table and spec.default is spec.default_factory is MISSING
    ]
    values = {
        key: read_value(hints[key], value, (*place, key), problems)
        for key, value in table.items()
        if key in hints
    }
    return kind(**values) if len(problems) == before else None


def read_value(hint: Any, value: Any, place: Place, problems: list[tuple[Place, str]]) -> Any:
    allowed = get_args(hint) or (hint,)
    if str(hint).startswith("tuple"):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        problems.append((place, f"{place[-1]} is {value!r}: expected a list of strings"))
    elif "Mapping" in str(hint):
        return read_texts(value, place, problems)
    elif int in allowed:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        problems.append((place, f"{place[-1]} is {value!r}: expected a whole number"))
    elif isinstance(value, str):
        return value
    elif place[-1] == "start" and isinstance(value, int):
        return str(value)
    else:
        problems.append((place, f"{place[-1]} is {value!r}: expected a string"))
    return None


def read_texts(table: Any, place: Place, problems: list[tuple[Place, str]]) -> Mapping[str, str]:
    if not isinstance(table, dict):
        problems.append((place, f"{place[-1]} is {table!r}: expected a table of strings"))
        return {}
    for key, value in table.items():
        if not isinstance(value, str | int | float | bool):
            problems.append(((*place, key), f"{key} is {value!r}: expected a string"))
    return {
        key: value if isinstance(value, str) else str(value).lower() for key, value in table.items()
    }
