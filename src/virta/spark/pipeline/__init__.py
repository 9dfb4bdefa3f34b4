"""
Pipelines: source → dedupe → filters → columns → aggregate → sinks, checked before Spark starts.

The values of a pipeline are imported here; `build` and `run`, which need pyspark, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from virta.spark.pipeline.model import (
    Aggregate,
    Dedupe,
    Pipeline,
    PipelineError,
    Sink,
    Source,
    Where,
)

__all__ = [
    "Aggregate",
    "Dedupe",
    "Pipeline",
    "PipelineError",
    "Sink",
    "Source",
    "Where",
    "build",
    "run",
]

LAZY = {"build": "virta.spark.pipeline.builder", "run": "virta.spark.pipeline.runner"}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'virta.spark.pipeline' has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)
