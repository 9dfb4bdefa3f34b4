"""
Settings for the memory of Spark's Python workers.

Spark collects garbage after every task. With pyspark, pyarrow, numpy and Virta loaded that takes 50 ms and more,
as long as decoding 300,000 records. And the C library returns the memory of every large buffer to the kernel, which
clears it page by page for the next one: a fifth of the time to decode events.
"""

from __future__ import annotations

import gc

from pyspark import TaskContext

from virta.malloc import keep_freed_memory

_prepared = False


def prepare_memory() -> None:
    """Exclude all present objects from garbage collection and, in a worker, keep freed memory; once per process."""
    global _prepared  # noqa: PLW0603 - one flag a process
    if _prepared:
        return
    gc.freeze()
    if TaskContext.get() is not None:  # a process of Spark's, not a program that reads a log
        keep_freed_memory()
    _prepared = True
