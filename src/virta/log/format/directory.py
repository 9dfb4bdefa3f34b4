"""
A log's directory: file names, the META file, lock files, and which directories can be a log.

    META                       JSON, written once: format, stream id, CRC-8 variant, segment size
    writer.lock sync.lock maint.lock
                               never renamed, never deleted, always empty
    control                    4096 bytes of hints, may be lost while no process has the log open
    <20 digits>.puro           segments, named by their first offset
    <20 digits>.pidx           sparse indexes of sealed segments, rebuildable
    <20 digits>.ptix           topic indexes of sealed segments, rebuildable
    groups/ pins/ quarantine/  consumers, pins of retention, bytes that recovery removed
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from virta import files
from virta.errors import LogFormatError, LogNotFoundError, LogReadOnlyError
from virta.log.format.compression import COMPRESSIONS
from virta.log.limits import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT: Final = 1
FEATURES: Final = ("zstd",)
META: Final = "META"
META_BYTES_MAX: Final = 64 * 1024  # ours has 200
CONTROL: Final = "control"
WRITER_LOCK, SYNC_LOCK, MAINT_LOCK = "writer.lock", "sync.lock", "maint.lock"
GROUPS, PINS, QUARANTINE = "groups", "pins", "quarantine"
SHIPPED = "shipped.json"  # how far object storage has the log
SEGMENT_SUFFIX, INDEX_SUFFIX, TOPIC_INDEX_SUFFIX = ".puro", ".pidx", ".ptix"
CRC8_VARIANT: Final = "0x31/00/MSB"
CONTROL_BYTES: Final = 4096

# Their locks or shared memory do not work as the log needs; a container's bind mount is fine.
REFUSED_FILE_SYSTEMS: Final = ("nfs", "cifs", "smb", "fuse.sshfs", "fuse.s3", "afs", "ceph")


class Meta(NamedTuple):
    stream: uuid.UUID
    segment_bytes: int
    compression: str = "none"  # of new segments
    features: tuple[str, ...] = ()  # what a reader must support


def segment_name(base: int) -> str:
    return f"{base:020d}{SEGMENT_SUFFIX}"


def index_name(base: int) -> str:
    return f"{base:020d}{INDEX_SUFFIX}"


def topic_index_name(base: int) -> str:
    return f"{base:020d}{TOPIC_INDEX_SUFFIX}"


def remove_topic_index(directory: Path, base: int) -> None:
    """Remove a topic index, before its segment is changed or removed."""
    (directory / topic_index_name(base)).unlink(missing_ok=True)


def segment_bases(directory: Path) -> list[int]:
    """Return the first offsets of all segments, in order; other files are ignored."""
    return sorted(
        int(name[:20])
        for name in os.listdir(directory)
        if name[20:] == SEGMENT_SUFFIX and name[:20].isdigit()
    )


def read_meta(directory: Path) -> Meta:
    """
    Return the content of the META file.

    Raises:
        LogNotFoundError: there is no log here.
        LogFormatError: it is damaged, or written by a newer Virta.
    """
    path = directory / META
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise LogNotFoundError(f"no log at {directory}: there is no META file in it") from None
    try:
        meta: dict[str, Any] = json.loads(text[:META_BYTES_MAX])
        version = meta["format"]
        stream = uuid.UUID(meta["stream"])
        segment_bytes = meta["segment_bytes"]
        features = tuple(meta.get("features", ()))
        compression = meta.get("compression", "none")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise LogFormatError(f"{path} is not a log's META file: {str(exc)[:200]!r}") from exc
    if type(version) is not int:
        raise LogFormatError(f"{path}: format {_short_repr(version)} is not a whole number")
    if version != FORMAT:
        raise LogFormatError(
            f"{directory} has log format {version!r}; this Virta reads format {FORMAT}: upgrade Virta",
            code="log_format_newer",
        )
    unknown = [str(name) for name in features if name not in FEATURES]
    if unknown or compression not in COMPRESSIONS:
        raise LogFormatError(
            f"{directory} uses features this Virta does not know: "
            f"{', '.join(unknown) or f'compression {_short_repr(compression)}'}",
            code="log_format_newer",
        )
    if (
        type(segment_bytes) is not int
        or not SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX
    ):
        raise LogFormatError(
            f"{path}: segment_bytes {_short_repr(segment_bytes)} is not a whole number from "
            f"{SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}"
        )
    return Meta(stream, segment_bytes, compression, features)


def _short_repr(value: object) -> str:
    return repr(value)[:60]


def write_meta(directory: Path, meta: Meta) -> Meta:
    """Write the META file of a new log, or replace it after its compression changed."""
    text = json.dumps(
        {
            "format": FORMAT,
            "stream": str(meta.stream),
            "crc8": CRC8_VARIANT,
            "segment_bytes": meta.segment_bytes,
            "features": meta.features,
            "compression": meta.compression,
        }
    )
    files.write_whole(directory / META, text.encode() + b"\n")
    return meta


def change_compression(directory: Path, compression: str) -> Meta:
    """Record how new segments are compressed, under the write lock; return what META says now."""
    meta = read_meta(directory)
    if meta.compression == compression:
        return meta
    features = meta.features if compression == "none" else tuple({*meta.features, compression})
    return write_meta(directory, meta._replace(compression=compression, features=features))


def make_directory(directory: Path, mode: int | None = None) -> None:
    """
    Create `directory` if needed and check that it can become a log; a new one is 0700, or `mode`.

    Raises:
        LogFormatError: it has other files, or its file system is one the log refuses.
        LogReadOnlyError: it cannot be created or written.
    """
    try:
        files.make_directory(directory, mode)
        strangers = [name for name in os.listdir(directory) if not _is_ours(name)]
    except PermissionError as exc:
        raise LogReadOnlyError(f"cannot make a log at {directory}: {exc.strerror}") from exc
    except (FileExistsError, NotADirectoryError) as exc:
        raise LogFormatError(f"{directory} is a file; a log is a directory") from exc
    if strangers and not (directory / META).exists():
        raise LogFormatError(
            f"{directory} is not a log and not empty (it contains {strangers[0]!r}); "
            "give the path of a log or of an empty or new directory",
            code="log_format_foreign",
        )
    refuse_network(directory)


def refuse_network(directory: Path) -> None:
    """Raise LogFormatError if the directory is on a file system that a log cannot be written on."""
    kind = file_system(directory)
    if kind.startswith(REFUSED_FILE_SYSTEMS):
        raise LogFormatError(
            f"{directory} is on a {kind} file system, whose locks and shared memory do not reach "
            "other machines; write on a local disk, or open it with read_only=True to read it",
            code="log_format_filesystem",
        )


def _is_ours(name: str) -> bool:
    return (
        name in {META, CONTROL, WRITER_LOCK, SYNC_LOCK, MAINT_LOCK, GROUPS, PINS, QUARANTINE}
        or name.startswith(".META.")
        or name.endswith((SEGMENT_SUFFIX, INDEX_SUFFIX, TOPIC_INDEX_SUFFIX))
    )


def file_system(directory: Path) -> str:
    """Return the type of the file system of `directory`, or "" if it is not known."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    where = str(directory.resolve()) + "/"
    best, kind = "", ""
    for line in mounts:
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ").rstrip("/") + "/"
        if where.startswith(point) and len(point) >= len(best):
            best, kind = point, name
    return kind


def boot_id() -> int:
    """Return a number of this run of the machine: after a reboot the control page is not trusted."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return uuid.UUID(text.strip()).int & 0xFFFFFFFFFFFFFFFF
    except (OSError, ValueError):
        return 1


def open_locks(directory: Path) -> tuple[int, int, int]:
    """Return descriptors of writer.lock, sync.lock and the control page; create what is missing."""
    refuse_network(directory)  # every writer comes through here
    fds: list[int] = []
    try:
        fds.extend(files.open_lock(directory / name) for name in (WRITER_LOCK, SYNC_LOCK))
        control = files.open_file(directory / CONTROL, os.O_RDWR | os.O_CREAT)
        fds.append(control)
        size = os.fstat(control).st_size
        if size < CONTROL_BYTES:
            if size:
                os.pwrite(control, bytes(8), 0)  # the rest of a truncated page is invalid
            os.ftruncate(control, CONTROL_BYTES)
            with suppress(OSError):  # a full disk must not prevent writing this page
                os.posix_fallocate(control, 0, CONTROL_BYTES)
    except OSError as exc:
        for fd in fds:
            os.close(fd)
        if isinstance(exc, PermissionError) or exc.errno == 30:  # EROFS
            raise LogReadOnlyError(
                f"cannot write in {directory}: {exc.strerror}; open it with read_only=True to read it"
            ) from exc
        raise
    return fds[0], fds[1], fds[2]


@contextmanager
def maintenance_lock(directory: Path, *, wait: bool = True) -> Iterator[bool]:
    """
    Take the maintenance lock: retention, compaction, repair and index building exclude each other.

    Without `wait` it yields False if another process has the lock.
    """
    try:
        fd = files.lock_file(directory / MAINT_LOCK, wait=wait)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        files.unlock_file(fd)
