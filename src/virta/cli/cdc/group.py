"""`virta cdc`: capture the changes of a database into a log."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from virta.cli.report import ReportingGroup, json_option, print_report
from virta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable

ACTIONS = ("run", "create", "drop", "status")
DSN_VARIABLE = "VIRTA_CDC_DSN"


@click.group(cls=ReportingGroup)
def cdc() -> None:
    """Capture the changes of a database into a log, as CloudEvents."""


def capture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what captures of all databases have in common."""
    for option in (
        json_option,
        click.option("--until-eof", is_flag=True, help="Also stop when standard input ends."),
        click.option("--once", is_flag=True, help="Stop when everything committed is in the log."),
        click.option(
            "--table", "tables", multiple=True, metavar="NAME",
            help="Capture this table only (repeatable); all tables with a primary key by default.",
        ),
        click.option(
            "--name", help="First part of the channels' names; the database's name by default."
        ),
        click.option(
            "--data-dir", default="./virta-data", show_default=True, type=click.Path(),
            help="Data directory of the server; the log is its `log` subdirectory.",
        ),
        click.argument("action", type=click.Choice(ACTIONS), default="run"),
    ):  # fmt: skip
        command = option(command)
    return command


@cdc.command()
@click.argument("file", type=click.Path())
@capture_options
def sqlite(file: str, action: str, **options: Any) -> None:
    """
    Capture the changes of a SQLite database file.

    ACTION is run (the default), create (triggers only), drop (remove them) or status.
    """
    from virta.cdc import sqlite_admin
    from virta.cdc.sqlite_capture import SqliteCapture, default_name

    name = options["name"] or default_name(file)
    if action == "status":
        show(sqlite_admin.status(file, options["data_dir"], name), as_json=options["as_json"])
    elif action == "drop":
        sqlite_admin.drop(file, options["data_dir"], name)
    elif action == "create":
        sqlite_admin.create(file, options["data_dir"], name, options["tables"] or None)
    else:
        tables = options["tables"] or None
        run(lambda: SqliteCapture(file, options["data_dir"], name=name, tables=tables), options)


@cdc.command()
@click.argument("dsn")
@capture_options
def postgres(dsn: str, action: str, **options: Any) -> None:
    """
    Capture the changes of a PostgreSQL database by logical replication.

    DSN is postgresql://user@host/database or host=… dbname=…; `-` takes it from the variable VIRTA_CDC_DSN.
    ACTION is run (the default), create (publication and slot only), drop (remove them) or status.
    """
    try:
        from virta.cdc.postgres import admin, connections
        from virta.cdc.postgres.capture import PostgresCapture
    except ModuleNotFoundError as error:
        raise missing_driver(error) from None
    where = os.environ.get(DSN_VARIABLE, "") if dsn == "-" else dsn
    name = options["name"] or connections.database_name(where)
    tables = options["tables"] or None
    if action == "status":
        show(admin.status(where, options["data_dir"], name), as_json=options["as_json"])
    elif action == "drop":
        admin.drop(where, options["data_dir"], name)
    elif action == "create":
        admin.create(where, options["data_dir"], name, tables)
    else:
        run(lambda: PostgresCapture(where, options["data_dir"], name=name, tables=tables), options)


def run(make: Callable[[], Any], options: dict[str, Any]) -> None:
    """Run a capture until a signal, the end of standard input, or with --once until it has caught up."""
    from virta.cdc.running import run_capture

    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # In a thread: the main thread may be inside of the event's own lock.
        signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
    if options["until_eof"]:
        threading.Thread(target=watch_input, args=(stopping,), daemon=True).start()
    changes = run_capture(make, stopping, until_caught_up=options["once"])
    print_report({"records": changes}, [f"{changes} records"], as_json=options["as_json"])


def watch_input(stopping: threading.Event) -> None:
    """Stop when standard input ends, because the parent process has ended."""
    while os.read(sys.stdin.fileno(), 4096):
        continue
    stopping.set()


def show(status: dict[str, Any], *, as_json: bool) -> None:
    lines = [f"{name:<16} {value}" for name, value in status.items() if name != "tables"]
    lines += [f"table            {name}: {text}" for name, text in status["tables"].items()]
    print_report(status, lines, as_json=as_json)


def missing_driver(error: ModuleNotFoundError) -> CaptureError:
    return CaptureError(f"{error.name} is missing: pip install 'virta[cdc]'")
