"""The examples run as printed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_log_demo_tells_its_story():
    """`make run`'s demo ends well within seconds: everything followed, resumed, survived, inspected."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "log_demo.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in ("offset 23", "second visit", "0 damaged places", "dashboard"):
        assert word in done.stdout


def test_log_demo_whose_writer_dies_inside_a_write(tmp_path, monkeypatch, capsys, caplog):
    """Half a batch is left behind, which is not always so: the demo tells of it, and nothing else does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = import_module("log_demo")
    caplog.set_level(logging.WARNING, "virta.log")  # and afterwards as it was
    real = os.kill

    def kill(pid: int, number: int) -> None:
        real(pid, number)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        (segment,) = tmp_path.glob("log/*.puro")
        with segment.open("r+b") as file:
            batch = file.read(1000)[64:]
            file.seek(0, os.SEEK_END)
            file.write(batch)

    monkeypatch.setattr(demo.os, "kill", kill)
    demo.kill(tmp_path / "log")

    assert "were cut off and set aside" in capsys.readouterr().out
    assert not caplog.records
