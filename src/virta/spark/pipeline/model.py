"""
A pipeline: source → dedupe → filters → columns → aggregate → sinks, as a value.

Written as TOML (`virta.spark.pipeline.file`) or made in Python; both give the same frozen dataclasses.
Creating one checks it (`virta.spark.pipeline.checks`): all errors that need no Spark are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003 - the types are read at run time
from dataclasses import dataclass, field
from pathlib import Path

from virta.errors import VirtaError
from virta.filters import Filter, parse
from virta.spark.pipeline.checks import check
from virta.spark.pipeline.toml_lines import Place, line_of


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
    """A filter; an event passes if one of the pipeline's filters matches it."""

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
    """Where results go; `checks.SINKS` has the keys of each kind."""

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


@dataclass(frozen=True)
class Spark:
    """Where and how the pipeline runs; the command line overrides it."""

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

    def location(self, *place: str | int) -> str:
        """Return `file:line: ` of a place for messages, "" for a pipeline made in Python."""
        return f"{self.file}:{line_of(self.lines, place)}: " if self.file else ""

    def path(self, name: str) -> str:
        """Return a path of the pipeline as absolute; URIs are unchanged."""
        return name if "://" in name else str((Path(self.directory) / name).resolve())

    def checkpoint_path(self) -> str:
        return self.path(self.checkpoint or f".virta/pipelines/{self.name}")

    def sink_names(self) -> list[str]:
        """Return the name of each sink: its own, or its kind and place. Checkpoints are kept under it."""
        return [sink.name or f"{sink.kind}-{i}" for i, sink in enumerate(self.sinks)]

    def writes_to_source(self, sink: Sink) -> bool:
        """Return whether a sink is a channel of the log that the pipeline reads."""
        source = self.source
        if sink.kind != "channel" or source.format != "virta" or not source.log:
            return False
        return sink.log is None or self.path(sink.log) == self.path(source.log)

    def own_topics(self) -> list[str]:
        """Return the topics that the pipeline itself writes to the log it reads, which it must not read."""
        sinks = [*self.sinks, *([self.dead_letter] if self.dead_letter else [])]
        return [sink.topic for sink in sinks if sink.topic and self.writes_to_source(sink)]
