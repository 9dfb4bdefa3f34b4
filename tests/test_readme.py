"""README does what it says: its Python and its commands run as printed, its links and make targets exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from server_harness import Server

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_runs(tmp_path):
    """All Python blocks, in order, as one program in an empty directory."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout == "0 42 b'{\"total\":7}'\n"


def test_the_commands_run(tmp_path):
    """All `$ …` lines, in order, in one shell; the live query of the first one gets both events."""
    text = README.replace("\\\n", " ")
    lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    assert len(lines) == 7
    with Server(tmp_path / "data") as server:
        base = f"127.0.0.1:{server.port}"
        environ = os.environ | {
            "VIRTA_URL": f"http://{base}",
            "VIRTA_JOURNAL_PORT": str(server.journal_port),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        stream, *rest = lines
        heard = tmp_path / "heard"
        # The prompt does not wait for the live query, this test does.
        script = [
            f"{stream.removesuffix(' &')} > {heard} &",
            f"until grep -q connect {heard}; do sleep 0.1; done",
        ]
        script += [
            *rest,
            f"until [ $(grep -c 'event: data' {heard}) = 2 ]; do sleep 0.1; done",
            "kill $!",
        ]
        code = "set -e\n" + "\n".join(script).replace("127.0.0.1:8232", base)
        done = subprocess.run(
            ["bash", "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=90, check=False
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"status":"paid"') == 2, "what `virta subscribe` printed"
    assert done.stdout.count('"frame": "row", "key": "o-1"') == 1, "what `virta live` printed"
    assert "orders.toml: ok" in done.stdout


def test_links_and_targets_exist():
    """Every linked page is there; every `make X` is a target."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"`?make ([a-z-]+)`?", README):
        assert name in targets
