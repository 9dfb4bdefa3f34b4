"""Delta, Iceberg and Kafka through their real connectors; skipped where Maven Central has none for this Spark."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyspark
from maven_jars import connector_jars, is_on_central, released
from spark_logs import fill, read_log

from virta.spark.connectors import COORDINATES, missing_connector, spark_version
from virta.spark.pipeline.file import loads
from virta.spark.pipeline.model import PipelineError
from virta.spark.pipeline.runner import QueryCounter, kafka_lag

HERE = Path(__file__).parent.parent
REPOSITORY = HERE.parent.parent
RUN_S = 400


def test_coordinates_are_those_of_the_docs():
    """The documentation names the coordinates that the code knows."""
    text = (REPOSITORY / "docs" / "spark.md").read_text() + (
        REPOSITORY / "docs" / "pipelines.md"
    ).read_text()

    for known in COORDINATES.values():
        for coordinates in known.values():
            assert coordinates in text
    assert pyspark.__version__.startswith(spark_version())
    for name, known in COORDINATES.items():
        expected = known.get(spark_version(), "Maven Central has it for Spark")
        assert expected in missing_connector(name)


def test_coordinates_exist_on_maven_central():
    """All coordinates that the documentation names can be downloaded."""
    text = "".join(path.read_text() for path in (REPOSITORY / "docs").glob("*.md"))
    named = set(re.findall(r"\b(?:org|io|com)\.[a-z.]+:[\w.-]+:[\d.]+\d", text))

    assert {one for known in COORDINATES.values() for one in known.values()} <= named
    assert [one for one in sorted(named) if not is_on_central(one)] == []


def test_lag_of_kafka():
    """Lag is what all partitions have after the position; positions of other sources have none."""
    end, latest = {"a": {"0": 5, "1": 7}}, {"a": {"0": 9, "1": 7}, "b": {"0": 3}}

    assert kafka_lag(end, latest) == 7
    assert kafka_lag(latest, end) == 0
    assert kafka_lag(json.dumps(end), json.dumps(latest)) == 7
    assert kafka_lag(str(end), str(latest)) == 7  # as pyspark 4.1 reports it
    assert kafka_lag({"x": 1}, {"x": 2}) is None
    assert kafka_lag({}, {"x": "y"}) is None


def test_an_idle_query_keeps_its_lag():
    """A report without the newest offsets, as an idle query may make, does not forget the lag."""
    counter = QueryCounter()
    end, latest = {"a": {"0": 5}}, {"a": {"0": 9}}

    assert counter.update_position({"sources": [{"endOffset": end, "latestOffset": latest}]})
    assert not counter.update_position({"sources": [{"endOffset": end, "latestOffset": None}]})
    assert counter.lag == 4


HEAD = """
[pipeline]
name = "p"
[source]
log = "log"
[[sink]]
"""


@pytest.mark.parametrize(
    ("sink", "problem"),
    [
        ('kind = "delta"', "a delta sink needs path"),
        ('kind = "iceberg"', "a iceberg sink needs table"),
        ('kind = "delta"\npath = "t"\ntable = "t"', "table does not go with a delta sink"),
        ('kind = "iceberg"\ntable = "a.b.c"\npath = "t"', "path does not go with a iceberg sink"),
        ('kind = "delta"\npath = "t"\npartition_by = ["nowhere"]', "nowhere"),
    ],
)
def test_keys_of_table_sinks(sink, problem):
    """Keys that a table sink lacks or does not use are found before Spark starts."""
    with pytest.raises(PipelineError, match=problem):
        loads(HEAD + sink)


def test_table_sinks_append_only():
    """Windows in mode update or complete cannot go to a table."""
    windows = (
        '\n[aggregate]\nwindow = "1 minute"\nmode = "complete"\naggregates = { n = "count(*)" }\n'
    )
    for sink in ('kind = "delta"\npath = "t"', 'kind = "iceberg"\ntable = "a.b.c"'):
        with pytest.raises(PipelineError, match="takes mode append only"):
            loads(HEAD + sink + windows)
        assert loads(HEAD + sink).sinks[0].kind in sink


@pytest.mark.slow
def test_tables_have_each_row_once(tmp_path):
    """Two kills, of an executor and of the driver: each row is once in a channel, Parquet (as DuckDB reads it), Delta, Iceberg."""
    pytest.importorskip("deltalake")
    pytest.importorskip("pyiceberg")
    pytest.importorskip("duckdb")
    import kill_rounds

    tables = released("delta", "iceberg")
    jars = ",".join(connector_jars(*tables))
    made = kill_rounds.run(tmp_path, jars, 2, random.Random(1), 6500)

    found = kill_rounds.faults(kill_rounds.counts(tmp_path), made["rows"])
    assert found == dict.fromkeys(("channel", "parquet", *tables), (0, 0))


@pytest.mark.slow
def test_a_real_kafka_broker(tmp_path):
    """A log to Kafka and back: the same events; a second run adds nothing; the status shows the lag."""
    from kafka_broker import broker

    jars = connector_jars("kafka")
    events = fill(str(tmp_path / "log"), 400)
    with broker(tmp_path) as address:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / "kafka_driver.py"), str(tmp_path), ",".join(jars), address],
            capture_output=True, text=True, timeout=RUN_S, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    sent, received, again, lags = (json.loads(line) for line in done.stdout.splitlines()[-4:])
    copies = [json.loads(record.value) for record in read_log(tmp_path / "out", "copy")]
    assert sorted(copies, key=lambda e: int(e["id"])) == events
    assert sent["state"] == received["state"] == again["state"] == "finished"
    first, second = (next(iter(run["queries"].values())) for run in (received, again))
    assert first["rows"] == 400
    assert first["lag"] == 0
    assert second["rows"] == 0
    known = [lag for lag in lags if lag is not None]
    assert known[-1] == 0
    assert max(known) > 0
    assert len(read_log(tmp_path / "limited", "copy")) == 400
