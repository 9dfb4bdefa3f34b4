"""The examples that need a server run as their first lines say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from server_harness import Server, event

EXAMPLES = Path(__file__).parents[1] / "examples"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("data"), "--webhook-allow", "127.0.0.1") as running:
        yield running


def start(name, *arguments):
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def order(n, total):
    return event(f"order-{n}", {"id": f"o-{n}", "status": "paid", "total": total}, subject=f"o-{n}")


def test_job_worker(server):
    """Five pushes are three jobs; the one that failed is tried again."""
    out = finish(start("job_worker.py", "--port", server.journal_port))

    assert "order 1002 at attempt 2" in out
    assert "3 receipts sent, each once: 1001, 1002, 1003" in out


def test_webhook_receiver(server):
    """It consents, receives what is published after that, and ends its subscription."""
    process = start("webhook_receiver.py", "--url", f"http://127.0.0.1:{server.port}")
    assert "subscribed" in process.stdout.readline()
    server.publish("orders", order(1, 250.0))
    out = finish(process)

    assert "received test order-1" in out
    assert server.request("GET", "/subscriptions").json == []


def test_asyncio_service_goes_on_where_it_was(server):
    """Two runs write one invoice for each order, none twice."""
    server.publish("orders", order(2, 10.0), order(3, 20.0))
    url = f"http://127.0.0.1:{server.port}"
    first = finish(start("asyncio_service.py", "--url", url, "--events", 2))
    server.publish("orders", order(4, 30.0))
    second = finish(start("asyncio_service.py", "--url", url, "--events", 1))

    assert first.count("invoice for") == 2
    assert second.count("invoice for") == 1
    assert not {line.split(" at ")[0] for line in first.split("\n") if line} & {second.split(" at ")[0]}  # fmt: skip


def test_percolation():
    """Saved searches are found for a document."""
    out = finish(start("percolation.py"))

    assert "50,000 saved searches" in out
    assert "satisfies" in out


@pytest.fixture
def dashboard():
    """Open the page of the example, served from another port, for a server; return it when it is live."""
    sync_api = pytest.importorskip("playwright.sync_api")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=EXAMPLES / "dashboard"))
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    try:
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

            def show(server):
                page = browser.new_page()
                page.goto(f"http://127.0.0.1:{web.server_address[1]}/?server=http://127.0.0.1:{server.port}")  # fmt: skip
                page.wait_for_selector("#state:has-text('Live')")
                return page

            yield show
            browser.close()
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_browser_dashboard(server, dashboard):
    """A page of another port of this machine counts paid orders, past and new."""
    page = dashboard(server)
    before = int(page.locator("#count").text_content())
    server.publish("orders", order("new", 999.0), event("open", {"status": "open"}))
    page.wait_for_selector("#last li:has-text('o-new: 999.00')")

    assert int(page.locator("#count").text_content()) >= before + 1
    assert page.locator("#largest").text_content() == "999.00"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_dashboard_counts_on_after_a_restart(tmp_path, dashboard):
    """What the tutorial says: the page reconnects by itself, misses nothing and counts nothing twice."""
    first = Server(tmp_path / "data")
    first.publish("orders", *[order(n, 10.0) for n in range(3)])
    page = dashboard(first)
    page.wait_for_function("document.querySelector('#count').textContent === '3'")
    first.publish("orders", order("4", 10.0))
    page.wait_for_function("document.querySelector('#count').textContent === '4'")
    first.stop()
    page.wait_for_selector("#state:has-text('Reconnecting')")
    with Server(tmp_path / "data", "--server-port", first.port) as again:
        again.publish("orders", order("5", 10.0), order("6", 20.0))
        page.wait_for_selector("#last li:has-text('o-6: 20.00')")
        count = page.locator("#count").text_content()

    assert count == "6"
