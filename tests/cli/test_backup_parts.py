"""Parts of `virta backup`: which files are in it, a journal that changes meanwhile, and manifests that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import virta
from virta.cli import main
from virta.cli.operating import backup as backup_module
from virta.cli.operating import backup_store
from virta.cli.operating.backup import make_backup, read_manifest, restore_backup
from virta.cli.operating.backup_store import BackupError
from virta.tier.store import TierStore


@pytest.fixture
def data(tmp_path):
    """A data directory: events, a second log, settings, a journal, and what a server makes again."""
    folder = tmp_path / "data"
    for name in ("log", "audit"):
        with virta.open(folder / name) as log:
            log.append_many([("t", b"", b"%d" % n) for n in range(10)])
    for name, text in {
        "access/tokens.json": "{}",
        "journal/3.snap": "snapshot",
        "journal/3.log": "changes",
        "journal/half.tmp": "unfinished",
        "journal/lock": "",
        "serve.lock": "",
        "views/orders": "rows",
        "pipelines/p.log": "printed",
    }.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def relative_files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_which_files_are_in_a_backup(data, tmp_path):
    """Everything but locks, unfinished files and what the server makes again."""
    manifest = make_backup(data, tmp_path / "copy")
    copied = relative_files(tmp_path / "copy" / "data")

    assert {"access/tokens.json", "journal/3.snap", "journal/3.log"} <= copied
    assert {"log/META", "audit/META"} <= copied
    assert not [n for n in copied if n.startswith(("views", "pipelines")) or n.endswith(".tmp")]
    assert not {"serve.lock", "journal/lock"} & copied
    assert manifest["next_offset"] == 10
    assert set(manifest["files"]) <= copied
    assert json.loads((tmp_path / "copy" / "backup.json").read_bytes()) == manifest


def test_a_restored_directory_has_the_same_files(data, tmp_path):
    manifest = make_backup(data, tmp_path / "copy")
    restore_backup(tmp_path / "copy", tmp_path / "again")

    for name in manifest["files"]:
        restored = (tmp_path / "again" / name).read_bytes()
        assert restored == (tmp_path / "copy" / "data" / name).read_bytes(), name
    for name in ("log", "audit"):
        with virta.open(tmp_path / "again" / name) as log:
            assert [record.value for record in log.read()] == [b"%d" % n for n in range(10)]
    assert (tmp_path / "again").stat().st_mode & 0o077 == 0


def test_a_journal_that_changes_meanwhile_is_copied_again(data, tmp_path, monkeypatch):
    """Snapshot and log are of one generation, however often a new one begins."""
    real, turns = backup_module.copy_file, []

    def copy(source, target):
        if source.suffix == ".snap" and len(turns) < 3:
            generation = int(source.stem)
            turns.append(generation)
            for suffix in (".snap", ".log"):
                source.with_suffix(suffix).rename(source.with_name(f"{generation + 1}{suffix}"))
        return real(source, target)

    monkeypatch.setattr(backup_module, "copy_file", copy)
    make_backup(data, tmp_path / "copy")

    assert turns == [3, 4, 5]
    assert relative_files(tmp_path / "copy" / "data" / "journal") == {"6.snap", "6.log"}


def test_a_journal_that_never_rests_is_given_up(data, tmp_path, monkeypatch):
    real = backup_module.copy_file

    def copy(source, target):
        real(source, target)
        if source.suffix == ".snap":
            source.rename(source.with_name(f"{int(source.stem) + 1}.snap"))

    monkeypatch.setattr(backup_module, "copy_file", copy)
    with pytest.raises(BackupError, match="changes too fast to be copied"):
        make_backup(data, tmp_path / "copy")
    assert not (tmp_path / "copy" / "backup.json").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"[]", "is no manifest of a backup"),
        (b'{"files": {}, "next_offset": 0, "time": ""}', "is no manifest of a backup"),
        (b'{"format": 1}', "is no manifest of a backup"),
        (b'{"format": 1, "files": [], "next_offset": 0, "time": ""}', "is no manifest of a backup"),
        (b'{"format": 2, "files": {}}', "has format 2: this version reads 1"),
        (b'{"format": 1, "files": {"/etc/x": {}}, "next_offset": 0, "time": ""}', "outside"),
        (b'{"format": 1, "files": {"a/../../x": {}}, "next_offset": 0, "time": ""}', "outside"),
    ],
)
def test_manifests_that_are_none(tmp_path, content, said):
    """One sentence and exit code 1; no directory is made."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "backup.json").write_bytes(content)
    with pytest.raises(BackupError, match=said):
        read_manifest(tmp_path / "copy")
    target = tmp_path / "again"
    done = CliRunner().invoke(main, ["restore", str(tmp_path / "copy"), "--data-dir", str(target)])

    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert not target.exists()


def test_a_manifest_that_does_not_fit_the_log(data, tmp_path):
    """The log's end is compared after restoring: a manifest of another backup is noticed."""
    make_backup(data, tmp_path / "copy")
    path = tmp_path / "copy" / "backup.json"
    path.write_text(path.read_text().replace('"next_offset": 10', '"next_offset": 11'))

    with pytest.raises(BackupError, match="the restored log ends at 10, not at 11"):
        restore_backup(tmp_path / "copy", tmp_path / "again")


def test_two_backups_to_one_url(data, tmp_path):
    """The manifest is created once: of two backups at a time the second one fails."""
    store = TierStore(f"file://{tmp_path}/store")
    make_backup(data, tmp_path / "copy")
    backup_store.require_empty(store)
    backup_store.upload(store, tmp_path / "copy")

    with pytest.raises(BackupError, match=r"is not empty \(it has backup.json\)"):
        backup_store.require_empty(store)
    with pytest.raises(BackupError, match="got another backup meanwhile"):
        backup_store.upload(store, tmp_path / "copy")


def test_the_directory_of_a_download_is_private_and_removed(data, tmp_path):
    store = TierStore(f"file://{tmp_path}/store")
    make_backup(data, tmp_path / "copy")
    backup_store.upload(store, tmp_path / "copy")
    with backup_store.downloaded(store, tmp_path / "new" / "data") as folder:
        assert Path(folder).parent == tmp_path / "new"
        assert folder.stat().st_mode & 0o077 == 0
        assert relative_files(folder / "data") == set(read_manifest(folder)["files"])

    assert list((tmp_path / "new").iterdir()) == []
