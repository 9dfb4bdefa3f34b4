"""What the disk refuses, as errors of the log: codes, sentences, and a probe that waits for nobody."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import virta
from virta.errors import LogLockTimeoutError, LogWriteError
from virta.log import disk_errors
from virta.log.disk_errors import already_written, disk_error, probe, translate_disk_errors


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [
        (errno.ENOSPC, "log_disk_full", "free some space"),
        (errno.EDQUOT, "log_disk_full", "free some space"),
        (errno.EFBIG, "log_file_too_big", "ulimit -f"),
        (errno.EMFILE, "log_too_many_files", "ulimit -n"),
        (errno.ENFILE, "log_too_many_files", "ulimit -n"),
        (errno.EACCES, "log_permission", "share it with a group"),
        (errno.EPERM, "log_permission", "share it with a group"),
        (errno.EIO, "log_write_failed", "check the disk"),
    ],
)
def test_each_error_says_what_to_do(number, code, advice):
    """With what was being done, the system's words, and what became of the data."""
    error = disk_error(OSError(number, os.strerror(number)), "writing x", "nothing was appended")

    assert error.code == code
    assert error.message.startswith(
        f"writing x failed: {os.strerror(number)}; nothing was appended"
    )
    assert advice in error.message


def test_an_error_without_a_number_keeps_its_words():
    assert "odd" in disk_error(OSError("odd"), "reading").message


def test_a_decorated_function_names_the_path():
    """Of its first argument: a path, or what has one; errors of ours pass as they are."""

    @translate_disk_errors("copying")
    def fail(place, error=None):
        raise error or OSError(errno.ENOSPC, "full")

    for place in ("/a/b", Path("/a/b"), SimpleNamespace(path=Path("/a/b"))):
        with pytest.raises(LogWriteError, match="copying /a/b failed") as caught:
            fail(place)
        assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(LogWriteError, match="copying failed"):
        fail(7)
    with pytest.raises(KeyError):
        fail("/a/b", KeyError("x"))


def test_a_timeout_after_the_write_is_no_timeout():
    """A lock timeout means that nothing was written; here the records are."""
    with pytest.raises(LogWriteError) as caught, already_written(Path("/log")):
        raise LogLockTimeoutError("not free")

    assert caught.value.code == "log_not_synced"
    assert "/log are written" in caught.value.message


def test_a_log_that_can_be_written(tmp_path):
    """The probe writes beside the segments, within a limit, and leaves nothing behind."""
    with virta.open(tmp_path / "log") as log:
        log.append("t", "", b"x")
        before = sorted(path.name for path in log.path.iterdir())

        assert probe(log.path, 0) is None
        assert probe(log.path, 1 << 40) is None
        assert sorted(path.name for path in log.path.iterdir()) == before
        assert log.append("t", "", b"x").offset == 1


def test_a_lock_that_is_not_free(tmp_path):
    """The probe says so at once."""
    import fcntl

    with virta.open(tmp_path / "log") as log:
        log.append("t", "", b"x")
        with open(log.path / disk_errors.WRITER_LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused = probe(log.path, 10)
        assert isinstance(refused, LogLockTimeoutError)
        assert probe(log.path, 10) is None


def test_a_directory_that_is_not_there(tmp_path):
    refused = probe(tmp_path / "none", 10)

    assert isinstance(refused, LogWriteError)
    assert refused.code == "log_write_failed"
