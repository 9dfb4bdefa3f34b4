"""
NEXMark q0 to q8 on Spark, and in DuckDB's SQL as an independent computation.

A query is one function of its tables, for batch and stream. q4 and q6 aggregate twice, which one Spark stream cannot:
there the first part writes a topic of the log (`finals`), the second reads it and keeps a keyed channel current, whose
rows (`virta.spark.view`) are the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from nexmark import AUCTION_MS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    Read = Callable[[str, str], DataFrame]  # table and columns -> rows

LATE = "2 seconds"
RATE_Q1 = 0.908
# Columns of each table that a query needs; date_time is the event's time, all others are members of its data.
BID_FIELDS = "auction bigint, bidder bigint, price bigint"
FIELDS = {
    "q0": {"bid": f"date_time timestamp, {BID_FIELDS}, extra string"},
    "q1": {"bid": f"date_time timestamp, {BID_FIELDS}"},
    "q2": {"bid": "auction bigint, price bigint"},
    "q3": {
        "person": "id bigint, name string, city string, state string",
        "auction": "id bigint, seller bigint, category bigint",
    },
    "q4": {
        "auction": "date_time timestamp, id bigint, seller bigint, category bigint, expires timestamp",
        "bid": "date_time timestamp, auction bigint, price bigint",
    },
    "q5": {"bid": "date_time timestamp, auction bigint"},
    "q7": {"bid": f"date_time timestamp, {BID_FIELDS}"},
    "q8": {
        "person": "date_time timestamp, id bigint, name string",
        "auction": "date_time timestamp, seller bigint",
    },
}
FIELDS["q6"] = FIELDS["q4"]
QUERIES = tuple(f"q{n}" for n in range(9))
TWO_PARTS = {"q4": "category", "q6": "seller"}  # query -> key of its channel
FINAL = "id bigint, seller bigint, category bigint, expires timestamp, price bigint"


def run(name: str, read: Read) -> DataFrame:
    """Return the rows of a query; `read` gives its tables."""
    tables = {table: read(table, fields) for table, fields in FIELDS[name].items()}
    if name in TWO_PARTS:
        return SECOND[name](final_prices(**tables))
    return FIRST[name](**tables)


def q0(bid: DataFrame) -> DataFrame:
    return bid.select("auction", "bidder", "price", "date_time", "extra")


def q1(bid: DataFrame) -> DataFrame:
    euros = (F.col("price") * F.lit(RATE_Q1)).alias("price")
    return bid.select("auction", "bidder", euros, "date_time")


def q2(bid: DataFrame) -> DataFrame:
    return bid.where("auction % 123 = 0").select("auction", "price")


def q3(person: DataFrame, auction: DataFrame) -> DataFrame:
    near = person.where("state IN ('OR', 'ID', 'CA')").withColumnRenamed("id", "person")
    offers = auction.where("category = 10").select("id", "seller")
    return near.join(offers, F.col("seller") == F.col("person"), "inner").select(
        "name", "city", "state", "id"
    )


def final_prices(auction: DataFrame, bid: DataFrame) -> DataFrame:
    """Return the highest bid of each auction that was made while it was open."""
    offers = auction.withWatermark("date_time", LATE).withColumnRenamed("date_time", "opened")
    bids = bid.withWatermark("date_time", LATE)
    made = (
        (F.col("auction") == F.col("id"))
        & F.col("date_time").between(F.col("opened"), F.col("expires"))
        # Spark can forget an auction only by a fixed interval; none is open for longer.
        & (
            F.col("date_time")
            <= F.col("opened") + F.expr(f"INTERVAL {AUCTION_MS_MAX} MILLISECONDS")
        )
    )
    joined = offers.join(bids, made, "inner")
    return (
        joined.groupBy("opened", "id", "seller", "category", "expires")
        .agg(F.max("price").alias("price"))
        .select("id", "seller", "category", "expires", "price")
    )


def q4(finals: DataFrame) -> DataFrame:
    return finals.groupBy("category").agg(F.avg("price").alias("average"))


def q5(bid: DataFrame) -> DataFrame:
    windows = F.window("date_time", "10 seconds", "2 seconds").alias("window")
    counts = bid.withWatermark("date_time", LATE).groupBy(windows, "auction").count()
    hot = counts.groupBy("window").agg(
        F.max("count").alias("most"), F.collect_list(F.struct("auction", "count")).alias("all")
    )
    winners = F.explode(F.filter("all", lambda one: one["count"] == F.col("most"))).alias("hot")
    return hot.select(F.col("window.start").alias("start"), winners).select(
        "start", "hot.auction", "hot.count"
    )


def q6(finals: DataFrame) -> DataFrame:
    sold = F.sort_array(F.collect_list(F.struct("expires", "id", "price")), asc=False)
    last = finals.groupBy("seller").agg(F.slice(sold, 1, 10).alias("last"))
    total = F.aggregate("last", F.lit(0).cast("bigint"), lambda sum_, one: sum_ + one["price"])
    return last.select("seller", (total / F.size("last")).alias("average"))


def q7(bid: DataFrame) -> DataFrame:
    """Return the highest bid of each ten seconds; of equal ones the earliest, as Beam's does."""
    order = F.struct(
        "price", -F.unix_micros("date_time"), -F.col("auction"), -F.col("bidder")
    )  # fmt: skip
    row = F.struct("auction", "bidder", "price", "date_time")
    windows = F.window("date_time", "10 seconds").alias("window")
    best = bid.withWatermark("date_time", LATE).groupBy(windows)
    return best.agg(F.max_by(row, order).alias("best")).select("best.*")


def q8(person: DataFrame, auction: DataFrame) -> DataFrame:
    joined = person.withWatermark("date_time", LATE).select(
        "id", "name", F.window("date_time", "10 seconds").alias("window")
    )
    offers = auction.withWatermark("date_time", LATE).select(
        "seller", F.window("date_time", "10 seconds").alias("offered")
    )
    found = joined.join(
        offers, (F.col("seller") == F.col("id")) & (F.col("offered") == F.col("window")), "inner"
    )
    return (
        found.dropDuplicates(["id", "name", "window"])
        .select("id", "name", F.col("window.start").alias("start"))
    )  # fmt: skip


FIRST = {"q0": q0, "q1": q1, "q2": q2, "q3": q3, "q5": q5, "q7": q7, "q8": q8}
SECOND = {"q4": q4, "q6": q6}

# The same in DuckDB: tables person, auction and bid with the columns of FIELDS.
_FINALS = """
    SELECT a.id, a.seller, a.category, a.expires, max(b.price) AS price FROM auction a JOIN bid b
    ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires GROUP BY ALL
"""
DUCKDB = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bid",
    "q1": f"SELECT auction, bidder, price * {RATE_Q1}::DOUBLE AS price, date_time FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE auction % 123 = 0",
    "q3": """SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON a.seller = p.id
             WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')""",
    "q4": f"SELECT category, avg(price) AS average FROM ({_FINALS}) GROUP BY category",
    "q5": """WITH windows AS (SELECT auction, unnest(range(0, 5)) AS n, date_time FROM bid),
             counts AS (SELECT time_bucket(INTERVAL 2 SECONDS, date_time) - n * INTERVAL 2 SECONDS AS start,
                        auction, count(*) AS count FROM windows GROUP BY ALL)
             SELECT start, auction, count FROM counts
             QUALIFY count = max(count) OVER (PARTITION BY start)""",
    "q6": f"""SELECT seller, avg(price) AS average FROM (
             SELECT seller, price FROM ({_FINALS})
             QUALIFY row_number() OVER (PARTITION BY seller ORDER BY expires DESC, id DESC) <= 10
             ) GROUP BY seller""",
    "q7": """SELECT auction, bidder, price, date_time FROM bid
             QUALIFY row_number() OVER (PARTITION BY time_bucket(INTERVAL 10 SECONDS, date_time)
             ORDER BY price DESC, date_time, auction, bidder) = 1""",
    "q8": """SELECT DISTINCT p.id, p.name, time_bucket(INTERVAL 10 SECONDS, p.date_time) AS start
             FROM person p JOIN auction a ON a.seller = p.id
             AND time_bucket(INTERVAL 10 SECONDS, p.date_time) = time_bucket(INTERVAL 10 SECONDS, a.date_time)""",
}
