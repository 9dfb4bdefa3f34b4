"""`virta publish`: events from the command line or a pipe to a channel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from virta.cli.input_lines import read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virta.errors import ClientError, EventError

# Lines of a pipe that are published in one request.
BATCH_LINES = 500
EXIT_FAILURE = 1


def client_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the server's address and token."""
    token = click.option("--token", envvar="VIRTA_TOKEN", help="Bearer token of the server.")
    url = click.option(
        "--url",
        envvar="VIRTA_URL",
        default="http://127.0.0.1:8232",
        show_default=True,
        help="Address of the server.",
    )
    return url(token(command))


def refusal_text(error: ClientError | EventError, token: str | None) -> str:
    """Return the line for an error of the client; without a token it says how to give one, if one is needed."""
    needs_token = getattr(error, "status", None) == 401 and not token
    return f"error: {error.message}" + (": give --token, or set VIRTA_TOKEN" if needs_token else "")


@click.command()
@click.argument("channel")
@click.argument("file", type=click.File("rb"), required=False)
@client_options
@click.option("--data", help="JSON data of a single event; nothing is read then.")
@click.option(
    "--type", "type_", default="virta.cli", show_default=True, help="Type of made events."
)
@click.option("--source", default="/virta/cli", show_default=True, help="Source of made events.")
@click.option("--subject", help="Subject of made events: the key of their row in live views.")
@click.option("--id", "id_", help="Id of the single event; random without it.")
def publish(
    channel: str,
    file: BinaryIO | None,
    url: str,
    token: str | None,
    data: str | None,
    type_: str,
    source: str,
    subject: str | None,
    id_: str | None,
) -> None:
    """
    Publish events to CHANNEL: the lines of FILE or of standard input, or one event with --data.

    Each line is a CloudEvent as JSON; a line that is other JSON becomes the data of a new event.
    Prints how many were accepted. Exit codes: 0 all accepted, 1 refused or unreachable, 2 bad input.
    """
    from virta.client import Client
    from virta.errors import ClientError, EventError

    attributes = {"type": type_, "source": source} | (
        {} if subject is None else {"subject": subject}
    )

    def make(text: str | bytes, place: str) -> Any:
        return _event(text, place, attributes)

    accepted, note = 0, ""
    if data is None and file is None and sys.stdin.isatty():
        click.echo(
            "reading events from the terminal, one JSON object per line; Ctrl-D ends", err=True
        )
    try:
        with Client(url, token=token) as client:
            if data is not None:
                event = make(data, "--data")
                if id_ is not None:
                    event = event.replace(id=id_)
                if client.publish(channel, event).duplicate:
                    note = ": the server already had it"
                accepted = 1
            else:
                for batch in _batches(file or sys.stdin.buffer):
                    client.publish(channel, *[make(t, f"line {n}") for n, t in batch])
                    accepted += len(batch)
    except click.UsageError as error:
        raise click.UsageError(f"{error.message}{_before(accepted)}") from None
    except (ClientError, EventError) as error:
        click.echo(f"{refusal_text(error, token)}{_before(accepted)}", err=True)
        sys.exit(EXIT_FAILURE)
    click.echo(f"{accepted} accepted{note}", err=True)


def _before(accepted: int) -> str:
    return f" ({accepted} events were accepted before)" if accepted else ""


def _batches(source: BinaryIO) -> Iterator[list[tuple[int, bytes]]]:
    """Yield numbered lines, as many together as have arrived: a slow pipe is published at once."""
    number = 0
    for lines in read_lines(source, BATCH_LINES):
        batch = [(n, line) for n, line in enumerate(lines, number + 1) if line.strip()]
        number += len(lines)
        if batch:
            yield batch


def _event(text: str | bytes, place: str, attributes: dict[str, str]) -> Any:
    from virta import jsontext
    from virta.errors import EventError
    from virta.event import Event

    try:
        value = jsontext.decode(text)
    except ValueError as error:
        raise click.UsageError(f"{place} is not JSON: {error}") from None
    if isinstance(value, dict) and "specversion" in value:
        try:
            return Event.from_json(text)
        except EventError as error:
            raise EventError(f"{place}: {error.message}") from error
    return Event.new(data=value, **attributes)
