"""The JavaScript client in Node and in a real browser, against a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from server_harness import Server

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "clients" / "js"
SCENARIO = Path(__file__).parent / "js_client.mjs"
NODE = shutil.which("node")
NPM = shutil.which("npm")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DEADLINE_S = 60

RUN = """
import * as virta from {module!r};
import {{ scenario }} from {scenario!r};
console.log(JSON.stringify(await scenario(virta, {url!r})));
process.exit(0);
"""
IN_PAGE = """
async ([client, scenario, url]) => {
  const load = (text) => import(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
  const virta = await load(client);
  return await (await load(scenario)).scenario(virta, url);
}
"""


def check(seen):
    """Compare what the scenario saw with what it should see."""
    assert seen["first"]["durability"] == "group"
    assert seen["first"]["offset"] == 0
    assert seen["repeat"] is True
    assert seen["ids"] == ["1", "3"]
    assert len(seen["gaps"]) == 1
    assert seen["afterGap"] == "4"
    assert seen["rows"] == ["a", "c"]
    assert seen["changes"] == [["enter", "b"], ["leave", "a"]]
    assert seen["calls"] == 3
    assert seen["after"] == ["b", "c"]
    assert seen["resumed"] == ["enter", "live"]
    assert seen["reset"] == ["unknown-position"]
    assert seen["groups"] == [
        {"group": "new", "count": 1, "sum": 0},
        {"group": "paid", "count": 3, "sum": 9},
        {"group": "sent", "count": 1, "sum": 0},
    ]
    assert seen["koncorde"] == ["b", "c", "e"]
    assert seen["work"] is True
    assert seen["refused"] == [True, "invalid-pointer", 400]
    assert seen["frames"] == [["a", "", "1"]]


@pytest.mark.skipif(NODE is None, reason="no Node on this machine")
def test_in_node(tmp_path):
    with Server(tmp_path) as server:
        code = RUN.format(
            module=str(PACKAGE / "index.js"),
            scenario=str(SCENARIO),
            url=f"http://127.0.0.1:{server.port}",
        )
        done = subprocess.run(
            [NODE, "--input-type=module", "-e", code],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_in_chromium(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    with Server(tmp_path) as server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/livez")
        seen = page.evaluate(
            IN_PAGE, [(PACKAGE / "index.js").read_text(), SCENARIO.read_text(), ""]
        )
        browser.close()
    check(seen)


@pytest.mark.skipif(NPM is None, reason="no npm on this machine")
def test_the_package_has_its_files():
    out = subprocess.run(
        [NPM, "pack", "--dry-run", "--json"],
        cwd=PACKAGE,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    ).stdout
    assert {file["path"] for file in json.loads(out)[0]["files"]} == {
        "README.md",
        "index.d.ts",
        "index.js",
        "package.json",
    }
