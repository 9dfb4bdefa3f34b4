"""
Backups in object storage: the files of a backup directory as objects below one URL.

Objects are written before `backup.json`, which is created last and never replaced, so a URL with it is a whole backup.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virta import files
from virta.errors import TierError, VirtaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.tier.store import TierStore

MANIFEST = "backup.json"
FORMAT = 1
# Members of a manifest that restoring needs, and their types.
MEMBERS = {"format": int, "files": dict, "time": str, "next_offset": int}


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
        for listed in parse_manifest(manifest, store.url)["files"]:
            name = f"data/{listed}"
            path = folder / name
            files.make_directory(path.parent)
            with open(path, "wb", opener=files.open_file) as file:
                file.writelines(store.stream(name))
        yield folder


def parse_manifest(data: bytes, place: str) -> dict[str, Any]:
    """Return the manifest of the backup at `place`; raise BackupError unless it can be restored from."""
    name = f"{place}/{MANIFEST}"
    try:
        manifest = json.loads(data)
    except ValueError as error:
        raise BackupError(f"{name} cannot be read: {error}") from None
    if isinstance(manifest, dict) and manifest.get("format", FORMAT) != FORMAT:
        raise BackupError(f"{place} has format {manifest['format']!r}: this version reads {FORMAT}")
    if not isinstance(manifest, dict) or not all(
        isinstance(manifest.get(member), kind) for member, kind in MEMBERS.items()
    ):
        raise BackupError(f"{name} is no manifest of a backup: it needs {', '.join(MEMBERS)}")
    if any(Path(one).is_absolute() or ".." in Path(one).parts for one in manifest["files"]):
        raise BackupError(f"{name} names files outside of the backup")
    return manifest


@contextmanager
def temporary(near: Path) -> Iterator[Path]:
    """Yield a new private directory on the disk of `near`."""
    files.make_directory(near.absolute().parent)
    with tempfile.TemporaryDirectory(prefix=".virta-backup-", dir=near.absolute().parent) as name:
        yield Path(name)
