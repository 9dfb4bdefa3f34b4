"""README does what it says: its Python runs as printed, its links and make targets exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def test_links_and_targets_exist():
    """Every linked page is there; every `make X` is a target."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"`?make ([a-z-]+)`?", README):
        assert name in targets
