"""
Copy a log to another directory while processes write to it.

Sealed segments do not change, except that compaction replaces a whole file; retention is kept away by a pin. Of the
active segment a prefix is copied: what is durable when the copy ends is in it. Opening the copy for writing removes
the rest of a batch that was being written, as after a crash. Hints, locks, pins and indexes are left out: they are
made again.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import virta.log
from virta import files
from virta.errors import LogError
from virta.log.disk_errors import translate_disk_errors
from virta.log.format.directory import GROUPS, META, segment_bases, segment_name

if TYPE_CHECKING:
    from pathlib import Path

COPY_BYTES = 1024 * 1024
# A segment that is removed while it is copied was removed by hand: try again from the start.
TRIES_MAX = 3


def is_log(directory: Path) -> bool:
    """Return whether a directory is a log."""
    return (directory / META).is_file()


@translate_disk_errors("copying")
def copy_log(source: Path, target: Path) -> int:
    """
    Copy a log; return the offset after the last record of the copy.

    Raises:
        LogError: the copy is not a whole log, or the disk refuses.
    """
    for last in [False] * (TRIES_MAX - 1) + [True]:
        try:
            _copy(source, target)
            break
        except FileNotFoundError:
            if last:
                raise
            shutil.rmtree(target)
    with virta.log.open(target, durability="fsync") as copy:
        problems = copy.verify().problems
        if problems:
            raise LogError(f"the copy of {source} has damage: {problems[0].reason}")
        return copy.next_offset


def _copy(source: Path, target: Path) -> None:
    files.make_directory(target)
    with virta.log.open(source, create=False) as log, log.pin(0):
        copy_file(source / META, target / META)
        if (source / GROUPS).is_dir():
            copy_tree(source / GROUPS, target / GROUPS)
        known: list[int] = []
        # A segment that begins while others are copied belongs to the copy too.
        while (bases := segment_bases(source)) != known:
            for base in bases:
                if base not in known or base == known[-1]:
                    copy_file(source / segment_name(base), target / segment_name(base))
            known = bases
    files.sync_directory(target)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a directory of small files; one that disappears meanwhile is left out."""
    files.make_directory(target)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            copy_tree(path, target / path.name)
        elif path.is_file():
            try:
                copy_file(path, target / path.name)
            except FileNotFoundError:
                continue


def copy_file(source: Path, target: Path) -> None:
    """Copy the bytes that a file has now, and sync them; the copy has the mode of a private file."""
    with open(source, "rb") as old:
        left = os.fstat(old.fileno()).st_size
        with open(target, "wb", opener=files.open_file) as new:
            while left and (piece := old.read(min(left, COPY_BYTES))):
                new.write(piece)
                left -= len(piece)
            new.flush()
            os.fsync(new.fileno())
