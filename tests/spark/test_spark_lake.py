"""The lake: sealed segments as Parquet, seen whole or not at all, united with the log without seam."""

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
from virta.spark import lake
from virta.spark.lake import (
    LakeError,
    compact,
    lake_ranges,
    only_writer,
    read_all,
    read_lake,
)

pytestmark = pytest.mark.slow


def rows(df):
    return sorted(
        (r.offset, r.topic, bytes(r.key), bytes(r.value), r.timestamp.replace(tzinfo=UTC))
        for r in df.collect()
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


def test_lake_and_log_are_one_history(spark, filled):
    """Compaction in steps; after each, and while one runs, lake and log together are every record once."""
    log, lake = filled

    first = compact(log, lake, spark=spark)
    everything = plain(read_log(log))
    assert 0 < first.records < 601
    assert first.next == first.records
    assert rows(read_all(log, lake, spark=spark)) == everything

    again = compact(log, lake, spark=spark)
    assert (again.first, again.next, again.records) == (first.next, first.next, 0)

    fill(log, 400, seed=5, first=600)
    everything = plain(read_log(log))
    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(compact, log, lake, spark=spark)
        while not compacting.done():
            assert rows(read_all(log, lake, spark=spark)) == everything
        second = compacting.result()
    assert second.first == first.next
    assert rows(read_all(log, lake, spark=spark)) == plain(read_log(log))
    assert len(lake_ranges(lake)) == 2


def test_history_outlives_retention(spark, filled):
    """Segments in the lake can be retired from the log; what neither has is an error, not silence."""
    log, lake = filled
    everything = plain(read_log(log))
    compact(log, lake, spark=spark)
    with virta.open(log) as opened:
        opened.retain(max_bytes=1)
        assert opened.first_offset > 0

    assert rows(read_all(log, lake, spark=spark)) == everything

    shutil.rmtree(lake_ranges(lake)[-1][2])
    with virta.open(log) as opened:
        first = opened.first_offset
    lake_ranges(lake)
    found = read_all(log, lake, spark=spark)
    assert min(r.offset for r in found.select("offset").collect()) == first


def test_records_that_move_to_the_lake_while_it_is_listed(spark, filled, monkeypatch):
    """A compaction, and retention after it, between listing lake and log hide no record."""
    log, lake_path = filled
    everything = plain(read_log(log))
    listings = []

    def then_moved(look):
        def looked(*args):
            listings.append(look)
            if len(listings) == 2:
                compact(log, lake_path, spark=spark)
                with virta.open(log) as opened:
                    opened.retain(max_bytes=1)
            return look(*args)

        return looked

    for name in ("sealed_end", "lake_ranges"):
        monkeypatch.setattr(lake, name, then_moved(getattr(lake, name)))
    found = read_all(log, lake_path, spark=spark)

    assert rows(found) == everything
    assert len(listings) > 2


def test_the_lake_has_typed_attributes_by_day_and_topic(spark, filled):
    """Attributes are columns, files lie by day and topic, any Parquet reader reads them."""
    import pyarrow.parquet as pq

    log, lake = filled
    compact(log, lake, spark=spark)
    df = read_lake(lake, spark=spark)
    directory = lake_ranges(lake)[0][2]

    sample = df.where("topic = 'orders' AND type = 'order.paid'").collect()
    files = sorted(directory.rglob("*.parquet"))
    offsets = pq.ParquetFile(files[0]).read(columns=["offset"])["offset"].to_pylist()

    assert sample
    assert all(json.loads(r.value)["type"] == "order.paid" for r in sample)
    assert {path.parent.name.split("=")[0] for path in files} == {"topic"}
    assert {path.parent.parent.name.split("=")[0] for path in files} == {"day"}
    assert offsets == sorted(offsets)
    assert not list(directory.rglob("*.crc"))


def test_one_compaction_at_a_time(spark, filled):
    """A second compaction of the same lake is refused, not let loose on the first one's draft."""
    log, lake = filled

    with only_writer(Path(lake)), pytest.raises(LakeError, match="another compaction is writing"):
        compact(log, lake, spark=spark)


def test_gaps_are_named(tmp_path):
    """A lake that ends before the log begins, or has a hole, is an error that says where."""
    log, lake = tmp_path / "log", tmp_path / "lake"
    fill(str(log), 600)
    with virta.open(log) as opened:
        opened.retain(max_bytes=1)
        first = opened.first_offset
    (lake / f"range={0:020d}-{10:020d}").mkdir(parents=True)

    with pytest.raises(LogGapError, match=f"offsets 10 to {first - 1}"):
        compact(str(log), str(lake))
    (lake / f"range={20:020d}-{30:020d}").mkdir()
    with pytest.raises(LakeError, match="offsets 10 to 20 are missing"):
        lake_ranges(lake)
