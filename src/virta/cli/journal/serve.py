"""`virta journal serve` and `forward`: the daemon, and the delivery of a spool."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from virta.cli.journal.group import (
    LIMIT,
    PORTS,
    SECONDS,
    TOKEN,
    ca_option,
    host_option,
    journal,
    port_option,
    start_logging,
    tls_context,
    tls_option,
    verbose_option,
)
from virta.cli.journal.output import errors_reported
from virta.errors import AccessError, JournalError
from virta.journal.protocol.messages import PORT

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine

    from virta.access.journal import JournalCredentials

log = logging.getLogger("virta.journal")
# How often the token store is checked for changes.
REFRESH_S = 1.0

# Allocations before the garbage collector checks young objects, and how rarely it checks old ones.
COLLECTOR = (20_000, 20, 50)


def run_until_signal(main: Coroutine[Any, Any, None]) -> None:
    """Run with uvloop if it is installed: a third more requests a second."""
    try:
        uvloop = import_module("uvloop")
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def stop_on_signal() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


@journal.command()
@click.option(
    "--host",
    default="127.0.0.1",
    help="Where to listen; anything but loopback should ask for tokens.",
)
@click.option(
    "--port",
    default=PORT,
    envvar="VIRTA_JOURNAL_PORT",
    type=PORTS,
    help="Where to listen, 0: any.",
)
@click.option(
    "--data-dir",
    default="virta-data",
    type=click.Path(path_type=Path, file_okay=False),
    help="The journal is in <data-dir>/journal.",
)
@click.option(
    "--durability",
    default="fsync",
    type=click.Choice(["none", "interval", "fsync"]),
    help="When a persist command is acknowledged.",
)
@click.option(
    "--memory-bytes-max",
    default=1 << 30,
    type=LIMIT,
    help="Values beyond that are on disk only.",
)
@click.option("--jobs-max", default=10_000_000, type=LIMIT, help="Jobs beyond that are refused.")
@click.option("--name", default="", show_default=False, help="This daemon's name among its peers.")
@click.option("--peer", "peers", multiple=True, help="name=host:port of another daemon; repeat.")
@click.option(
    "--copies",
    default=1,
    type=click.IntRange(min=1),
    help="Daemons that have a change before it is acknowledged.",
)
@click.option(
    "--copies-timeout",
    default=10.0,
    type=SECONDS,
    help="Seconds until no-copies is the answer instead.",
)
@click.option(
    "--require-token", is_flag=True, help="Ask for tokens of `virta token create --jobs`."
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False),
    help="File of tokens with all rights, one per line, plain or `sha256:<hex>`.",
)
@click.option("--tls-cert", type=click.Path(dir_okay=False), help="PEM certificate chain: TLS.")
@click.option("--tls-key", type=click.Path(dir_okay=False), help="PEM key of the certificate.")
@verbose_option
def serve(
    host: str,
    port: int,
    data_dir: Path,
    name: str,
    peers: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    token_file: str | None,
    *,
    require_token: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Serve the journal until SIGINT or SIGTERM."""
    start_logging(verbose=verbose)

    async def main() -> None:
        from virta.journal.replication.peers import Peer, Peers
        from virta.journal.serving.commit_loop import CommitLoop
        from virta.journal.serving.tcp import JournalServer

        copies, timeout = options.pop("copies"), options.pop("copies_timeout")
        if copies > 1 and not peers:
            raise JournalError(f"--copies {copies} needs a --peer to copy to", code="bad-peer")
        node = CommitLoop(data_dir / "journal", **options)
        if peers:
            if not name:
                raise JournalError("a daemon with peers needs a --name", code="bad-peer")
            others = [Peer.parse(text) for text in peers]
            directory = data_dir / "peers"
            node.peers = Peers(
                node.engine, directory, name, others, copies=copies, copies_timeout=timeout
            )
        credentials = None
        if require_token or token_file:
            from virta.access.journal import JournalCredentials

            credentials = JournalCredentials(data_dir, token_file)
        if peers and (credentials is not None or tls_cert):
            raise JournalError(
                "--peer with tokens or TLS: daemons talk to each other without; use a private network",
                code="bad-peer",
            )
        server = JournalServer(
            host=host,
            port=port,
            node=node,
            authenticate=None if credentials is None else credentials.rights_of,
            tls=server_tls(tls_cert, tls_key),
        )
        stop = stop_on_signal()
        await server.start()
        refreshing = asyncio.create_task(refresh_credentials(credentials))
        # The objects of now stay for good, and few objects of requests are in reference cycles.
        gc.freeze()
        gc.set_threshold(*COLLECTOR)
        click.echo(f"journal ready on {server.address[0]}:{server.address[1]}")
        sys.stdout.flush()
        await stop.wait()
        refreshing.cancel()
        await server.stop()

    with errors_reported():
        run_until_signal(main())


def server_tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS of a listening port; None without a certificate."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise JournalError(
            "--tls-cert and --tls-key go together: give both or none", code="bad-settings"
        )
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise JournalError(
            f"cannot use certificate {certificate} with key {key}: {error}", code="bad-settings"
        ) from error
    return context


async def refresh_credentials(credentials: JournalCredentials | None) -> None:
    """Notice new and revoked tokens, every REFRESH_S seconds."""
    while credentials is not None:
        await asyncio.sleep(REFRESH_S)
        try:
            credentials.refresh()
        except AccessError as error:
            log.warning("access_unreadable %s", error.message)


@journal.command()
@click.argument("spool", type=click.Path(path_type=Path, file_okay=False))
@host_option
@port_option
@tls_option
@ca_option
@click.option("--once", is_flag=True, help="Stop when nothing is pending.")
@verbose_option
def forward(
    spool: Path, host: str, port: int, ca: Path | None, *, tls: bool, once: bool, verbose: bool
) -> None:
    """Deliver the commands in the SPOOL directory, also those that are added."""
    start_logging(verbose=verbose)

    async def main() -> None:
        from virta.journal.clients.forwarder import Forwarder

        stop = stop_on_signal()
        context = tls_context(ca, tls=tls)
        sender = Forwarder(spool, host, port, token=os.environ.get(TOKEN), tls=context)
        running = asyncio.create_task(sender.run(stop))
        if once:
            drained = asyncio.create_task(sender.drained.wait())
            await asyncio.wait([running, drained], return_when=asyncio.FIRST_COMPLETED)
            drained.cancel()
            stop.set()
        await running
        click.echo(f"forwarded {sender.forwarded}, rejected {sender.rejected}")

    with errors_reported():
        run_until_signal(main())
