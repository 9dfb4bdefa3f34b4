"""
`virta pipeline`: check, run, list and watch pipelines; replay history through filters.

Exit codes: 0 done, 1 a run failed, 2 a file or an option is wrong. Only `run` and `replay` start Spark, after
everything else is checked. Options about Spark override the pipeline's `[spark]`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from virta.errors import FilterError, VirtaError
from virta.spark.pipeline.checks import is_moment
from virta.spark.pipeline.file import load, nameless
from virta.spark.pipeline.model import PipelineError
from virta.spark.pipeline.status import read_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from virta.filters import Filter
    from virta.spark.pipeline.model import Pipeline

ENVIRONMENT = ".virta-environment"
STARTED_NAME = "virta-pipeline"
EOF_SECONDS_MAX = 15.0  # how long a run may take to stop after the end of its input


class StopFlag:
    """Set by signals. Not an Event: a signal during another one's `set` would wait for its lock for ever."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


@click.group()
def pipeline() -> None:
    """Check, run and watch Spark pipelines over a log."""


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that start Spark."""
    for option in (
        click.option(
            "--archives", help="An environment for executors, made by `virta pipeline package`."
        ),
        click.option("--py-files", multiple=True, help="Python files or zips for executors."),
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A Spark setting."),
        click.option("--master", help="Where to run; local[*] by default."),
    ):
        command = option(command)
    return command


@pipeline.command()
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per file.")
def check(files: tuple[str, ...], *, as_json: bool) -> None:
    """Check pipeline files without starting Spark."""
    bad = 0
    for file in files:
        problems: list[str] = []
        try:
            load(file)
        except PipelineError as error:
            problems = error.problems
        bad += bool(problems)
        if as_json:
            click.echo(json.dumps({"file": file, "ok": not problems, "problems": problems}))
        else:
            click.echo("\n".join(problems) if problems else f"{file}: ok", err=bool(problems))
    sys.exit(2 if bad else 0)


@pipeline.command()
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print each status as one JSON line.")
@click.option("--until-eof", is_flag=True, help="Also stop when standard input ends.")
@spark_options
def run(file: str, *, as_json: bool, until_eof: bool, **spark: Any) -> None:
    """Run a pipeline until its input is used up, or until it is interrupted."""
    wanted = loaded(file)
    if wanted.source.log is not None:
        check_log(wanted.path(wanted.source.log))
    stopping = StopFlag()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    if until_eof:
        threading.Thread(target=watch_input, args=(stopping,), daemon=True).start()
    with claimed_run(wanted):
        run_claimed(wanted, spark, stopping, as_json=as_json)


def run_claimed(
    wanted: Pipeline, spark: dict[str, Any], stopping: StopFlag, *, as_json: bool
) -> None:
    from virta.spark.pipeline.status import write_starting

    write_starting(wanted)
    session = start_spark(f"{STARTED_NAME}-{wanted.name}", wanted, **spark)
    from virta.spark.pipeline.runner import run as run_pipeline

    with ended(session):
        run_pipeline(
            session,
            wanted,
            on_progress=lambda status: click.echo(shown(status, as_json=as_json)),
            stopping=stopping.is_set,
        )


@pipeline.command(name="list")
@click.argument("directory", default=".", type=click.Path(exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per pipeline.")
def list_(directory: str, *, as_json: bool) -> None:
    """List the pipeline files of a directory with their last state."""
    for file in sorted(Path(directory).glob("*.toml")):
        if nameless(file):
            continue
        try:
            found = load(file)
        except PipelineError as error:
            row = {"pipeline": None, "state": "invalid", "problems": error.problems}
        else:
            row = read_status(found)
        show_row({"file": str(file), **row}, as_json=as_json)


@pipeline.command()
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status(file: str, *, as_json: bool) -> None:
    """Show what a pipeline's last or present run has done: rows, rows/s, lag."""
    click.echo(shown(read_status(loaded(file)), as_json=as_json))


@pipeline.command()
@click.argument("log", type=click.Path(exists=True, file_okay=False))
@click.option("--from", "start", help="First time (ISO 8601) or offset.")
@click.option("--to", "end", help="Last time or offset, not included.")
@click.option("--topics", help="Only these topics, separated by commas.")
@click.option("--filter", "filters", multiple=True, help="A filter; several: one must hold.")
@click.option("--dialect", default="query-string", show_default=True, help="The filters' language.")
@click.option("--topic", help="Append the events found to this topic of the log.")
@click.option("--parquet", type=click.Path(), help="Write the events found to this directory.")
@spark_options
def replay(log: str, **options: Any) -> None:
    """Run history through filters; print the number found, or write them to a topic or Parquet."""
    spark_arguments = {
        name: options.pop(name) for name in ("master", "conf", "py_files", "archives")
    }
    if options["topic"] and options["parquet"]:
        fail("--topic and --parquet exclude each other: give one")
    filters = parsed(options["filters"], options["dialect"])
    reading = reading_options(options)
    check_log(log)
    session = start_spark("virta-replay", **spark_arguments)
    with ended(session):
        begun = time.monotonic()
        events = session.read.format("virta").options(**reading).load(log)
        if options["topic"] and not options["topics"]:
            # The results of earlier replays are not replayed.
            events = events.where(events.topic != options["topic"])
        count = write_replay(replayed(events, filters), log, options["topic"], options["parquet"])
        seconds = time.monotonic() - begun
        click.echo(json.dumps({"events": count, "seconds": round(seconds, 2)}))


@pipeline.command()
@click.argument("archive", type=click.Path(dir_okay=False))
def package(archive: str) -> None:
    """Pack what executors need into ARCHIVE: .tar.gz for --archives, .zip for --py-files."""
    from virta.spark.launch.package import write_package

    try:
        size = write_package(Path(archive))
    except VirtaError as error:
        fail(error.message)
    click.echo(f"{archive}: {size / 1e6:.0f} MB")


# Shared by the commands.


def fail(message: str, code: int = 2) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


def loaded(file: str) -> Pipeline:
    try:
        return load(file)
    except PipelineError as error:
        fail("\n".join(error.problems))


@contextmanager
def claimed_run(wanted: Pipeline) -> Iterator[None]:
    """Claim the pipeline for this run; exit with code 1 if another run has it."""
    from virta.spark.pipeline.status import BusyError, claimed

    try:
        with claimed(wanted):
            yield
    except BusyError as error:
        fail(error.message, 1)


def watch_input(stopping: StopFlag) -> None:
    """Stop the run when stdin ends, because its parent has ended; by force after EOF_SECONDS_MAX."""
    while os.read(sys.stdin.fileno(), 4096):
        continue
    stopping.set()
    time.sleep(EOF_SECONDS_MAX)
    os._exit(1)


def start_spark(
    app: str,
    wanted: Pipeline | None = None,
    *,
    master: str | None,
    conf: tuple[str, ...],
    py_files: tuple[str, ...],
    archives: str | None,
) -> SparkSession:
    settings: dict[str, Any] = {}
    if wanted is not None:
        own = wanted.spark
        settings |= own.conf
        master = master or own.master
        py_files = py_files or tuple(map(wanted.path, own.py_files))
        archives = archives or (own.archives and wanted.path(own.archives))
    for item in conf:
        name, sign, value = item.partition("=")
        if not sign:
            fail(f"--conf {item!r}: expected KEY=VALUE")
        settings[name] = value
    if py_files:
        settings["spark.submit.pyFiles"] = ",".join(py_files)
    if archives:
        # Unpacked in each executor's directory under the name after '#'.
        settings["spark.archives"] = f"{archives}#{ENVIRONMENT}"
    from virta.spark.launch.session import outlive_java, session, use_packed_python

    if archives:
        use_packed_python(ENVIRONMENT)
    try:
        started = session(app, master, **settings)
    except VirtaError as error:
        fail(error.message, 1)
    outlive_java(started)
    return started


@contextmanager
def ended(session: SparkSession) -> Iterator[None]:
    """Stop Spark at the end; print an error as one sentence and exit with code 1."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    from virta.spark.pipeline.errors import JVM_ERRORS, explain

    try:
        yield
    except (VirtaError, PySparkException, Py4JError) as error:
        fail(error.message if isinstance(error, VirtaError) else explain(error), 1)
    finally:
        with suppress(*JVM_ERRORS):
            session.stop()


def shown(status: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(status)
    lines = [f"{status['pipeline']}: {status['state']}"]
    if status.get("restarts"):
        lines[0] += f", {status['restarts']} restarts"
    if status.get("reason"):
        lines.append(f"  {status['reason']}")
    for name, query in status["queries"].items():
        lag = "?" if query["lag"] is None else query["lag"]
        lines.append(
            f"  {name}: {query['rows']} rows in {query['batches']} batches,"
            f" {query['rows_per_second']:.0f} rows/s, {query['late']} too late,"
            f" {query['dead']} dead, lag {lag}"
        )
    lines += [
        f"  {name}: {sink['batches']} batches in {sink['seconds']:.1f} s"
        for name, sink in status.get("sinks", {}).items()
    ]
    return "\n".join(lines)


def show_row(row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(row))
    else:
        click.echo(f"{row['state']:10} {row['pipeline'] or '-':20} {row['file']}")


def check_log(path: str) -> None:
    """Exit with code 1 if there is no log, before Spark is started."""
    import virta

    try:
        virta.open(path, create=False, read_only=True).close()
    except VirtaError as error:
        fail(error.message, 1)


def parsed(texts: tuple[str, ...], dialect: str) -> list[Filter]:
    from virta.filters import parse

    try:
        return [parse(text, dialect) for text in texts]
    except FilterError as error:
        fail(error.message)


def reading_options(options: dict[str, Any]) -> dict[str, str]:
    reading = {"events": "true"}
    for name, offset, instant in (("start", "start", "startTime"), ("end", "end", "endTime")):
        value = options[name]
        if value is None:
            continue
        if not is_moment(value):
            flag = {"start": "--from", "end": "--to"}[name]
            fail(f"{flag} {value!r}: expected an offset or a time, 2026-01-31T12:00:00Z")
        reading[offset if value.isdecimal() else instant] = value
    if options["topics"]:
        reading["topics"] = options["topics"]
    return reading


def replayed(events: DataFrame, filters: list[Filter]) -> DataFrame:
    from virta.spark.matching.match import where
    from virta.spark.transforms import valid_events

    return where(valid_events(events), filters) if filters else valid_events(events)


def write_replay(found: DataFrame, log: str, topic: str | None, parquet: str | None) -> int:
    from pyspark.sql import functions as F  # noqa: N812

    if topic:
        records = found.select(F.lit(topic).alias("topic"), "key", "value").persist()
        count = records.count()
        records.write.format("virta").mode("append").save(log)
        return count
    if parquet:
        found.withColumn("day", F.to_date("timestamp")).write.partitionBy("day", "topic").option(
            "compression", "zstd"
        ).parquet(parquet)
        # With a schema, because a directory without files (nothing was found) has none.
        return found.sparkSession.read.schema(found.schema).parquet(parquet).count()
    return found.count()
