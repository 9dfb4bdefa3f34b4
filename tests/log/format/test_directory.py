"""The directory of a log: where it may be."""

from __future__ import annotations

import pytest

import virta
from virta.errors import LogFormatError
from virta.log.format import directory


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.s3fs"])
def test_a_log_on_a_network_is_read_and_never_written(tmp_path, monkeypatch, kind):
    """An existing log there opens for reading; opening it for writing is refused, as creating one is."""
    with virta.open(tmp_path / "log") as log:
        log.append("t", "k", b"v")
    monkeypatch.setattr(directory, "file_system", lambda _: kind)

    for path in ("log", "new"):
        with pytest.raises(LogFormatError, match=f"is on a {kind} file system") as refused:
            virta.open(tmp_path / path)
        assert refused.value.code == "log_format_filesystem"
    with virta.open(tmp_path / "log", read_only=True) as log:
        assert [record.value for record in log.read()] == [b"v"]
