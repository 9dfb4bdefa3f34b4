"""
Write each micro-batch of a pipeline to all of its sinks: it is read and decoded once.

    source ──► flow ──► micro-batch, kept in Spark's cache ──┬─► sink ─► sink ─► …
                                                             └─► dead letters (of a stateless pipeline)

Invariant: a micro-batch is committed after all sinks have it. A run that repeats it, because a sink failed or the driver
died, skips the sinks that are recorded in `written.json`; the others write under the same query id, sink name and
number, which channels refuse, directories replace and keyed tables overwrite. So a sink that fails doubles no
other one, and a crash between a write and its record doubles none that is exactly once.

A stateful query is executed in every attempt, also if all sinks have the rows: it moves the state and the watermark.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from virta.spark.pipeline.builder import is_stateful, split
from virta.spark.pipeline.outputs import BatchId, write_dead, write_sink
from virta.spark.pipeline.status import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame

    from virta.spark.pipeline.model import Pipeline

DEAD_LETTER = "dead-letter"
WRITTEN = "written.json"
# Kinds of sinks that run several jobs for a micro-batch, or read only a part of it.
SEVERAL_JOBS = frozenset(("jdbc", "console", "iceberg"))


class FanOut:
    """The function that foreachBatch calls; `failing` names the sink that failed."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        on_begin: Callable[[str, int], None] | None,
        on_dead: Callable[[int], None],
    ) -> None:
        self._pipeline = pipeline
        self._on_begin = on_begin
        self._on_dead = on_dead
        self._is_stateful = is_stateful(pipeline)
        names = [*pipeline.sink_names(), *([DEAD_LETTER] if pipeline.dead_letter else [])]
        self.figures: dict[str, dict[str, Any]] = {
            name: {"batches": 0, "seconds": 0.0} for name in names
        }
        self.failing: str | None = None

    def __call__(self, rows: DataFrame, number: int) -> None:
        batch = BatchId(query_id(rows), number)
        if self._on_begin is not None:
            self._on_begin(batch.query, number)
        written = Written(self._pipeline, batch)
        with ExitStack() as stack:
            is_empty = False
            if self._has_several_jobs():
                rows = stack.enter_context(persisted(rows))
                # Executes all of it, once.
                is_empty = rows.count() == 0
            if is_empty and not self._replaces_all():
                return
            self._write(rows, batch, written)

    def _has_several_jobs(self) -> bool:
        pipeline = self._pipeline
        jobs = len(pipeline.sinks) + (pipeline.dead_letter is not None)
        kinds = {sink.kind for sink in pipeline.sinks}
        return self._is_stateful or jobs > 1 or bool(kinds & SEVERAL_JOBS)

    def _replaces_all(self) -> bool:
        """Return whether even an empty result changes a sink."""
        aggregate = self._pipeline.aggregate
        return aggregate is not None and aggregate.mode == "complete"

    def _write(self, rows: DataFrame, batch: BatchId, written: Written) -> None:
        pipeline = self._pipeline
        results, dead = (rows, None) if self._is_stateful else split(rows, pipeline)
        for name, sink in zip(pipeline.sink_names(), pipeline.sinks, strict=True):
            with self._writing(name, written) as is_due:
                if is_due:
                    write_sink(results, sink, pipeline, name, batch)
        if dead is not None:
            with self._writing(DEAD_LETTER, written) as is_due:
                if is_due:
                    self._on_dead(write_dead(dead, pipeline, "invalid", batch))

    @contextmanager
    def _writing(self, name: str, written: Written) -> Iterator[bool]:
        """Measure and record a write, unless an earlier attempt has done it."""
        if name in written.names:
            yield False
            return
        begun = time.monotonic()
        self.failing = name
        yield True
        self.failing = None
        figures = self.figures[name]
        figures["batches"] += 1
        figures["seconds"] = round(figures["seconds"] + time.monotonic() - begun, 3)
        written.add(name)


class Written:
    """The sinks that have a micro-batch, on disk beside the checkpoint."""

    def __init__(self, pipeline: Pipeline, batch: BatchId) -> None:
        self._pipeline = pipeline
        self._batch = batch
        kept = read_json(pipeline, WRITTEN)
        is_this = kept.get("query") == batch.query and kept.get("batch") == batch.number
        self.names: set[str] = set(kept["sinks"]) if is_this else set()

    def add(self, name: str) -> None:
        self.names.add(name)
        batch = self._batch
        record = {"query": batch.query, "batch": batch.number, "sinks": sorted(self.names)}
        write_json(self._pipeline, WRITTEN, record)


@contextmanager
def persisted(rows: DataFrame) -> Iterator[DataFrame]:
    kept = rows.persist()
    try:
        yield kept
    finally:
        kept.unpersist()


def query_id(rows: DataFrame) -> str:
    """Return the id of the query whose micro-batch this is."""
    context = rows.sparkSession.sparkContext
    return str(context.getLocalProperty("sql.streaming.queryId"))
