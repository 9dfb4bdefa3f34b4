"""
The lake: a log's history as Parquet, Delta or Iceberg tables, and reads of lake and log together.

Compaction needs no JVM; reading into Spark does. Names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from virta.spark.lake.directory import Lake, LakeError

LAZY = {
    "LakeReport": "virta.spark.lake.compaction",
    "compact": "virta.spark.lake.compaction",
    "infer_schema": "virta.spark.lake.inference",
    "read_all": "virta.spark.lake.reading",
    "read_lake": "virta.spark.lake.reading",
}

__all__ = ["Lake", "LakeError", *sorted(LAZY)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'virta.spark.lake' has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)
