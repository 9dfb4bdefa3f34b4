"""The docs as a site: every page has a place, and every link leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def pages(nav):
    """Yield the pages of a navigation, in order."""
    for one in nav:
        if isinstance(one, str):
            yield one
        else:
            for inner in one.values():
                yield from pages(inner)


def test_every_page_has_one_place():
    """A page that is not in the navigation is found by nobody."""
    nav = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))

    assert sorted(nav) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_site_builds(tmp_path):
    """Strictly: a link or an anchor that leads nowhere fails; nothing is loaded from elsewhere."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    tutorial = (tmp_path / "tutorial" / "index.html").read_text()

    assert (tmp_path / "index.html").exists()
    assert "https://fonts." not in tutorial
    assert 'class="highlight"' in tutorial
