"""A shipped log read by Spark: from the store alone, and with a part of it still local."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import pytest
from spark_logs import fill, read_log

import virta

pytest.importorskip("obstore", reason="object storage needs obstore")

from s3_server import s3_environment, started_s3
from virta.spark.lake.compaction import compact
from virta.spark.lake.directory import Lake
from virta.spark.lake.reading import read_all
from virta.spark.pipeline.model import Pipeline, Sink, Source, Where
from virta.spark.pipeline.runner import run
from virta.tier import Shipper, TierStore

DRIVER = """
import json, sys
import virta.spark
from pyspark.sql import functions as F
url, checkpoint, out = sys.argv[1:]
spark = virta.spark.session(**{"spark.ui.enabled": "false"})
frame = spark.read.format("virta").option("splitBytes", "65536").load(url)
rows = frame.select("offset", "topic", "value").orderBy("offset").collect()
found = {"batch": [[r.offset, r.topic, bytes(r.value).decode()] for r in rows]}
found["partitions"] = frame.rdd.getNumPartitions()
stream = spark.readStream.format("virta").option("maxRecordsPerTrigger", "200").load(url)
query = (
    stream.select("offset").writeStream.format("parquet").option("path", out)
    .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
)
query.awaitTermination()
found["stream"] = sorted(r.offset for r in spark.read.parquet(out).collect())
print("RESULT " + json.dumps(found))
spark.stop()
"""


def ship(path, url):
    with virta.open(path, create=False) as log, Shipper(log, TierStore(url)) as shipper:
        return shipper.ship()


def offsets(frame):
    return sorted(row.offset for row in frame.select("offset").collect())


def test_a_store_gives_the_rows_of_the_directory(spark, tmp_path):
    """Planned from manifest and indexes, read by byte range; the log's directory is not there any more."""
    url = f"file://{tmp_path}/store"
    fill(tmp_path / "log", 2000)
    ship(tmp_path / "log", url)
    expected = [tuple(record) for record in read_log(tmp_path / "log")]
    os.rename(tmp_path / "log", tmp_path / "moved")

    frame = spark.read.format("virta").option("splitBytes", "65536").load(url)

    rows = frame.select("offset", "topic", "value").orderBy("offset").collect()
    assert [(r.offset, r.topic, bytes(r.value)) for r in rows] == [
        (offset, topic.decode(), bytes(value)) for topic, _, value, offset, _ in expected
    ]
    assert frame.rdd.getNumPartitions() > 2
    orders = (
        spark.read.format("virta").option("events", "true").option("topics", "orders").load(url)
    )
    assert orders.count() == sum(topic == b"orders" for topic, *_ in expected)


def test_a_log_of_which_a_part_is_local(spark, tmp_path):
    """After retention the older offsets come from the store, the newer ones from the directory."""
    url = f"file://{tmp_path}/store"
    fill(tmp_path / "log", 1500)
    ship(tmp_path / "log", url)
    with virta.open(tmp_path / "log") as log:
        assert log.retain(max_bytes=0).first_offset > 100
    fill(tmp_path / "log", 300, first=1500)

    frame = spark.read.format("virta").load(str(tmp_path / "log"))

    assert offsets(frame) == list(range(1800))


def test_a_compacted_segment_is_found_again(spark, tmp_path):
    """A plan made before compaction names objects that were removed since; executors plan again by offset."""
    from virta.spark.source.decode import ScanSpec, read_rows
    from virta.spark.source.splits import Plan

    url = f"file://{tmp_path}/store"
    fill(tmp_path / "log", 1500)
    ship(tmp_path / "log", url)
    plan = Plan(url)
    splits = plan.splits(0, 1500)
    plan.close()
    with virta.open(tmp_path / "log") as log:
        log.compact()
        with Shipper(log, TierStore(url), garbage_age_s=0) as shipper:
            shipper.ship()
            assert shipper.collect_garbage(now=True) > 0
        kept = len(list(log.read()))

    rows = sum(
        part.size
        for split in splits
        for part in read_rows(ScanSpec(url, skip_gaps=True), split, ["offset"], [])
    )

    assert rows == kept


def test_a_lake_beside_a_store(spark, tmp_path):
    """`read_all` unites a lake with a log in a store, and with one whose older segments are only there."""
    url, lake = f"file://{tmp_path}/store", str(tmp_path / "lake")
    fill(tmp_path / "log", 900)
    compact(str(tmp_path / "log"), lake)
    fill(tmp_path / "log", 600, first=900)
    ship(tmp_path / "log", url)
    with virta.open(tmp_path / "log") as log:
        assert log.retain(max_bytes=0).first_offset > Lake.load(lake).next

    assert 0 < Lake.load(lake).next < 900
    for place in (url, str(tmp_path / "log")):
        assert offsets(read_all(place, lake, spark=spark)) == list(range(1500))
    assert compact(url, lake).first < 900
    assert offsets(read_all(url, lake, spark=spark)) == list(range(1500))


@pytest.mark.slow
def test_a_pipeline_over_a_store(spark, tmp_path):
    """Filters, results and dead letters of a stream over a shipped log, and of what is shipped after that."""
    url = f"file://{tmp_path}/store"
    events = fill(tmp_path / "log", 600)
    junk = [("orders", "", b"no event")]
    with virta.open(tmp_path / "log") as log:
        log.append_many(junk)
    ship(tmp_path / "log", url)
    pipeline = Pipeline(
        name="copy",
        source=Source(log=url),
        filters=(Where("n=>=50"),),
        sinks=(Sink(kind="channel", topic="copy", log="out"),),
        dead_letter=Sink(kind="channel", topic="dead", log="out"),
        directory=str(tmp_path),
    )

    assert run(spark, pipeline)["state"] == "finished"
    events += fill(tmp_path / "log", 300, first=600)
    ship(tmp_path / "log", url)
    os.rename(tmp_path / "log", tmp_path / "moved")
    assert run(spark, pipeline)["state"] == "finished"

    copied = [json.loads(record.value)["id"] for record in read_log(tmp_path / "out", "copy")]
    assert sorted(copied) == sorted(e["id"] for e in events if e["data"]["n"] >= 50)
    assert len(read_log(tmp_path / "out", "dead")) == len(junk)


@pytest.mark.slow
def test_batch_and_stream_from_s3(tmp_path):
    """Driver and executors have credentials in their environment and see no log directory."""
    with started_s3(tmp_path) as endpoint:
        urllib.request.urlopen(
            urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=10
        ).close()
        environment = os.environ | s3_environment(endpoint)
        fill(tmp_path / "log", 1200)
        expected = [
            [offset, topic.decode(), bytes(value).decode()]
            for topic, _, value, offset, _ in read_log(tmp_path / "log")
        ]
        subprocess.run(
            [sys.executable, "-m", "virta", "log", "ship", tmp_path / "log", "s3://bucket/orders"],
            env=environment,
            check=True,
        )
        os.rename(tmp_path / "log", tmp_path / "moved")
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, "s3://bucket/orders", tmp_path / "c", tmp_path / "out"],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert result, done.stderr[-3000:]
    found = json.loads(result[0].removeprefix("RESULT "))
    assert found["batch"] == expected
    assert found["stream"] == [offset for offset, *_ in expected]
    assert found["partitions"] > 2
