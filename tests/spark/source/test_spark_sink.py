"""The log as a Spark sink: what lands, what is refused, and that a repeated batch lands once."""

from __future__ import annotations

import itertools
import json
import random

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType
from spark_logs import fill, read_log

import virta
from virta.spark.source import sink, staging
from virta.spark.source.sink import LogStreamWriter, SinkError, batch_records, chunks, producer_id

pytestmark = pytest.mark.slow

KINDS = {"string": StringType(), "binary": BinaryType(), "int": IntegerType()}


def schema(ddl):
    """A schema without a session: `StructType.fromDDL` asks the JVM."""
    pairs = [column.split() for column in ddl.split(", ")]
    return StructType([StructField(name, KINDS[kind]) for name, kind in pairs])


RECORD = schema("topic string, key binary, value binary")


def batch(*rows):
    topics, keys, values = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(topics, pa.string()), pa.array(keys, pa.binary()), pa.array(values, pa.binary())],
        names=["topic", "key", "value"],
    )


def test_batch_write_appends_all_rows(spark, tmp_path):
    """A DataFrame of records lands whole, keys and values as they are."""
    path = str(tmp_path / "log")
    rows = [(f"t{i % 3}", f"k{i}", json.dumps({"i": i})) for i in range(500)]

    spark.createDataFrame(rows, "topic string, key string, value string").write.format(
        "virta"
    ).mode("append").save(path)

    found = sorted((str(r.topic), bytes(r.key).decode(), r.value.decode()) for r in read_log(path))
    assert found == sorted(rows)


def test_batch_write_is_idempotent_with_an_id(spark, tmp_path):
    """The same queryId and sequence append once, the next sequence appends again."""
    path = str(tmp_path / "log")
    df = spark.createDataFrame([("a",), ("b",)], "value string")

    for sequence in ("0", "0", "1", "0"):
        df.write.format("virta").mode("append").option("topic", "t").option(
            "queryId", "job-7"
        ).option("sequence", sequence).save(path)

    assert [r.value for r in read_log(path)].count(b"a") == 2


@pytest.mark.parametrize(
    ("ddl", "options", "message"),
    [
        ("n int", {"topic": "t"}, "there is no column 'value'"),
        ("value string", {}, "no topic"),
        ("value string, colour string", {"topic": "t"}, "column 'colour' has no place"),
        ("value int", {"topic": "t"}, "column 'value' is int"),
        ("value string", {"topic": "t", "durability": "maybe"}, "option durability is 'maybe'"),
        ("value string", {"topic": "t", "queryId": "q"}, "belong together"),
    ],
)
def test_wrong_rows_and_options_are_refused(ddl, options, message, tmp_path):
    """What cannot be a record is refused before a task starts, with the reason."""
    with pytest.raises(Exception, match=message):
        LogStreamWriter({"path": str(tmp_path), **options}, schema(ddl), overwrite=False)


def test_overwriting_is_refused():
    """A log is appended to."""
    with pytest.raises(Exception, match="only appended to"):
        LogStreamWriter({"path": "x"}, RECORD, overwrite=True)


def test_commit_again_appends_nothing(tmp_path):
    """A commit that is repeated after a crash finds its sequence in the log: no row twice, none lost."""
    path = str(tmp_path / "log")
    writer = LogStreamWriter(
        {"path": path, "queryId": "q", "sequence": "0"}, RECORD, overwrite=False
    )
    messages = [writer.write(iter([batch(("t", b"k", str(i).encode()))])) for i in range(3)]
    for message, place in zip(messages, (2, 0, 1), strict=True):
        message.partition = place

    for number in (0, 0, 1, 0, 1):
        writer.commit(messages, number)

    # Rows come in the order of partitions, whatever the order of messages.
    assert [r.value for r in read_log(path)] == [b"1", b"2", b"0"] * 2


def test_abort_after_a_commit_keeps_what_was_appended(tmp_path):
    """Spark aborts after a failed commit; the appended rows stay and the staging goes."""
    path = str(tmp_path / "log")
    writer = LogStreamWriter(
        {"path": path, "queryId": "q", "sequence": "0"}, RECORD, overwrite=False
    )
    large = writer.write(iter([batch(("t", b"", bytes(1 << 20)))]))
    assert large.path is not None

    writer.commit([large, None], 0)
    writer.abort([large, None], 0)

    assert len(read_log(path)) == 1
    assert list((tmp_path / "log" / staging.STAGING).iterdir()) == []


def test_large_batches_are_several_appends_each_once(tmp_path, monkeypatch):
    """A micro-batch over the log's largest batch is appended in parts; repeats find every part."""
    monkeypatch.setattr(sink, "APPEND_BYTES_MAX", 3000)
    path = str(tmp_path / "log")
    writer = LogStreamWriter(
        {"path": path, "queryId": "q", "sequence": "0"}, RECORD, overwrite=False
    )
    message = writer.write(iter([batch(*[("t", b"", bytes([i]) * 1000) for i in range(10)])]))

    writer.commit([message], 0)
    writer.commit([message], 0)

    assert [r.value[0] for r in read_log(path)] == list(range(10))
    rows = batch_records(batch(*[("t", b"", bytes(1000)) for _ in range(10)]), None)
    assert [len(part) for part in chunks([rows])] == [2, 2, 2, 2, 2]
    halves = [(rows[0][:3], rows[1][:3]), (rows[0][3:], rows[1][3:])]
    assert [len(part) for part in chunks(halves)] == [2, 2, 2, 2, 2]


def test_a_row_without_topic_is_refused(tmp_path):
    """A null topic without a default is an error, not a record somewhere."""
    writer = LogStreamWriter({"path": str(tmp_path / "log")}, RECORD, overwrite=False)
    message = writer.write(iter([batch((None, b"", b"x"))]))

    with pytest.raises(SinkError, match="a row has no topic"):
        writer.commit([message], 0)


def test_producers_are_distinct_and_allowed():
    """Ids differ by query and part and lie in the range the log takes."""
    ids = {producer_id(query, part) for query in ("a", "b") for part in range(3)}

    assert len(ids) == 6
    assert all(2 <= number < 1 << 64 for number in ids)


def test_stream_from_log_to_log_is_exact(spark, tmp_path):
    """A stream copies a log; run again, with and without new records, nothing is doubled or lost."""
    source, target = str(tmp_path / "in"), str(tmp_path / "out")
    events = fill(source, 400)

    def copy():
        query = (
            spark.readStream.format("virta")
            .option("maxRecordsPerTrigger", "150")
            .load(source)
            .select(F.lit("copy").alias("topic"), "key", "value")
            .writeStream.format("virta")
            .option("path", target)
            .option("checkpointLocation", str(tmp_path / "c"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    copy()
    copy()
    events += fill(source, 100, seed=9, first=400)
    copy()

    records = read_log(target)
    assert [json.loads(r.value)["id"] for r in records] == [e["id"] for e in events]
    assert {str(r.topic) for r in records} == {"copy"}


def test_a_lost_commit_file_repeats_the_batch_but_not_the_rows(spark, tmp_path):
    """Spark runs the last micro-batch again when its commit is lost; the log refuses the repeat."""
    source, target, checkpoint = str(tmp_path / "in"), str(tmp_path / "out"), tmp_path / "c"
    fill(source, 100)

    def copy():
        spark.readStream.format("virta").load(source).select(
            "topic", "key", "value"
        ).writeStream.format("virta").option("path", target).option(
            "checkpointLocation", str(checkpoint)
        ).trigger(availableNow=True).start().awaitTermination()

    copy()
    for name in ("0", ".0.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    copy()

    assert len(read_log(target)) == 100
    with virta.open(target, read_only=True) as log:
        assert log.next_offset == 100


def crash_after(parts, monkeypatch):
    """Let the log fail after some appends, as a driver that is killed between the parts of a micro-batch."""
    append, count = virta.Log.append_many, iter(range(parts))

    def fail(self, *args, **kwargs):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return append(self, *args, **kwargs)

    monkeypatch.setattr(virta.Log, "append_many", fail)


@pytest.mark.parametrize("parts", [0, 1, 3, 4])
def test_a_repeat_in_another_order_appends_the_rest(tmp_path, monkeypatch, parts):
    """Killed between its parts and run again with other partitions and order, each row is there once."""
    monkeypatch.setattr(sink, "APPEND_BYTES_MAX", 4_000)
    monkeypatch.setattr(sink, "MESSAGE_BYTES_MAX", 6_000)  # some rows in messages, some in files
    path = str(tmp_path / "log")
    rng = random.Random(parts)
    rows = [("t", b"", f"{i}".encode() * rng.randrange(1, 400)) for i in range(100)]
    writer = LogStreamWriter(
        {"path": path, "queryId": "q", "sequence": "0"}, RECORD, overwrite=False
    )

    def attempt():
        given = rng.sample(rows, len(rows))
        cuts = sorted(rng.sample(range(1, len(rows)), 3))
        pieces = [given[a:b] for a, b in itertools.pairwise([0, *cuts, len(rows)])]
        messages = [writer.write(iter([batch(*piece)])) for piece in pieces]
        for number, message in enumerate(messages):
            message.partition = number
        try:
            writer.commit(messages, 0)
        except KeyboardInterrupt:
            writer.abort(messages, 0)  # as Spark does when it still can
            raise

    with pytest.MonkeyPatch.context() as crash:
        crash_after(parts, crash)
        with pytest.raises(KeyboardInterrupt):
            attempt()
    attempt()
    attempt()  # the commit file was lost: all of it is there

    assert sorted(r.value for r in read_log(path)) == sorted(row[2] for row in rows)
    assert list((tmp_path / "log" / staging.STAGING).iterdir()) == []


def test_an_executor_without_the_log_fails(tmp_path):
    """Rows that need the log's directory fail where it is missing or another one; no empty log appears."""
    writer = LogStreamWriter({"path": str(tmp_path / "log")}, RECORD, overwrite=False)
    large = batch(("t", b"", bytes(1 << 20)))
    (tmp_path / "log").rename(tmp_path / "elsewhere")

    with pytest.raises(SinkError, match="this executor does not see the log"):
        writer.write(iter([large]))
    assert not (tmp_path / "log").exists()
    virta.open(tmp_path / "log").close()
    with pytest.raises(SinkError, match="this executor does not see the log"):
        writer.write(iter([large]))
