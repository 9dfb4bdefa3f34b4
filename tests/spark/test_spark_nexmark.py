"""
NEXMark q0 to q8 on a Virta log, on its lake and as streams, against DuckDB on the same million events.

With the plain engines, which take ten times as long to decode an event, it is a tenth of them. VIRTA_NEXMARK_EVENTS
chooses another number; `make bench-nexmark` has ten million.
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
from virta.native import PLAIN

pytest.importorskip("pyspark")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from nexmark import CYCLE, FIRST_ID, Generator, last_events, write
from nexmark_queries import DUCKDB, FIELDS, QUERIES, run
from nexmark_streams import Streams
from nexmark_tables import Duck, from_lake, from_log, same_rows, write_lake

EVENTS = int(os.environ.get("VIRTA_NEXMARK_EVENTS", "100000" if PLAIN else "1000000"))
MICRO_BATCHES = 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A log, its lake, and at the end of the log what ends the streams; removed early, as they are gigabytes."""
    directory = tmp_path_factory.mktemp("nexmark")
    write(directory, EVENTS)
    write_lake(directory)
    with virta.open(directory / "log") as log:
        log.append_many(list(last_events(EVENTS)))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def streams(spark, data):
    limit = EVENTS // MICRO_BATCHES + 1
    return Streams(spark, str(data / "log"), data, maxRecordsPerTrigger=limit)


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
def test_a_query_equals_duckdb(spark, data, streams, name):
    """
    Its rows over the log, over the lake's typed tables, and as a stream of several micro-batches that writes them to a
    log exactly once, are those that DuckDB computes from the same events as JSON lines.
    """
    duck = Duck(data)
    duck.define(FIELDS[name])
    wanted = duck.rows(DUCKDB[name])
    assert wanted.num_rows

    for place, rows in {
        "log": lambda: run(name, from_log(spark, str(data / "log"), end=EVENTS)),
        "lake": lambda: run(name, from_lake(spark, data)),
        "stream": lambda: streams.run(name),
    }.items():
        rest, _ = same_rows(wanted, rows().toArrow())
        assert (place, rest) == (place, 0)
