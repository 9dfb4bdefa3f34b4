"""Screens that act on others in a real Chromium: subscribers, webhooks, pipelines."""

from __future__ import annotations

import asyncio
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from console_tab import CHROMIUM, Tab
from server_harness import Consumer, Server, event

from waiting import wait_until

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


def test_jobs_that_match_are_dropped_and_recurring_ones_shown(browser, tmp_path):
    """Dropping waits ten seconds and can be undone; what matches the words is selected at once; next runs are listed."""
    kind = {"Content-Type": "application/json"}

    def post(path, body, method="POST"):
        answer = server.request(method, path, json.dumps(body), kind)
        assert answer.status < 300, answer
        return answer.json

    def dead():
        found = server.request("GET", "/journal/jobs?state=dead").json["jobs"]
        return sorted(job["uri"] for job in found)

    with Server(tmp_path / "data", "--durability", "none") as server:
        for number in range(3):
            post("/journal/jobs", {"uri": f"mail://shop/{number}"})
            (job,) = post("/journal/jobs/next", {})["jobs"]
            reason = "Timeout" if number else "ValueError: no"
            post("/journal/jobs/fail", {"key": job["key"], "reason": reason, "dead": True})
        schedule = {"schedule": "@every 5m", "uri": "rates://shop/refresh"}
        post("/journal/jobs/recurring/rates", schedule, "PUT")
        tab = Tab(browser, server)
        page = tab.open("#/jobs")
        page.wait_for_selector("#jobs tr.pick >> nth=2")
        page.wait_for_selector("#recurring .rec:has-text('rates'):has-text('next in ')")
        ticks = page.locator("#recurring .ticks i").count()
        page.fill("[data-find]", "timeout")
        page.wait_for_selector("#jobs tr.pick >> nth=2", state="detached")
        page.get_by_label("Select all that are shown").check()
        page.wait_for_selector(".bulk:has-text('2 selected')")
        page.click(".bulk button:has-text('Drop')")
        page.wait_for_selector(".toasts:has-text('2 jobs are dropped in 10 s')")
        before = dead()
        page.click(".toasts button:has-text('Undo')")
        page.wait_for_selector("#jobs tr.pick >> nth=1")
        page.get_by_label("Select all that are shown").check()
        page.click(".bulk button:has-text('Drop')")
        wait_until(lambda: dead() == ["mail://shop/0"], "the drop")
        page.close()

    assert before == [f"mail://shop/{number}" for number in range(3)]
    assert ticks in {11, 12}
    assert tab.errors == []


def test_health_verifies_the_log(browser, tmp_path):
    """No damage is said with figures; a damaged byte is found and named."""
    with Server(tmp_path / "data", "--durability", "none", "--journal-port", "none") as server:
        server.publish("a", *[event(str(n), {"n": n}) for n in range(5)])
        tab = Tab(browser, server)
        page = tab.open("#/health")
        page.wait_for_selector("#checks li")
        page.click("#verify")
        page.wait_for_selector("[role=status]:has-text('No damage: 5 records in 1 segment')")
        (segment,) = (tmp_path / "data" / "log").glob("*.puro")
        with segment.open("r+b") as file:
            file.seek(200)
            file.write(b"\xff\xff")
        page.click("#verify")
        page.wait_for_selector("[role=status] .bad")
        said = page.inner_text("[role=status] .bad")
        page.close()

    assert segment.name in said
    assert tab.errors == []


LONG = """
[pipeline]
name = "orders-per-minute-and-country-of-the-customer"
description = "Counts paid orders per minute and country"
checkpoint = "checkpoint"
trigger = "10 seconds"

[source]
log = "data/log"
topics = ["orders", "orders.of-the-second-shop"]

[[filter]]
match = "status=paid&total=>120;status=refunded&total=>1000"

[columns]
country = "try_variant_get(data, '$.country', 'string')"
total = "try_variant_get(data, '$.total', 'double')"

[aggregate]
window = "1 minute"
by = ["country"]
aggregates = { orders = "count(*)" }

[[sink]]
kind = "channel"
topic = "orders.per-minute-and-country-of-the-customer"

[dead_letter]
kind = "channel"
topic = "orders.dead"
"""
# Texts of the graph that do not fit into their box.
CUT = "[...document.querySelectorAll('.gnode *')].filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflow !== 'visible' || e.getBoundingClientRect().right > e.closest('.gnode').getBoundingClientRect().right + 1).map(e => e.textContent)"


@pytest.mark.slow
def test_the_texts_of_a_graph_are_whole(browser, tmp_path):
    """At both widths and in both themes; nothing for axe, nothing wider than the window; when it runs is said."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    file = tmp_path / "long.toml"
    file.write_text(LONG)
    problems = {}
    with Server(tmp_path / "data", "--durability", "none", "--pipelines", file) as server:
        for width, theme in ((1440, "light"), (1440, "dark"), (375, "light"), (375, "dark")):
            tab = Tab(browser, server, width=width, theme=theme)
            page = tab.open("#/pipelines")
            page.wait_for_selector(".gnode >> nth=5")
            page.wait_for_selector(".facts:has-text('every 10 seconds')")
            page.wait_for_selector("#status.good")
            cut = page.evaluate(CUT)
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            found = [one["id"] for one in axe.run(page).response["violations"]]
            if cut or wide > 0 or found or tab.errors:
                problems[width, theme] = (cut, wide, found, tab.errors)
            titles = page.locator(".gnode strong").all_inner_texts()
            page.close()

    assert problems == {}
    assert "status=paid&total=>120;status=refunded&total=>1000" in titles
    assert titles[-1] == "orders.dead"
