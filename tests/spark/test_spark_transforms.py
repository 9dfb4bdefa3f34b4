"""Transforms on small tables: what each keeps, adds and refuses, against plain Python."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.spark import transforms
from virta.spark.transforms import TransformError

pytestmark = pytest.mark.slow

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
RECORD = "topic string, offset long, timestamp timestamp, key binary, value binary"


def at(seconds):
    return BEGIN + timedelta(seconds=seconds)


def naive(seconds):
    """As Spark's rows give it: UTC without saying so."""
    return at(seconds).replace(tzinfo=None)


def record(offset, value, topic="orders", key=b"", seconds=None):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return (topic, offset, at(offset if seconds is None else seconds), key, raw)


def event(name, data=None, **attributes):
    members = {"specversion": "1.0", "id": name, "source": "/s", "type": "t", **attributes}
    return members if data is None else {**members, "data": data}


def records(spark, *rows):
    return spark.createDataFrame(list(rows), RECORD)


def test_decode_events_types_attributes_and_keeps_every_row(spark):
    """Attributes are typed, data is a VARIANT, and what is no event keeps its row with the reason."""
    rows = [
        event("1", {"n": 1, "s": "x", "list": [1, 2.5, None, True]}, time="2026-01-01T00:00:01Z"),
        event("2", [1, 2], subject="sub", myext="v"),
        event("3", data_base64="AAEC"),
        event("4"),
    ]
    bad = [b"not json", b"[1]", b'{"id": "5"}', b""]
    df = records(spark, *[record(i, row) for i, row in enumerate([*rows, *bad])])

    found = transforms.decode_events(df).orderBy("offset").collect()

    assert [row.id for row in found] == ["1", "2", "3", "4", None, None, None, None]
    assert found[0].time == naive(1)
    assert json.loads(found[0].data.toJson()) == rows[0]["data"]
    assert json.loads(found[1].data.toJson()) == [1, 2]
    assert found[1].extensions == {"myext": "v"}
    assert found[2].data_binary == b"\x00\x01\x02"
    assert found[3].data is None
    assert all(row.invalid is None for row in found[:4])
    assert all(row.invalid for row in found[4:])
    assert [bytes(row.value) for row in found[4:]] == bad


def test_dead_letters_and_valid_events_share_the_rows(spark):
    """Every row is in exactly one of the two."""
    df = records(spark, record(0, event("1")), record(1, b"junk"), record(2, event("2")))
    events = transforms.decode_events(df)

    valid = transforms.valid_events(events).select("offset").collect()
    dead = transforms.dead_letters(events).collect()

    assert sorted(row.offset for row in valid) == [0, 2]
    assert [(row.offset, bytes(row.value)) for row in dead] == [(1, b"junk")]
    assert "JSON" in dead[0].reason


def test_variant_encoding_is_what_spark_reads(spark):
    """Random JSON values come back from the VARIANT as they went in."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def value(depth):
        kind = rng.randrange(8 if depth else 6)
        if kind == 0:
            return rng.choice([None, True, False])
        if kind == 1:
            return rng.choice([0, -1, 127, -128, 128, 40_000, -(2**31), 2**31, 2**63 - 1, -(2**63)])
        if kind == 2:
            return rng.choice([0.5, -1e300, 1e-9, 3.25])
        if kind in {3, 4}:
            return rng.choice(["", "a", "é☃", "😀", "x" * 63, "y" * 64, "z" * 70_000])
        if kind in {5, 6}:
            count = rng.choice([0, 1, 3, 300])
            return (
                {f"k{i}": value(0 if count == 300 else depth - 1) for i in range(count)}
                if depth
                else {}
            )
        return [value(depth - 1) for _ in range(rng.choice([0, 1, 4]))]

    values = [v for v in (value(3) for _ in range(60)) if v is not None]
    df = records(spark, *[record(i, event(str(i), v)) for i, v in enumerate(values)])

    found = (
        transforms.decode_events(df)
        .orderBy("offset")
        .select(F.to_json("data").alias("json"), "invalid")
        .collect()
    )

    assert [row.invalid for row in found] == [None] * len(values)
    assert [json.loads(row.json) for row in found] == values


def test_dedupe_keeps_the_first(spark):
    """Of equal keys the first by time and offset stays, and only that."""
    rows = [record(i, event(str(i % 7))) for i in range(40)]
    events = transforms.decode_events(records(spark, *rows))

    found = transforms.dedupe(events).select("id", "offset").collect()

    assert sorted((row.offset, row.id) for row in found) == [(i, str(i)) for i in range(7)]


def test_latest_by_key_drops_deleted(spark):
    """The newest record of each (topic, key); an empty value deletes the key."""
    rows = [
        record(0, b"a", key=b"1"),
        record(1, b"b", key=b"2"),
        record(2, b"c", key=b"1"),
        record(3, b"", key=b"2"),
        record(4, b"d", key=b"1", topic="other"),
    ]

    found = transforms.latest_by_key(records(spark, *rows)).collect()

    assert sorted((r.topic, bytes(r.key), bytes(r.value)) for r in found) == [
        ("orders", b"1", b"c"),
        ("other", b"1", b"d"),
    ]


def test_window_aggregate_equals_a_plain_count(spark):
    """Counts and sums per window and key are what Python counts."""
    rng = random.Random(7)
    rows = [(at(rng.randrange(600)), rng.choice("abc"), rng.randrange(100)) for _ in range(500)]
    df = spark.createDataFrame(rows, "timestamp timestamp, who string, n int")

    found = transforms.window_aggregate(
        df, "1 minute", by=["who"], aggregates={"count": "count(*)", "total": "sum(n)"}
    ).collect()

    expected = {}
    for time, who, n in rows:
        start = BEGIN + timedelta(minutes=(time - BEGIN) // timedelta(minutes=1))
        count, total = expected.get((start, who), (0, 0))
        expected[start, who] = (count + 1, total + n)
    assert {(r.start.replace(tzinfo=UTC), r.who): (r["count"], r.total) for r in found} == expected


def test_sessionize_splits_at_gaps(spark):
    """Events of a key closer than the gap are one session."""
    rows = [(at(s), "a") for s in (0, 5, 9, 30, 31, 100)]
    df = spark.createDataFrame(rows, "timestamp timestamp, who string")

    found = transforms.sessionize(df, "10 seconds", by=["who"], aggregates={"n": "count(*)"})

    assert sorted(row.n for row in found.collect()) == [1, 2, 3]


def test_enrich_joins_without_overwriting(spark):
    """Columns of the table come prefixed; an event that finds nothing stays with nulls."""
    events = spark.createDataFrame([("a", 1), ("b", 2)], "user string, n int")
    users = spark.createDataFrame([("a", "Ada", 9)], "user string, name string, n int")

    found = transforms.enrich(events, users, "user", prefix="user_").orderBy("n").collect()

    assert [(r.user, r.n, r.user_name, r.user_n) for r in found] == [
        ("a", 1, "Ada", 9),
        ("b", 2, None, None),
    ]
    with pytest.raises(TransformError, match="both sides have the column 'n'"):
        transforms.enrich(events, users, "user")


def test_changes_to_table_replays_changes(spark):
    """Create, update and delete leave the table a database would have."""

    def change(offset, op, before, after, **attributes):
        data = {"op": op, "before": before, "after": after}
        return record(offset, event(str(offset), data, **attributes))

    rows = [
        change(0, "c", None, {"id": 1, "full name": "a"}),
        change(1, "c", None, {"id": 2, "full name": "b"}),
        change(2, "u", {"id": 1, "full name": "a"}, {"id": 1, "full name": "c"}),
        change(3, "d", {"id": 2, "full name": "b"}, None),
        change(4, "r", None, {"id": 3, "full name": None}),
        record(
            5,
            event("5", {"payload": {"after": {"id": 4, "full name": "d"}}}, iodebeziumop="c"),
        ),
        change(6, "c", None, {"full name": "of no row"}),
        change(7, "t", None, None),
    ]
    events = transforms.decode_events(records(spark, *rows))

    table = transforms.changes_to_table(events, "id INT, `full name` STRING", key="id")

    assert sorted(tuple(r) for r in table.collect()) == [(1, "c"), (3, None), (4, "d")]


def test_to_events_makes_events_that_decode(spark):
    """Rows become records whose values are events, with the same id for the same row."""
    df = spark.createDataFrame(
        [("x", 1, at(0)), ("y", 2, at(1))], "who string, n int, time timestamp"
    )

    made = transforms.to_events(df, topic="out", type="t", source="/p", key="who", time="time")
    again = transforms.to_events(df, topic="out", type="t", source="/p", key="who", time="time")
    found = transforms.decode_events(made).orderBy("time").collect()

    assert [bytes(r.key) for r in found] == [b"x", b"y"]
    assert [json.loads(r.data.toJson())["n"] for r in found] == [1, 2]
    assert [r.time for r in found] == [naive(0), naive(1)]
    assert sorted(made.collect()) == sorted(again.collect())


def test_to_events_writes_instants(spark):
    """Times in events are the column's, to the microsecond, also in a session of another zone; no id is null."""
    sql = "SELECT cast(null AS string) AS id, timestamp_micros(1793511000123456) AS t, timestamp_micros(-1) AS u"
    spark.conf.set(
        "spark.sql.session.timeZone", "America/New_York"
    )  # at 1:30, an hour that comes twice
    try:
        df = spark.sql(sql)
        made = transforms.to_events(
            df, topic="o", type="t", source="/p", id="id", time="t"
        ).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")

    event = json.loads(made[0].value)
    assert event["time"] == event["data"]["t"] == "2026-11-01T05:30:00.123456Z"
    assert event["data"]["u"] == "1969-12-31T23:59:59.999999Z"
    assert len(event["id"]) == 64


def test_transforms_name_the_missing_column(spark):
    """A transform on the wrong table says which column it needs and which there are."""
    df = spark.createDataFrame([(1,)], "n int")

    with pytest.raises(TransformError, match="dedupe needs the column 'source': there are n"):
        transforms.dedupe(df)
    with pytest.raises(TransformError, match="latest_by_key needs the column 'key': there are n"):
        transforms.latest_by_key(df, by="key", order="n")
    with pytest.raises(TransformError, match="dedupe by nothing"):
        transforms.dedupe(df, by=[], time="n")
