"""`virta lake`: sealed segments of a log as Parquet, Delta or Iceberg tables that any engine reads."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from virta.cli.report import json_option
from virta.cli.units import SIZE
from virta.errors import VirtaError


@click.group()
def lake() -> None:
    """Keep a log's history as tables."""


@lake.command()
@click.argument("log", type=click.Path(exists=True, file_okay=False))
@click.argument("directory", type=click.Path(file_okay=False))
@click.option(
    "--format",
    "form",
    type=click.Choice(["parquet", "delta", "iceberg"]),
    help="What a new lake consists of; parquet by default.",
)
@click.option(
    "--schema",
    "schemas",
    metavar="TOPIC=TYPE",
    multiple=True,
    help="The type of a topic's data, such as 'orders=id BIGINT, total DOUBLE'; may be repeated.",
)
@click.option(
    "--infer",
    metavar="TOPIC",
    multiple=True,
    help="Find the type of a topic's data in its newest events, unless it has one; may be repeated.",
)
@click.option("--file-bytes", type=SIZE, default="128MiB", show_default=True, help="A file's size.")
@click.option(
    "--on-gap",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="What to do when the log has lost offsets the lake does not have.",
)
@json_option
def compact(
    log: str,
    directory: str,
    *,
    form: str | None,
    schemas: tuple[str, ...],
    infer: tuple[str, ...],
    file_bytes: int,
    on_gap: str,
    as_json: bool,
) -> None:
    """Write the sealed segments of LOG that are not in DIRECTORY yet."""
    from virta.spark.lake.compaction import compact as compact_lake
    from virta.spark.lake.directory import Lake
    from virta.spark.lake.inference import infer_schema

    types: dict[str, Any] = dict(topic_type(text) for text in schemas)
    try:
        known = Lake.load(directory)
        for topic in infer:
            if topic not in types and (known is None or topic not in known.types):
                types[topic] = infer_schema(log, topic)
        report = compact_lake(
            log, directory, format=form, types=types, on_gap=on_gap, file_bytes_max=file_bytes
        )
    except VirtaError as error:
        click.echo(error.message, err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    elif report.next > report.first:
        click.echo(
            f"offsets {report.first} to {report.next}: {report.records} records,"
            f" {report.bytes} bytes in {report.files} files"
        )
    else:
        click.echo("nothing to do: every sealed segment is in the lake")


def topic_type(text: str) -> tuple[str, str]:
    topic, separator, kind = text.partition("=")
    if not separator or not kind.strip():
        raise click.BadParameter(
            f"{text!r}: expected TOPIC=TYPE, such as 'orders=id BIGINT, total DOUBLE'",
            param_hint="--schema",
        )
    return topic, kind
