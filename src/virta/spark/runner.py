"""The documented import path of `run`, which is in `virta.spark.pipeline`."""

from virta.spark.pipeline.runner import run

__all__ = ["run"]
