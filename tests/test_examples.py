"""The examples run as printed."""

from __future__ import annotations

import subprocess
import sys
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
