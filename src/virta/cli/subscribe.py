"""`virta subscribe`: print a channel's events, pretty on a terminal, one JSON event a line in a pipe."""

from __future__ import annotations

import json
import sys
import threading
import time
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import click

from virta.cli.publish import client_options, refusal_text

if TYPE_CHECKING:
    from virta.client import Received, Subscription

EXIT_FAILURE = 1
EXIT_TOO_FEW = 3


@click.command()
@click.argument("channel")
@click.argument("query", default="")
@client_options
@click.option(
    "--from", "start", help="earliest, latest, an offset, a position or an RFC 3339 time."
)
@click.option("--last-event-id", help="Continue after this: the id of a frame, or a position.")
@click.option("--count", type=click.IntRange(1), help="End after so many events.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="End when no event arrived for this long; with --count, exit code 3 if there were fewer.",
)
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
    timeout: float | None,
    *,
    no_reconnect: bool,
    as_json: bool,
) -> None:
    """
    Print the events of CHANNEL that satisfy QUERY, e.g. 'status=paid&/total=>100'.

    Exit codes: 0 ended as requested, 1 refused or unreachable, 3 --timeout passed before --count events.
    """
    from virta.client import Client
    from virta.errors import ClientError

    pretty = sys.stdout.isatty() and not as_json
    received_count = 0
    try:
        with (
            Client(url, token=token) as client,
            client.subscribe(
                channel,
                query,
                start=start,
                last_event_id=last_event_id,
                reconnect=not no_reconnect,
                on_gap=_report_gap,
            ) as events,
            _IdleTimer(events, timeout) as idle,
        ):
            for received in events:
                idle.stop()
                _show(received) if pretty else click.echo(received.event.to_line())
                sys.stdout.flush()
                received_count += 1
                if received_count == count:
                    return
                idle.start()
    except ClientError as error:
        click.echo(refusal_text(error, token), err=True)
        sys.exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        return
    if idle.over and not idle.connected:
        click.echo(f"error: no answer from {url} for {timeout:g} s", err=True)
        sys.exit(EXIT_FAILURE)
    if idle.over and count is not None:
        click.echo(f"{received_count} of {count} events arrived; none for {timeout:g} s", err=True)
        sys.exit(EXIT_TOO_FEW)


class _IdleTimer:
    """Closes a subscription without events for a number of seconds; time to print does not count."""

    def __init__(self, events: Subscription, timeout: float | None) -> None:
        self._events = events
        self._timeout = timeout
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._left = False
        self.over = False
        self.connected = False  # whether the stream was open when the time passed
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _IdleTimer:
        if self._timeout is not None:
            self.start()
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._left = True
            self._changed.notify()

    def start(self) -> None:
        """Start to wait for the next event."""
        if self._timeout is not None:
            self._set(time.monotonic() + self._timeout)

    def stop(self) -> None:
        if self._timeout is not None:
            self._set(None)

    def _set(self, deadline: float | None) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._left:
                wait = None if self._deadline is None else self._deadline - time.monotonic()
                if wait is not None and wait <= 0:
                    self.over = True
                    break
                self._changed.wait(wait)
        if self.over:
            self.connected = self._events.connected
            self._events.close()


def _report_gap(gap: dict[str, Any]) -> None:
    click.echo(f"gap: {json.dumps(gap)}", err=True)


def _show(received: Received) -> None:
    event = received.event
    kind = click.style(_printable(event.type), fg="cyan")
    place = _printable(f"{event.source} {event.id}")
    offset = "" if received.offset is None else click.style(f"@{received.offset} ", dim=True)
    click.echo(f"{offset}{_printable(event.time or '')} {kind} {place}".strip())
    if isinstance(event.data, bytes):
        click.echo(f"  data_base64: {b64encode(event.data).decode()}")
    elif event.has_data:
        text = json.dumps(event.data, indent=2, ensure_ascii=False)
        click.echo("\n".join("  " + _printable(line) for line in text.split("\n")))


def _printable(text: str) -> str:
    """Return text with every character replaced that could control the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
