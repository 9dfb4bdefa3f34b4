"""The examples that show databases and Spark live: each runs as its docstring says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

import virta
from virta.cdc.sqlite_capture import SqliteCapture

EXAMPLES = Path(__file__).parents[1] / "examples"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DEADLINE_S = 60


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def post(port, path, body):
    """Return the status of a POST, tried again until the server listens."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            return connection.getresponse().status
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        finally:
            connection.close()


def test_fastapi_with_the_outbox(tmp_path):
    """An order that is accepted has its event, one that is refused has neither row nor event."""
    pytest.importorskip("fastapi")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "fastapi_outbox.py", tmp_path / "shop.db", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert post(port, "/orders", {"product": "Kettle", "total": 59}) == 201
        assert post(port, "/orders", {"product": "Trick", "total": -1}) == 422
        assert post(port, "/orders", {"product": "Cup", "total": 9}) == 201
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
    capture = SqliteCapture(tmp_path / "shop.db", tmp_path / "data")
    capture.run(threading.Event(), until_caught_up=True)
    capture.close()

    with virta.open(tmp_path / "data" / "log") as log:
        events = [virta.event.Event.from_json(record.value) for record in log.read("orders")]
        rows = list(log.read("shop.main.orders"))
    assert [event.data["product"] for event in events] == ["Kettle", "Cup"]
    assert len(rows) == 2


@pytest.mark.slow
def test_spark_over_history_and_live():
    """The batch counts history; the stream has history and what arrived later, each once."""
    pytest.importorskip("pyspark")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "spark_history_and_live.py"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "history: 100 paid orders" in done.stdout
    assert "history and live: 200 paid orders, 200 different" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_table_of_postgres_in_a_browser(tmp_path):
    """A row that changes in PostgreSQL changes in the page; p50 and p99 of that are printed."""
    sync_api = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("psycopg2", reason="pip install virta[cdc]")
    from pg_server import PgServer, binaries

    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    server = PgServer()
    try:
        with server.connect().cursor() as cursor:
            cursor.execute("CREATE TABLE orders (id int PRIMARY KEY, status text, total numeric)")
            cursor.execute("INSERT INTO orders SELECT g, 'new', g FROM generate_series(1, 5) g")
            cursor.execute("INSERT INTO orders VALUES (9, 'shipped', 1)")
            process = start_table(tmp_path, f"postgresql://virta@127.0.0.1:{server.port}/postgres")
            try:
                page_url = next(
                    filter(None, (re.findall(r"open (\S+)", line) for line in process.stdout))
                )[0]
                with sync_api.sync_playwright() as playwright:
                    browser = playwright.chromium.launch(
                        executable_path=CHROMIUM, args=["--no-sandbox"]
                    )
                    page = browser.new_page()
                    page.goto(page_url)
                    watch_table(page, cursor)
                    browser.close()
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=DEADLINE_S)
    finally:
        server.stop()


def start_table(folder, dsn):
    arguments = [dsn, "public.orders", "status=!shipped", "0"]
    return subprocess.Popen(
        [sys.executable, EXAMPLES / "postgres_table" / "run.py", *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ,
    )  # fmt: skip


def watch_table(page, cursor):
    """Enter, update and leave are seen; then time some updates."""
    page.wait_for_function("document.querySelectorAll('tbody tr').length === 5")
    cursor.execute("UPDATE orders SET status = 'shipped' WHERE id = 1")
    page.wait_for_function("document.querySelectorAll('tbody tr').length === 4")
    cursor.execute("INSERT INTO orders VALUES (6, 'new', 6), (7, 'shipped', 7)")
    page.wait_for_function("document.querySelectorAll('tbody tr').length === 5")
    waits = []
    for number in range(30):
        began = time.perf_counter()
        cursor.execute("UPDATE orders SET status = %s WHERE id = 2", (f"step {number}",))
        page.wait_for_function(
            f"document.querySelector('tbody').textContent.includes('step {number}')"
        )
        waits.append((time.perf_counter() - began) * 1000)
    waits.sort()
    print(f"row to page: p50 {waits[15]:.0f} ms, p99 {waits[-1]:.0f} ms")
