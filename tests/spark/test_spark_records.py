"""Spark's answers about odd records are those of the server and the embedded matcher."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

import virta
import virta.spark
from odd_records import FILTERS, ODD
from virta.event import filter_view
from virta.filters import parse
from virta.match.events import parse_event


def test_where_and_match_see_what_others_see(spark, tmp_path):
    """As Columns and in the matcher: of every event what `filter_view` gives, of other records nothing."""
    path = str(tmp_path / "log")
    with virta.open(path) as log:
        log.append_many([("odd", "", value) for value, _ in ODD])
        records = list(log.read())
    df = spark.read.format("virta").option("events", "true").load(path)
    wanted = {
        f"{dialect} {text}": {
            record.offset
            for record, (_, is_event) in zip(records, ODD, strict=True)
            if is_event and parse(text, dialect).matches(parse_event(filter_view(record, dialect)))
        }
        for dialect, text in FILTERS
    }

    invalid = df.where("invalid IS NOT NULL").select("offset").collect()
    named = {f"{dialect} {text}": parse(text, dialect) for dialect, text in FILTERS}
    pairs = virta.spark.match(df, named, keep=["offset"]).collect()
    # Of some only: each is a plan of its own.
    kept = [
        virta.spark.where(df, named[name]).select("offset", F.lit(name).alias("filter_id"))
        for name in list(named)[1::3]
    ]
    rows = reduce(type(df).union, kept).collect()

    assert {row.offset for row in invalid} == {
        record.offset for record, (_, is_event) in zip(records, ODD, strict=True) if not is_event
    }
    for name, offsets in wanted.items():
        assert {row.offset for row in pairs if row.filter_id == name} == offsets, name
    for name in list(named)[1::3]:
        assert {row.offset for row in rows if row.filter_id == name} == wanted[name], name
