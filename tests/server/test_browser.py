"""A real browser's EventSource: it hears events, loses its server, comes back and resumes."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from server_harness import event

import virta

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


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_eventsource_that_heard_nothing_loses_nothing(start):
    """The server is killed before the first event; what is published meanwhile and after arrives."""
    sync_api = pytest.importorskip("playwright.sync_api")
    server = start()
    port = server.port
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/livez")
        page.evaluate(PAGE, f"http://127.0.0.1:{port}/channels/first?x=1")
        page.wait_for_function("window.opened === 1")
        server.stop(signal.SIGKILL)
        with virta.open(server.data_dir / "log") as log:  # by another process, while it is down
            for n in range(3):
                log.append("first", b"", json.dumps(event(f"down-{n}", {"x": n % 2})).encode())
        server = start("--server-port", port)
        server.publish("first", event("up", {"x": 1}))
        page.wait_for_function("window.opened === 2 && window.heard.length === 2")
        server.stop(signal.SIGKILL)
        server = start("--server-port", port)
        server.publish("first", event("again", {"x": 1}))
        page.wait_for_function("window.heard.length === 3")
        heard = page.evaluate("window.heard.map(([id]) => id)")
        browser.close()

    assert heard == ["down-1", "up", "again"]


SOCKET_PAGE = """
(base) => {
  window.heard = [];
  window.opened = 0;
  let position = null;
  const open = () => {
    const at = position === null ? "$positions=1" : "$last-event-id=" + encodeURIComponent(position);
    const socket = new WebSocket(`ws://${base}/channels/s?x=1&${at}`, "cloudevents.json");
    socket.onmessage = (message) => {
      const event = JSON.parse(message.data);
      position = event.virtaposition ?? position;
      if (event.type === "virta.connect") window.opened += 1;
      else window.heard.push(event.type.startsWith("virta.") ? event.type : event.id);
    };
    socket.onclose = () => setTimeout(open, 100);
  };
  open();
}
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_websocket_of_a_page_resumes(start):
    """A page comes back with `$last-event-id` and hears everything once, from before its first event on."""
    sync_api = pytest.importorskip("playwright.sync_api")
    server = start()
    port = server.port
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/livez")
        page.evaluate(SOCKET_PAGE, f"127.0.0.1:{port}")
        page.wait_for_function("window.opened === 1")
        for turn in range(3):
            server.stop(signal.SIGKILL)
            with virta.open(server.data_dir / "log") as log:
                log.append("s", b"", json.dumps(event(f"down-{turn}", {"x": 1})).encode())
            server = start("--server-port", port)
            server.publish("s", event(f"no-{turn}", {"x": 2}), event(f"up-{turn}", {"x": 1}))
            page.wait_for_function(f"window.heard.length === {2 * turn + 2}")
        heard = page.evaluate("window.heard")
        browser.close()

    assert heard == [f"{kind}-{turn}" for turn in range(3) for kind in ("down", "up")]
