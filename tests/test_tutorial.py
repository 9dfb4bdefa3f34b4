"""docs/tutorial.md and docs/how-to.md: the commands and programs run, the links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from server_harness import Server

DOCS = Path(__file__).parents[1] / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text()
PAGES = ["tutorial", "how-to", "operations", "compatibility", "console", "README", "cli-operating"]


def test_the_tutorial_runs(tmp_path):
    """The commands publish, the live query answers, the program prints the orders over 100."""
    with Server(tmp_path / "data") as server:
        url = f"http://127.0.0.1:{server.port}"
        environ = os.environ | {"VIRTA_URL": url}
        for line in re.findall(r"^\$ (virta (?:publish|subscribe) .*)$", TUTORIAL, re.MULTILINE):
            command = [sys.executable, "-m", *shlex.split(line)]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=30)  # fmt: skip
        assert '"id":"o-1"' in done.stdout
        (program,) = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
        code = program.replace("http://127.0.0.1:8232", url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)  # fmt: skip

    assert [line.split()[1] for line in done.stdout.splitlines()] == ["o-1", "o-10", "o-12"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Each relative link is a file, each anchor a heading of it."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (DOCS / f"{page}.md").read_text()):
        name, _, anchor = target.partition("#")
        path = (DOCS / name).resolve() if name else DOCS / f"{page}.md"
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, target


def test_the_dashboard_of_the_tutorial_is_the_example():
    """The line that opens the stream stands in the example as in the text."""
    page = (DOCS.parent / "examples" / "dashboard" / "index.html").read_text()
    assert "/channels/orders/from/earliest?status=paid&$positions=1" in page
    assert "/channels/orders/from/earliest?status=paid&$positions=1" in TUTORIAL
