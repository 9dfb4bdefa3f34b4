"""
Rows of a micro-batch between its tasks and the append: staged files, and the manifest of a large micro-batch.

    <log>/staging/<random>.arrow                        one task's rows
    <log>/staging/<producer>-<sequence>-<n>.arrow       the same, owned by a manifest
    <log>/staging/<producer>-<sequence>.json            the manifest: these files, in this order

Invariant: a micro-batch of several parts has a durable manifest before its first part is appended and until its last
one is. A repeat of the micro-batch, after a crash of driver or machine, finds it and appends the same parts.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from virta import files

if TYPE_CHECKING:
    from collections.abc import Iterable

STAGING = "staging"
STAGING_SECONDS_MAX = 24 * 3600  # older files belong to drivers that died
MANIFEST_SECONDS_MAX = 30 * 24 * 3600  # older ones belong to queries that were never started again


@dataclass
class Staged(WriterCommitMessage):
    """A task's rows: in `rows` as an Arrow stream, or in the file `path`."""

    partition: int
    query: str | None
    count: int
    rows: bytes | None
    path: str | None


@dataclass(frozen=True)
class Manifest:
    """The rows of a micro-batch's first attempt, in order."""

    path: Path
    files: tuple[Path, ...]

    def staged(self) -> list[Staged]:
        return [Staged(i, None, 1, None, str(file)) for i, file in enumerate(self.files)]

    def remove(self) -> None:
        """Remove the manifest, then its files: without it they are only litter."""
        self.path.unlink()
        files.sync_directory(self.path.parent)
        for file in self.files:
            file.unlink(missing_ok=True)


def manifest_path(directory: Path, producer: int, sequence: int) -> Path:
    return directory / f"{producer:016x}-{sequence}.json"


def find_manifest(directory: Path, producer: int, sequence: int) -> Manifest | None:
    """Return the manifest that an earlier attempt of a micro-batch left, None if there is none."""
    path = manifest_path(directory, producer, sequence)
    try:
        names = json.loads(path.read_bytes())["files"]
    except FileNotFoundError:
        return None
    return Manifest(path, tuple(directory / name for name in names))


def write_manifest(
    directory: Path, producer: int, sequence: int, staged: Iterable[Staged]
) -> Manifest:
    """Keep the rows of a micro-batch under its own name, durably."""
    files.make_inside(directory)
    path = manifest_path(directory, producer, sequence)
    kept = []
    for i, message in enumerate(staged):
        target = directory / f"{path.stem}-{i}.arrow"
        if message.path is None:
            assert message.rows is not None
            files.write_whole(target, message.rows)
        else:
            # Another name: Spark aborts a failed commit, and that removes the task's own file.
            os.replace(message.path, target)
            sync_file(target)
        kept.append(target)
    files.write_whole(path, json.dumps({"files": [file.name for file in kept]}).encode())
    return Manifest(path, tuple(kept))


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def discard(messages: Iterable[Staged | None]) -> None:
    """Remove the files of tasks."""
    for message in messages:
        if message is not None and message.path is not None:
            with suppress(OSError):
                Path(message.path).unlink()


def sweep(directory: Path) -> None:
    """Remove files of dead drivers; those of a live one are younger than a day."""
    with suppress(OSError):
        for entry in os.scandir(directory):
            age = time.time() - entry.stat().st_mtime
            limit = MANIFEST_SECONDS_MAX if "-" in entry.name else STAGING_SECONDS_MAX
            if age > limit:
                Path(entry.path).unlink()
