"""
Write rows to a database table, through Spark's JDBC.

With `keys`, a micro-batch is written to a staging table of the sink, and one transaction replaces the rows with the
same keys: a repeated micro-batch changes nothing, and readers see all of it or none. In mode complete the table
is truncated and filled again. Otherwise rows are appended, at least once.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from virta.errors import VirtaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame

    from virta.spark.pipeline.model import Sink

STAGING = "_virta_"  # between the table's name and the sink's number in the name of a staging table


class JdbcError(VirtaError):
    """Rows that do not fit their table."""

    default_code = "jdbc_invalid"


def staging_table(table: str, owner: str) -> str:
    return f"{table}{STAGING}{hashlib.sha256(owner.encode()).hexdigest()[:8]}"


def write_jdbc(rows: DataFrame, sink: Sink, mode: str, owner: str = "") -> None:
    """
    Append, replace by keys, or (mode complete) replace all.

    `owner` is unique to the sink: several may write to one table, each by a staging table of its own.
    """
    assert sink.url is not None
    assert sink.table is not None
    options = dict(sink.options)
    if sink.keys:
        staging = staging_table(sink.table, owner)
        replace_by_keys(rows, sink.url, (sink.table, staging), sink.keys, options)
    elif mode == "complete":
        rows.write.option("truncate", value=True).jdbc(
            sink.url, sink.table, mode="overwrite", properties=options
        )
    else:
        rows.write.jdbc(sink.url, sink.table, mode="append", properties=options)


def replace_by_keys(
    rows: DataFrame,
    url: str,
    tables: tuple[str, str],
    keys: tuple[str, ...],
    options: dict[str, str],
) -> None:
    table, staging = tables
    missing = [key for key in keys if key not in rows.columns]
    if missing:
        raise JdbcError(f"the key {missing[0]!r} is no column: there are {', '.join(rows.columns)}")
    # Creates the table if it is missing; the empty write is cheap if it exists.
    rows.limit(0).write.jdbc(url, table, mode="append", properties=options)
    rows.write.jdbc(url, staging, mode="overwrite", properties=options)
    with connected(rows, url, table, options) as (connection, quote):
        same = " AND ".join(same_value(f"{table}.{quote(key)}", f"s.{quote(key)}") for key in keys)
        names = ", ".join(quote(name) for name in rows.columns)
        # Table names are SQL of the pipeline's author, as everywhere in Spark's JDBC.
        staged = f"SELECT 1 FROM {staging} s WHERE {same}"  # noqa: S608
        run(connection, f"DELETE FROM {table} WHERE EXISTS ({staged})")  # noqa: S608
        run(connection, f"INSERT INTO {table} ({names}) SELECT {names} FROM {staging}")  # noqa: S608
        connection.commit()
        run(connection, f"DROP TABLE {staging}")
        connection.commit()


def same_value(left: str, right: str) -> str:
    return f"({left} = {right} OR ({left} IS NULL AND {right} IS NULL))"


@contextmanager
def connected(
    rows: DataFrame, url: str, table: str, options: dict[str, str]
) -> Iterator[tuple[Any, Callable[[str], str]]]:
    """Yield a connection like Spark's own, without automatic commits, and a function that quotes names."""
    spark = rows.sparkSession
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - no Python API for connections
    jdbc = jvm.org.apache.spark.sql.execution.datasources.jdbc
    java_options = jvm.java.util.HashMap()
    for name, value in options.items():
        java_options.put(name, value)
    parameters = jvm.PythonUtils.toScalaMap(java_options)
    dialect = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url)
    factory = dialect.createConnectionFactory(jdbc.JDBCOptions(url, table, parameters))
    connection = factory.apply(-1)
    try:
        connection.setAutoCommit(False)
        yield connection, dialect.quoteIdentifier
    except BaseException:
        connection.rollback()
        raise
    finally:
        connection.close()


def run(connection: Any, statement: str) -> None:
    prepared = connection.createStatement()
    try:
        prepared.executeUpdate(statement)
    finally:
        prepared.close()
