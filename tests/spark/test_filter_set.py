"""Files of filter sets: private where they must be, few, and whole whoever writes them at once."""

from __future__ import annotations

import os
import tempfile
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from virta.filters import parse
from virta.spark.matching import filter_set
from virta.spark.matching.filter_set import (
    MatchError,
    joined,
    keep,
    opened_set,
    own_directory,
    pack,
    write_set,
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A directory for temporary files of its own; the one for filter sets is to be in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"virta-filters-{os.geteuid()}"


def test_a_directory_of_others_is_not_ours(machine):
    """Sets are unpickled, so nobody else may have made, or may write to, the directory they are kept in."""
    machine.mkdir(mode=0o700)
    machine.chmod(0o770)
    with pytest.raises(MatchError, match="only this user can write to"):
        own_directory()
    machine.rmdir()
    (machine.parent / "theirs").mkdir()
    machine.symlink_to(machine.parent / "theirs")
    with pytest.raises(MatchError, match="only this user can write to"):
        write_set({"a": parse("n=1")})
    machine.unlink()
    assert own_directory() == machine


def test_sets_do_not_pile_up(machine, monkeypatch):
    """What was not used for days goes, and what is too much; what cannot go keeps nothing else from going."""
    monkeypatch.setattr(filter_set, "SET_FILES_MAX", 4)
    (own_directory() / "folder").mkdir()
    (machine / "old").write_bytes(b"")
    os.utime(machine / "old", (1, 1))
    now = time.time()
    for age in range(6):
        (machine / f"f{age}").write_bytes(b"")
        os.utime(machine / f"f{age}", (now - 10 * age, now - 10 * age))
    os.utime(machine / "folder", (1, 1))
    own_directory()

    assert sorted(os.listdir(machine)) == ["f0", "f1", "f2", "f3", "folder"]


def test_threads_keep_one_set_at_once(tmp_path):
    """Threads that write the same set get the same file, and leave no other."""
    packed = pack({"a": parse("n=1")})
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: keep(packed, "0" * 64, str(tmp_path / "d")), range(200)))

    assert [str(one) for one in (tmp_path / "d").iterdir()] == list(paths)


def test_a_set_others_may_write_to_is_copied(tmp_path, monkeypatch):
    """What could change after its digest was compared is read once, not mapped."""
    monkeypatch.setattr(filter_set, "_sets", OrderedDict())
    path = Path(write_set({"a": parse("n=1")}, str(tmp_path / "shared")))
    path.parent.chmod(0o777)
    found = opened_set(str(path))
    path.write_bytes(bytes(path.stat().st_size))

    assert found.pairs(joined([b'{"data": {"n": 1}}']))[1].to_pylist() == ["a"]
