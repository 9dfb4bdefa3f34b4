"""
`virta journal`: the group, and the options its commands share.

Exit codes: 0 done, 1 refused or out of reach, 2 wrong use, 3 nothing there (no such key, no job).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from virta.cli.journal.output import Output, errors_reported
from virta.errors import JournalError
from virta.journal.clients.client import Client
from virta.journal.clients.spool import Spool
from virta.journal.protocol.messages import PORT
from virta.log_lines import log_stream

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from virta.journal.protocol.commands import Command

F = TypeVar("F", bound="Callable[..., Any]")
SECONDS = click.FloatRange(min=0)
LIMIT = click.IntRange(min=0)
PORTS = click.IntRange(0, 65_535)
STDIN = "-"
# The variable with the token for a journal that asks for one.
TOKEN = "VIRTA_TOKEN"  # noqa: S105 - its name
# Arguments that name what a command is about, for errors that do not.
ABOUT = ("key", "new", "additional", "uri", "domain")


@click.group(context_settings={"show_default": True})
def journal() -> None:
    """Keys, values and jobs that are never lost."""


host_option = click.option(
    "--host", default="127.0.0.1", envvar="VIRTA_JOURNAL_HOST", help="The daemon's host."
)
port_option = click.option(
    "--port", default=PORT, envvar="VIRTA_JOURNAL_PORT", type=PORTS, help="The daemon's port."
)
tls_option = click.option(
    "--tls", is_flag=True, envvar="VIRTA_JOURNAL_TLS", help="The daemon's port has TLS."
)
ca_option = click.option(
    "--ca",
    envvar="VIRTA_JOURNAL_CA",
    type=click.Path(path_type=Path, dir_okay=False),
    help="PEM file of the authorities to trust instead of the system's; implies --tls.",
)
verbose_option = click.option("--verbose", is_flag=True, help="Log what happens.")
memory_option = click.option(
    "--memory", is_flag=True, help="Keep it in memory only: lost at a restart."
)
spool_option = click.option(
    "--spool",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write to this spool directory instead; `virta journal forward` delivers it.",
)
domain_option = click.option(
    "--domain", default="", show_default=False, help="Where it waits; the uri's host by default."
)
priority_option = click.option(
    "--priority", default=0, type=click.IntRange(0, 255), help="0 (first) to 255."
)
uri_option = click.option(
    "--uri", default="", show_default=False, help="Only the job of this uri."
)  # fmt: skip


class TakesNumbers(click.Command):
    """A command whose arguments may be negative numbers, which click would read as options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = any(re.fullmatch(r"-[0-9.]+.*", word) for word in args)
        return super().parse_args(ctx, args)


def connected(function: F) -> F:
    """Add options for the daemon's address and the output; pass a client and an Output."""

    @host_option
    @port_option
    @tls_option
    @ca_option
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @wraps(function)
    def wrapper(
        host: str, port: int, ca: Path | None, *, tls: bool, as_json: bool, **arguments: Any
    ) -> None:
        out = Output(as_json=as_json)
        with errors_reported(*(arguments[name] for name in ABOUT if arguments.get(name))):
            if arguments.get("spool") is not None:
                function(None, out, **arguments)
                return
            context = tls_context(ca, tls=tls)
            with Client(host, port, token=os.environ.get(TOKEN), tls=context) as client:
                function(client, out, **arguments)

    return wrapper  # type: ignore[return-value]


def tls_context(ca: Path | None, *, tls: bool) -> ssl.SSLContext | None:
    """Return what the options --tls and --ca ask for; None without them."""
    if not tls and ca is None:
        return None
    import ssl

    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise JournalError(
            f"cannot use --ca {ca}: {error}; a PEM file of certificates is needed",
            code="bad-settings",
        ) from error


def deliver(client: Client | None, command: Command[Any], spool: Path | None) -> Any:
    """Send a command to the daemon and return its result, or write it to a spool and return None."""
    if spool is None:
        assert client is not None
        return client.call(command)
    writer = Spool(spool)
    try:
        writer.put(command.request)
    finally:
        writer.close()
    return None


def start_logging(*, verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=log_stream(sys.stderr),
    )
