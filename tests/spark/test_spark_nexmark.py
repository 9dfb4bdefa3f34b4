"""
NEXMark q0 to q8 on a Virta log and its lake, and as streams, against DuckDB on the same events.

Bounded queries run on a million events; streams, which write every row to a log and take ten times as long, on 50,000.
VIRTA_NEXMARK_EVENTS and VIRTA_NEXMARK_STREAM_EVENTS choose others; `make bench-nexmark` has ten million.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

import virta

pytest.importorskip("pyspark")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from nexmark import CYCLE, FIRST_ID, Generator, last_events, write
from nexmark_queries import DUCKDB, FIELDS, QUERIES, run
from nexmark_streams import Streams
from nexmark_tables import Duck, from_lake, from_log, same_rows, write_lake

EVENTS = int(os.environ.get("VIRTA_NEXMARK_EVENTS", "1000000"))
STREAM_EVENTS = int(os.environ.get("VIRTA_NEXMARK_STREAM_EVENTS", "50000"))
MICRO_BATCHES = 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A log and its lake; removed early, as they are two gigabytes."""
    directory = tmp_path_factory.mktemp("nexmark")
    write(directory, EVENTS)
    write_lake(directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def streams(spark, tmp_path_factory):
    directory = tmp_path_factory.mktemp("streams")
    write(directory, STREAM_EVENTS)
    with virta.open(directory / "log") as log:
        log.append_many(list(last_events(STREAM_EVENTS)))
    limit = STREAM_EVENTS // MICRO_BATCHES + 1
    return Streams(spark, str(directory / "log"), directory, maxRecordsPerTrigger=limit)


def expected(directory, name):
    """Return the rows of a query as DuckDB computes them from the JSON lines."""
    duck = Duck(directory)
    duck.define(FIELDS[name])
    return duck.rows(DUCKDB[name])


def test_the_proportions_are_nexmarks():
    """Of 50 events one is a person, three are auctions, 46 are bids; a seed gives the same events."""
    records = list(Generator(7).records(10_000))

    topics = Counter(topic for topic, _, _ in records)
    events = [json.loads(value) for _, _, value in records]
    bids = Counter(e["data"]["auction"] for e in events if e["type"] == "nexmark.bid")
    assert topics == {"person": 200, "auction": 600, "bid": 9200}
    assert records == list(Generator(7).records(10_000))
    assert records != list(Generator(8).records(10_000))
    assert 340 < sum(len(value) for _, _, value in records) / len(records) < 400
    # Every second bid is for the hottest auction of its time: one id of a hundred.
    hot = sum(count for auction, count in bids.items() if (auction - FIRST_ID) % 100 == 0)
    assert 0.45 < hot / topics["bid"] < 0.55
    assert [e["id"] for e in events] == [str(n) for n in range(10_000)]
    assert events[CYCLE]["data"]["id"] == FIRST_ID + 1


@pytest.mark.parametrize("name", QUERIES)
def test_a_batch_query_equals_duckdb(spark, data, name):
    """The rows of a query over the log are those that DuckDB computes from the same events as JSON lines."""
    rows = run(name, from_log(spark, str(data / "log"))).toArrow()

    rest, count = same_rows(expected(data, name), rows)
    assert rest == 0
    assert count > 0


@pytest.mark.parametrize("name", ["q2", "q3", "q7"])
def test_a_query_on_the_lake_equals_duckdb(spark, data, name):
    """So are those over the lake's typed tables; the bench compares all queries."""
    rest, count = same_rows(expected(data, name), run(name, from_lake(spark, data)).toArrow())

    assert rest == 0
    assert count > 0


@pytest.mark.parametrize("name", QUERIES)
def test_a_stream_equals_duckdb(streams, name):
    """The same query as a stream of several micro-batches, its rows written to a log exactly once."""
    found = streams.run(name).toArrow()

    if name in {"q0", "q1", "q2"}:  # these have the event that ends the stream, too
        found = found.filter([auction >= 0 for auction in found["auction"].to_pylist()])
    rest, count = same_rows(expected(streams.directory, name), found)
    assert rest == 0
    assert count > 0
