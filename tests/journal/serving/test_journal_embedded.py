"""The journal inside a process: the same promises without a daemon."""

from __future__ import annotations

import shutil
import threading

import pytest
from journal_support import Disks, raising

from virta.errors import JournalError, LogWriteError
from virta.journal.protocol import commands
from virta.journal.protocol.messages import RefusedError
from virta.journal.serving.embedded import Journal
from virta.journal.storage import directory as persistence


def test_everything_is_there_again(tmp_path):
    """Values and jobs survive closing, and a crash."""
    tmp_path, crashed = tmp_path / "journal", tmp_path / "crashed"
    with Journal(tmp_path) as journal:
        journal.set("color", "blue")
        journal.set("short", 1, persist=False)
        journal.push("http://h/1", payload="p")
        (job,) = journal.next("h").jobs
    with Journal(tmp_path) as journal:
        assert (journal.get("color"), journal.get("short")) == ("blue", None)
        assert journal.next("h").jobs == []
        assert journal.done(job.key) is True
        journal.push("http://h/2")
        shutil.copytree(tmp_path, crashed)  # what a crash would leave
    with Journal(crashed) as journal:
        assert [job.uri for job in journal.next("h", count=9).jobs] == [b"http://h/2"]


def test_pipeline_shares_a_commit(tmp_path, monkeypatch):
    """Many commands, one append; a refusal stands in its place."""
    commits = []
    real = persistence.Persistence.commit
    with Journal(tmp_path) as journal:
        monkeypatch.setattr(
            persistence.Persistence, "commit", lambda *a: (commits.append(a), real(*a))[1]
        )
        results = journal.pipeline(
            [commands.push(f"http://h/{i}") for i in range(50)] + [commands.unlock("x")]
        )
        monkeypatch.undo()

        assert len(commits) == 1
        assert results[50].code == "not-owner"
        assert len(journal.next("h", count=100).jobs) == 50


def test_threads_share_it(tmp_path):
    """Threads that take and finish jobs never get the same one."""
    taken = []

    def work(journal):
        while jobs := journal.next("h").jobs:
            taken.append(jobs[0].uri)
            journal.done(jobs[0].key)

    with Journal(tmp_path, durability="none") as journal:
        journal.pipeline([commands.push(f"http://h/{i}") for i in range(200)])
        threads = [threading.Thread(target=work, args=(journal,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(taken) == len(set(taken)) == 200


def test_rotation_in_between(tmp_path, monkeypatch):
    """A journal that is used for long keeps its directory small."""
    monkeypatch.setattr(persistence, "ROTATE_BYTES_MIN", 20_000)
    with Journal(tmp_path, durability="none") as journal:
        for i in range(300):
            journal.set("k", b"x" * 1000 + bytes([i % 256]))
        assert 1_000 < journal.admin("stats")["disk_bytes"] < 50_000

        assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 100_000


def test_after_a_failure_nothing_is_accepted(tmp_path, monkeypatch):
    """When the disk refuses, so does the journal, until it is opened again; nothing false is kept."""
    errors = []
    journal = Journal(tmp_path, open_disk=Disks(raising(errors)))
    journal.set("k", 1)
    errors += [LogWriteError("no space left")] * 2
    for _ in range(2):
        with pytest.raises(RefusedError, match="disk"):
            journal.set("k", 2)
    errors.clear()
    with pytest.raises(RefusedError, match="disk"):
        journal.get("k")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.get("k")
    with Journal(tmp_path) as journal:
        assert journal.get("k") == 1
