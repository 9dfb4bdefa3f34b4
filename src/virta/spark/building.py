"""The documented import path of `build`, which is in `virta.spark.pipeline`."""

from virta.spark.pipeline.builder import build

__all__ = ["build"]
