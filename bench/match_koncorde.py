"""Koncorde itself on the same filters and documents; skipped, visibly, where there is no Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import match_workload as workload

VERSION = "4.6.0"
HOME = workload.CACHE / "node"
SCRIPT = Path(__file__).with_name("match_koncorde.js")


def install():
    """The reason why Koncorde cannot run here, or None."""
    if not shutil.which("node") or not shutil.which("npm"):
        return "no Node"
    if (HOME / "node_modules" / "koncorde").exists():
        return None
    HOME.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", f"koncorde@{VERSION}"]
    run = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False)
    return f"npm: {run.stderr.strip()[-200:] or run.returncode}" if run.returncode else None


def rows(family, size, seconds, engines):
    """Rows of the table: Koncorde with RE2, its default, and with JavaScript's own expressions."""
    reason = install()
    if reason:
        yield {"skipped": f"{family:10} Koncorde skipped: {reason}"}
        return
    filters = workload.CACHE / f"{family}-{size}.jsonl"
    if not filters.exists():
        filters.write_text("".join(json.dumps(f) + "\n" for f in workload.filters(family, size)))
    for engine in engines:
        command = [
            "node",
            "--max-old-space-size=8192",
            str(SCRIPT),
            str(HOME),
            engine,
            str(filters),
        ]
        command += [str(workload.SHARED / "docs-2k.jsonl"), str(seconds)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            yield {"skipped": f"{family:10} Koncorde {engine} failed: {run.stderr.strip()[-200:]}"}
            continue
        result = json.loads(run.stdout.splitlines()[-1])
        yield {"engine": f"Koncorde {engine}", "family": family, **result}
