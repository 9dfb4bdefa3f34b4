"""Run `virta log` in its own process or in this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from virta.cli import main

VIRTA = str(Path(sys.executable).parent / "virta")
DEADLINE_S = 30


def run(*args, stdin: str | bytes = b"", code: int = 0) -> subprocess.CompletedProcess:
    """Run the installed command; bytes in, text out."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [VIRTA, "log", *map(str, args)],
        input=data,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    done.stdout, done.stderr = done.stdout.decode(errors="replace"), done.stderr.decode()
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def call(*args, code: int = 0, stdin: bytes = b""):
    """The same without a process, where only the answer matters."""
    result = CliRunner().invoke(main, ["log", *map(str, args)], input=stdin)
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def report(*args, code: int = 0) -> dict:
    return json.loads(call(*args, "--json", code=code).stdout)
