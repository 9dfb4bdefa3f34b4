"""`virta lake`: sealed segments of a log as Parquet files that any engine reads."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from virta.cli.pipeline import ended, spark_options, start_spark
from virta.errors import VirtaError


@click.group()
def lake() -> None:
    """Keep a log's history as Parquet."""


@lake.command()
@click.argument("log", type=click.Path(exists=True, file_okay=False))
@click.argument("directory", type=click.Path(file_okay=False))
@click.option(
    "--on-gap",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="What to do when the log has lost offsets the lake does not have.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@spark_options
def compact(log: str, directory: str, *, on_gap: str, as_json: bool, **spark: Any) -> None:
    """Write the sealed segments of LOG that are not in DIRECTORY yet."""
    from virta.spark.lake import LakeReport, pending
    from virta.spark.lake import compact as compact_lake

    try:
        _, start, stop = pending(log, directory, on_gap=on_gap)
    except VirtaError as error:
        click.echo(error.message, err=True)
        sys.exit(1)
    if stop <= start:
        report = LakeReport(start, start, 0, 0)
    else:
        session = start_spark("virta-lake", **spark)
        with ended(session):
            report = compact_lake(log, directory, spark=session, on_gap=on_gap)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    elif report.records or report.next > report.first:
        click.echo(
            f"offsets {report.first} to {report.next}: {report.records} records,"
            f" {report.bytes} bytes of Parquet"
        )
    else:
        click.echo("nothing to do: every sealed segment is in the lake")
