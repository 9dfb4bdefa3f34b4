"""The position of a stream as a named consumer of the log; without a JVM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StructType

import virta
from virta.errors import ConsumerError, LogNotFoundError
from virta.log.consumers.positions import position_of
from virta.spark.positions import PositionError, StreamPosition
from virta.spark.schemas import RECORD
from virta.spark.source.options import OptionError, read_options
from virta.spark.source.source import LogStreamReader, UnlimitedStreamReader, VirtaSource
from virta.spark.versions import HAS_READ_LIMITS, ReadAllAvailable


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log") as opened:
        opened.append_many([(("a", "b")[n % 2], "", b"v") for n in range(10)])
    return str(tmp_path / "log")


def consumers(path):
    with virta.open(path, read_only=True) as opened:
        return {c.name: (c.position, c.lag) for c in opened.consumers()}


def test_a_position_moves_both_ways_and_stays(log):
    """Lag counts the stream's topics; a new checkpoint may begin again at the start."""
    position = StreamPosition(log, "s", [b"a"])
    assert position_of(Path(log), "s") is None
    position.move(4)
    assert consumers(log) == {"s": (4, 3)}
    position.move(10)
    position.close()
    assert (consumers(log), position_of(Path(log), "s")) == ({"s": (10, 0)}, 10)

    again = StreamPosition(log, "s", None)
    again.move(2)
    again.close()
    assert consumers(log) == {"s": (2, 8)}


def test_a_killed_stream_leaves_its_position_to_the_next(log):
    """The process that held it is gone; another one moves it at once."""
    script = (
        "import os, signal, sys\nfrom virta.spark.positions import StreamPosition\n"
        "StreamPosition(sys.argv[1], 's', None).move(3)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, log], check=False, timeout=60)
    assert position_of(Path(log), "s") == 3

    position = StreamPosition(log, "s", None)
    position.move(7)
    position.close()

    assert consumers(log) == {"s": (7, 3)}


def test_what_cannot_be_stored_is_refused(log, tmp_path):
    """Object storage, a wrong name, a missing log, and a bounded read, which has no position."""
    with pytest.raises(PositionError, match="a log in object storage"):
        StreamPosition("s3://bucket/log", "s", None)
    with pytest.raises(ConsumerError, match="a consumer's name is"):
        StreamPosition(log, "no name", None)
    with pytest.raises(LogNotFoundError):
        StreamPosition(str(tmp_path / "none"), "s", None).move(0)
    with pytest.raises(OptionError, match="option consumer is 's': only a stream has a position"):
        VirtaSource({"path": log, "consumer": "s"}).reader(StructType(RECORD.fields))


def test_the_reader_of_spark_4_1_stores_it_too(log):
    """Spark 4.1 asks for the end without the start, after the commit of the micro-batch it has planned."""
    options = read_options({"path": log, "consumer": "s"})
    reader = UnlimitedStreamReader(options, StructType(RECORD.fields))
    reader.partitions(reader.initialOffset(), reader.latestOffset())
    assert consumers(log) == {"s": (0, 10)}

    reader.latestOffset()
    reader.stop()

    assert consumers(log) == {"s": (10, 0)}


@pytest.mark.skipif(not HAS_READ_LIMITS, reason="Spark 4.1 asks for the end without the start")
def test_the_reader_stores_what_spark_has_committed(log):
    """A micro-batch begins where the one before was committed; asking for more does not move the position."""
    reader = VirtaSource({"path": log, "consumer": "s"}).streamReader(StructType(RECORD.fields))
    assert isinstance(reader, LogStreamReader)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    reader.partitions(start, end)
    assert consumers(log) == {"s": (0, 10)}

    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert consumers(log) == {"s": (10, 0)}
    reader.partitions(start, end)  # a micro-batch again, after a crash
    reader.commit(end)
    reader.stop()

    assert consumers(log) == {"s": (10, 0)}
