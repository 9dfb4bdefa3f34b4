"""
Virta on Spark: the same log and the same filters, on any number of machines.

Importing this package does not import pyspark: names are loaded when first used, so that checking a pipeline
file and `virta doctor` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

EXPORTS = {
    "changes_to_table": "virta.spark.transforms",
    "dead_letters": "virta.spark.transforms",
    "decode_events": "virta.spark.transforms",
    "dedupe": "virta.spark.transforms",
    "enrich": "virta.spark.transforms",
    "infer_schema": "virta.spark.lake.inference",
    "latest_by_key": "virta.spark.transforms",
    "match": "virta.spark.matching.match",
    "match_log": "virta.spark.reading",
    "read": "virta.spark.reading",
    "read_all": "virta.spark.lake.reading",
    "read_lake": "virta.spark.lake.reading",
    "read_stream": "virta.spark.reading",
    "session": "virta.spark.launch.session",
    "sessionize": "virta.spark.transforms",
    "to_events": "virta.spark.transforms",
    "valid_events": "virta.spark.transforms",
    "view": "virta.spark.row_view",
    "where": "virta.spark.matching.match",
    "window_aggregate": "virta.spark.transforms",
}

__all__ = sorted(EXPORTS)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'virta.spark' has no attribute {name!r}")
    return getattr(import_module(EXPORTS[name]), name)
