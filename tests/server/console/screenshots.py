"""
Take the screenshots of the console for `docs/`: `python tests/server/console/screenshots.py [--pipelines]`.

A server with events, subscribers, jobs, webhooks and, with `--pipelines`, a Spark pipeline runs for a minute; then
Chromium opens every screen. Figures are those of that minute.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from console_tab import CHROMIUM, Tab  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402
from server_harness import Server  # noqa: E402

from waiting import wait_until  # noqa: E402

DOCS = HERE.parents[2] / "docs"
WARM_S = 75
# A chart of rows per second shows something after a few micro-batches.
PIPELINE_MS = 45_000
FILTER = "status%3Dpaid%26total%3D%3E120%3Bstatus%3Drefunded"
SCREENS = {
    "overview": ("#/", ".tile .figure"),
    "channels": ("#/channels", "#channels tr a"),
    "channel": (f"#/channels/orders?from=earliest&filter={FILTER}", "#rows tr.yes"),
    "view": ("#/views/orders?filter=status%3Dpaid", "#rows tr[data-row]"),
    "queries": ("#/queries", "#queries tr"),
    "why": ("#/why?channel=orders&offset=5&filter=status%3Dpaid%26total%3D%3E120", ".answer"),
    "jobs": ("#/jobs", ".attempts li"),
    "webhooks": ("#/webhooks", "#webhook .kv"),
    "pipelines": ("#/pipelines", "#pipeline"),
    "health": ("#/health", "#checks li"),
}
PIPELINE = """
[pipeline]
name = "orders-per-minute"
description = "Counts paid orders per minute and country"
checkpoint = "../checkpoint"
trigger = "10 seconds"

[source]
log = "../data/log"
topics = ["orders"]

[[filter]]
match = "status=paid"

[columns]
country = "try_variant_get(data, '$.country', 'string')"
total = "try_variant_get(data, '$.total', 'double')"

[aggregate]
window = "1 minute"
by = ["country"]
mode = "update"
aggregates = { orders = "count(*)", revenue = "round(sum(total), 2)" }

[[sink]]
kind = "channel"
topic = "orders.per-minute"

[dead_letter]
kind = "channel"
topic = "orders.dead"
"""
TRACE = """Traceback (most recent call last):
  File "/srv/worker.py", line 61, in send_receipt
    render(order["lines"])
  File "/srv/receipts.py", line 18, in render
    return template.format(total=order["total"])
"""


class Sink(BaseHTTPRequestHandler):
    """A webhook's receiver that is away sometimes."""

    def do_OPTIONS(self):
        self.send_response(200)
        self.send_header("WebHook-Allowed-Origin", "*")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204 if self.path == "/crm" else random.choice([204, 204, 400]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


def post(server, path, body):
    answer = server.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    assert answer.status < 300, answer
    return answer.json


def flow(server, stop):
    """Publish orders, payments and clicks until `stop` is set."""
    number = 0
    while not stop.wait(0.05):
        number += 1
        order = random.randrange(880_000, 880_400)
        status = random.choice(["created", "paid", "paid", "packed", "shipped", "refunded"])
        data = {"status": status, "total": round(random.uniform(5, 400), 2)}
        data |= {"country": random.choice(["FI", "DE", "FR", "ES"]), "tier": "silver"}
        made = {"specversion": "1.0", "type": f"shop.order.{status}", "source": "/shop/eu"}
        server.publish("orders", made | {"id": f"o{number}", "subject": f"o-{order}", "data": data})
        clicks = [{"page": random.choice(["/", "/cart", "/pay"])} for _ in range(3)]
        server.publish(
            "clicks",
            *[
                made | {"type": "click", "id": f"c{number}-{n}", "data": c}
                for n, c in enumerate(clicks)
            ],
        )
        if number % 4 == 0:
            server.publish("payments", made | {"type": "paid", "id": f"p{number}", "data": data})


def listen(server, path):
    """Read a stream until the server ends."""
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", path)
    answer = connection.getresponse()
    while answer.read1(65536):
        pass


def add_jobs(server):
    for n in range(6):
        post(
            server,
            "/journal/jobs",
            {"uri": f"mail://shop/receipt/{n}", "payload": '{"order": 880120}'},
        )
    for _ in range(3):
        for job in post(server, "/journal/jobs/next", {"count": 2})["jobs"]:
            body = {
                "key": job["key"],
                "reason": "ConnectionError: smtp.example refused",
                "delay": 0,
            }
            post(server, "/journal/jobs/fail", body)
    for job in post(server, "/journal/jobs/next", {"count": 2})["jobs"]:
        body = {"key": job["key"], "reason": "KeyError: 'total'", "traceback": TRACE, "dead": True}
        post(server, "/journal/jobs/fail", body)
    post(server, "/journal/jobs", {"uri": "crawl://partner/prices", "delay": 3600})
    server.request(
        "PUT", "/journal/jobs/recurring/daily-report",
        json.dumps({"schedule": "*/15 * * * *", "uri": "report://shop/daily"}),
        {"Content-Type": "application/json"},
    )  # fmt: skip


def has_windows(server):
    """Return whether the pipeline runs, has read rows and knows which windows are closed."""
    (found,) = server.request("GET", "/pipelines").json
    assert found["state"] not in {"failed", "finished"}, found
    return found["state"] == "running" and found.get("rows") and found.get("watermark")


def shoot(server):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shots = [(name, name, 1440, "light") for name in SCREENS]
        shots += [("dark", "channel", 1440, "dark"), ("phone", "jobs", 375, "light")]
        for file, name, width, theme in shots:
            hash_, ready = SCREENS[name]
            tab = Tab(browser, server, width=width, theme=theme)
            page = tab.open(hash_)
            page.wait_for_selector(ready, timeout=60_000)
            page.wait_for_timeout(PIPELINE_MS if name == "pipelines" else 5_000)
            if name == "channel":
                page.click("#pause")
                page.locator("#rows tr.no:has-text('paid')").first.click()
                page.wait_for_selector(".answer.no")
            page.screenshot(path=DOCS / f"console-{file}.png")
            page.close()
        browser.close()


def main():
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--webhook-allow", "127.0.0.1", "--webhook-attempts", "1"]
        if "--pipelines" in sys.argv:
            file = Path(directory) / "pipelines" / "orders-per-minute.toml"
            file.parent.mkdir()
            file.write_text(PIPELINE)
            flags += ["--pipelines", str(file)]
        with Server(Path(directory) / "data", *flags) as server:
            stop = threading.Event()
            feeder = threading.Thread(target=flow, args=(server, stop))
            feeder.start()
            queries = ["?status=paid", "?status=refunded", "?country=DE", "", "?total=>300"]
            for query in queries:
                path = f"/channels/orders{query}"
                threading.Thread(target=listen, args=(server, path), daemon=True).start()
            for name in ("crm", "billing"):
                sink = f"http://127.0.0.1:{receiver.server_port}/{name}"
                body = {"sink": sink, "types": ["shop.order.paid"], "config": {"channel": "orders"}}
                post(server, "/subscriptions", body)
            add_jobs(server)
            time.sleep(WARM_S)
            if "--pipelines" in sys.argv:
                wait_until(lambda: has_windows(server), "rows of the pipeline", seconds=300)
            shoot(server)
            stop.set()
            feeder.join()
    receiver.shutdown()


if __name__ == "__main__":
    main()
