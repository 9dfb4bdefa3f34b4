"""The log as a Spark data source, bounded and streaming, against the log's own reader."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from spark_logs import fill, read_log

import virta
from virta.spark.versions import HAS_READ_LIMITS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("source") / "log")
    events = fill(path, 1500)
    return path, events


needs_limits = pytest.mark.skipif(
    not HAS_READ_LIMITS, reason="Spark 4.1 has no limits for Python sources"
)


def load(spark, path, **options):
    return spark.read.format("virta").options(**options).load(path)


def rows(df):
    return sorted(
        (r.offset, r.topic, bytes(r.key), bytes(r.value), r.timestamp.replace(tzinfo=UTC))
        for r in df.collect()
    )


def plain(records):
    return [(r.offset, str(r.topic), bytes(r.key), r.value, r.time) for r in records]


def stream(spark, path, into, checkpoint, **options):
    """Run a streaming read to its end; the batches' offsets go to `into`."""

    def take(batch, number):
        into.append((number, sorted(r.offset for r in batch.select("offset").collect())))

    query = (
        spark.readStream.format("virta")
        .options(**options)
        .load(path)
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return query


def test_batch_read_equals_the_log(spark, filled):
    """Columns and rows are the log's records, over many splits."""
    path, _ = filled
    df = load(spark, path, splitBytes="65536")

    assert df.columns == ["topic", "offset", "timestamp", "key", "value"]
    assert df.rdd.getNumPartitions() > 2
    assert rows(df) == plain(read_log(path))
    assert df.count() == 1500


def test_a_compressed_log_is_read_like_any_other(spark, tmp_path):
    """Batch and streaming reads, with a topic pushed down, of a log that was compressed half way."""
    path = str(tmp_path / "log")
    fill(path, 300)
    virta.open(path, compression="zstd").close()
    fill(path, 600, seed=2, first=300)

    assert rows(load(spark, path)) == plain(read_log(path))
    some = load(spark, path).where("topic = 'users'")
    assert rows(some) == plain(r for r in read_log(path) if r.topic == "users")
    into: list = []
    stream(spark, path, into, tmp_path / "checkpoint")
    assert sorted(offset for _, offsets in into for offset in offsets) == list(range(900))


def test_columns_and_types_are_by_schema(spark, filled):
    """A schema picks columns and reads bytes as text; what does not exist is refused by name."""
    path, events = filled

    found = (
        spark.read.format("virta")
        .schema("value string, offset long")
        .load(path)
        .orderBy("offset")
        .collect()
    )

    assert [json.loads(row.value) for row in found] == events
    with pytest.raises(Exception, match="there is no column 'colour'"):
        spark.read.format("virta").schema("colour string").load(path).count()
    with pytest.raises(Exception, match="column 'offset' cannot be string"):
        spark.read.format("virta").schema("offset string").load(path).count()


def test_events_are_typed(spark, filled):
    """With the option events, attributes are columns and data is a VARIANT."""
    path, events = filled
    df = load(spark, path, events="true")

    found = df.orderBy("offset").collect()

    assert [r.id for r in found] == [e["id"] for e in events]
    assert [r.type for r in found] == [e["type"] for e in events]
    assert [json.loads(r.data.toJson()) for r in found] == [e["data"] for e in events]
    assert found[0].time == datetime.fromisoformat(events[0]["time"]).replace(tzinfo=None)
    total = df.agg(F.sum(F.variant_get("data", "$.n", "int")).alias("n")).first().n
    assert total == sum(e["data"]["n"] for e in events)


def test_data_as_a_user_schema(spark, filled):
    """Data can be asked as a struct; members that are missing or of another type are null."""
    path, events = filled

    found = (
        spark.read.format("virta")
        .option("events", "true")
        .schema(
            "offset long, data struct<n: int, price: double, user: int, deep: struct<city: string>>"
        )
        .load(path)
        .orderBy("offset")
        .collect()
    )

    assert [(r.data.n, r.data.price, r.data.user, r.data.deep.city) for r in found] == [
        (e["data"]["n"], e["data"]["price"], None, e["data"]["deep"]["city"]) for e in events
    ]


CONDITIONS = {
    "offset >= 700 AND offset < 720": lambda r: 700 <= r.offset < 720,
    "offset > 1495 OR offset = 3": lambda r: r.offset > 1495 or r.offset == 3,
    "offset = 77": lambda r: r.offset == 77,
    "offset < 9223372036854775807 AND offset >= 1490": lambda r: r.offset >= 1490,
    "topic = 'users'": lambda r: r.topic == "users",
    "topic IN ('users', 'nobody') AND offset > 1200": lambda r: (
        r.topic == "users" and r.offset > 1200
    ),
    "topic != 'users' AND offset <= 50": lambda r: r.topic != "users" and r.offset <= 50,
    "topic = 'users' AND topic = 'orders'": lambda r: False,
    "timestamp < TIMESTAMP '1969-12-31' OR offset BETWEEN 5 AND 6": lambda r: r.offset in {5, 6},
    "timestamp > TIMESTAMP '1969-12-31' AND offset < 9": lambda r: r.offset < 9,
    "true": lambda r: True,
}


def test_pushed_conditions_change_no_answer(spark, filled):
    """Conditions are pushed down, each scan's own, which changes the work and never the answer."""
    path, _ = filled
    records = read_log(path)
    expected = {
        (n, r.offset) for n, holds in enumerate(CONDITIONS.values()) for r in records if holds(r)
    }

    load(spark, path).createOrReplaceTempView("records")
    parts = [
        f"SELECT {n} AS n, offset FROM records WHERE {sql}" for n, sql in enumerate(CONDITIONS)
    ]
    found = [tuple(row) for row in spark.sql(" UNION ALL ".join(parts)).collect()]

    assert len(found) == len(expected)
    assert set(found) == expected


def test_one_dataframe_serves_many_conditions(spark, filled):
    """Every query on a loaded DataFrame has a plan of its own, with only the splits its conditions need."""
    path, _ = filled
    records = read_log(path)
    df = load(spark, path, splitBytes="65536")
    head, tail = df.where("offset < 10"), df.where("offset >= 1480")
    young = df.where(F.col("timestamp") >= F.lit(records[-1].time))
    splits = df.rdd.getNumPartitions()

    assert [part.rdd.getNumPartitions() for part in (head, tail, young)] == [1, 1, 1]
    assert splits > 2
    assert [head.count(), tail.count(), df.count(), head.count()] == [10, 20, 1500, 10]
    assert df.join(head, "offset").count() == 10


def test_a_dataframe_has_one_end(spark, tmp_path):
    """What is appended after the first query on a loaded DataFrame is not seen by the next one on it."""
    path = str(tmp_path / "log")
    fill(path, 30)
    df = load(spark, path)
    assert df.count() == 30

    fill(path, 10, seed=2, first=30)

    assert [df.count(), df.where("offset > 20").count()] == [30, 9]
    assert load(spark, path).count() == 40


def test_times_select(spark, filled):
    """Bounds on time, as options and as conditions, select by the append time."""
    path, _ = filled
    records = read_log(path)
    middle = records[700].time
    expected = [r.offset for r in records if r.time >= middle]

    by_option = load(spark, path, startTime=middle.isoformat(), splitBytes="65536")
    by_condition = load(spark, path).where(F.col("timestamp") >= F.lit(middle))

    assert sorted(r.offset for r in by_option.select("offset").collect()) == expected
    assert sorted(r.offset for r in by_condition.select("offset").collect()) == expected
    assert (
        by_option.rdd.getNumPartitions()
        < load(spark, path, splitBytes="65536").rdd.getNumPartitions()
    )


def test_bounds_and_topics_as_options(spark, filled):
    """start, end and topics bound a read; an unknown option is refused, not ignored."""
    path, _ = filled
    expected = [r.offset for r in read_log(path, "orders") if 100 <= r.offset < 900]

    df = load(spark, path, start="100", end="900", topics="orders")

    assert sorted(r.offset for r in df.select("offset").collect()) == expected
    with pytest.raises(Exception, match="unknown option 'startoffset'"):
        load(spark, path, startOffset="1").count()


PLAIN_SESSION = """
import logging, sys
from virta.spark import session
from virta.spark.launch.plan_rule import PUSHDOWN_SETTING, plan_each_query

logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
spark = session(master="local[1]")
def counts():
    df = spark.read.format("virta").load(sys.argv[1])
    return [df.where("offset < 10").count(), df.count()]
print(spark.conf.get(PUSHDOWN_SETTING), counts())
spark.conf.set(PUSHDOWN_SETTING, "true")
print(counts())
plan_each_query(spark)
print(spark.conf.get(PUSHDOWN_SETTING), counts())
"""


def test_a_session_without_the_rule_never_lies(filled):
    """By default, and where the rule comes too late, nothing is pushed: a DataFrame can be used twice."""
    path, _ = filled
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN_SESSION, path],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines() == [
        "false [10, 1500]",
        "[10, 1500]",
        "conditions on a log are not pushed down by this Spark: the session has analysed a query already",
        "false [10, 1500]",
    ]


def test_tables_in_sql(spark, tmp_path):
    """CREATE TABLE and CREATE TEMPORARY VIEW keep the options; a table can be inserted into and streamed from."""
    path = str(tmp_path / "log")
    fill(path, 20)
    spark.sql(f"CREATE TABLE sql_log USING virta LOCATION '{path}' COMMENT 'all of it'")
    spark.sql(f"CREATE TABLE sql_events USING virta OPTIONS (path '{path}', events 'true', end 5)")
    spark.sql(f"CREATE TEMPORARY VIEW sql_view USING virta OPTIONS (path '{path}', start 15)")
    try:
        spark.sql("INSERT INTO sql_log SELECT 'new', 0L, now(), X'41', X'42'")
        counts = [spark.table(name).count() for name in ("sql_log", "sql_events", "sql_view")]
        ids = {row.id for row in spark.sql("SELECT id FROM sql_events").collect()}
        streamed = spark.readStream.table("sql_log").schema.names
    finally:
        spark.sql("DROP TABLE sql_log")
        spark.sql("DROP TABLE sql_events")

    assert counts == [21, 5, 6]
    assert ids == {"0", "1", "2", "3", "4"}
    assert streamed == ["topic", "offset", "timestamp", "key", "value"]
    assert len(read_log(path)) == 21
    spark.sql(f"CREATE TABLE sql_typed (offset BIGINT) USING virta LOCATION '{path}'")
    with pytest.raises(Exception, match="is missing: give the log's directory"):
        spark.table("sql_typed").count()
    spark.sql("DROP TABLE sql_typed")


def test_an_empty_log_and_a_missing_one(spark, tmp_path):
    """An empty log has no rows; a directory that is none is a clear error."""
    with virta.open(tmp_path / "empty"):
        pass

    assert load(spark, str(tmp_path / "empty")).count() == 0
    with pytest.raises(Exception, match="LogNotFoundError"):
        load(spark, str(tmp_path / "none")).count()


@needs_limits
def test_stream_equals_batch_and_obeys_the_limit(spark, filled, tmp_path):
    """A stream sees every offset once, in batches of at most maxRecordsPerTrigger."""
    path, _ = filled
    batches = []

    query = stream(spark, path, batches, tmp_path / "c", maxRecordsPerTrigger="400")

    assert [len(offsets) for _, offsets in batches] == [400, 400, 400, 300]
    assert [o for _, offsets in batches for o in offsets] == list(range(1500))
    assert json.loads(query.recentProgress[-1]["sources"][0]["endOffset"])["offset"] == 1500


@needs_limits
def test_stream_obeys_the_byte_limit(spark, filled, tmp_path):
    """maxBytesPerTrigger bounds a batch to whole pieces of about that size."""
    path, _ = filled
    batches = []

    stream(spark, path, batches, tmp_path / "c", maxBytesPerTrigger="100000")

    assert len(batches) > 2
    assert [o for _, offsets in batches for o in offsets] == list(range(1500))


def test_stream_resumes_from_its_checkpoint(spark, tmp_path):
    """A second run reads exactly what came after the first."""
    path = str(tmp_path / "log")
    fill(path, 300)
    first, second = [], []

    stream(spark, path, first, tmp_path / "c")
    fill(path, 200, seed=2, first=300)
    stream(spark, path, second, tmp_path / "c")

    assert [o for _, offsets in first for o in offsets] == list(range(300))
    assert [o for _, offsets in second for o in offsets] == list(range(300, 500))


def test_retention_under_a_stream_is_an_error_or_a_gap(spark, tmp_path):
    """A checkpoint older than the log's first offset fails by name, or goes on with onGap=skip."""
    path = str(tmp_path / "log")
    fill(path, 300)
    stream(spark, path, [], tmp_path / "c", end="10")
    with virta.open(path) as log:
        log.retain(max_bytes=1)
        first, end = log.first_offset, log.next_offset
    assert first > 10

    with pytest.raises(Exception, match=f"offsets 10 to {first - 1} of .* are not there any more"):
        stream(spark, path, [], tmp_path / "c")
    skipped = []
    stream(spark, path, skipped, tmp_path / "c", onGap="skip")

    assert [o for _, offsets in skipped for o in offsets] == list(range(first, end))


def test_damage_is_named_or_skipped_and_reported(spark, tmp_path):
    """A corrupt batch ends a query with file and range, or is skipped and reported by option."""
    path = str(tmp_path / "log")
    fill(path, 300, segment_bytes=1 << 20)
    segment = next((tmp_path / "log").glob("*.puro"))
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    segment.write_bytes(raw)

    with pytest.raises(Exception, match=rf"{segment.name}: bytes \d+ to \d+ are damaged"):
        load(spark, path).count()
    kept = load(spark, path, onCorruption="skip", problems=str(tmp_path / "problems")).count()

    assert 270 < kept < 300
    (report,) = (tmp_path / "problems").iterdir()
    problem = json.loads(report.read_text())
    assert kept == 300 - (problem["offset_to"] - problem["offset_from"])


def test_a_foreign_checkpoint_is_refused(spark, tmp_path):
    """A checkpoint that is ahead of the log belongs to another log."""
    fill(str(tmp_path / "long"), 300)
    fill(str(tmp_path / "short"), 20)
    stream(spark, str(tmp_path / "long"), [], tmp_path / "c")

    with pytest.raises(Exception, match="it is another log"):
        stream(spark, str(tmp_path / "short"), [], tmp_path / "c")
