"""Disk errors as the log's own exceptions, with a hint for the user; no bare OSError leaves the log."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from virta.errors import LogError, LogLockTimeoutError, LogWriteError
from virta.log.format.directory import WRITER_LOCK
from virta.log.limits import PROBE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def disk_error(exc: OSError, doing: str, consequence: str = "") -> LogWriteError:
    """Return the error to raise for `exc`; `consequence` says what happened to the data."""
    if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
        code, hint = "log_disk_full", "free some space and try again"
    elif exc.errno == errno.EFBIG:
        code, hint = "log_file_too_big", "raise the process's file size limit (ulimit -f)"
    elif exc.errno in {errno.EMFILE, errno.ENFILE}:
        code, hint = "log_too_many_files", "close some files or raise the limit (ulimit -n)"
    elif exc.errno in {errno.EACCES, errno.EPERM}:
        code = "log_permission"
        hint = "its owner can share it with a group (docs/log.md, Who may use it)"
    else:
        code, hint = "log_write_failed", "check the disk"
    advice = f"{consequence}: {hint}" if consequence else hint
    return LogWriteError(f"{doing} failed: {exc.strerror or exc}; {advice}", code=code)


@contextmanager
def already_written(directory: Path) -> Iterator[None]:
    """Turn a lock timeout after the write into another error: a timeout means that nothing was written."""
    try:
        yield
    except LogLockTimeoutError as exc:
        raise LogWriteError(
            f"the records appended to {directory} are written, but may not be on disk yet: {exc.message}",
            code="log_not_synced",
        ) from exc


def translate_disk_errors(
    doing: str,
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """
    Decorate a function so that an OSError becomes a LogWriteError that names `doing`.

    Its first argument is a path or has the attribute `path`.
    """

    def decorate(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @wraps(function)
        def translated(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except OSError as exc:
                where = getattr(args[0], "path", args[0])
                named = f" {where}" if isinstance(where, str | Path) else ""
                raise disk_error(exc, f"{doing}{named}") from exc

        return translated

    return decorate


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
