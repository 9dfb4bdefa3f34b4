"""`virta subscribe`: hear a channel, pretty on a terminal, one JSON event a line in a pipe."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import click

from virta.cli.publish import client_options

if TYPE_CHECKING:
    from virta.client import Received

EXIT_FAILURE = 1


@click.command()
@click.argument("channel")
@click.argument("query", default="")
@client_options
@click.option("--from", "start", help="earliest, latest, an offset or an RFC 3339 time.")
@click.option("--last-event-id", help="Continue behind this event.")
@click.option("--count", type=click.IntRange(1), help="End after so many events.")
@click.option("--no-reconnect", is_flag=True, help="End when the connection is cut.")
@click.option("--json", "as_json", is_flag=True, help="One JSON event a line, also on a terminal.")
def subscribe(
    channel: str,
    query: str,
    url: str,
    token: str | None,
    start: str | None,
    last_event_id: str | None,
    count: int | None,
    *,
    no_reconnect: bool,
    as_json: bool,
) -> None:
    """
    Print the events of CHANNEL that satisfy QUERY, e.g. 'status=paid&/total=>100'.

    Exit codes: 0 ended as asked, 1 refused or unreachable.
    """
    from virta.client import Client
    from virta.errors import ClientError

    pretty = sys.stdout.isatty() and not as_json
    heard = 0
    try:
        with (
            Client(url, token=token) as client,
            client.subscribe(
                channel,
                query,
                start=start,
                last_event_id=last_event_id,
                reconnect=not no_reconnect,
                on_gap=_tell_gap,
            ) as events,
        ):
            for received in events:
                _show(received) if pretty else click.echo(received.event.to_line())
                sys.stdout.flush()
                heard += 1
                if heard == count:
                    return
    except ClientError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        return


def _tell_gap(gap: dict[str, Any]) -> None:
    click.echo(f"gap: {json.dumps(gap)}", err=True)


def _show(received: Received) -> None:
    event = received.event
    kind = click.style(_printable(event.type), fg="cyan")
    place = _printable(f"{event.source} {event.id}")
    click.echo(f"{_printable(event.time or '')} {kind} {place}".strip())
    if isinstance(event.data, bytes):
        click.echo(f"  data_base64: {b64encode(event.data).decode()}")
    elif event.has_data:
        text = json.dumps(event.data, indent=2, ensure_ascii=False)
        click.echo("\n".join("  " + _printable(line) for line in text.split("\n")))


def _printable(text: str) -> str:
    """Text of which nothing speaks to the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
