"""
Backups in object storage: the files of a backup directory as objects below one URL.

Objects are written before `backup.json`, which is created last and never replaced, so a URL with it is a whole backup.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from virta import files
from virta.errors import TierError, VirtaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.tier.store import TierStore

MANIFEST = "backup.json"


class BackupError(VirtaError):
    """A backup that cannot be made or used."""

    default_code = "backup_failed"


def open_store(url: str) -> TierStore:
    from virta.tier.store import TierStore

    return TierStore(url)


def require_empty(store: TierStore) -> None:
    """Refuse a URL with a backup, or with a part of one."""
    if found := store.list(""):
        raise BackupError(
            f"{store.url} is not empty (it has {found[0].name}): give a new URL for each backup"
        )


def upload(store: TierStore, backup: Path) -> None:
    """Write the files of a backup; raises TierError or BackupError."""
    for path in sorted(backup.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with open(path, "rb") as file:
                store.write(path.relative_to(backup).as_posix(), file)
    if not store.create(MANIFEST, (backup / MANIFEST).read_bytes()):
        raise BackupError(f"{store.url} got another backup meanwhile: give a new URL for each")


@contextmanager
def downloaded(store: TierStore, near: Path) -> Iterator[Path]:
    """Yield a directory with the files of a backup, on the disk of `near`; it is removed afterwards."""
    with temporary(near) as folder:
        try:
            manifest = store.read(MANIFEST)
        except TierError as error:
            if error.code != "tier_object_missing":
                raise
            raise BackupError(
                f"{store.url} has no {MANIFEST}: it is no backup, or was not finished"
            ) from None
        files.write_whole(folder / MANIFEST, manifest)
        for name in _names(store, manifest):
            path = folder / name
            files.make_directory(path.parent)
            with open(path, "wb", opener=files.open_file) as file:
                file.writelines(store.stream(name))
        yield folder


def _names(store: TierStore, manifest: bytes) -> list[str]:
    """Return the objects of a backup; the manifest itself is checked by who restores it."""
    try:
        listed = json.loads(manifest)["files"]
    except (ValueError, KeyError, TypeError):
        return []
    names = [f"data/{name}" for name in listed]
    if any(".." in Path(name).parts or Path(name).is_absolute() for name in [*listed, *names]):
        raise BackupError(f"{store.url}/{MANIFEST} names files outside of the backup")
    return names


@contextmanager
def temporary(near: Path) -> Iterator[Path]:
    """Yield a new private directory on the disk of `near`."""
    files.make_directory(near.absolute().parent)
    with tempfile.TemporaryDirectory(prefix=".virta-backup-", dir=near.absolute().parent) as name:
        yield Path(name)
