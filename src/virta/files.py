"""
Files and directories: their modes, durable writes, and locks.

Modes are the same whatever the umask is: a new directory is 0700 and a new file 0600. They contain data and
secrets, and a lock file that another user can open can be locked by that user. A directory with the set-group-ID bit is shared
(`chmod 2770 DIR`): what Virta creates in it gets the directory's read and write bits instead, so all
processes on one log agree. Only a file that is locked as a whole (`open_lock`) has no rights for users who
may read the directory but not write in it: `flock` works on a file that is open for reading, too. Files and
directories that exist already are never changed.

A file is durable under its name only after its directory is synced, too: `write_whole`, `sync_directory`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PRIVATE_DIRECTORY: Final = 0o700
PRIVATE_FILE: Final = 0o600
# A file may be removed between finding and opening it; after this many tries the cause is something else.
CREATE_TRIES_MAX: Final = 100
# Pauses of `lock_until` between attempts: doubling from the time of a system call to one that is not noticed.
LOCK_PAUSE_S_MIN: Final = 0.00002
LOCK_PAUSE_S_MAX: Final = 0.001


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """
    Open a file like `os.open`; a file that this creates gets the mode of the module's rule.

    It is also an opener: `open(path, "wb", opener=files.open_file)`.
    """
    return _open(path, flags, file_mode)


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open or create a file for `flock`; users who cannot write in the directory cannot lock it."""
    return _open(path, os.O_RDWR | os.O_CREAT, lock_mode)


def _open(
    path: str | os.PathLike[str],
    flags: int,
    mode_of: Callable[[str | os.PathLike[str]], int],
) -> int:
    flags |= os.O_CLOEXEC
    if not flags & os.O_CREAT:
        return os.open(path, flags)
    for _ in range(CREATE_TRIES_MAX):
        if not flags & os.O_EXCL:
            with suppress(FileNotFoundError):
                return os.open(path, flags & ~os.O_CREAT)
        mode = mode_of(os.path.dirname(path) or ".")
        try:
            fd = os.open(path, flags | os.O_EXCL, mode)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
        else:
            _set_mode(fd, mode)
            return fd
    raise FileExistsError(errno.EEXIST, "can be neither opened nor created", str(path))


def write_all(fd: int, data: bytes | bytearray, pos: int) -> None:
    """Write all of `data` at byte `pos`: one `pwrite` may write less on a nearly full disk, or after a signal."""
    done = os.pwrite(fd, data, pos)
    if done < len(data):
        with memoryview(data) as view:
            while done < len(data):
                done += os.pwrite(fd, view[done:], pos + done)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file durably: after a crash it has the old content or the new, never a part."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=open_file) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable: files created, renamed and removed in it."""
    sync_file(path)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make the content of a file durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_file(path: str | os.PathLike[str], *, wait: bool = False) -> int:
    """
    Lock a file for this process alone, creating it if needed; return a descriptor for `unlock_file`.

    The kernel drops the lock when the process ends, however it ends.

    Raises:
        BlockingIOError: another process has the lock, and `wait` is not set.
    """
    fd = open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlock_file(fd: int) -> None:
    """Release and close a lock of `lock_file`."""
    try:
        # A child that was forked meanwhile has it open, too: closing alone would leave it locked.
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def lock_until(fd: int, deadline: float) -> bool:
    """Lock an open file for this process alone; False if that fails until `deadline` (of time.monotonic)."""
    pause = LOCK_PAUSE_S_MIN
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, LOCK_PAUSE_S_MAX)
        else:
            return True


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole text file; a new one gets the mode of the module's rule."""
    with open(path, "w", encoding="utf-8", opener=open_file) as file:
        file.write(text)


def make_directory(path: str | os.PathLike[str], mode: int | None = None) -> None:
    """
    Create a directory and its parents unless it exists, with mode 0700 or `mode`.

    A mode with rights for the group or others also gets the set-group-ID bit, so what is created inside is shared
    in the same way and belongs to the same group.
    """
    directory = Path(path)
    if directory.is_dir():
        return
    if not directory.parent.exists():
        make_directory(directory.parent, mode)
    wanted = PRIVATE_DIRECTORY if mode is None else mode
    if wanted & 0o077:
        wanted |= stat.S_ISGID
    try:
        os.mkdir(directory, wanted & 0o777)
    except FileExistsError:
        if not directory.is_dir():
            raise
    else:
        _set_mode(directory, wanted)


def make_inside(path: str | os.PathLike[str]) -> None:
    """Create a directory inside one of Virta's unless it exists: 0700, or shared like its parent."""
    make_directory(path, shared_mode(os.path.dirname(path) or "."))


def shared_mode(directory: str | os.PathLike[str]) -> int | None:
    """Return the mode for directories created in `directory`; None unless it is shared or does not exist."""
    try:
        mode = os.stat(directory).st_mode
    except FileNotFoundError:
        return None
    return mode & 0o777 | PRIVATE_DIRECTORY if mode & stat.S_ISGID else None


def file_mode(directory: str | os.PathLike[str]) -> int:
    """Return the mode of files created in `directory`."""
    mode = os.stat(directory).st_mode
    return mode & 0o666 | PRIVATE_FILE if mode & stat.S_ISGID else PRIVATE_FILE


def lock_mode(directory: str | os.PathLike[str]) -> int:
    """Return the mode of lock files created in `directory`: for users who can write in it."""
    writers = os.stat(directory).st_mode & 0o222 if shared_mode(directory) is not None else 0
    return writers | writers << 1 | PRIVATE_FILE


def is_directory_mode(mode: object) -> bool:
    """Return whether `mode` fits a data directory: all rights for the owner, and readers can also enter."""
    if isinstance(mode, bool) or not isinstance(mode, int) or mode & ~0o2777:
        return False
    return mode & 0o700 == 0o700 and all(bits in {0, 5, 7} for bits in (mode >> 3 & 7, mode & 7))


def open_to_others(directory: str | os.PathLike[str]) -> str | None:
    """Return a warning if the directory exists and users outside its group can enter or list it, else None."""
    try:
        mode = stat.S_IMODE(os.stat(directory).st_mode)
    except OSError:
        return None
    if not mode & 0o007:
        return None
    return (
        f"{directory} has mode {mode:04o}: other users of this machine can read it; "
        f"`chmod -R o-rwx {directory}` keeps them out"
    )


def _set_mode(made: int | Path, mode: int) -> None:
    """Set the mode bits that the umask removed at creation."""
    if stat.S_IMODE(os.stat(made).st_mode) & 0o777 != mode & 0o777 or mode & stat.S_ISGID:
        with suppress(PermissionError):  # on file systems without modes, the mount options decide
            os.chmod(made, mode)
