"""
Arrow arrays from the buffers of a decoder engine.

The engine is native/arrow.c or `virta.spark.source.arrow_plain`. Text columns with invalid UTF-8 get U+FFFD: a stray
byte in a topic must not end a query, and a Spark string cannot contain it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from virta.log.format.compression import decompress
from virta.native import load
from virta.spark.source import arrow_plain as plain

native = load("virta.spark._arrow")
if native is not None:
    native.set_decompress(decompress)

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORD_COLUMNS = plain.RECORD_FIELDS
TEXT_COLUMNS = frozenset(("topic", "key", "value"))
TIMESTAMP = pa.timestamp("us", tz="UTC")

# Any: no common type describes the functions of a module and an extension.
kernel: Any = native or plain


def want_mask(names: Sequence[str]) -> int:
    return sum(1 << i for i, name in enumerate(RECORD_COLUMNS) if name in names)


def make_array(name: str, kind: pa.DataType, rows: int, column: Any, *, is_text: bool) -> pa.Array:
    """Return one column's buffers as an array of `kind`, without a copy unless text is invalid."""
    if name == "offset":
        return pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(column)])
    if name == "timestamp":
        return pa.Array.from_buffers(TIMESTAMP, rows, [None, pa.py_buffer(column)])
    ends, data = column
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    if kind == pa.binary() or is_text:
        return pa.Array.from_buffers(kind, rows, buffers)
    raw = pa.Array.from_buffers(pa.binary(), rows, buffers)
    return pa.array([v.decode("utf-8", "replace") for v in raw.to_pylist()], pa.string())
