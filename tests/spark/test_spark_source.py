"""The log as a Spark data source, bounded and streaming, against the log's own reader."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from spark_logs import fill, read_log

import virta

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("source") / "log")
    events = fill(path, 1500)
    return path, events


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


@pytest.mark.parametrize(
    "condition",
    [
        "offset >= 700 AND offset < 720",
        "offset > 1495 OR offset = 3",
        "offset = 77",
        "offset < 0",
        "topic = 'users'",
        "topic IN ('users', 'nobody') AND offset > 1200",
        "topic != 'users' AND offset <= 50",
        "topic = 'nobody'",
    ],
)
def test_conditions_give_the_same_rows_pushed_or_not(spark, filled, condition):
    """Pushed-down conditions change the work, never the answer."""
    path, _ = filled
    cached = spark.createDataFrame(
        [(str(r.topic), r.offset) for r in read_log(path)], "topic string, offset long"
    )

    expected = sorted(cached.where(condition).collect())
    for pushdown in ("true", "false"):
        found = load(spark, path, pushdown=pushdown).where(condition).select("topic", "offset")

        assert sorted(found.collect()) == expected


def test_offset_conditions_are_pushed(spark, filled):
    """With pushdown, a range of offsets plans only the splits it needs."""
    path, _ = filled
    df = load(spark, path, splitBytes="65536", pushdown="true")

    few = df.where("offset >= 700 AND offset < 720")

    assert few.rdd.getNumPartitions() == 1
    assert few.count() == 20


def test_one_dataframe_serves_many_conditions(spark, filled):
    """By default a loaded DataFrame may be filtered one way, another way and not at all."""
    path, _ = filled
    df = load(spark, path)

    counts = [df.where("offset < 10").count(), df.where("offset >= 1480").count(), df.count()]

    assert counts == [10, 20, 1500]


def test_times_select(spark, filled):
    """Bounds on time, as options and as conditions, select by the append time."""
    path, _ = filled
    records = read_log(path)
    middle = records[700].time
    expected = [r.offset for r in records if r.time >= middle]

    by_option = load(spark, path, startTime=middle.isoformat())
    by_condition = load(spark, path, pushdown="true").where(F.col("timestamp") >= F.lit(middle))

    assert sorted(r.offset for r in by_option.select("offset").collect()) == expected
    assert sorted(r.offset for r in by_condition.select("offset").collect()) == expected


def test_bounds_and_topics_as_options(spark, filled):
    """start, end and topics bound a read; an unknown option is refused, not ignored."""
    path, _ = filled
    expected = [r.offset for r in read_log(path, "orders") if 100 <= r.offset < 900]

    df = load(spark, path, start="100", end="900", topics="orders")

    assert sorted(r.offset for r in df.select("offset").collect()) == expected
    with pytest.raises(Exception, match="unknown option 'startoffset'"):
        load(spark, path, startOffset="1").count()


def test_a_session_without_pushdown_reads_too(spark, filled):
    """The source works in any session: with Spark's default, conditions are simply not pushed."""
    path, _ = filled
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert load(spark, path).where("offset < 10").count() == 10
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_an_empty_log_and_a_missing_one(spark, tmp_path):
    """An empty log has no rows; a directory that is none is a clear error."""
    with virta.open(tmp_path / "empty"):
        pass

    assert load(spark, str(tmp_path / "empty")).count() == 0
    with pytest.raises(Exception, match="LogNotFoundError"):
        load(spark, str(tmp_path / "none")).count()


def test_stream_equals_batch_and_obeys_the_limit(spark, filled, tmp_path):
    """A stream sees every offset once, in batches of at most maxRecordsPerTrigger."""
    path, _ = filled
    batches = []

    query = stream(spark, path, batches, tmp_path / "c", maxRecordsPerTrigger="400")

    assert [len(offsets) for _, offsets in batches] == [400, 400, 400, 300]
    assert [o for _, offsets in batches for o in offsets] == list(range(1500))
    assert json.loads(query.recentProgress[-1]["sources"][0]["endOffset"])["offset"] == 1500


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

    with pytest.raises(Exception, match=f"offsets 10 to {first} are no longer in the log"):
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

    with pytest.raises(Exception, match=f"{segment.name} is damaged in bytes"):
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
