"""
What differs between the supported versions of Spark, 4.1 to 4.3, in one place.

Spark 4.1 has no limits for micro-batches of Python sources: a trigger reads all that is there, and the options
`maxRecordsPerTrigger` and `maxBytesPerTrigger` have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    HAS_READ_LIMITS = True
except ImportError:  # Spark 4.1
    HAS_READ_LIMITS = False

    class ReadLimit:  # type: ignore[no-redef]
        """How much a micro-batch may read."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """No limit."""

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """At most so many rows."""

        max_rows: int

    @dataclass
    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        """At most so many bytes."""

        max_bytes: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Spark 4.1 fixes the end of such a run itself."""


# Digits of a second that Spark reads of a TIME in text.
TIME_DIGITS = 9 if tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 3) else 6

__all__ = [
    "HAS_READ_LIMITS",
    "TIME_DIGITS",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
    "arrow_type",
]

# Spark 4.1 has no such argument; its timestamps are in UTC by default.
_IN_UTC: dict[str, Any] = (
    {"timezone": "UTC"} if "timezone" in signature(to_arrow_type).parameters else {}
)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of a source."""
    return to_arrow_schema(schema, **_IN_UTC)


def arrow_type(kind: DataType) -> pa.DataType:
    """Return the Arrow type that Spark expects of a column."""
    return to_arrow_type(kind, **_IN_UTC)
