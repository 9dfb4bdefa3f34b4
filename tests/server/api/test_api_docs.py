"""docs/server.md: every route, code and setting is documented, and its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import routes_page

from virta.server.api.description.openapi import openapi
from virta.server.settings import SETTINGS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "server.md").read_text()
SOURCES = [
    p.read_text()
    for room in ("server", "hub")
    for p in (ROOT / "src" / "virta" / room).glob("*.py")
]

# Subtub's routes answer with the sentence alone.
SENTENCES = {
    "bad-handshake",
    "invalid-max-queued",
    "invalid-message-body",
    "malformed-stream-id",
    "no-streams",
}


def test_every_code_is_documented():
    """A code that a client can get stands in the document."""
    pattern = r'RequestError\(\s*\d+,\s*"([a-z-]+)"|code="([a-z]+-[a-z-]+)"'
    codes = {a or b for text in SOURCES for a, b in re.findall(pattern, text)}

    codes -= SENTENCES
    assert sorted(code for code in codes if f"`{code}`" not in PAGE) == []


def test_every_route_is_documented():
    """A path that is served stands in the document."""
    for path in openapi()["paths"]:
        fixed = path.split("{")[0].rstrip("/")
        assert fixed in PAGE, path


def test_the_page_of_routes_is_current():
    """`make reference` writes it from the descriptions and the table of rights."""
    assert routes_page.PAGE.read_text() == routes_page.page(), "run `make reference`"


def test_every_setting_is_documented():
    """Each flag stands in the table of the command's page, with its default and its range."""
    page = (ROOT / "docs" / "cli-serve.md").read_text()
    for setting in SETTINGS:
        for flag in setting.flags:
            assert f"`{flag}`" in page, flag
        (line,) = re.findall(rf"^\| `{setting.flags[0]}`.*$", page, re.MULTILINE)
        if "CPUs" in line:  # of the machine
            continue
        _, _, default, allowed, *_ = (cell.strip() for cell in line.split("|"))
        if isinstance(setting.default, int | str) and not isinstance(setting.default, bool):
            assert default.strip("`") == str(setting.default), line
        if setting.minimum is not None and setting.kind is int:
            assert f"{setting.minimum} to {setting.maximum}" in allowed, line


def test_the_example_runs(server):
    """The Python example prints what it should."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = example.replace("http://127.0.0.1:8232", f"http://127.0.0.1:{server.port}")

    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )

    assert out.stdout == "{'status': 'paid'}\n"
