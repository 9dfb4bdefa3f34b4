"""`virta journal serve` and `forward`: the daemon, and the delivery of a spool."""

from __future__ import annotations

import asyncio
import gc
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
    host_option,
    journal,
    port_option,
    start_logging,
    verbose_option,
)
from virta.cli.journal.output import errors_reported
from virta.errors import JournalError
from virta.journal.protocol.messages import PORT

if TYPE_CHECKING:
    from collections.abc import Coroutine

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
@click.option("--host", default="127.0.0.1", help="Where to listen; there is no authentication.")
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
@verbose_option
def serve(
    host: str,
    port: int,
    data_dir: Path,
    name: str,
    peers: tuple[str, ...],
    *,
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
        server = JournalServer(host=host, port=port, node=node)
        stop = stop_on_signal()
        await server.start()
        # The objects of now stay for good, and few objects of requests are in reference cycles.
        gc.freeze()
        gc.set_threshold(*COLLECTOR)
        click.echo(f"journal ready on {server.address[0]}:{server.address[1]}")
        sys.stdout.flush()
        await stop.wait()
        await server.stop()

    with errors_reported():
        run_until_signal(main())


@journal.command()
@click.argument("spool", type=click.Path(path_type=Path, file_okay=False))
@host_option
@port_option
@click.option("--once", is_flag=True, help="Stop when nothing is pending.")
@verbose_option
def forward(spool: Path, host: str, port: int, *, once: bool, verbose: bool) -> None:
    """Deliver the commands in the SPOOL directory, also those that are added."""
    start_logging(verbose=verbose)

    async def main() -> None:
        from virta.journal.clients.forwarder import Forwarder

        stop = stop_on_signal()
        sender = Forwarder(spool, host, port, token=os.environ.get(TOKEN))
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
