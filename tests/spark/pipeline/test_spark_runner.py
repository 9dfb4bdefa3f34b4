"""Pipelines run from a file to their sinks: results, dead letters, restarts, failures, status."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")

from click.testing import CliRunner
from py4j.protocol import Py4JNetworkError
from spark_logs import fill, read_log

import virta
from virta.cli.pipeline import ended
from virta.cli.pipeline import pipeline as command
from virta.log.limits import VALUE_BYTES_MAX
from virta.spark.pipeline import runner
from virta.spark.pipeline.builder import build, read_source, source_schema
from virta.spark.pipeline.errors import explain
from virta.spark.pipeline.file import loads
from virta.spark.pipeline.model import Aggregate, Pipeline, Sink, Source, Where
from virta.spark.pipeline.runner import PipelineRun, RunError, run
from virta.spark.pipeline.status import read_status

pytestmark = pytest.mark.slow

AGGREGATE = """
[pipeline]
name = "per-type"

[source]
log = "log"
topics = ["orders"]

[dedupe]
by = ["source", "id"]

[[filter]]
match = "n=>=10"

[columns]
n = "variant_get(data, '$.n', 'int')"

[aggregate]
window = "1 minute"
by = ["type"]
time = "time"
late = "1 hour"
mode = "update"
aggregates = { orders = "count(*)", total = "sum(n)" }

[[sink]]
kind = "channel"
log = "out"
topic = "per-type"

[dead_letter]
kind = "channel"
log = "out"
topic = "dead"
"""

COPY = """
[pipeline]
name = "copy"

[source]
log = "log"
max_records_per_trigger = 250

[[filter]]
dialect = "cesql"
match = "type = 'order.made'"

[[filter]]
dialect = "koncorde"
match = '{"equals": {"user": "u7"}}'

[[sink]]
kind = "channel"
log = "out"
topic = "copy"

[[sink]]
kind = "parquet"
path = "lake"
"""


def append(path, *values, topic="orders"):
    with virta.open(path) as log:
        log.append_many([(topic, "", v) for v in values])


def test_an_aggregate_with_duplicates_and_junk(spark, tmp_path):
    """Duplicates count once, junk goes to the dead letters with the reason, the rest is what Python counts."""
    log = tmp_path / "log"
    events = fill(str(log), 300, topics=("orders",))
    append(log, *[json.dumps(e).encode() for e in events[:50]])  # the same events again
    junk = [b"not json", b'{"id": 1}', b"[]", b"\xff\xfe", b'{"source": "/s"}', b""]
    append(log, *junk)
    huge = {**events[0], "id": "huge", "data": {"n": 99, "text": "x" * 9_000_000}}
    odd = [{**events[0], "id": "none", "data": None}, {**events[0], "id": "list", "data": [1, 2]}]
    del odd[0]["data"]
    append(log, *[json.dumps(e).encode() for e in [huge, *odd]])
    pipeline = loads(AGGREGATE, directory=str(tmp_path))

    status = run(spark, pipeline)

    expected = {}
    for event in [*events, huge]:
        n = event["data"]["n"]
        if n >= 10:
            start = datetime.fromisoformat(event["time"]).replace(second=0)
            orders, total = expected.get((start, event["type"]), (0, 0))
            expected[start, event["type"]] = (orders + 1, total + n)
    found = {}
    for record in read_log(tmp_path / "out", "per-type"):
        data = json.loads(record.value)["data"]
        start = datetime.fromisoformat(data["start"]).replace(tzinfo=UTC)
        found[start, data["type"]] = (data["orders"], data["total"])
    assert found == expected
    dead = [json.loads(r.value)["data"] for r in read_log(tmp_path / "out", "dead")]
    assert len(dead) == len(junk)
    assert all(letter["reason"] for letter in dead)
    assert status["state"] == "finished"
    assert status["queries"]["query"]["lag"] == 0


def test_the_largest_values_are_no_obstacle(spark, tmp_path):
    """Junk of 10 MiB, and an event that grows beyond it, are dead letters with the reason; the rest goes on."""
    (event,) = fill(str(tmp_path / "log"), 1)
    text = {**event, "id": "big", "data": {"n": 7, "text": ""}}
    free = VALUE_BYTES_MAX - len(json.dumps(text))
    text["data"]["text"] = "y" * free
    append(tmp_path / "log", b"x" * VALUE_BYTES_MAX, json.dumps(text).encode())
    pipeline = Pipeline(
        name="grow",
        source=Source(log="log"),
        columns={"n": "variant_get(data, '$.n', 'int')"},
        sinks=(Sink(kind="channel", topic="grown"),),
        dead_letter=Sink(kind="channel", topic="dead"),
        directory=str(tmp_path),
    )

    run(spark, pipeline)

    grown = [json.loads(r.value)["data"]["n"] for r in read_log(tmp_path / "log", "grown")]
    assert grown == [event["data"]["n"]]
    dead = [json.loads(r.value)["data"] for r in read_log(tmp_path / "log", "dead")]
    assert sorted((d["offset"], d["reason"].partition(":")[0]) for d in dead) == [
        (1, "the body is not valid JSON"),
        (2, "too large"),
    ]
    assert all(d["reason"].endswith("bytes are left out here") and "value" not in d for d in dead)


def test_a_pipeline_runs_again_without_repeats(spark, tmp_path):
    """Filters of two dialects, two sinks; a second run adds only what is new; the bounded query gives the same."""
    log = tmp_path / "log"
    events = fill(str(log), 400)
    pipeline = loads(COPY, directory=str(tmp_path))

    run(spark, pipeline)
    events += fill(str(log), 100, seed=8, first=400)
    run(spark, pipeline)

    wanted = [e["id"] for e in events if e["type"] == "order.made" or e["data"]["user"] == "u7"]
    copied = [json.loads(r.value)["id"] for r in read_log(tmp_path / "out", "copy")]
    lake = spark.read.parquet(str(tmp_path / "lake"))
    bounded = build(spark, pipeline, streaming=False).results.orderBy("offset").collect()
    assert copied == wanted == [row.id for row in bounded]
    assert sorted(r.id for r in lake.select("id").collect()) == sorted(wanted)
    assert {"day", "topic"} <= set(lake.columns)
    status = read_status(pipeline)
    assert status["state"] == "finished"
    assert status["queries"]["query"]["offset"] == 500


@pytest.mark.parametrize("filters", [("n=>=0",), ("n=>=50", "n=<50")], ids=["column", "matcher"])
def test_filters_and_columns_leave_dead_letters_alone(spark, tmp_path, filters):
    """What is no event passes filters on its way to the dead letters, and no expression is evaluated for it."""
    events = fill(str(tmp_path / "log"), 20)
    append(tmp_path / "log", b"not json", b"{}")
    pipeline = Pipeline(
        name="p",
        source=Source(log="log"),
        filters=tuple(Where(text) for text in filters),
        columns={"checked": "assert_true(id IS NOT NULL)"},
        sinks=(Sink(kind="console"),),
        dead_letter=Sink(kind="console"),
        directory=str(tmp_path),
    )

    built = build(spark, pipeline, streaming=False)

    assert [row.offset for row in built.dead.orderBy("offset").collect()] == [20, 21]
    assert sorted(row.id for row in built.results.collect()) == sorted(e["id"] for e in events)


COUNT = Aggregate(window="1 hour", time="time", aggregates={"n": "count(*)"})
COLUMN, ATTRIBUTE = Where("n=>=50"), Where("type = 'order.made'", "cesql")
KONCORDE = Where('{"equals": {"user": "u7"}}', "koncorde")
NUMBER = Where("id = '7'", "cesql")  # an id may be a number in the event: only the matcher is exact


@pytest.mark.parametrize(
    ("filters", "used"),
    [
        ((COLUMN,), ["data"]),
        ((ATTRIBUTE,), ["type"]),
        ((KONCORDE,), ["value"]),
        ((NUMBER,), ["value"]),
        ((COLUMN, KONCORDE), ["value"]),
    ],
    ids=["column", "attribute", "koncorde", "number", "two"],
)
def test_only_columns_of_filters_are_read(spark, tmp_path, filters, used):
    """A filter adds the columns of its Column, or the value that the matcher needs; it chooses the same events."""
    events = fill(str(tmp_path / "log"), 200)
    append(tmp_path / "log", json.dumps({**events[0], "id": 7}).encode(), b"not json")
    events.append(events[0] | {"id": "7"})
    pipeline = Pipeline(
        name="p",
        source=Source(log="log", topics=("orders", "users")),
        filters=filters,
        aggregate=COUNT,
        sinks=(Sink(kind="console"),),
        directory=str(tmp_path),
    )

    (row,) = build(spark, pipeline, streaming=False).results.collect()

    def holds(one, event):
        return one.parsed().matches(event["data"] if one.dialect == "koncorde" else event)

    assert row.n == sum(any(holds(one, event) for one in filters) for event in events)
    assert set(source_schema(pipeline).names) == {"time", "invalid", *used}


def test_only_used_columns_of_other_sources_are_decoded(spark, tmp_path):
    """Records from elsewhere are decoded to the pipeline's columns, too."""
    events = fill(str(tmp_path / "log"), 100)
    spark.read.format("virta").load(str(tmp_path / "log")).write.parquet(str(tmp_path / "records"))
    options = {"path": str(tmp_path / "records")}
    pipeline = Pipeline(
        name="p",
        source=Source(format="parquet", options=options),
        filters=(ATTRIBUTE,),
        aggregate=COUNT,
        sinks=(Sink(kind="console"),),
        directory=str(tmp_path),
    )

    (row,) = build(spark, pipeline, streaming=False).results.collect()

    rows = read_source(spark, pipeline, streaming=False, consumer=None)
    assert row.n == sum(event["type"] == "order.made" for event in events)
    assert set(rows.columns) == {"topic", "type", "time", "invalid"}


def test_a_position_that_cannot_be_stored_fails_no_run(spark, tmp_path, monkeypatch, caplog):
    """The log cannot be read any more when the query has ended."""

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    class Run(PipelineRun):
        def _stop(self):
            super()._stop()
            monkeypatch.setattr(runner, "position_of", fail)

    fill(str(tmp_path / "log"), 50)
    status = Run(spark, loads(COPY, directory=str(tmp_path)), None).go(lambda: False)
    assert status["state"] == "finished"
    assert "the log does not store the position of copy: " in caplog.text


def test_a_failure_is_one_sentence(spark, tmp_path):
    """A query that fails stops the run with the reason, which the status keeps."""
    log = tmp_path / "log"
    fill(str(log), 100, segment_bytes=1 << 20)
    segment = next(log.glob("*.puro"))
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 1
    segment.write_bytes(raw)
    pipeline = loads(COPY, directory=str(tmp_path))

    with pytest.raises(RunError, match=r"bytes \d+ to \d+ are damaged"):
        run(spark, pipeline)

    status = read_status(pipeline)
    assert status["state"] == "failed"
    assert "\n" not in status["reason"]


def test_a_pipeline_does_not_read_what_it_writes(spark, tmp_path):
    """Results and dead letters in the log that is read, all topics of it, are no input of the next run."""
    fill(str(tmp_path / "log"), 30, topics=("orders", "paid", "dead"))
    pipeline = Pipeline(
        name="p",
        source=Source(log="log"),
        sinks=(Sink(kind="channel", topic="paid"), Sink(kind="channel", topic="orders", log="out")),
        dead_letter=Sink(kind="channel", topic="dead"),
        directory=str(tmp_path),
    )

    found = build(spark, pipeline, streaming=False).results.select("topic").distinct().collect()

    assert [row.topic for row in found] == ["orders"]


def test_the_end_of_the_jvm_is_one_sentence_or_a_stop(tmp_path, monkeypatch):
    """A JVM that has ended fails the run with one sentence; if the run was asked to stop, it has stopped."""
    pipeline = Pipeline(
        name="p", source=Source(log="l"), sinks=(Sink(kind="console"),), directory=str(tmp_path)
    )

    def no_answer(_):
        raise Py4JNetworkError("no answer")

    monkeypatch.setattr(PipelineRun, "_start", no_answer)

    with pytest.raises(RunError, match="Spark's JVM has ended"):
        run(None, pipeline)
    assert read_status(pipeline)["state"] == "failed"
    assert run(None, pipeline, stopping=lambda: True)["state"] == "stopped"


def test_errors_of_a_jvm_that_runs_are_not_its_end(spark, tmp_path, monkeypatch):
    """Java's own sentence, also where pyspark has no exception for it; a full disk is not the JVM's end either."""
    pipeline = Pipeline(
        name="p", source=Source(log="l"), sinks=(Sink(kind="console"),), directory=str(tmp_path)
    )

    def fail_in_java(_):
        spark._jvm.java.util.Optional.empty().get()

    def fail_here(_):
        raise OSError(errno.ENOSPC, "No space left on device", "/x")

    for fail, sentence in (
        (fail_in_java, "NoSuchElementException: No value present"),
        (fail_here, "[Errno 28] No space left on device: '/x'"),
    ):
        monkeypatch.setattr(PipelineRun, "_start", fail)
        with pytest.raises(RunError) as caught:
            run(spark, pipeline)
        assert caught.value.message == sentence
        assert read_status(pipeline)["reason"] == sentence
    # It stops the session that it is given: not that of the other tests.
    with pytest.raises(SystemExit), ended(SimpleNamespace(stop=lambda: None)):
        fail_in_java(None)


def test_run_and_replay_check_the_log_before_spark_starts(tmp_path):
    """A missing log and an invalid time are reported at once."""
    (tmp_path / "p.toml").write_text(AGGREGATE)
    with virta.open(tmp_path / "there"):
        pass

    started = CliRunner().invoke(command, ["run", str(tmp_path / "p.toml")])
    replay = CliRunner().invoke(command, ["replay", str(tmp_path / "there"), "--from", "May"])

    assert (started.exit_code, started.output.startswith("no log at ")) == (1, True)
    assert (replay.exit_code, replay.output) == (
        2,
        "--from 'May': expected an offset or a time, 2026-01-31T12:00:00Z\n",
    )


SIGNALS = """
import os, signal, sys, threading
from click.testing import CliRunner
from virta.cli import pipeline as module

def interrupted(wanted, spark, stopping, *, as_json):
    os.kill(os.getpid(), signal.SIGTERM)
    print(stopping.is_set())

class Condition(threading.Condition):
    def notify_all(self):
        os.kill(os.getpid(), signal.SIGINT)
        super().notify_all()

threading.Condition = Condition
module.run_claimed = interrupted
done = CliRunner().invoke(module.pipeline, ["run", sys.argv[1]])
print(done.output)
"""


def test_a_signal_during_the_handler_of_another(tmp_path):
    """A second signal during the handler of the first does not deadlock the run."""
    with virta.open(tmp_path / "log"):
        pass
    (tmp_path / "p.toml").write_text(COPY)
    command = [sys.executable, "-c", SIGNALS, str(tmp_path / "p.toml")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout.split() == ["True"]


def test_commands_check_list_and_status(tmp_path):
    """The commands that need no Spark tell what is wrong and what ran."""
    runner = CliRunner()
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(COPY)
    bad.write_text(COPY.replace('kind = "parquet"', 'kind = "parkett"'))

    checked = runner.invoke(command, ["check", str(good), str(bad)])
    listed = runner.invoke(command, ["list", str(tmp_path), "--json"])
    status = runner.invoke(command, ["status", str(good)])

    assert checked.exit_code == 2
    assert f"{good}: ok" in checked.output
    assert f"{bad}:23: kind 'parkett'" in checked.output
    rows = [json.loads(line) for line in listed.output.splitlines()]
    assert [(row["pipeline"], row["state"]) for row in rows] == [
        (None, "invalid"),
        ("copy", "never run"),
    ]
    assert "never run" in status.output


def test_explain_finds_the_python_part():
    """Of 200 lines of stack the sentence that a person needs is kept."""
    text = "Py4JJavaError: x\n  at y\nvirta.errors.LogGapError: offsets 1 to 2 were removed\n\tat z"

    assert explain(RuntimeError(text)) == "LogGapError: offsets 1 to 2 were removed"
    assert explain(RuntimeError("plain")) == "plain"
