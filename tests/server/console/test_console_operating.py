"""Screens that act on others in a real Chromium: subscribers, webhooks, pipelines."""

from __future__ import annotations

import asyncio
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from console_tab import CHROMIUM, Tab
from server_harness import Consumer, Server, event

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
PIPELINE = """
[pipeline]
name = "paid"
checkpoint = "checkpoint"

[source]
log = "data/log"
topics = ["orders"]

[columns]
total = "try_variant_get(data, '$.total', 'double')"

[[sink]]
kind = "channel"
topic = "copies"
"""


@pytest.fixture
def sink():
    """A webhook's receiver that answers what `status` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_OPTIONS(self):
            self.send_response(200)
            self.send_header("WebHook-Allowed-Origin", "*")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self):
            self.server.received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(self.server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.status, made.received = 204, []
    thread = Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_subscriber_is_disconnected(browser, tmp_path):
    """The screen shows who is subscribed with which filter; Disconnect ends the stream of that one only."""
    with Server(tmp_path / "data", "--durability", "none") as server:
        said = []

        async def consume():
            consumer = await Consumer.open(server.port, "/channels/orders?status=paid")
            other = await Consumer.open(server.port, "/channels/orders?status=open")
            await consumer.connected()
            await other.connected()
            said.append((await consumer.frame()).event)
            server.publish("orders", event("1", {"status": "open"}))
            said.append((await other.frame()).event)
            await consumer.close()
            await other.close()

        tab = Tab(browser, server)
        thread = Thread(target=lambda: asyncio.run(consume()))
        thread.start()
        page = tab.open("#/queries")
        for query in ("status=open", "status=paid"):  # a row that comes later would move the other
            page.wait_for_selector(f"#queries tr.pick:has-text('{query}')")
        page.click("#queries tr.pick:has-text('status=paid')")
        page.click("aside button:text-is('Disconnect')")
        page.wait_for_selector(".toasts:has-text('Disconnected')")
        thread.join(20)
        page.wait_for_selector("#queries tr.pick:has-text('status=paid')", state="detached")
        page.close()

    assert said == ["disconnect", "data"]
    assert tab.errors == []


def test_a_webhook_shows_its_last_answer_and_redelivers(browser, tmp_path, sink):
    """A refused event becomes a dead letter with its reason; when the sink accepts again it is redelivered."""
    flags = ["--durability", "none", "--webhook-allow", "127.0.0.1", "--webhook-attempts", "1"]
    with Server(tmp_path / "data", *flags) as server:
        body = {"sink": f"http://127.0.0.1:{sink.server_port}/", "config": {"channel": "orders"}}
        kind = {"Content-Type": "application/json"}
        made = server.request("POST", "/subscriptions", json.dumps(body), kind)
        assert made.status == 201, made
        server.publish("orders", event("good"))
        tab = Tab(browser, server)
        page = tab.open("#/webhooks")
        page.wait_for_selector("#webhook:has-text('status 204, now')")
        sink.status = 400
        server.publish("orders", event("bad"))
        page.wait_for_selector("#webhooks tr:has-text('status 400')")
        page = tab.open("#/webhooks")
        page.wait_for_selector("#webhook details:has-text('status 400')")
        sink.status = 204
        page.click("#webhook details summary")
        page.click("#webhook details button:has-text('Redeliver')")
        page.wait_for_selector(".toasts:has-text('1 of 1 delivered')")
        page.click("#test-event")
        page.wait_for_selector(".toasts:has-text('accepted the test event')")
        page.close()

    ids = [json.loads(one).get("id") for one in sink.received]
    assert ids[:3] == ["good", "bad", "bad"]
    assert json.loads(sink.received[3])["type"] == "virta.webhook.test"
    assert tab.errors == []


@pytest.mark.slow
def test_a_pipeline_shows_its_graph_and_stops(browser, tmp_path):
    """The graph comes from the file before a row has flown; Stop ends the run and Restart begins one."""
    file = tmp_path / "paid.toml"
    file.write_text(PIPELINE)
    with Server(tmp_path / "data", "--durability", "none", "--pipelines", file) as server:
        tab = Tab(browser, server)
        page = tab.open("#/pipelines")
        page.wait_for_selector(".gnode:has-text('copies')")
        kinds = page.locator(".gnode h3").all_text_contents()
        page.click("#stop")
        page.wait_for_selector("#list:has-text('Stopped')", timeout=60_000)
        page.click("#restart")
        page.wait_for_selector("#list .pill:not(:text-is('Stopped'))")
        page.close()

    assert kinds == ["Source", "Columns", "Channel"]
    assert tab.errors == []
