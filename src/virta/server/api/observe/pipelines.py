"""The steps of a pipeline as a graph, and the end of what it printed."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from starlette.routing import Route

from virta.errors import RequestError
from virta.server.api.handler import ApiHandler, not_found
from virta.server.api.observe.schemas import PipelineGraph, PipelineLog, PipelineStep

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request
    from starlette.responses import Response

    from virta.server.pipeline_supervisor import SupervisedPipeline
    from virta.spark.pipeline.model import Pipeline, Sink

LINES_DEFAULT, LINES_MAX = 100, 1000
LOG_BYTES_MAX = 256 * 1024


class PipelineDetailsApi(ApiHandler):
    """Handlers under `/pipelines/NAME`."""

    def routes(self) -> list[Route]:
        return [
            Route("/pipelines/{name}/graph", self.graph, methods=["GET"]),
            Route("/pipelines/{name}/log", self.log, methods=["GET"]),
        ]

    async def graph(self, request: Request) -> Response:
        return self._json(graph_of(self._supervised(request).pipeline))

    async def log(self, request: Request) -> Response:
        one = self._supervised(request)
        text = request.query_params.get("lines", str(LINES_DEFAULT))
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= LINES_MAX):
            raise RequestError(
                400,
                "invalid-limit",
                f"lines is {text[:20]!r}: a whole number from 1 to {LINES_MAX}",
            )
        lines = await asyncio.to_thread(last_lines, one.log, int(text))
        return self._json(PipelineLog(one.pipeline.name, lines))

    def _supervised(self, request: Request) -> SupervisedPipeline:
        found = self._service.pipelines.supervised.get(request.path_params["name"])
        if found is None:
            raise not_found("no pipeline of this name runs here")
        return found


def graph_of(pipeline: Pipeline) -> PipelineGraph:
    """Return the steps of a pipeline in the order of its rows."""
    source = pipeline.source
    title = ", ".join(source.topics) or source.log or source.format
    steps = [[PipelineStep("source", title, source.format)]]
    if pipeline.dedupe is not None:
        within = f"within {pipeline.dedupe.within}"
        steps.append([PipelineStep("dedupe", ", ".join(pipeline.dedupe.by), within)])
    if pipeline.filters:
        steps.append([PipelineStep("filter", one.match, one.dialect) for one in pipeline.filters])
    if pipeline.columns:
        steps.append([PipelineStep("columns", ", ".join(pipeline.columns), "")])
    if pipeline.aggregate is not None:
        found = pipeline.aggregate
        window = found.window or found.session or ""
        by = f"by {', '.join(found.by)}" if found.by else ""
        steps.append([PipelineStep("aggregate", f"{window} {by}".strip(), f"late {found.late}")])
    sinks = [
        _sink(name, sink) for name, sink in zip(pipeline.sink_names(), pipeline.sinks, strict=True)
    ]
    if pipeline.dead_letter is not None:
        dead = pipeline.dead_letter
        sinks.append(PipelineStep("dead letters", dead.topic or dead.path or dead.kind, dead.kind))
    steps.append(sinks)
    return PipelineGraph(pipeline.name, pipeline.file, pipeline.trigger, steps)


def _sink(name: str, sink: Sink) -> PipelineStep:
    return PipelineStep(sink.kind, sink.topic or sink.path or sink.table or name, name)


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a file; none if it does not exist. Blocks."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES_MAX))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    lines = text.splitlines()
    return (lines[1:] if size > LOG_BYTES_MAX else lines)[-count:]
