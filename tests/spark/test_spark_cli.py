"""The commands that start Spark, one after the other in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from spark_logs import fill, read_log

import virta

pytestmark = pytest.mark.slow

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
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, command)
    print(json.dumps([done.exit_code, done.output]))
"""


def test_run_replay_and_compact(tmp_path):
    """A pipeline run, two replays, a compaction, and a run that fails: outputs, exit codes, results."""
    log = str(tmp_path / "log")
    events = fill(log, 300)
    (tmp_path / "p.toml").write_text(PIPELINE)
    conf = ["--master", "local[2]", "--conf", "spark.driver.memory=700m"]
    with virta.open(log) as opened:
        assert len(opened.segments()) > 1
    commands = [
        ["pipeline", "run", str(tmp_path / "p.toml"), "--json", *conf],
        ["pipeline", "status", str(tmp_path / "p.toml")],
        ["pipeline", "replay", log, "--from", "100", "--to", "200", "--filter", "n=>=50", *conf],
        ["pipeline", "replay", log, "--filter", '{"equals": {"user": "u1"}}', "--dialect", "koncorde",
         "--parquet", str(tmp_path / "found"), *conf],
        ["lake", "compact", log, str(tmp_path / "lake"), "--json", *conf],
        ["lake", "compact", log, str(tmp_path / "lake"), *conf],
        ["pipeline", "replay", log, "--filter", "n=", "--dialect", "sql", *conf],
        ["pipeline", "replay", str(tmp_path), *conf],
    ]  # fmt: skip

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    run, status, replay, parquet, compact, again, dialect, nothing = map(
        json.loads, done.stdout.splitlines()
    )

    paid = [e["id"] for e in events if e["type"] == "order.paid"]
    assert [json.loads(r.value)["id"] for r in read_log(tmp_path / "out")] == paid
    assert run[0] == 0
    assert json.loads(run[1].splitlines()[-1])["state"] == "finished"
    assert "paid: finished" in status[1]
    assert json.loads(replay[1])["events"] == sum(e["data"]["n"] >= 50 for e in events[100:200])
    assert json.loads(parquet[1])["events"] == sum(e["data"]["user"] == "u1" for e in events)
    assert list(Path(tmp_path / "found").glob("day=*/topic=*/*.parquet"))
    report = json.loads(compact[1])
    assert report["records"] == report["next"] > 0
    assert "nothing to do" in again[1]
    assert dialect[0] == 2
    assert "unknown dialect" in dialect[1]
    assert nothing[0] == 1
    assert nothing[1].startswith("LogNotFoundError: ")
    assert nothing[1].count("\n") == 1
