"""The lake in Spark: united with the log without seam, in every format, also while a compaction runs."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from spark_logs import fill, read_log

import virta
import virta.spark
from virta.errors import LogGapError
from virta.spark.lake import reading
from virta.spark.lake.compaction import compact
from virta.spark.lake.directory import Lake, LakeError, ranges
from virta.spark.lake.reading import read_all, read_lake
from virta.spark.schemas import EVENT

pytestmark = pytest.mark.slow

NEEDS = {"delta": "deltalake", "iceberg": "pyiceberg"}
TYPES = {"orders": "n long, tags array<string>, deep struct<city: string>"}


@pytest.fixture(params=["parquet", "delta", "iceberg"])
def form(request):
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return request.param


def rows(df):
    return sorted(
        (r.offset, r.topic, bytes(r.key), bytes(r.value), r.timestamp.replace(tzinfo=UTC))
        for r in df.select("offset", "topic", "key", "value", "timestamp").collect()
    )


def plain(records):
    return [(r.offset, str(r.topic), bytes(r.key), r.value, r.time) for r in records]


@pytest.fixture
def filled(tmp_path):
    log, lake = str(tmp_path / "log"), str(tmp_path / "lake")
    fill(log, 600, topics=("orders", "users", "a/b=c d", "1"))
    with virta.open(log) as opened:
        opened.append("", "", b"no topic, no event")
    return log, lake


def test_lake_and_log_are_one_history(spark, filled, form):
    """Compaction in steps; after each, and while one runs, lake and log together are every record once."""
    log, lake = filled
    compact(log, lake, format=form, types=TYPES)
    assert rows(read_all(log, lake, spark=spark)) == plain(read_log(log))

    fill(log, 400, seed=5, first=600)
    everything = plain(read_log(log))
    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(compact, log, lake)
        while not compacting.done():
            assert rows(read_all(log, lake, spark=spark)) == everything
        assert compacting.result().records
    assert rows(read_all(log, lake, spark=spark)) == everything


def test_events_are_those_of_the_log(spark, filled, form):
    """All event columns, from lake and log, equal those that the log alone gives."""
    log, lake = filled
    compact(log, lake, format=form, types=TYPES)
    names = [
        "offset",
        *(name for name in EVENT.names if name not in {"offset", "key", "value", "data"}),
    ]
    columns = [*names, "to_json(data) AS data"]

    found = read_all(log, lake, spark=spark)
    whole = spark.read.format("virta").option("events", "true").load(log)

    assert found.columns == EVENT.names
    assert sorted(found.selectExpr(*columns).collect()) == sorted(
        whole.selectExpr(*columns).collect()
    )
    assert found.where("invalid IS NOT NULL").count() == 1


def test_a_typed_topic_has_its_columns(spark, filled, form):
    """With a topic, `data` has the type of the lake in rows of the lake and of the log."""
    log, lake = filled
    compact(log, lake, format=form, types=TYPES)
    expected = {
        r.offset: json.loads(r.value)["data"] for r in read_log(log) if str(r.topic) == "orders"
    }

    found = read_all(log, lake, topic="orders", spark=spark)
    sample = found.select("offset", "data.n", "data.tags", "data.deep.city", "rescued").collect()

    assert {r.offset for r in sample} == set(expected)
    assert len(sample) == len(expected)
    for row in sample:
        data = expected[row.offset]
        assert (row.n, row.tags, row.city) == (data["n"], data["tags"], data["deep"]["city"])
        assert row.rescued is None
    untyped = read_all(log, lake, topic="users", spark=spark)
    assert untyped.schema["data"].dataType.simpleString() == "variant"
    assert untyped.count() == sum(str(r.topic) == "users" for r in read_log(log))


def test_a_topic_that_gets_its_type_later(spark, filled):
    """Earlier records, in the table of topics without a type, come with the type, too."""
    log, lake = filled
    compact(log, lake)
    fill(log, 400, seed=5, first=600)
    compact(log, lake, types=TYPES)

    found = read_all(log, lake, topic="orders", spark=spark)

    numbers = [json.loads(r.value)["data"]["n"] for r in read_log(log) if str(r.topic) == "orders"]
    assert [r.n for r in found.select("offset", "data.n").sort("offset").collect()] == numbers


def test_rows_after_the_lake_s_end_are_not_read(spark, filled, tmp_path):
    """Tables that a killed compaction committed, before lake.json, are united with the log without doubles."""
    pytest.importorskip("deltalake")
    log, lake = filled
    compact(log, lake, format="delta", types=TYPES)
    before = (tmp_path / "lake" / "lake.json").read_text()
    fill(log, 400, seed=5, first=600)
    compact(log, lake)
    (tmp_path / "lake" / "lake.json").write_text(before)

    assert rows(read_all(log, lake, spark=spark)) == plain(read_log(log))
    assert compact(log, lake).records == 0
    assert rows(read_all(log, lake, spark=spark)) == plain(read_log(log))


def test_history_outlives_retention(spark, filled):
    """Segments in the lake can be retired from the log; what neither has is an error, not silence."""
    log, lake = filled
    everything = plain(read_log(log))
    compact(log, lake)
    with virta.open(log) as opened:
        opened.retain(max_bytes=1)
        first = opened.first_offset
        assert first > 0

    assert rows(read_all(log, lake, spark=spark)) == everything

    shutil.rmtree(ranges(lake)[-1][2])
    found = read_all(log, lake, spark=spark)
    assert min(r.offset for r in found.select("offset").collect()) == first
    (Path(lake) / f"range={0:020d}-{first - 10:020d}").mkdir()
    with pytest.raises(LogGapError):
        read_all(log, lake, spark=spark)


def test_records_that_move_to_the_lake_while_it_is_listed(spark, filled, monkeypatch, form):
    """A compaction, and retention after it, between listing log and lake hide no record."""
    log, lake = filled
    everything = plain(read_log(log))
    original = reading.sealed_end

    def then_moved(path):
        found = original(path)
        compact(log, lake, format=form)
        with virta.open(log) as opened:
            opened.retain(max_bytes=1)
        return found

    monkeypatch.setattr(reading, "sealed_end", then_moved)
    found = read_all(log, lake, spark=spark)

    assert rows(found) == everything


def test_records_that_move_to_the_lake_after_it_was_loaded(spark, filled, monkeypatch, form):
    """A compaction between loading the lake and listing its files doubles no record."""
    log, lake = filled
    compact(log, lake, format=form, types=TYPES)
    fill(log, 400, seed=5, first=600)
    original, before = reading.format_of, Lake.load(lake).next

    def then_moved(loaded):
        compact(log, lake)
        return original(loaded)

    monkeypatch.setattr(reading, "format_of", then_moved)
    found = read_all(log, lake, spark=spark)

    assert rows(found) == plain(read_log(log))
    assert Lake.load(lake).next > before


def operators(df, *names):
    """Return the operators of these names in the optimized plan, from above."""
    lines = df._jdf.queryExecution().optimizedPlan().toString().splitlines()
    return [name for line in lines for name in names if name in line]


def test_a_topic_is_read_without_needless_work(spark, filled, form):
    """A table of one topic, typed from the start, is a plain scan: no condition, no other table, no Python stage."""
    log, lake = filled
    compact(log, lake, format=form, types=TYPES)

    found = read_lake(lake, topic="orders", spark=spark).select("data.n")

    assert operators(found, "Union", "MapInArrow", "Filter", "Relation") == ["Relation"]


def test_earlier_records_of_a_topic_are_decoded_after_the_condition(spark, filled):
    """Of the table that all topics share, only the rows of the topic reach the Python stage."""
    log, lake = filled
    compact(log, lake)
    fill(log, 400, seed=5, first=600)
    compact(log, lake, types=TYPES)

    found = read_lake(lake, topic="orders", spark=spark).select("data.n")

    names = operators(found, "Union", "MapInArrow", "Filter", "Relation")
    assert names == ["Union", "MapInArrow", "Filter", "Relation", "Relation"]


def test_lakes_without_the_beginning_of_types_are_read(spark, filled, tmp_path):
    """Where lake.json does not say since when a topic has its type, earlier records are looked for."""
    log, lake = filled
    compact(log, lake)
    fill(log, 400, seed=5, first=600)
    compact(log, lake, types=TYPES)
    description = tmp_path / "lake" / "lake.json"
    known = json.loads(description.read_text())
    assert known.pop("typed_from") == {"orders": ranges(lake)[1][0]}
    description.write_text(json.dumps(known))

    found = read_all(log, lake, topic="orders", spark=spark)

    assert found.count() == sum(str(r.topic) == "orders" for r in read_log(log))


def test_a_type_added_after_a_killed_compaction(spark, filled, tmp_path):
    """Records that it committed to the shared table stay there: the topic's own table begins after them."""
    pytest.importorskip("deltalake")
    log, lake = filled
    compact(log, lake, format="delta")
    before = (tmp_path / "lake" / "lake.json").read_text()
    fill(log, 400, seed=5, first=600)
    compact(log, lake)
    (tmp_path / "lake" / "lake.json").write_text(before)
    fill(log, 400, seed=6, first=1000)

    compact(log, lake, types=TYPES)

    assert rows(read_all(log, lake, spark=spark)) == plain(read_log(log))
    orders = [row for row in plain(read_log(log)) if row[1] == "orders"]
    assert rows(read_all(log, lake, topic="orders", spark=spark)) == orders


def test_lakes_of_the_first_layout_are_read(spark, filled, tmp_path):
    """Ranges of `day=…/topic=…`, which earlier versions wrote, are part of the history."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    log, lake = filled
    fill(log, 400, seed=5, first=600)
    end = 300
    records = spark.read.format("virta").option("end", str(end)).load(log)
    (
        records.withColumn("day", F.to_date("timestamp"))
        .write.partitionBy("day", "topic")
        .parquet(f"{lake}/range={0:020d}-{end:020d}")
    )

    assert rows(read_all(log, lake, spark=spark)) == plain(read_log(log))
    assert compact(log, lake, types=TYPES).first == end
    assert rows(read_all(log, lake, spark=spark)) == plain(read_log(log))
    assert read_lake(lake, topic="orders", spark=spark).select("data.n").count() > 0


def test_no_lake(spark, filled):
    """Without a lake `read_all` is the log; `read_lake` says that there is none."""
    log, lake = filled

    assert rows(read_all(log, lake, spark=spark)) == plain(read_log(log))
    with pytest.raises(LakeError, match="there is no lake"):
        read_lake(lake, spark=spark)
    assert virta.spark.read_lake is read_lake
