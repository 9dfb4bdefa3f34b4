"""
What a Python worker of Spark does once.

Spark collects garbage after every task, before the worker takes the next: with everything that pyspark,
pyarrow, numpy and Virta have loaded that is 50 ms and more, as long as decoding 300,000 records.
"""

from __future__ import annotations

import gc

_frozen = False


def freeze_gc() -> None:
    """Leave what is loaded by now out of garbage collection: it is there for as long as the worker is."""
    global _frozen  # noqa: PLW0603 - one flag a process
    if not _frozen:
        gc.freeze()
        _frozen = True
