"""Koncorde itself on the same filters and documents; skipped, visibly, where there is no Node."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import match_workload as workload

VERSION = "4.6.0"
HOME = workload.CACHE / "node"
BUILT = ("boost-geospatial-index", "kuzzle-espresso-logic-minimizer", "re2")
INSTALL_SECONDS_MAX = 600
RUN_SECONDS_MAX = 120
SCRIPT = Path(__file__).with_name("match_koncorde.js")


@lru_cache
def install():
    """The reason why Koncorde cannot run here, or None."""
    if not shutil.which("node") or not shutil.which("npm"):
        return "no Node"
    if loads() is None:
        return None
    HOME.mkdir(parents=True, exist_ok=True)
    # npm runs the scripts of packages only if they are listed: these three are built from source.
    package = {"dependencies": {"koncorde": VERSION}, "allowScripts": dict.fromkeys(BUILT, True)}
    (HOME / "package.json").write_text(json.dumps(package))
    try:
        run = subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund"],
            cwd=HOME,
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"npm: no answer within {INSTALL_SECONDS_MAX} s"
    return f"npm: {run.stderr.strip()[-200:] or run.returncode}" if run.returncode else loads()


def loads():
    """The reason why the installed Koncorde does not start, or None."""
    if not (HOME / "node_modules" / "koncorde").exists():
        return "not installed"
    command = ["node", "-e", "require('koncorde')"]
    run = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False)
    return failure(run) if run.returncode else None


def failure(run):
    """What Node says of an error, without the trace."""
    lines = [line for line in run.stderr.splitlines() if "Error:" in line]
    return f"node: {lines[0].strip() if lines else run.returncode}"


def measure(filters, documents, seconds):
    """Koncorde's figures on filters and documents of JSON; None and the reason if it is skipped."""
    reason = install()
    if reason:
        return None, reason
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, name) for name in ("filters", "documents")]
        for file, values in zip(files, (filters, documents), strict=True):
            file.write_text("".join(json.dumps(value) + "\n" for value in values))
        command = ["node", str(SCRIPT), str(HOME), "re2", *map(str, files), str(seconds)]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=RUN_SECONDS_MAX
            )
        except subprocess.TimeoutExpired:
            return None, f"no end within {RUN_SECONDS_MAX} s"
    if run.returncode:
        return None, failure(run)
    return json.loads(run.stdout.splitlines()[-1]), None


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
