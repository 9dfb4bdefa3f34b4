"""The commands that start Spark, one after the other in a process of their own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq
from spark_logs import fill, make_event, read_log

import virta

pytestmark = pytest.mark.slow

BATCH = "application/cloudevents-batch+json"
PIPELINE = """
[pipeline]
name = "paid"
[source]
log = "log"
[[filter]]
match = "../type=order.paid"
[[sink]]
kind = "channel"
topic = "paid"
log = "out"
"""

SCRIPT = """
import json, sys
from click.testing import CliRunner
from virta.cli import main
for line in sys.stdin:
    done = CliRunner().invoke(main, json.loads(line))
    print(json.dumps([done.exit_code, done.output]))
"""


class Live:
    """A real server, with consumers that note the ids they are sent until the event `end`."""

    def __init__(self, data_dir):
        command = [sys.executable, "-m", "virta", "serve", "--server-port", "0"]
        command += ["--journal-port", "none", "--durability", "none", "--data-dir", str(data_dir)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=data_dir.parent)
        said = next(json.loads(line) for line in self.process.stdout if b'"listening"' in line)
        self.port = int(said["url"].rsplit(":", 1)[1])
        self.threads = []

    def request(self, method, path, body, kind):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": kind})
            answer = connection.getresponse()
            assert answer.status < 300
            return json.loads(answer.read())
        finally:
            connection.close()

    def consume(self, path):
        """Return the ids that a consumer receives; complete after `heard`."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.readline() == b"event: connect\n"
        found = []

        def listen():
            try:
                for line in answer:
                    name, _, value = line.decode().partition(": ")
                    made = json.loads(value) if name == "data" else {}
                    if "id" in made:
                        found.append(made["id"])
                    if made.get("id") == "end":
                        return
            finally:
                connection.close()

        self.threads.append(threading.Thread(target=listen))
        self.threads[-1].start()
        return found

    def publish(self, channel, events):
        """In batches of random size, three at a time: the order is the log's."""
        rng = random.Random(9)
        batches = []
        while events:
            size = rng.choice([1, 4, 15])
            batches, events = [*batches, events[:size]], events[size:]
        with ThreadPoolExecutor(3) as pool:
            list(
                pool.map(lambda b: self.request("POST", f"/channels/{channel}", b, BATCH), batches)
            )

    def heard(self):
        for thread in self.threads:
            thread.join(60)
        self.process.terminate()
        self.process.communicate(timeout=60)


def live_deliveries(data_dir):
    """What a live query and a standing Koncorde filter were sent of 300 random events."""
    rng = random.Random(4)
    events = [make_event(rng, n) for n in range(300)]
    end = {**events[0], "id": "end", "data": {"n": 99, "user": "u1"}}
    server = Live(data_dir)
    made = server.request(
        "POST", "/filters/shop/orders", {"equals": {"user": "u1"}}, "application/json"
    )
    query = server.consume("/channels/orders?n=%3E%3D50")
    koncorde = server.consume(f"/filters/{made['id']}/events")
    for channel in ("orders", "shop%2Forders"):
        server.publish(channel, events)
        server.publish(channel, [end])
    server.heard()
    return query, koncorde


class Commands:
    """A process that runs commands one after the other while we do other things; its last words in a file."""

    def __init__(self, words, java):
        self.words = words
        java.mkdir()
        options = f"{os.environ['JDK_JAVA_OPTIONS']} -Djava.io.tmpdir={java}"
        with words.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PYTHONWARNINGS": "ignore", "JDK_JAVA_OPTIONS": options},
            )

    def give(self, commands):
        self.process.stdin.writelines(json.dumps(command) + "\n" for command in commands)
        self.process.stdin.flush()

    def answers(self):
        said, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, self.words.read_text()[-3000:]
        return [json.loads(line) for line in said.splitlines()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def test_run_replay_and_compact(tmp_path):
    """
    A run, replays (equal to what a live server delivered), compactions, failures: outputs, exit codes, results; and
    when they have ended Java has ended too, and left nothing.
    """
    live = str(tmp_path / "data" / "log")
    log = str(tmp_path / "log")
    events = fill(log, 300)
    (tmp_path / "p.toml").write_text(PIPELINE)
    conf = ["--master", "local[2]", "--conf", "spark.driver.memory=700m"]
    with virta.open(log) as opened:
        assert len(opened.segments()) > 1
    commands = [
        ["pipeline", "run", str(tmp_path / "p.toml"), "--json", *conf],
        ["pipeline", "status", str(tmp_path / "p.toml")],
        ["lake", "compact", log, str(tmp_path / "lake"), "--json"],
        ["lake", "compact", log, str(tmp_path / "lake")],
        ["pipeline", "replay", log, "--filter", "n=", "--dialect", "sql", *conf],
        ["pipeline", "replay", str(tmp_path), *conf],
    ]
    replays = [
        ["pipeline", "replay", live, "--topics", "orders", "--filter", "n=>=50", "--topic", "again", *conf],
        ["pipeline", "replay", live, "--from", "301", "--to", "602", "--filter", '{"equals": {"user": "u1"}}',
         "--dialect", "koncorde", "--parquet", str(tmp_path / "found"), *conf],
    ]  # fmt: skip

    with Commands(tmp_path / "words", tmp_path / "java") as process:
        process.give(commands)
        query, koncorde = live_deliveries(tmp_path / "data")
        process.give(replays)
        run, status, compact, again, dialect, nothing, topic, parquet = process.answers()

    assert list((tmp_path / "java").iterdir()) == []
    assert "Traceback" not in (tmp_path / "words").read_text()
    paid = [e["id"] for e in events if e["type"] == "order.paid"]
    assert [json.loads(r.value)["id"] for r in read_log(tmp_path / "out")] == paid
    assert run[0] == 0
    assert json.loads(run[1].splitlines()[-1])["state"] == "finished"
    assert "paid: finished" in status[1]
    assert json.loads(topic[1])["events"] == len(query) > 100
    assert [json.loads(r.value)["id"] for r in read_log(live, "again")] == query
    assert json.loads(parquet[1])["events"] == len(koncorde) > 5
    files = sorted(Path(tmp_path / "found").glob("day=*/topic=*/*.parquet"))
    rows = [
        row for file in files for row in pq.ParquetFile(file).read(["offset", "id"]).to_pylist()
    ]
    assert [row["id"] for row in sorted(rows, key=lambda row: row["offset"])] == koncorde
    report = json.loads(compact[1])
    assert report["records"] == report["next"] > 0
    assert "nothing to do" in again[1]
    assert dialect[0] == 2
    assert "unknown dialect" in dialect[1]
    assert nothing[0] == 1
    assert nothing[1].startswith("no log at ")
    assert nothing[1].count("\n") == 1
