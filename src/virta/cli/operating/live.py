"""`virta live`: the rows of a live view, a table that changes in place on a terminal, JSON lines in a pipe."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from virta.cli.publish import client_options, refusal_text

if TYPE_CHECKING:
    from virta.client import LiveRows

EXIT_FAILURE = 1
# The table is drawn at most this often.
DRAW_S = 0.1
COLUMNS_MAX = 8
CELL_CHARS_MAX = 40


@click.command()
@click.argument("channel")
@click.argument("query", default="")
@client_options
@click.option("--filter", "filter_", default="", help="A filter in --dialect instead of QUERY.")
@click.option("--dialect", default="", help="query-string, koncorde, cesql or cloudevents.")
@click.option("--key", default="", help="JSON pointer to the key of a row, such as /data/id.")
@click.option("--fields", default="", help="JSON pointers, separated by commas, to what is sent.")
@click.option("--select", default="", help="Aggregates: count, sum(/data/total), min, max.")
@click.option("--group", default="", help="JSON pointer to the group of aggregates.")
@click.option("--since", help="Continue from this position.")
@click.option("--once", is_flag=True, help="End when the result is complete; do not reconnect.")
@click.option("--no-reconnect", is_flag=True, help="End when the connection is cut.")
@click.option("--json", "as_json", is_flag=True, help="One JSON frame a line, also on a terminal.")
def live(
    channel: str,
    query: str,
    url: str,
    token: str | None,
    filter_: str,
    dialect: str,
    key: str,
    fields: str,
    select: str,
    group: str,
    since: str | None,
    *,
    once: bool,
    no_reconnect: bool,
    as_json: bool,
) -> None:
    """
    Show the rows of CHANNEL that satisfy QUERY, e.g. 'status=paid', as they enter, change and leave.

    While the server does not answer, it says so once and tries again, unless --once or --no-reconnect.

    Exit codes: 0 ended as requested, 1 refused, unreachable, or cut before --once was complete.
    """
    from virta.client import Client
    from virta.errors import ClientError

    table = sys.stdout.isatty() and not as_json
    try:
        with (
            Client(url, token=token) as client,
            client.live(
                channel,
                query,
                filter=filter_,
                dialect=dialect,
                key=key,
                fields=fields,
                select=select,
                group=group,
                since=since,
                reconnect=not (once or no_reconnect),
            ) as rows,
        ):
            drawn = 0.0
            for change in rows:
                if not table:
                    click.echo(json.dumps({"frame": change.kind} | change.data))
                elif time.monotonic() - drawn > DRAW_S or change.kind == "live":
                    click.echo(draw(channel, rows), nl=False)
                    drawn = time.monotonic()
                sys.stdout.flush()
                if once and change.kind == "live":
                    return
    except ClientError as error:
        click.echo(refusal_text(error, token), err=True)
        sys.exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        return
    if once:
        click.echo("error: the connection ended before the result was complete", err=True)
        sys.exit(EXIT_FAILURE)


def draw(channel: str, rows: LiveRows) -> str:
    """Return the table as text that replaces the screen."""
    width, height = shutil.get_terminal_size()
    lines = table_lines(rows.rows, rows.groups)
    shown = [line[:width] for line in lines[: max(1, height - 3)]]
    count = len(rows.groups) or len(rows.rows)
    head = f"{channel}: {count} rows{'' if rows.is_live else ', reading'}"
    return "\x1b[H\x1b[2J" + "\n".join([head[:width], "", *shown]) + "\n"


def table_lines(rows: dict[str, dict[str, Any]], groups: dict[Any, dict[str, Any]]) -> list[str]:
    """Return aligned lines: one a row with the members of its data, or one a group."""
    cells = [{"key": key} | _members(event) for key, event in sorted(rows.items())]
    if groups:
        cells = list(groups.values())
    names = list(dict.fromkeys(name for cell in cells for name in cell))[:COLUMNS_MAX]
    lines = [names, *[[_cell(cell.get(name)) for name in names] for cell in cells]]
    widths = [max(len(line[at]) for line in lines) for at in range(len(names))]
    return ["  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in lines]  # fmt: skip


def _members(event: dict[str, Any]) -> dict[str, Any]:
    data = event.get("data")
    return data if isinstance(data, dict) else {"data": data}


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"
