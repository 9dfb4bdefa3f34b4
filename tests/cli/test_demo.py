"""`virta demo` runs as a user starts it, shows movement, and leaves nothing but its directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from virta.cli.demo.shop import ORDERS_MAX, Shop

DEADLINE_S = 60
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class RunningDemo:
    """The process, its address, and what it printed."""

    def __init__(self, folder):
        command = [sys.executable, "-m", "virta", "demo", "--no-spark", "--server-port", "0"]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            found = re.search(r"Virta demo at http://127.0.0.1:(\d+)/", line)
            if found:
                self.port = int(found[1])
                break
        else:
            raise AssertionError("".join(self.said))

    def get(self, path):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def stop(self, number=signal.SIGINT):
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=DEADLINE_S)
        self.said.append(rest)
        return self.process.returncode


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def descendants(pid):
    """Return the processes that a process started, and theirs."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    found, rest = set(), {pid}
    while rest:
        rest = {child for child, parent in parents.items() if parent in rest}
        found |= rest
    return found


@pytest.mark.slow
def test_the_demo_moves_and_leaves_only_its_directory(tmp_path):
    """Rows, payments, jobs and webhooks are alive within seconds; Ctrl-C ends all processes."""
    demo = RunningDemo(tmp_path)
    try:

        def counts():
            page = json.loads(demo.get("/channels"))
            return {channel["name"]: channel["records"] for channel in page["channels"]}

        names = {"shop.main.orders", "shop.main.products", "payments"}
        first = wait_for(lambda: (found := counts()).keys() >= names and found)
        wait_for(lambda: all(counts()[name] > first[name] for name in names))
        wait_for(lambda: json.loads(demo.get("/subscriptions"))[0]["status"]["delivered"] > 0)
        db = sqlite3.connect(tmp_path / "virta-demo" / "shop.db", timeout=30)
        shipped = "SELECT count(*) FROM orders WHERE status = 'shipped'"
        wait_for(lambda: db.execute(shipped).fetchone()[0])
        db.close()
        wait_for(
            lambda: json.loads(demo.get("/channels/shop.main.orders/rows?status=shipped"))["rows"]
        )
        started = descendants(demo.process.pid)
        assert len(started) >= 2  # the server and the capture
    finally:
        code = demo.stop()

    assert code == 0, demo.said
    assert os.listdir(tmp_path) == ["virta-demo"]
    wait_for(lambda: not [pid for pid in started if Path(f"/proc/{pid}").exists()])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_console_of_the_demo_moves(tmp_path):
    """Within a minute of the start, the overview's figures and the lists of jobs and webhooks are alive."""
    sync_api = pytest.importorskip("playwright.sync_api")
    began = time.monotonic()
    demo = RunningDemo(tmp_path)
    try:
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(DEADLINE_S * 1000)
            page.goto(f"http://127.0.0.1:{demo.port}/#/")
            page.wait_for_selector("#channels a:text-is('shop.main.orders')")
            moving = "!['', '0'].includes(document.querySelector('.tile .figure span')?.textContent ?? '')"
            page.wait_for_function(moving)
            print(f"the console moves {time.monotonic() - began:.1f} s after the start")
            for screen in ("#/jobs", "#/webhooks"):
                page.goto(f"http://127.0.0.1:{demo.port}/{screen}")
                page.wait_for_selector(f"{screen.replace('/', '')} tr")
            browser.close()
    finally:
        assert demo.stop() == 0


def test_the_shop_keeps_its_size_and_publishes_what_was_paid(tmp_path):
    """Old orders are removed, paid ones are reported once, and each has an event in the outbox."""
    paid = []
    shop = Shop(tmp_path / "shop.db", paid.append, seed=1)
    for _ in range(60):
        shop.step()
    shop.ship(paid[0])

    db = sqlite3.connect(tmp_path / "shop.db")
    statuses = dict(db.execute("SELECT status, count(*) FROM orders GROUP BY status"))
    assert statuses["shipped"] == 1
    assert statuses["paid"] == len(paid) - 1 == len(set(paid)) - 1
    assert db.execute("SELECT count(*) FROM virta_outbox").fetchone()[0] == len(paid)
    assert sum(statuses.values()) <= ORDERS_MAX
    db.close()


def test_the_shop_stops_when_asked(tmp_path):
    stopping = threading.Event()
    stopping.set()
    Shop(tmp_path / "shop.db", lambda _: None).run(stopping)
