"""
`virta backup` and `virta restore`: a whole data directory, consistent while the server runs.

    BACKUP/backup.json    version, time, and size and SHA-256 of every file; written last
    BACKUP/data/…         the data directory

BACKUP is a directory, or a URL of object storage (`virta.cli.operating.backup_store`).
Parts are copied in an order in which no part refers to what another lacks: registrations and tokens, the journal, then
the log of events, which only grows.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import virta
from virta import files
from virta.cli.operating import backup_store
from virta.cli.operating.backup_store import FORMAT, MANIFEST, BackupError
from virta.cli.report import json_option, print_report
from virta.cli.units import show_count, show_size
from virta.clock import now_us, time_text
from virta.errors import VirtaError
from virta.log.upkeep.copying import copy_file, copy_log, copy_tree, is_log
from virta.tier.store import is_store_url

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = "data"
LOG, JOURNAL = "log", "journal"
# Made again by the server: locks, what a pipeline printed, row tables of live views.
LEFT_OUT = frozenset({"serve.lock", "lock", "pipelines", "views"})
# A journal that begins a new generation while it is copied is copied again.
JOURNAL_TRIES_MAX = 10
READ_BYTES = 1024 * 1024


@click.command()
@click.argument("backup_dir", metavar="BACKUP")
@click.option("--data-dir", default="./virta-data", show_default=True, help="The data directory to copy.")  # fmt: skip
@json_option
def backup(backup_dir: str, *, data_dir: str, as_json: bool) -> None:
    """Copy a data directory to BACKUP, a new directory or URL (s3://…); the server may run meanwhile."""
    with _failures():
        if is_store_url(backup_dir):
            store = backup_store.open_store(backup_dir)
            backup_store.require_empty(store)
            with backup_store.temporary(Path(data_dir)) as folder:
                found = make_backup(Path(data_dir), folder)
                backup_store.upload(store, folder)
        else:
            found = make_backup(Path(data_dir), Path(backup_dir))
    count, size = len(found["files"]), sum(one["bytes"] for one in found["files"].values())
    text = f"{show_count(count, 'file')}, {show_size(size)} in {backup_dir}; events below offset {found['next_offset']}"  # fmt: skip
    members = {"backup": backup_dir, "files": count, "bytes": size} | {k: found[k] for k in ("time", "next_offset")}  # fmt: skip
    print_report(members, [text], as_json=as_json)


@click.command()
@click.argument("backup_dir", metavar="BACKUP")
@click.option("--data-dir", default="./virta-data", show_default=True, help="The data directory to make; it must not exist or be empty.")  # fmt: skip
@json_option
def restore(backup_dir: str, *, data_dir: str, as_json: bool) -> None:
    """Make a data directory from BACKUP, a directory or URL, after checking every file of it."""
    with _failures():
        if is_store_url(backup_dir):
            store = backup_store.open_store(backup_dir)
            with backup_store.downloaded(store, Path(data_dir)) as folder:
                found = restore_backup(folder, Path(data_dir))
        else:
            found = restore_backup(Path(backup_dir), Path(data_dir))
    text = f"{show_count(len(found['files']), 'file')} in {data_dir}, as of {found['time']}; the next offset is {found['next_offset']}"  # fmt: skip
    members = {"data_dir": data_dir, "files": len(found["files"])} | {k: found[k] for k in ("time", "next_offset")}  # fmt: skip
    print_report(members, [text], as_json=as_json)


class _failures:  # noqa: N801 - reads as a statement
    """Print an error in one line and exit with 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, VirtaError | OSError):
            message = error.message if isinstance(error, VirtaError) else str(error)
            click.echo(f"error: {message}", err=True)
            sys.exit(1)


def make_backup(data_dir: Path, target: Path) -> dict[str, Any]:
    """Copy a data directory and return the manifest; raises BackupError, LogError or OSError."""
    if not is_log(data_dir / LOG):
        raise BackupError(f"{data_dir} is no data directory: it has no log in {LOG}/")
    if target.exists() and any(target.iterdir()):
        raise BackupError(f"{target} is not empty: give a new directory for each backup")
    began = time_text(now_us())
    files.make_directory(target)
    copied = target / DATA
    files.make_directory(copied)
    for path in sorted(data_dir.iterdir()):
        if path.name in LEFT_OUT | {LOG, JOURNAL}:
            continue
        if path.is_dir() and is_log(path):
            copy_log(path, copied / path.name)
        elif path.is_dir():
            copy_tree(path, copied / path.name)
        elif path.is_file():
            copy_file(path, copied / path.name)
    if (data_dir / JOURNAL).is_dir():
        _copy_journal(data_dir / JOURNAL, copied / JOURNAL)
    next_offset = copy_log(data_dir / LOG, copied / LOG)
    manifest = {
        "format": FORMAT,
        "version": virta.__version__,
        "time": began,
        "next_offset": next_offset,
        "files": {name: _described(copied / name) for name in _names(copied)},
    }
    files.write_whole(target / MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _copy_journal(source: Path, target: Path) -> None:
    """Copy a journal as of one time: its snapshot and logs must be of the same generations."""
    for _ in range(JOURNAL_TRIES_MAX):
        before = _generations(source)
        files.make_directory(target)
        try:
            for path in sorted(source.iterdir()):
                if path.is_dir() and is_log(path):
                    copy_log(path, target / path.name)
                elif path.is_file() and path.name not in LEFT_OUT and path.suffix != ".tmp":
                    copy_file(path, target / path.name)
            if _generations(source) == before:
                return
        except FileNotFoundError:
            pass
        shutil.rmtree(target)
    raise BackupError(f"{source} changes too fast to be copied: try again when there is less to do")


def _generations(journal: Path) -> set[str]:
    return {path.name for path in journal.iterdir() if path.suffix in (".snap", ".log")}


def restore_backup(source: Path, data_dir: Path) -> dict[str, Any]:
    """Check a backup, copy it to a new data directory and return the manifest."""
    manifest = read_manifest(source)
    if data_dir.exists() and any(data_dir.iterdir()):
        raise BackupError(f"{data_dir} is not empty: restore into a new directory")
    copied = source / DATA
    for name, facts in manifest["files"].items():
        path = copied / name
        if not path.is_file() or _described(path) != facts:
            raise BackupError(f"{path} is not as it was written: this backup is damaged")
    files.make_directory(data_dir)
    for name in manifest["files"]:
        files.make_directory((data_dir / name).parent)
        copy_file(copied / name, data_dir / name)
    files.sync_directory(data_dir)
    with virta.open(data_dir / LOG, create=False) as log:
        if log.next_offset != manifest["next_offset"]:
            raise BackupError(f"the restored log ends at {log.next_offset}, not at {manifest['next_offset']}")  # fmt: skip
    return manifest


def read_manifest(source: Path) -> dict[str, Any]:
    """Return the manifest of a backup; raise BackupError if it is not complete."""
    try:
        data = (source / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise BackupError(
            f"{source} has no {MANIFEST}: it is no backup, or was not finished"
        ) from None
    return backup_store.parse_manifest(data, str(source))


def _names(folder: Path) -> Iterator[str]:
    """Return the files below a folder; locks and hints, which opening a copy makes, are left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (".lock", ".pidx") and path.name != "control":
            yield str(path.relative_to(folder))


def _described(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
