"""A real browser: its EventSource resumes, and its pages are allowed or refused."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from server_harness import event

import virta

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# One foreign name, so that a page of another site can be had without a network.
ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"]

PAGE = """
(address) => {
  window.received = [];
  window.opened = 0;
  window.source = new EventSource(address);
  window.source.addEventListener("connect", () => { window.opened += 1; });
  window.source.addEventListener("data", (m) => { window.received.push([JSON.parse(m.data).id, m.lastEventId]); });
}
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_eventsource_reconnects_and_resumes(start):
    """Events published while the server was down or the browser offline arrive once, in order."""
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
        page.wait_for_function("window.received.length === 1")
        server.stop(signal.SIGKILL)
        server = start("--server-port", port)
        server.publish("b", event("2", {"x": 1}), event("3", {"x": 1}))
        page.wait_for_function("window.opened === 2 && window.received.length === 3")
        server.stop()
        server = start("--server-port", port)
        page.wait_for_function("window.opened === 3")
        server.publish("b", event("4", {"x": 1}))
        page.wait_for_function("window.received.length === 4")
        received = page.evaluate("window.received")
        browser.close()
    server.stop()

    assert received == [[str(n), f"%2F%2Ftest+{n}"] for n in range(1, 5)]


USE_EVERYTHING = """
async (base) => {
  const tried = {};
  const attempt = async (name, options) => {
    try {
      const answer = await fetch(`http://${base}${options.path}`, options);
      tried[name] = answer.type === "opaque" ? "opaque" : [answer.status, (await answer.json()).code];
    } catch (error) { tried[name] = "failed"; }
  };
  const event = JSON.stringify({source: "s", id: "1"});
  const structured = {"Content-Type": "application/cloudevents+json"};
  const messages = JSON.stringify([{publish_to: "a:b", payload: "hi"}]);
  await attempt("get", {path: "/openapi.json"});
  await attempt("put", {path: "/channels/page", method: "PUT", headers: structured, body: event});
  await attempt("post", {path: "/publish", method: "POST", body: messages});
  await attempt("blind", {path: "/publish", method: "POST", mode: "no-cors", body: messages});
  await attempt("delete", {path: "/journal/keys/a", method: "DELETE"});
  tried.stream = await new Promise((resolve) => {
    const source = new EventSource(`http://${base}/channels/page/from/earliest`);
    source.addEventListener("connect", () => { resolve("open"); source.close(); });
    source.onerror = () => { resolve("failed"); source.close(); };
  });
  tried.socket = await new Promise((resolve) => {
    const socket = new WebSocket(`ws://${base}/subscribe?streams=a:&max_queued=5`);
    socket.onopen = () => { resolve("open"); socket.close(); };
    socket.onerror = () => resolve("failed");
  });
  return tried;
}
"""
FORM = """
(base) => {
  const form = document.createElement("form");
  form.method = "POST"; form.enctype = "text/plain"; form.action = `http://${base}/publish`;
  const field = document.createElement("input");
  field.name = '[{"publish_to":"a:b","payload":"'; field.value = '"}]';
  form.append(field); document.body.append(form); form.submit();
}
"""


@pytest.fixture
def pages():
    """A web server with pages of another origin: of this machine, or under a foreign name."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>page</title><body></body>")

        def log_message(self, *arguments):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    yield web.server_port
    web.shutdown()
    thread.join()
    web.server_close()


@pytest.fixture
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield made
        made.close()


def written(server):
    """Return the number of events in the server's log."""
    (line,) = re.findall(r"^virta_log_next_offset ([0-9.e+]+)$", metrics(server), re.MULTILINE)
    return float(line)


def refused(server, status):
    found = re.findall(
        rf'^virta_refusals_total{{status="{status}"}} ([0-9.]+)$', metrics(server), re.MULTILINE
    )
    return float(found[0]) if found else 0.0


def metrics(server):
    return server.request("GET", "/metrics").body.decode()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pages_of_another_site_are_refused(start, browser, pages):
    """A page of another site can neither read nor write, by any API of a browser."""
    with start() as server:
        base = f"127.0.0.1:{server.port}"
        page = browser.new_page()
        page.goto(f"http://evil.example:{pages}/")
        tried = page.evaluate(USE_EVERYTHING, base)
        with page.expect_navigation() as navigation:
            page.evaluate(FORM, base)
        form = navigation.value.status
        page.goto(f"http://evil.example:{pages}/")
        page.evaluate("(base) => { location.href = `http://${base}/subscriptions`; }", base)
        page.wait_for_url(f"http://{base}/subscriptions")
        linked = page.evaluate("document.body.innerText")
        count, empty = refused(server, 403), written(server) == 0

    assert tried.pop("blind") == "opaque"
    assert set(tried.values()) == {"failed"}, tried
    assert form == 403
    assert "origin-not-allowed" in linked
    assert count >= len(tried) + 3
    assert empty


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pages_under_a_rebound_name_are_refused(start, browser):
    """A foreign name that leads here is the same origin for the browser, and no name of the server."""
    with start() as server:
        base = f"evil.example:{server.port}"
        page = browser.new_page()
        first = page.goto(f"http://{base}/livez")
        tried = page.evaluate(USE_EVERYTHING, base)
        count, empty = refused(server, 421), written(server) == 0

    assert first.status == 421
    assert tried.pop("stream") == "failed"
    assert tried.pop("socket") == "failed"
    assert set(map(tuple, tried.values())) == {(421, "misdirected-host")}, tried
    assert count >= len(tried) + 3
    assert empty


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_pages_of_this_machine_are_allowed(start, browser, pages, name):
    """A page of localhost on another port reads and writes, with preflights, streams and sockets."""
    with start() as server:
        page = browser.new_page()
        page.goto(f"http://{name}:{pages}/")
        tried = page.evaluate(USE_EVERYTHING, f"127.0.0.1:{server.port}")
        count = written(server)

    assert tried["put"] == [202, "accepted"]
    assert tried["get"] == [200, None]
    assert tried["delete"][0] in {200, 404}
    assert (tried["blind"], tried["stream"], tried["socket"]) == ("opaque", "open", "open")
    assert count == 3


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pages_that_are_listed_are_allowed(start, browser, pages):
    """`--allow-origin` lets a page of another site do the same."""
    with start("--allow-origin", f"http://evil.example:{pages}") as server:
        page = browser.new_page()
        page.goto(f"http://evil.example:{pages}/")
        tried = page.evaluate(USE_EVERYTHING, f"127.0.0.1:{server.port}")

    assert tried["put"] == [202, "accepted"]
    assert (tried["stream"], tried["socket"]) == ("open", "open")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_eventsource_without_events_loses_nothing(start):
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
        page.wait_for_function("window.opened === 2 && window.received.length === 2")
        server.stop(signal.SIGKILL)
        server = start("--server-port", port)
        server.publish("first", event("again", {"x": 1}))
        page.wait_for_function("window.received.length === 3")
        received = page.evaluate("window.received.map(([id]) => id)")
        browser.close()

    assert received == ["down-1", "up", "again"]


SOCKET_PAGE = """
(base) => {
  window.received = [];
  window.opened = 0;
  let position = null;
  const open = () => {
    const at = position === null ? "$positions=1" : "$last-event-id=" + encodeURIComponent(position);
    const socket = new WebSocket(`ws://${base}/channels/s?x=1&${at}`, "cloudevents.json");
    socket.onmessage = (message) => {
      const event = JSON.parse(message.data);
      position = event.virtaposition ?? position;
      if (event.type === "virta.connect") window.opened += 1;
      else window.received.push(event.type.startsWith("virta.") ? event.type : event.id);
    };
    socket.onclose = () => setTimeout(open, 100);
  };
  open();
}
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_websocket_of_a_page_resumes(start):
    """A page reconnects with `$last-event-id` and gets everything once, also before its first event."""
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
            page.wait_for_function(f"window.received.length === {2 * turn + 2}")
        received = page.evaluate("window.received")
        browser.close()

    assert received == [f"{kind}-{turn}" for turn in range(3) for kind in ("down", "up")]
