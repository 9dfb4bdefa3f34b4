"""The docs as a site: every page has a place, and every link leads somewhere."""

from __future__ import annotations

import os
import re
import shutil
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


def build(source, target):
    """Build the site as `make docs` does; return the exit code and what it said."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(
        command,
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    return done.returncode, done.stderr


def test_the_site_builds(tmp_path):
    """Nothing is loaded from elsewhere; linked examples are on the site."""
    code, said = build(ROOT, tmp_path)
    assert code == 0, said
    tutorial = (tmp_path / "tutorial" / "index.html").read_text()

    assert (tmp_path / "index.html").exists()
    assert "https://fonts." not in tutorial
    assert 'class="highlight"' in tutorial
    assert re.search(r'href="[./]*/examples/dashboard/(index.html)?"', tutorial)
    dashboard = ROOT / "examples" / "dashboard" / "index.html"
    assert (tmp_path / "examples/dashboard/index.html").read_bytes() == dashboard.read_bytes()


@pytest.mark.parametrize("link", ["none.md", "server.md#none", "../examples/none.py"])
def test_a_link_that_leads_nowhere_fails(tmp_path, link):
    """A page, a heading, a file of the repository."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    page = tmp_path / "docs" / "events.md"
    page.write_text(f"{page.read_text()}\n[there]({link})\n")
    code, said = build(tmp_path, tmp_path / "site")

    assert code == 1
    assert link.removeprefix("../") in said


def test_make_builds_it_in_the_same_way():
    """With `--quiet`, mkdocs counts no warning, and `--strict` refuses nothing."""
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line]  # fmt: skip

    assert "build --strict" in line
    assert "--quiet" not in line.partition("#")[0]
