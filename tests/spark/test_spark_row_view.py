"""`virta.spark.view` has the rows of a live view over the same log."""

from __future__ import annotations

import json
import random

import pytest

import virta
from virta import views
from virta.errors import FilterError, ViewError
from virta.filters import parse
from virta.spark.transforms import TransformError

pytest.importorskip("pyspark")

KEYS = [f"k{n}" for n in range(40)]
FILTERS = [
    ("", "query-string"),
    ("status=paid", "query-string"),
    ("status=paid&total=>3", "query-string"),
    ("status=new;status=sent", "query-string"),
    ({"equals": {"status": "paid"}}, "koncorde"),
    ({"and": [{"range": {"total": {"gte": 3}}}, {"not": {"equals": {"status": "new"}}}]}, "koncorde"),
    ({"ids": {"values": ["s1", "s2", "5", "77"]}}, "koncorde"),
    ("type = 'order' AND EXISTS subject", "cesql"),
    ("type = 'virta.record'", "cesql"),
    ("LEFT(type, 2) = 'or' AND id LIKE '%1%'", "cesql"),
    ([{"suffix": {"type": "er"}}], "cloudevents"),
    ([{"not": {"exact": {"type": "order"}}}], "cloudevents"),
]  # fmt: skip


def random_record(rng, number):
    """Return key and value: states, deletes of every kind, Debezium's changes, records that are no events."""
    key = rng.choice(KEYS)
    data = {"status": rng.choice(["new", "paid", "sent"]), "total": rng.randint(0, 6), "id": key}
    event = {"specversion": "1.0", "id": str(number), "source": "/s", "type": "order", "data": data}
    choice = rng.random()
    if choice < 0.1:
        key, event["subject"] = "", rng.choice(["s1", "s2", "s3"])
    elif choice < 0.15:
        key = ""
    elif choice < 0.25:
        return key, b""
    elif choice < 0.3:
        event["data"] = None
    elif choice < 0.35:
        event["type"] = rng.choice(["order.deleted", "deleted"])
    elif choice < 0.5:
        op = rng.choice("cuurd")
        after = None if op == "d" else data
        event["data"] = {"op": op, "source": {}, "before": data, "after": after}
    elif choice < 0.505:
        event["data"] = {"op": "t", "source": {}, "before": None, "after": None}
    elif choice < 0.55:
        event["data"] = {"op": "d", "status": "paid"}  # not Debezium's shape
    elif choice < 0.6:
        return key, rng.choice([b"no JSON", b"[1, 2]", b'{"status":"paid"}', b"\xff\xfe"])
    elif choice < 0.63:
        event["id"] = number  # a number as id is its text
    elif choice < 0.66:
        return key, json.dumps(event, indent=2).encode()  # more than one line
    elif choice < 0.68:
        event["data"]["total"] = 1e999
        return key, json.dumps(event).replace("Infinity", "1e999").encode()
    elif choice < 0.7:
        event["data"]["status"] = "\udc00"
    return key, json.dumps(event).encode()


def fill(path, seed, count=1200):
    rng = random.Random(seed)
    with virta.open(path, segment_bytes=64 * 1024, durability="none") as log:
        for number in range(count):
            key, value = random_record(rng, number)
            log.append("other" if rng.random() < 0.1 else "orders", key, value)


def live_rows(path, filter_, dialect, **options):
    with (
        virta.open(path, read_only=True) as log,
        views.open(log, "orders", filter_, dialect=dialect, **options) as view,
    ):
        offsets = {update.key: update.offset for update in view.refresh()}
        return {key: (offsets[key], event) for key, event in view.rows.items()}


def spark_rows(spark, path, filter_, dialect, **options):
    records = spark.read.format("virta").option("splitBytes", 64 * 1024).load(str(path))
    frame = virta.spark.view(records, filter_, dialect=dialect, **options)
    found = {}
    for row in frame.where("topic = 'orders'").collect():
        assert row.key not in found
        found[row.key] = (row.offset, json.loads(row.value))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return a log that ends after its last truncation, and has one before."""
    path = tmp_path_factory.mktemp("view") / "log"
    fill(path, seed=16)
    return path


@pytest.mark.parametrize(("filter_", "dialect"), FILTERS, ids=[str(f) for f, _ in FILTERS])
def test_the_rows_are_those_of_a_live_view(spark, path, filter_, dialect):
    """Random keyed events with deletes and truncations, filters of every dialect."""
    live = live_rows(path, filter_, dialect)

    found = spark_rows(spark, path, filter_, dialect)

    assert live == found
    assert live  # the filter holds for something


@pytest.mark.parametrize("options", [{"key": "/data/id"}, {"row": "event"}, {"key": "/subject"}])
def test_key_rule_and_root_are_those_of_a_live_view(spark, path, options):
    for filter_, dialect in FILTERS[:3]:
        assert live_rows(path, filter_, dialect, **options) == spark_rows(
            spark, path, filter_, dialect, **options
        )


def test_a_truncation_removes_what_is_before_it_only(spark, tmp_path):
    """The rows of a topic before Debezium's `t` are gone, those of other topics stay."""
    truncate = {"op": "t", "source": {}, "before": None, "after": None}
    with virta.open(tmp_path / "log") as log:
        for topic, key, data in [
            ("a", "1", {}), ("b", "1", {}), ("a", "2", {}), ("a", "", truncate), ("a", "2", {}), ("a", "3", {}),
        ]:  # fmt: skip
            log.append(topic, key, {"id": "1", "source": "/", "type": "row", "data": data})

    rows = virta.spark.view(virta.spark.read(str(tmp_path / "log"))).collect()

    assert {(row.topic, row.key, row.offset) for row in rows} == {
        ("a", "2", 4),
        ("a", "3", 5),
        ("b", "1", 1),
    }


def test_a_view_can_be_decoded_and_continues_as_a_dataframe(spark, path):
    """The result has the record columns, so every transform of events applies to it."""
    frame = virta.spark.view(virta.spark.read(str(path), topics=["orders"]), parse("status=paid"))

    decoded = virta.spark.decode_events(frame)
    paid = decoded.where("variant_get(data, '$.status', 'string') = 'paid'").select("key", "id")

    live = live_rows(path, "status=paid", "query-string")
    assert {(key, str(event["id"])) for key, (_, event) in live.items()} == {
        (row.key, row.id) for row in paid.collect()
    }


def test_bad_input_is_a_sentence(spark, path):
    records = virta.spark.read(str(path))

    with pytest.raises(FilterError):
        virta.spark.view(records, {"equals": 1}, dialect="koncorde")
    with pytest.raises(ViewError, match="JSON pointer from the event's root"):
        virta.spark.view(records, key="data.id")
    with pytest.raises(ViewError, match="write auto or event"):
        virta.spark.view(records, row="after")
    with pytest.raises(TransformError, match="needs the column 'offset'"):
        virta.spark.view(records.select("topic", "key", "value"))
    with pytest.raises(TransformError, match="bounded DataFrame, not a stream"):
        virta.spark.view(virta.spark.read_stream(str(path)))
