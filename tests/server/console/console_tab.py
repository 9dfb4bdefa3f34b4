"""A page of the console in a real Chromium, for its tests."""

from __future__ import annotations

import shutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HARMLESS = "net::ERR_"  # a request that was cut by leaving the page


class Tab:
    """A page that remembers what its console said."""

    def __init__(self, browser, server, *, width=1440, theme="light"):
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        self.base = f"http://127.0.0.1:{server.port}/"
        self.errors = []
        self.page.on("console", lambda said: said.type == "error" and self.add(said.text))
        self.page.on("pageerror", lambda error: self.add(str(error)))
        self.page.set_default_timeout(15_000)

    def add(self, text):
        if HARMLESS not in text:
            self.errors.append(text)

    def open(self, hash_):
        self.page.goto("about:blank")
        self.page.goto(self.base + hash_)
        return self.page


def reconnect(page):
    """Click the button of a lost connection, unless the page has reconnected by itself before."""
    page.evaluate("document.querySelector('.lost button')?.click()")
