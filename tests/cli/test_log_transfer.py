"""`virta log import | export`: files written and read by the real command, and its progress bar."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from log_command import DEADLINE_S, call, report, run

import virta


@pytest.mark.parametrize("crc", ["plain", "puro"])
def test_puro_round_trip(filled, tmp_path, crc):
    """A log exported to Puro and imported again has the same records in the same order."""
    target = tmp_path / "out.puro"
    members = report("export", filled, target, "--crc", crc)
    assert (members["records"], members["bytes"]) == (20, target.stat().st_size)

    again = tmp_path / "again"
    imported = report("import", again, target)
    assert (imported["records"], imported["crc"], imported["generation"]) == (20, crc, "flat")
    assert (
        call("tail", again, "--from", "earliest").stdout
        == call("tail", filled, "--from", "earliest").stdout
    )


def test_ndjson_round_trip(tmp_path, place):
    """Record objects carry every byte, also through a pipe."""
    with virta.open(place) as log:
        log.append_many(
            [("t", b"\xff\x00", bytes(range(256))), ("ü", "ключ", b""), ("t", "", b"\n")]
        )
    target = tmp_path / "out.ndjson"
    assert report("export", place, target, "--format", "ndjson")["records"] == 3
    piped = run("export", place, "-", "--format", "ndjson").stdout
    assert piped == target.read_text()

    for name, source, stdin in (("a", target, ""), ("b", "-", piped)):
        run("import", tmp_path / name, source, "--format", "ndjson", stdin=stdin)
        with (
            virta.open(tmp_path / name, read_only=True) as copy,
            virta.open(place, read_only=True) as log,
        ):
            assert [r[:3] for r in copy.read()] == [r[:3] for r in log.read()]


def test_export_chooses_and_protects(filled, tmp_path):
    """Topics and places choose; an existing file is not replaced unless asked."""
    target = tmp_path / "out.puro"
    assert (
        report("export", filled, target, "--topic", "t0", "--from", 4, "--to", 10)["records"] == 3
    )
    done = run("export", filled, target, code=5)
    assert "exists already" in done.stderr
    assert report("export", filled, target, "--force")["records"] == 20
    assert list(tmp_path.glob(".*tmp")) == []
    assert "stdout carries the records" in run("export", filled, "-", "--json", code=2).stderr


def test_export_to_a_directory_of_segments(filled, tmp_path):
    """Into a directory Puro segments are written, each but the last with its tombstone."""
    target = tmp_path / "stream"
    target.mkdir()
    members = report("export", filled, target, "--segment-bytes", 100)
    assert members["records"] == 20
    assert len(members["files"]) == len(list(target.glob("stream*.puro"))) > 2

    imported = report("import", tmp_path / "again", target)
    assert (imported["records"], imported["segments"], imported["spurious"]) == (
        20,
        len(members["files"]),
        [],
    )


def test_import_names_damage(filled, tmp_path):
    """Damage stops an import with file and bytes; --skip-damaged passes it and exits with 1."""
    target = tmp_path / "out.puro"
    run("export", filled, target)
    data = bytearray(target.read_bytes())
    data[30] ^= 1
    target.write_bytes(data)

    assert f"{target}: bytes " in run("import", tmp_path / "a", target, code=4).stderr
    members = report("import", tmp_path / "b", target, "--skip-damaged", code=1)
    assert members["records"] == 19
    assert len(members["damaged"]) == 1
    assert run("import", tmp_path / "c", tmp_path / "none", code=2).stderr.startswith(
        "error: there is no "
    )


@pytest.mark.parametrize("prelude", ["", "sys.modules['rich'] = None; "], ids=["rich", "plain"])
def test_progress_is_for_terminals(filled, tmp_path, prelude):
    """On a terminal there is a progress bar on stderr, with rich or without; stdout has only the report."""
    target = tmp_path / "out.puro"
    code = f"import sys; {prelude}from virta.cli import main; main(sys.argv[1:])"
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, "log", "export", str(filled), str(target)],
            stdout=subprocess.PIPE, stderr=theirs, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        os.close(theirs)
        shown = os.read(ours, 65536)
    finally:
        os.close(ours)

    assert done.returncode == 0
    assert done.stdout.startswith(b"exported 20 records")
    assert b"export" in shown
    assert b"Traceback" not in shown
    assert run("export", filled, target, "--force").stderr == ""
