"""`virta top`: what a server does, redrawn once a second in the terminal."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from virta.cli.publish import client_options, refusal_text
from virta.cli.units import show_size
from virta.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.client import HTTPResponse

TIMEOUT_S = 10.0
CLEAR = "\x1b[H\x1b[2J"
BARS = "▁▂▃▄▅▆▇█"
HISTORY = 60
LINE_BYTES_MAX = 4 * 1024 * 1024
DAY_S = 86_400
FULL_SOON_S = 3650 * DAY_S  # beyond it the number of days says nothing


@click.command()
@client_options
@click.option("--once", is_flag=True, help="Print one sample and end; so does output that is no terminal.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print samples as JSON, one a line.")
def top(*, url: str, token: str | None, once: bool, as_json: bool) -> None:
    """Show rates, latency, subscribers, disk, busiest channels and jobs of a server."""
    history: list[float] = []
    try:
        for sample in samples(url, token):
            history = [*history, sample["eventsPerSecond"]][-HISTORY:]
            if as_json:
                click.echo(json.dumps(sample))
            else:
                screen = "\n".join(drawn(url, sample, history))
                live = sys.stdout.isatty() and not once
                click.echo((CLEAR if live else "") + screen)
            if once or not (sys.stdout.isatty() or as_json):
                return
    except KeyboardInterrupt:
        return
    except ClientError as error:
        click.echo(refusal_text(error, token), err=True)
        sys.exit(1)
    except (OSError, ValueError) as error:
        click.echo(f"error: {url} does not answer as a Virta server: {error}", err=True)
        sys.exit(1)


def samples(url: str, token: str | None) -> Iterator[dict[str, Any]]:
    """
    Yield a sample a second.

    Raises:
        ClientError: the server refused.
    """
    from http.client import HTTPConnection, HTTPSConnection

    from virta.client.calls import check

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http or https address")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", f"{parts.path.rstrip('/')}/stats/stream", headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            check(answer.status, answer.read(LINE_BYTES_MAX))
        yield from _frames(answer)
    finally:
        connection.close()


def _frames(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := answer.readline(LINE_BYTES_MAX):
        if line.startswith(b"data: ") and line.startswith(b'data: {"time"'):
            yield json.loads(line[len(b"data: ") :])


def drawn(url: str, now: dict[str, Any], history: list[float]) -> list[str]:
    """Return the lines of one screen."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    used = 1 - now["diskFreeBytes"] / max(now["diskBytes"], 1)
    latency = "none" if now["p50Ms"] is None else f"{now['p50Ms']:.2f} ms p50, {now['p99Ms']:.1f} ms p99"  # fmt: skip
    lines = [
        f"Virta at {url}",
        "",
        f"  events in       {now['eventsPerSecond']:>12,.0f} /s   {show_size(int(now['bytesPerSecond']))}/s",
        f"  deliveries out  {now['deliveriesPerSecond']:>12,.0f} /s",
        f"  publish to deliver  {latency}",
        f"  subscribers     {now['subscribers']:>12,}      {now['filters']:,} distinct filters",
        f"  log             {show_size(now['logBytes']):>12}      next offset {now['nextOffset']:,}",
        f"  disk            {used:>11.0%}      {_full_in(now['fullInSeconds'])}",
        "",
        f"  {spark(history)}",
    ]  # fmt: skip
    if now["channels"]:
        lines += ["", "  channel                                   events/s"]
        lines += [f"  {one['name'][:40]:40}  {one['eventsPerSecond']:>8,.1f}" for one in now["channels"][:10]]  # fmt: skip
    if now["jobs"] is not None:
        lines += ["", "  jobs   " + "   ".join(f"{name} {count:,}" for name, count in now["jobs"].items())]  # fmt: skip
    return [line[:width] for line in lines]


def _full_in(seconds: float | None) -> str:
    """Return when the disk is full, in the words of the console."""
    if seconds is None:
        return "does not grow"
    if seconds > FULL_SOON_S:
        return "full in over 10 years"
    if seconds > 2 * DAY_S:
        return f"full in {seconds / DAY_S:,.0f} days"
    return (
        f"full in {seconds / 3600:.0f} hours"
        if seconds > 7200
        else f"full in {seconds / 60:.0f} min"
    )


def spark(values: list[float]) -> str:
    """Return values as a line of bars."""
    most = max(values, default=0.0) or 1.0
    return "".join(
        BARS[min(len(BARS) - 1, int(value / most * (len(BARS) - 1)))] for value in values
    )
