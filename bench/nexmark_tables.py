"""The tables of NEXMark as each engine reads them: Virta's log and lake, JSON lines, Parquet; DuckDB on the same files."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

import virta
from virta.spark.lake import compact, read_lake

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

TIME = "date_time"
PADDING_BYTES = 1 << 20


def event_ddl(fields: str) -> str:
    """Return the schema of events with these columns: the time and a struct of the others."""
    names = [part.strip() for part in fields.split(",")]
    members = ", ".join(part.replace(" ", ": ", 1) for part in names if not part.startswith(TIME))
    time = "time timestamp, " if fields.startswith(TIME) else ""
    return f"{time}data struct<{members}>"


def flat(events: DataFrame, fields: str) -> DataFrame:
    """Return events as a table with these columns."""
    names = [part.split()[0] for part in fields.split(",")]
    return events.select(
        *[F.col("time" if n == TIME else f"data.{n}").alias(n) for n in names]
    )  # fmt: skip


def from_log(
    spark: SparkSession, path: str, *, stream: bool = False, **options: Any
) -> Callable[[str, str], DataFrame]:
    """Return a reader of the log; `options` are the source's."""

    def read(table: str, fields: str) -> DataFrame:
        reader = spark.readStream if stream else spark.read
        found = reader.format("virta").options(events="true", topics=table, **options)
        return flat(found.schema(event_ddl(fields)).load(path), fields)

    return read


def from_json(spark: SparkSession, directory: Path) -> Callable[[str, str], DataFrame]:
    def read(table: str, fields: str) -> DataFrame:
        found = spark.read.schema(event_ddl(fields)).json(str(directory / f"{table}.jsonl"))
        return flat(found, fields)

    return read


def from_parquet(spark: SparkSession, directory: Path) -> Callable[[str, str], DataFrame]:
    """Return a reader of plain Parquet tables with a column each, as `write_parquet` makes them."""

    def read(table: str, fields: str) -> DataFrame:
        names = [part.split()[0] for part in fields.split(",")]
        return spark.read.parquet(str(directory / f"{table}.parquet")).select(*names)

    return read


COLUMNS = {
    "person": "date_time timestamp, id bigint, name string, emailAddress string, creditCard string, city string,"
    " state string, extra string",
    "auction": "date_time timestamp, id bigint, itemName string, description string, initialBid bigint,"
    " reserve bigint, expires timestamp, seller bigint, category bigint, extra string",
    "bid": "date_time timestamp, auction bigint, bidder bigint, price bigint, channel string, url string,"
    " extra string",
}


def write_parquet(spark: SparkSession, directory: Path) -> None:
    """Write each table as Parquet (zstd) from the log."""
    read = from_log(spark, str(directory / "log"))
    for table, fields in COLUMNS.items():
        target = str(directory / f"{table}.parquet")
        read(table, fields).write.option("compression", "zstd").parquet(target)


def from_lake(spark: SparkSession, directory: Path) -> Callable[[str, str], DataFrame]:
    """Return a reader of the lake's typed tables, as `write_lake` makes them."""

    def read(table: str, fields: str) -> DataFrame:
        return flat(read_lake(directory / "lake", topic=table, spark=spark), fields)

    return read


def write_lake(directory: Path) -> None:
    """Compact a copy of the log, with its last segment sealed, to a lake in which each topic has its type."""
    copy = directory / "sealed"
    shutil.copytree(directory / "log", copy)
    with virta.open(copy, durability="none") as log:
        end = log.next_offset
        while not any(segment.sealed and segment.next >= end for segment in log.segments()):
            log.append("padding", "", bytes(PADDING_BYTES))
    types = {
        table: event_ddl(fields).partition("data ")[2] for table, fields in COLUMNS.items()
    }  # fmt: skip
    compact(str(copy), str(directory / "lake"), types=types)
    shutil.rmtree(copy)


class Duck:
    """DuckDB over the JSON lines, or over the Parquet files."""

    def __init__(self, directory: Path, *, parquet: bool = False, threads: int = 2) -> None:
        import duckdb  # noqa: PLC0415 - a development dependency

        self.directory, self.parquet = directory, parquet
        self.db = duckdb.connect(config={"threads": threads})

    def define(self, tables: dict[str, str]) -> None:
        """Make views with the columns of a query."""
        for table, fields in tables.items():
            self.db.execute(f"CREATE OR REPLACE VIEW {table} AS {self.source(table, fields)}")

    def source(self, table: str, fields: str) -> str:
        names = [part.split()[0] for part in fields.split(",")]
        if self.parquet:
            found = ", ".join(
                f"{n}::TIMESTAMP AS {n}" if n in {TIME, "expires"} else n for n in names
            )
            return f"SELECT {found} FROM '{self.directory}/{table}.parquet/*.parquet'"
        inner = [part.split() for part in fields.split(",") if not part.strip().startswith(TIME)]
        members = ", ".join(f"{name} {DUCK_TYPES[kind]}" for name, kind in inner)
        columns = {"time": "TIMESTAMP"} if TIME in names else {}
        columns["data"] = f"STRUCT({members})"
        found = ", ".join("time AS date_time" if n == TIME else f"data.{n} AS {n}" for n in names)
        return (
            f"SELECT {found} FROM read_json('{self.directory}/{table}.jsonl',"
            f" format='newline_delimited', columns={columns})"
        )

    def rows(self, sql: str) -> pa.Table:
        return self.db.sql(sql).to_arrow_table()

    def drain(self, sql: str) -> None:
        """Run a query and throw its rows away, batch by batch."""
        for _ in self.db.sql(sql).to_arrow_reader():
            pass

    def checksum(self, sql: str, names: list[str] | None = None) -> tuple[list[str], int, int]:
        """Return the columns, the number of rows, and a sum of the rows' hashes, which their order does not change."""
        kinds = {name: kind for name, kind, *_ in self.db.execute(f"DESCRIBE {sql}").fetchall()}
        names = names or list(kinds)
        values = ", ".join(comparable(name, kinds[name]) for name in names)
        query = f"SELECT count(*), coalesce(sum(hash({values})::HUGEINT), 0) FROM ({sql})"
        count, total = self.db.execute(query).fetchone()
        return names, count, total


def comparable(name: str, kind: str) -> str:
    """Return SQL for a column of which each engine has a type of its own."""
    if kind.startswith("TIMESTAMP"):
        return f"epoch_us({name})"
    if kind.startswith(("DECIMAL", "FLOAT", "DOUBLE")):
        return f"{name}::DOUBLE"
    return f"{name}::BIGINT" if kind.endswith("INT") or kind == "INTEGER" else name


DUCK_TYPES = {"bigint": "BIGINT", "string": "VARCHAR", "timestamp": "TIMESTAMP"}


def same_rows(left: pa.Table, right: pa.Table) -> tuple[int, int]:
    """Return how many rows are in only one of two tables, and how many there are in both; times as microseconds."""
    import duckdb  # noqa: PLC0415

    db = duckdb.connect()
    db.register("a", plain(left))
    db.register("b", plain(right.select(left.column_names)))
    (rest,) = db.execute(
        "SELECT count(*) FROM ((FROM a EXCEPT ALL FROM b) UNION ALL (FROM b EXCEPT ALL FROM a))"
    ).fetchone()
    return rest, left.num_rows


def plain(table: pa.Table) -> pa.Table:
    columns = [
        column.cast(pa.timestamp("us")).cast(pa.int64())
        if pa.types.is_timestamp(column.type)
        else column.cast(pa.float64())
        if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)
        else column
        for column in table.columns
    ]
    return pa.table(dict(zip(table.column_names, columns, strict=True)))
