"""Open a log: find it, create it, or wait for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from virta import files
from virta.errors import LogError, LogLimitError, LogNotFoundError
from virta.log.disk_errors import translate_disk_errors
from virta.log.engine import kernel
from virta.log.engine.writer import DURABILITIES
from virta.log.format.compression import COMPRESSIONS, load_library
from virta.log.format.directory import (
    META,
    Meta,
    boot_id,
    make_directory,
    open_locks,
    read_meta,
    write_meta,
)
from virta.log.limits import (
    LOCK_TIMEOUT_S,
    POLL_S,
    SEGMENT_BYTES_DEFAULT,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
)
from virta.log.log import Log
from virta.log.validation import check_option

if TYPE_CHECKING:
    from virta.log.log import Compression, Durability, Visibility


@translate_disk_errors("opening")
def open_log(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    read_only: bool = False,
    durability: Durability = "group",
    visibility: Visibility | None = None,
    segment_bytes: int | None = None,
    compression: Compression | None = None,
    mode: int | None = None,
    lock_timeout: float = LOCK_TIMEOUT_S,
    wait: float | None = None,
) -> Log:
    """
    Open the log in directory `path`; create it if it does not exist.

    Args:
        create: make the log when there is none (never with read_only).
        read_only: neither lock nor write anything; works in a directory without write permission.
        durability: what an append waits for unless it says otherwise: none, interval, group or fsync.
        visibility: what readers see: "durable" records only (default), or all "committed" ones
            (default with durability="none").
        segment_bytes: size at which a new log starts its next segment; fixed when the log is made.
        compression: "zstd" compresses each batch from now on, "none" no longer; recorded in the log, for all writers.
            Without it the log stays as it is (a new one: not compressed).
        mode: directory mode of a log that this call creates: 0o700 (default), or 0o770 to share it
            with the directory's group; files follow. An existing directory keeps its mode.
        lock_timeout: seconds to wait for other writers before giving up.
        wait: seconds to wait for another process to create the log; implies create=False.
    """
    directory = Path(path)
    check_option("durability", durability, DURABILITIES)
    seen: Visibility = visibility or ("committed" if durability == "none" else "durable")
    check_option("visibility", seen, ("committed", "durable"))
    if compression is not None:
        check_option("compression", compression, COMPRESSIONS)
    if segment_bytes is not None and not SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX:
        raise LogLimitError(
            f"segment_bytes is {segment_bytes}; it must be from {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}"
        )
    if mode is not None and not files.is_directory_mode(mode):
        raise LogLimitError(
            f"mode is {mode!r}; it must be a directory's mode such as 0o700, 0o750 or 0o770"
        )
    if wait is not None:
        _await_creation(directory, wait)
    if read_only or not create or wait is not None:
        meta = read_meta(directory)
    else:
        features = () if compression in {None, "none"} else (str(compression),)
        size = segment_bytes or SEGMENT_BYTES_DEFAULT
        meta = _create(directory, Meta(uuid4(), size, compression or "none", features), mode)
    if meta.features or compression == "zstd":
        load_library()
    log = Log(
        directory,
        meta,
        read_only=read_only,
        durability=durability,
        visibility=seen,
        lock_timeout=lock_timeout,
    )
    if compression is not None and compression != meta.compression and not read_only:
        try:
            log.compress_with(compression)
        except BaseException:
            log.close()
            raise
    return log


def _create(directory: Path, meta: Meta, mode: int | None) -> Meta:
    try:
        return read_meta(directory)
    except LogNotFoundError:
        pass
    make_directory(directory, mode)
    lock_fd, sync_fd, control_fd = open_locks(directory)
    core = kernel.Kernel(lock_fd, sync_fd, control_fd, boot_id(), True)
    os.close(control_fd)
    try:
        if not core.lock(LOCK_TIMEOUT_S):
            raise LogError(f"another process has been creating the log at {directory} for too long")
        try:
            if not (directory / META).exists():
                return write_meta(directory, meta)
        finally:
            core.unlock()
    finally:
        core.close()
    return read_meta(directory)


def _await_creation(directory: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not (directory / META).exists():
        if time.monotonic() >= deadline:
            raise LogNotFoundError(f"no log appeared at {directory} within {seconds:g} s")
        time.sleep(min(POLL_S / 10, seconds))
