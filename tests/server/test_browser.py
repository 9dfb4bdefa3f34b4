"""A real browser's EventSource: it hears events, loses its server, comes back and resumes."""

from __future__ import annotations

import shutil
import signal

import pytest
from server_harness import event

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# One foreign name, so that a page of another site can be had without a network.
ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"]

PAGE = """
(address) => {
  window.heard = [];
  window.opened = 0;
  window.source = new EventSource(address);
  window.source.addEventListener("connect", () => { window.opened += 1; });
  window.source.addEventListener("data", (m) => { window.heard.push([JSON.parse(m.data).id, m.lastEventId]); });
}
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_eventsource_reconnects_and_resumes(start):
    """What was published while the server was down or the browser away is heard once, in order."""
    sync_api = pytest.importorskip("playwright.sync_api")
    server = start()
    port = server.port
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/livez")
        page.evaluate(PAGE, f"http://127.0.0.1:{port}/channels/b?x=1")
        page.wait_for_function("window.opened === 1")
        server.publish("b", event("1", {"x": 1}), event("no", {"x": 2}))
        page.wait_for_function("window.heard.length === 1")
        server.stop(signal.SIGKILL)
        server = start("--server-port", port)
        server.publish("b", event("2", {"x": 1}), event("3", {"x": 1}))
        page.wait_for_function("window.opened === 2 && window.heard.length === 3")
        server.stop()
        server = start("--server-port", port)
        page.wait_for_function("window.opened === 3")
        server.publish("b", event("4", {"x": 1}))
        page.wait_for_function("window.heard.length === 4")
        heard = page.evaluate("window.heard")
        browser.close()
    server.stop()

    assert heard == [[str(n), f"%2F%2Ftest+{n}"] for n in range(1, 5)]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_fetch_and_websocket_from_another_origin(start):
    """A page from anywhere can publish, preflight and all; only pages of this machine open WebSockets."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with start() as server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page()
        page.goto(f"http://localhost:{server.port}/livez")  # another origin than 127.0.0.1
        base = f"127.0.0.1:{server.port}"
        status = page.evaluate(
            """async (base) => {
              const answer = await fetch(`http://${base}/channels/f`, {method: "PUT",
                headers: {"Content-Type": "application/cloudevents+json"},
                body: JSON.stringify({source: "s", id: "1"})});
              return [answer.status, (await answer.json()).code];
            }""",
            base,
        )
        message = page.evaluate(
            """(base) => new Promise((resolve) => {
              const socket = new WebSocket(`ws://${base}/subscribe?streams=a:&max_queued=5`);
              socket.onmessage = (m) => { resolve(m.data); socket.close(); };
              socket.onopen = () => fetch(`http://${base}/publish`, {method: "POST",
                body: JSON.stringify([{publish_to: "a:b", payload: "hi"}])});
            })""",
            base,
        )
        # A name of somebody else's that leads here: the page is served, its socket is not.
        page.goto(f"http://evil.example:{server.port}/livez")
        refused = page.evaluate(
            """(base) => new Promise((resolve) => {
              const socket = new WebSocket(`ws://${base}/subscribe?streams=a:&max_queued=5`);
              socket.onopen = () => resolve("open");
              socket.onerror = () => resolve("refused");
            })""",
            base,
        )
        browser.close()

    assert refused == "refused"
    assert status == [202, "accepted"]
    assert message == '{"publish_to":"a:b","payload":"hi"}'
