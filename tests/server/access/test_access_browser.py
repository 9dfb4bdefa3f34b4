"""A real Chromium and a server with tokens: pages of other sites, rebound names, sessions and tickets."""

from __future__ import annotations

import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from access_support import ALL, bearer, token

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
# Two names of other sites lead to this machine, as a rebinding attacker makes them.
ARGUMENTS = [
    "--no-sandbox",
    "--host-resolver-rules=MAP evil.example 127.0.0.1,MAP friend.example 127.0.0.1",
]
# Everything that a page can try with a token, or with the cookie of a session.
TRY = """
async ([base, token, credentials]) => {
  const tried = {};
  const authorization = token ? { Authorization: `Bearer ${token}` } : {};
  const attempt = async (name, path, options = {}) => {
    try {
      const answer = await fetch(base + path, { credentials, ...options, headers: { ...authorization, ...options.headers } });
      if (answer.type === "opaque") { tried[name] = "opaque"; return null; }
      const text = await answer.text(), body = text ? JSON.parse(text) : {};
      tried[name] = body.reason ?? body.code ?? answer.status;
      return body;
    } catch (error) { tried[name] = "failed"; return null; }
  };
  const event = JSON.stringify({ specversion: "1.0", type: "t", source: "/page", id: crypto.randomUUID?.() ?? String(Math.random()) });
  const structured = { "Content-Type": "application/cloudevents+json" };
  await attempt("read", "/session");
  await attempt("channels", "/channels");
  await attempt("publish", "/channels/page", { method: "POST", headers: structured, body: event });
  await attempt("drop", "/journal/keys/a", { method: "DELETE" });
  if (!token) tried.blind = await fetch(base + "/channels/page", { method: "POST", mode: "no-cors", credentials: "include", headers: { "Content-Type": "text/plain" }, body: event }).then((a) => a.type, () => "failed");
  const ticket = (await attempt("ticket", "/tickets", { method: "POST" }))?.ticket;
  const open = async () => (ticket ? `?ticket=${(await (await fetch(base + "/tickets", { method: "POST", credentials, headers: authorization })).json()).ticket}` : "");
  const stream = `${base}/channels/page/from/earliest${ticket ? `?ticket=${ticket}` : ""}`;
  tried.stream = await new Promise((resolve) => {
    const source = new EventSource(stream, { withCredentials: credentials === "include" });
    source.addEventListener("connect", () => { resolve("open"); source.close(); });
    source.onerror = () => { resolve("failed"); source.close(); };
  });
  const query = await open();
  tried.socket = await new Promise((resolve) => {
    const socket = new WebSocket(`${base.replace("http", "ws")}/channels/page${query}`, "cloudevents.json");
    socket.onopen = () => { resolve("open"); socket.close(); };
    socket.onerror = () => resolve("failed");
  });
  return tried;
}
"""
LOG_IN = """
async (token) => (await fetch("/session", { method: "POST", headers: { Authorization: `Bearer ${token}` } })).status
"""
WORKS = {
    "channels": 200,
    "publish": "accepted",
    "drop": 200,
    "ticket": 201,
    "stream": "open",
    "socket": "open",
}


@pytest.fixture
def pages():
    """A web server of another origin."""

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


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield made
        made.close()


@pytest.fixture
def page(browser):
    """A page of a new profile, without cookies of another test."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def guarded(start, tmp_path):
    """Start a server that asks for tokens; it knows one with all rights."""

    def begin(*flags):
        text = token(tmp_path / "data", (ALL, "**"))
        server = start(
            "--require-token", "--durability", "none", *flags, data_dir=tmp_path / "data"
        )
        return server, text

    return begin


def written(server, text):
    """Return the number of events in the server's log."""
    return figure(server, text, "virta_log_next_offset")


def refused(server, text):
    return figure(server, text, 'virta_refusals_total{status="403"}')


def figure(server, text, name):
    said = server.request("GET", "/metrics", headers=bearer(text)).body.decode()
    (number,) = re.findall(rf"^{re.escape(name)} ([0-9.e+]+)$", said, re.MULTILINE)
    return float(number)


def test_a_page_of_another_site_is_refused_even_with_a_token(guarded, page, pages):
    """A stolen token does not help a page, and neither does the victim's own session."""
    server, text = guarded()
    with server:
        page.goto(f"http://127.0.0.1:{server.port}/")
        assert page.evaluate(LOG_IN, text) == 204  # the victim is logged in
        page.goto(f"http://evil.example:{pages}/")
        base = f"http://127.0.0.1:{server.port}"
        stolen = page.evaluate(TRY, [base, text, "omit"])
        ridden = page.evaluate(TRY, [base, "", "include"])
        count, refusals = written(server, text), refused(server, text)

    assert ridden.pop("blind") == "opaque"
    assert set(stolen.values()) == {"failed"}, stolen
    assert set(ridden.values()) == {"failed"}, ridden
    assert refusals >= len(stolen) + len(ridden)
    assert count == 0


def test_a_page_under_a_rebound_name_is_refused_even_with_a_token(guarded, page):
    """The browser takes it for the same origin; the server is not called that."""
    server, text = guarded()
    with server:
        base = f"http://evil.example:{server.port}"
        first = page.goto(f"{base}/")
        tried = page.evaluate(TRY, [base, text, "omit"])
        count = written(server, text)

    assert first.status == 421
    assert (tried.pop("stream"), tried.pop("socket")) == ("failed", "failed")
    assert set(tried.values()) == {"misdirected-host"}, tried
    assert count == 0


def test_a_listed_page_needs_a_token_as_well(guarded, page, pages):
    """Without one 401 and no stream; with one everything, streams by tickets."""
    server, text = guarded("--allow-origin", f"http://friend.example:{pages}")
    with server:
        page.goto(f"http://friend.example:{pages}/")
        base = f"http://127.0.0.1:{server.port}"
        without = page.evaluate(TRY, [base, "", "omit"])
        nothing = written(server, text)
        tried = page.evaluate(TRY, [base, text, "omit"])
        count = written(server, text)

    assert without.pop("blind") == "opaque"
    assert (without.pop("stream"), without.pop("socket")) == ("failed", "failed")
    assert set(without.values()) == {"no-credential"}, without
    assert nothing == 0
    assert {name: tried[name] for name in WORKS} == WORKS
    assert count == 1


def test_the_own_page_works_with_a_session(guarded, page):
    """The cookie of `POST /session` is enough for the server's own pages, streams included."""
    server, text = guarded()
    with server:
        base = f"http://127.0.0.1:{server.port}"
        page.goto(f"{base}/")
        before = page.evaluate(TRY, [base, "", "include"])
        assert page.evaluate(LOG_IN, text) == 204
        after = page.evaluate(TRY, [base, "", "include"])

    assert before["read"] == before["publish"] == "no-credential"
    assert (before["stream"], before["socket"]) == ("failed", "failed")
    assert {name: after[name] for name in WORKS} == WORKS
