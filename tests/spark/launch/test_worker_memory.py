"""Memory of Spark's Python workers: freed buffers are used again, programs of users stay as they are."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")

from virta.spark.launch import worker_memory

# Three buffers of 20 MiB: as they are freed, glibc by itself returns them to the kernel.
SCRIPT = """
import gc, resource
from virta.spark.launch import worker_memory
worker_memory.TaskContext.get = lambda: worker_memory.TaskContext()
worker_memory.prepare_memory()
def work(rounds):
    for _ in range(rounds):
        [b"x" * (20 << 20) for _ in range(3)]
work(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work(10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, gc.get_freeze_count() > 0)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_workers_keep_freed_memory():
    """In a task the pages of freed buffers stay, and what is loaded is no garbage."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )

    faults, frozen = done.stdout.split()
    assert frozen == "True"
    assert int(faults) < 1000


def test_a_program_keeps_its_own_settings(monkeypatch):
    """Outside of a task, as in a compaction, the C library is left alone."""
    called = []
    monkeypatch.setattr(worker_memory, "_prepared", False)
    monkeypatch.setattr(worker_memory.gc, "freeze", lambda: None)
    monkeypatch.setattr(worker_memory, "keep_freed_memory", lambda: called.append(1))

    worker_memory.prepare_memory()

    assert called == []
