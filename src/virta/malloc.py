"""
Settings of the C library's allocator: which freed memory goes back to the system.

By default glibc gives every thread an arena of its own, and raises its limit for unused memory with the largest
block ever freed, up to 64 MiB an arena. In a daemon with a dozen threads, each of which rarely needs a few megabytes,
memory then grows with every thread that has had its turn, and looks like a leak. A worker that decodes one large
buffer after the other wants the opposite. Both are set by `mallopt`; other C libraries have no such settings.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

# Parameters of mallopt(3).
M_TRIM_THRESHOLD = -1  # unused bytes at the end of an arena beyond which they are returned
M_MMAP_THRESHOLD = -3  # blocks from this size on are mapped one by one and returned when freed
M_ARENA_MAX = -8

MIB = 1024 * 1024
# One arena for the event loop and one for all other threads, which mostly wait for each other anyway.
DAEMON_ARENAS = 2
# Request bodies and batches of the log are smaller, so they are reused; parts of the log that a search reads are not.
DAEMON_MMAP_THRESHOLD_BYTES = 1 * MIB
DAEMON_TRIM_THRESHOLD_BYTES = 2 * MIB
# Arrow batches of a worker.
WORKER_MMAP_THRESHOLD_BYTES = 32 * MIB
WORKER_TRIM_THRESHOLD_BYTES = 128 * MIB


def return_freed_memory() -> None:
    """Return freed memory to the system, for daemons; call it before threads start."""
    _set(
        {
            M_ARENA_MAX: DAEMON_ARENAS,
            M_MMAP_THRESHOLD: DAEMON_MMAP_THRESHOLD_BYTES,
            M_TRIM_THRESHOLD: DAEMON_TRIM_THRESHOLD_BYTES,
        }
    )


def keep_freed_memory() -> None:
    """Keep the memory of large buffers for the next ones, for workers."""
    _set(
        {
            M_MMAP_THRESHOLD: WORKER_MMAP_THRESHOLD_BYTES,
            M_TRIM_THRESHOLD: WORKER_TRIM_THRESHOLD_BYTES,
        }
    )


def _set(parameters: dict[int, int]) -> None:
    with suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in parameters.items():
            mallopt(parameter, value)
