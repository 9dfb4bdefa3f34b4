"""Find out whether an append would succeed now, after one has failed and without waiting for the next."""

from __future__ import annotations

import fcntl
import os
import tempfile
from typing import TYPE_CHECKING

from virta.errors import LogError, LogLockTimeoutError
from virta.log.disk_errors import disk_error
from virta.log.format.directory import WRITER_LOCK
from virta.log.limits import PROBE_BYTES_MAX

if TYPE_CHECKING:
    from pathlib import Path


def probe(directory: Path, size: int) -> LogError | None:
    """
    Return the error that an append of `size` bytes to the log in `directory` would raise, or None.

    The write lock must be free, and a scratch file of that size must be written and synced next to the
    segments. Never waits for the lock.
    """
    try:
        lock = os.open(directory / WRITER_LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(lock)
        with tempfile.TemporaryFile(dir=directory) as scratch:
            scratch.write(bytes(min(max(size, 1), PROBE_BYTES_MAX)))
            scratch.flush()
            os.fsync(scratch.fileno())
    except BlockingIOError:
        return LogLockTimeoutError(f"the write lock of {directory} is not free")
    except OSError as exc:
        return disk_error(exc, f"writing to {directory}")
    return None
