"""One read for many sinks: each micro-batch once from the log, each row once in each sink, also after failures and kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow.dataset as ds
from pyspark.sql.streaming import StreamingQueryListener
from spark_logs import fill, read_log

import virta
from virta.spark.pipeline.fan_out import WRITTEN
from virta.spark.pipeline.file import loads
from virta.spark.pipeline.model import Pipeline, Sink, Source
from virta.spark.pipeline.runner import RunError, run
from virta.spark.pipeline.status import CheckpointError, check_checkpoint, write_status
from virta.spark.versions import HAS_READ_LIMITS

pytestmark = pytest.mark.slow

KILL_ROUNDS = int(os.environ.get("VIRTA_SPARK_FAN_OUT_ROUNDS", "1"))
DEADLINE = 240.0
JUNK = (b"not json", b"{}")
TEXT = """
[pipeline]
name = "many"

[source]
log = "log"
max_records_per_trigger = 100

[[filter]]
dialect = "cesql"
match = "type <> 'user.seen'"

[[sink]]
kind = "channel"
log = "out"
topic = "first"

[[sink]]
kind = "jdbc"
url = "jdbc:derby:DATABASE;create=true"
table = "copied"
options = { createTableColumnTypes = "id VARCHAR(20)" }

[[sink]]
kind = "parquet"
path = "lake"

[[sink]]
kind = "channel"
log = "out"
topic = "last"

[dead_letter]
kind = "channel"
log = "out"
topic = "dead"
"""


class Counted(StreamingQueryListener):
    """What Spark says of all queries: how many began, and how many rows they read."""

    def __init__(self):
        self.queries, self.rows = 0, 0

    def onQueryStarted(self, event):  # noqa: N802
        self.queries += 1

    def onQueryProgress(self, event):  # noqa: N802
        self.rows += event.progress.numInputRows

    def onQueryIdle(self, event):  # noqa: N802
        pass

    def onQueryTerminated(self, event):  # noqa: N802
        pass


def made(tmp_path, text=TEXT):
    return loads(text.replace("DATABASE", f"{tmp_path}/database"), directory=str(tmp_path))


def prepare(path, count=250, seed=1):
    """Events and, among them, values that are not; returns the ids that pass the filter."""
    events = fill(path, count, seed=seed, segment_bytes=32 * 1024)
    with virta.open(path) as log:
        log.append_many([("orders", "", value) for value in JUNK])
    return sorted(event["id"] for event in events if event["type"] != "user.seen")


def ids(path, topic):
    return sorted(json.loads(record.value)["id"] for record in read_log(path, topic))


def lake_ids(path):
    """As any engine sees it that reads all files below a directory."""
    table = ds.dataset(path, partitioning="hive").to_table(["id"])
    return sorted(table["id"].to_pylist())


def check_sinks(tmp_path, wanted):
    assert ids(tmp_path / "out", "first") == wanted
    assert ids(tmp_path / "out", "last") == wanted
    assert lake_ids(tmp_path / "lake") == wanted
    assert len(read_log(tmp_path / "out", "dead")) == len(JUNK)


def wait_for(condition, what, process=None):
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if condition():
            return
        if process is not None and process.poll() is not None:
            raise AssertionError(
                f"the process ended before {what}: {process.stderr.read()[-2000:]}"
            )
        threading.Event().wait(0.002)
    raise AssertionError(f"waited {DEADLINE:.0f} s for {what}")


def test_a_micro_batch_is_read_once(spark, tmp_path, caplog):
    """
    Four sinks and the dead letters: one query, each row read once; a failed sink is repeated, the others are not, and
    its error is logged nowhere but in the run's own sentence.
    """
    spark.sparkContext._jvm.java.lang.System.setProperty("derby.stream.error.file", "/dev/null")
    wanted = prepare(tmp_path / "log")
    counted = Counted()
    (tmp_path / "lake").write_text("in the way")
    with pytest.raises(RunError, match=r"many\.parquet-2: "):
        run(spark, made(tmp_path))
    assert "Traceback" not in caplog.text
    first = json.loads((tmp_path / ".virta" / "pipelines" / "many" / WRITTEN).read_text())
    (tmp_path / "lake").unlink()
    spark.streams.addListener(counted)
    try:
        status = run(spark, made(tmp_path))
        wait_for(lambda: counted.rows >= 250 + len(JUNK), "the reports")
    finally:
        spark.streams.removeListener(counted)

    assert (counted.queries, counted.rows) == (1, 250 + len(JUNK))
    assert (first["batch"], first["sinks"]) == (0, ["channel-0", "jdbc-1"])
    check_sinks(tmp_path, wanted)
    rows = spark.read.jdbc(f"jdbc:derby:{tmp_path}/database", "copied").select("id").collect()
    assert (
        sorted(row.id for row in rows) == wanted
    )  # without keys: the record of the sinks prevents a double
    assert status["queries"]["query"]["rows"] == 250 + len(JUNK)
    # Spark 4.1 has no limit: there is one micro-batch, which the first sink has already.
    batches = [status["sinks"][name]["batches"] for name in ("channel-0", "parquet-2")]
    assert batches == ([2, 3] if HAS_READ_LIMITS else [0, 1])
    check_consumer(tmp_path / "log")


def check_consumer(path):
    """The log knows the position of the finished run, and keeps what it has not read."""
    with virta.open(path) as log:
        (consumer,) = log.consumers()
        assert (consumer.name, consumer.position, consumer.lag) == ("pipeline.many", 252, 0)
        read = log.retain(consumed=True)
        assert read.records > 0
        fill(path, 200, seed=9, segment_bytes=32 * 1024)
        assert log.consumers()[0].lag == 200
        log.retain(consumed=True)
        assert log.first_offset <= 252


DRIVER = """
import sys
import virta.spark
from virta.spark.pipeline.file import load
from virta.spark.pipeline.runner import run
spark = virta.spark.session("many", "local[2]", **{"spark.driver.memory": "700m"})
run(spark, load(sys.argv[1]))
"""


def stopped_between(process, written, rng):
    """Stop the driver and all it started; True if it is between two sinks of a micro-batch then."""

    def is_between():
        try:
            return 0 < len(json.loads(written.read_text())["sinks"]) < 4
        except (OSError, ValueError):
            return False

    if not is_between():
        return False
    threading.Event().wait(rng.uniform(0, 0.05))
    os.killpg(process.pid, signal.SIGSTOP)
    if is_between():
        return True
    os.killpg(process.pid, signal.SIGCONT)
    return False


@pytest.mark.skipif(not HAS_READ_LIMITS, reason="Spark 4.1 would read all in one micro-batch")
def test_driver_killed_between_sinks(spark, tmp_path):
    """SIGKILL between two sinks of a micro-batch, again and again: each row is in each sink once."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    text = (
        TEXT[: TEXT.index('[[sink]]\nkind = "jdbc"')] + TEXT[TEXT.index('[[sink]]\nkind = "parq') :]
    )
    text = text.replace("trigger = 100", "trigger = 20")
    wanted = prepare(tmp_path / "log", 1500, seed)
    (tmp_path / "many.toml").write_text(text)
    written = tmp_path / ".virta" / "pipelines" / "many" / WRITTEN
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "many.toml")]
    for _ in range(KILL_ROUNDS):
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(Path(virta.__file__).parents[1])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            before = written.read_text() if written.exists() else ""
            wait_for(
                lambda b=before: written.exists() and written.read_text() != b, "a write", process
            )
            wait_for(lambda p=process: stopped_between(p, written, rng), "a sink", process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert 0 < len(ids(tmp_path / "out", "first")) < len(wanted)

    run(spark, loads(text.replace("trigger = 20", "trigger = 2000"), directory=str(tmp_path)))

    check_sinks(tmp_path, wanted)


def test_the_checkpoint_of_an_older_version_is_refused(tmp_path):
    """A checkpoint per sink is not continued silently from the beginning; the message has the offset."""
    pipeline = Pipeline(
        name="old", source=Source(log="l"), sinks=(Sink(kind="console"),), directory=str(tmp_path)
    )
    check_checkpoint(pipeline)
    (Path(pipeline.checkpoint_path()) / "console-0" / "offsets").mkdir(parents=True)
    write_status(
        pipeline, {"queries": {"console-0": {"offset": 17}, "dead-letter": {"offset": 12}}}
    )

    with pytest.raises(CheckpointError, match=r"a query per sink \(console-0\).* start = 12"):
        check_checkpoint(pipeline)
