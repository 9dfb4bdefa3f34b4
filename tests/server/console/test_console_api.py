"""The console uses the public API only: every request that it makes is described."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from console_tab import CHROMIUM, Tab
from server_harness import Server, event

from virta import console
from virta.server.api.description.openapi import openapi

SCREENS = [
    "/",
    "/channels",
    "/channels/a",
    "/channels/a?from=earliest&filter=n%3D1",
    "/views",
    "/queries",
]
SCREENS += [
    "/views/a?filter=n%3D1",
    "/why?channel=a&offset=0&filter=n%3D1",
    "/jobs",
    "/webhooks",
    "/pipelines",
    "/health",
]
# What modules pass to these functions is a path of the API; names are inserted into it.
CALLED = re.compile(r"""\b(?:call|Stream)\(["`](/[^"`?]*)""")
INSERTED = re.compile(r"\$\{[^}]*\}")
PATHS = {
    path: re.compile(re.sub(r"\\\{[^}]*\\\}", ".+", re.escape(path)))
    for path in openapi()["paths"]
}  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_every_request_is_described(browser, tmp_path):
    """All screens, with what they ask for in their first seconds."""
    asked = set()
    with Server(tmp_path / "data", "--durability", "none") as server:
        server.publish("a", event("1", {"n": 1}))
        tab = Tab(browser, server)
        tab.page.on("request", lambda sent: asked.add((sent.method, sent.url)))
        for screen in SCREENS:
            tab.open(f"#{screen}").wait_for_selector("#status.good")
            tab.page.wait_for_timeout(1500)
        tab.page.close()
    mine = {(method, urlsplit(url).path) for method, url in asked if url.startswith(tab.base)}
    known = {
        (method, path)
        for method, path in mine
        for name, pattern in PATHS.items()
        if pattern.fullmatch(path) and method.lower() in openapi()["paths"][name]
    }

    assert mine - known == set()
    assert len(mine) > 25
    assert {url for _, url in asked if not url.startswith((tab.base, "about:"))} == set()


def test_every_path_in_the_code_is_described():
    """Also of buttons that change something."""
    found = [
        INSERTED.sub("x", path).rstrip("/")
        for module in (Path(console.__file__).parent / "js").rglob("*.js")
        for path in CALLED.findall(module.read_text())
    ]

    assert len(found) > 15
    assert [
        one for one in found if not any(pattern.fullmatch(one) for pattern in PATHS.values())
    ] == []
