"""Sinks beyond the log: a real database by JDBC, and one clear sentence where a connector is missing."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime

import pytest

pytest.importorskip("pyspark")

from spark_logs import fill

from virta.spark.connectors import missing_connector
from virta.spark.pipeline import jdbc
from virta.spark.pipeline.errors import DRIVER
from virta.spark.pipeline.file import loads
from virta.spark.pipeline.jdbc import JdbcError, write_jdbc
from virta.spark.pipeline.model import PipelineError, Sink
from virta.spark.pipeline.runner import RunError, run
from virta.spark.pipeline.status import read_status

pytestmark = pytest.mark.slow

TOTALS = """
[pipeline]
name = "totals"

[source]
log = "log"

[columns]
bucket = "variant_get(data, '$.n', 'int') % 3"

[aggregate]
window = "30 minutes"
by = ["bucket"]
time = "time"
late = "1 day"
mode = "update"
aggregates = { events = "count(*)" }

[[sink]]
kind = "jdbc"
url = "jdbc:derby:DATABASE;create=true"
table = "totals"
keys = ["start", "bucket"]
"""


@pytest.fixture
def database(spark, tmp_path):
    """The URL of an empty Derby database, which comes with Spark."""
    system = spark.sparkContext._jvm.java.lang.System
    system.setProperty("derby.stream.error.file", str(tmp_path / "derby.log"))
    return f"jdbc:derby:{tmp_path}/database;create=true"


def totals(events):
    counts = Counter()
    for event in events:
        at = datetime.fromisoformat(event["time"])
        start = at.replace(minute=at.minute // 30 * 30, second=0)
        counts[start, event["data"]["n"] % 3] += 1
    return dict(counts)


def table(spark, url):
    rows = spark.read.jdbc(url, "totals").collect()
    found = {(r.start.replace(tzinfo=UTC), r.bucket): r.events for r in rows}
    assert len(found) == len(rows)
    return found


def test_rows_are_replaced_by_their_keys(spark, tmp_path, database):
    """A table holds one row per window, the newest; a micro-batch that Spark repeats changes nothing."""
    pipeline = loads(TOTALS.replace("DATABASE", f"{tmp_path}/database"), directory=str(tmp_path))
    events = fill(str(tmp_path / "log"), 150)
    run(spark, pipeline)
    assert table(spark, database) == totals(events)

    state = tmp_path / ".virta" / "pipelines" / "totals"
    commits = state / "query" / "commits"
    (state / "written.json").unlink()
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdecimal())
    for file in (commits / str(last), commits / f".{last}.crc"):
        file.unlink(missing_ok=True)
    events += fill(str(tmp_path / "log"), 50, seed=2, first=150)
    run(spark, pipeline)

    assert table(spark, database) == totals(events)


def test_other_modes(spark, database):
    """Mode complete fills the table anew, append adds; a key that is no column is named."""
    rows = spark.createDataFrame([(1, 2.5), (2, 3.5)], "k int, v double")
    sink = Sink(kind="jdbc", url=database, table="modes")
    for mode in ("complete", "complete", "append"):
        write_jdbc(rows, sink, mode)

    assert spark.read.jdbc(database, "modes").count() == 4
    with pytest.raises(JdbcError, match="the key 'x' is no column: there are k, v"):
        write_jdbc(rows, Sink(kind="jdbc", url=database, table="modes", keys=("x",)), "update")


def test_two_sinks_share_a_table(spark, database, monkeypatch):
    """A sink that writes while another is between its staging table and its transaction disturbs neither."""
    sink = Sink(kind="jdbc", url=database, table="shared", keys=("k",))
    rows = [spark.createDataFrame([(i, "x")], "k int, v string") for i in range(2)]
    connected, others = jdbc.connected, iter([("b", rows[1])])

    def between(*arguments):
        for owner, row in others:
            write_jdbc(row, sink, "update", owner)
        return connected(*arguments)

    monkeypatch.setattr(jdbc, "connected", between)
    write_jdbc(rows[0], sink, "update", "a")

    assert sorted(row.k for row in spark.read.jdbc(database, "shared").collect()) == [0, 1]


BASE = """
[pipeline]
name = "odd"
[source]
log = "log"
[[sink]]
kind = "console"
"""
FROM_KAFKA = BASE.replace('log = "log"', 'format = "kafka"\noptions = { subscribe = "a" }')
TO_DELTA = BASE.replace('kind = "console"', 'kind = "delta"\npath = "table"')
TO_KAFKA = BASE.replace('kind = "console"', 'kind = "kafka"\ntopic = "a"')
TO_NOWHERE = BASE.replace('kind = "console"', 'kind = "jdbc"\nurl = "jdbc:no:x"\ntable = "t"')


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (FROM_KAFKA, missing_connector("kafka")),
        (TO_KAFKA, missing_connector("kafka")),
        (TO_DELTA, missing_connector("delta")),
        (TO_NOWHERE, DRIVER),
        (BASE + '[columns]\n\nx = "no_such(id)"\n', "p.toml:10: [UNRESOLVED_ROUTINE]"),
        (BASE + '[columns]\nx = "1 +"\n', "p.toml:9: [PARSE_SYNTAX_ERROR]"),
        (
            BASE + '[aggregate]\nwindow = "1 hour"\naggregates = { n = "sum(x)" }\n',
            "p.toml:10: [UNRESOLVED_COLUMN",
        ),
    ],
    ids=["kafka-source", "kafka-sink", "delta-sink", "jdbc", "function", "syntax", "column"],
)
def test_what_is_missing_is_one_sentence(spark, tmp_path, text, sentence):
    """A connector that is not there, and SQL that only Spark can judge: a sentence, with the line; the status keeps it."""
    fill(str(tmp_path / "log"), 3)
    pipeline = loads(text, "p.toml", str(tmp_path))

    with pytest.raises((RunError, PipelineError)) as caught:
        run(spark, pipeline)

    status = read_status(pipeline)
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message
    assert (status["state"], status["reason"]) == ("failed", caught.value.message)
    assert json.dumps(status)
