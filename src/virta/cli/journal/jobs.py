"""More of `virta journal`: looking after jobs, and the processes that serve and forward."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from virta.cli.journal.keys import LIMIT, PORTS, SECONDS, connected, journal
from virta.cli.journal.output import EXIT_NOTHING, line, moment, nothing, plain_text, reported, show
from virta.errors import JournalError
from virta.journal.protocol.messages import PORT, RefusedError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from virta.journal.clients.client import Client

# Allocations before the collector looks at young objects, and how rarely it looks at old ones.
COLLECTOR = (20_000, 20, 50)


# Looking after jobs.


@journal.command()
@click.argument("domain", default="")
@connected
def stats(client: Client, as_json: bool, domain: str) -> None:  # noqa: FBT001
    """Figures of the journal, and of DOMAIN or the first domains."""
    answer = client.admin("stats", domain=domain)
    lines = [
        f"{'keys':22} {answer['keys']}",
        f"{'memory':22} {answer['memory_bytes']} of {answer['memory_bytes_max']} bytes",
        f"{'values on disk only':22} {answer['values_spilled']}",
        f"{'disk':22} {answer['disk_bytes']} bytes",
        f"{'recurring jobs':22} {answer['recurring']}",
        *(f"{'jobs ' + state:22} {count}" for state, count in answer["jobs"].items()),
        f"{'oldest ready':22} {answer['oldest_ready_seconds']:.1f} s",
        *(f"{'since start ' + name:22} {count}" for name, count in answer["totals"].items()),
    ]
    for place in answer["domains"]:
        counts = " ".join(f"{s}={place[s]}" for s in answer["jobs"] if place[s])
        paused = " (paused)" if place["settings"]["paused"] else ""
        lines.append(line(f"  {place['domain']:20} {counts or 'empty'}{paused}"))
    show(answer, as_json, "\n".join(lines))


@journal.command()
@click.argument("domain", default="")
@click.option(
    "--state",
    type=click.Choice(["delayed", "ready", "held", "working", "dead"]),
    help="Only jobs in this state.",
)
@click.option("--limit", default=100, type=LIMIT, help="Print at most so many.")
@connected
def jobs(client: Client, as_json: bool, domain: str, state: str | None, limit: int) -> None:  # noqa: FBT001
    """List jobs, of DOMAIN or of all."""
    answer = client.admin("list", domain=domain, state=state or "", limit=limit)
    for job in answer["jobs"]:
        due = moment(job["start"] / 1e6)
        text = f"{job['state']:8} {job['priority']:3} {due} {job['uri']} {job.get('reason', '')}"
        show(job, as_json, line(text.rstrip()))


@journal.command()
@click.argument("domain", default="")
@click.option("--limit", default=100, type=LIMIT, help="At most so many.")
@click.option("--requeue", is_flag=True, help="Send them back to work.")
@click.option("--drop", is_flag=True, help="Forget them.")
@click.option("--uri", default="", show_default=False, help="Only the job of this uri.")
@click.option("--traceback", is_flag=True, help="Show where the last attempt failed.")
@connected
def dead(
    client: Client,
    as_json: bool,  # noqa: FBT001
    domain: str,
    limit: int,
    requeue: bool,  # noqa: FBT001
    drop: bool,  # noqa: FBT001
    uri: str,
    traceback: bool,  # noqa: FBT001
) -> None:
    """Jobs that failed too often: list them with their reasons, requeue or drop them."""
    if requeue and drop:
        raise click.UsageError("--requeue and --drop exclude each other")
    if requeue or drop:
        do = "requeue" if requeue else "drop"
        answer = client.admin(do, domain=domain, uri=uri, limit=limit)
        show(answer, as_json, " ".join(f"{name} {count}" for name, count in answer.items()))
        return
    rows = (
        dead_job(client, uri)
        if uri
        else client.admin("list", domain=domain, state="dead", limit=limit)["jobs"]
    )
    if not rows:
        if not as_json:  # else a line per job, and there is none
            click.echo("no dead jobs", err=True)
        sys.exit(EXIT_NOTHING)
    for job in rows:
        text = (
            f"{moment(job['died'] / 1e6)} {job['uri']} attempts={job['attempts']} {job['reason']}"
        )
        show(job, as_json, line(text))
        if traceback and not as_json:
            for text in job.get("traceback", "").splitlines():
                click.echo(line(f"  {text}"))


def dead_job(client: Client, uri: str) -> list[dict[str, Any]]:
    """The job of a uri if it is dead, however many others are."""
    try:
        job = client.admin("show", uri=uri)
    except RefusedError as refused:
        if refused.code != "does-not-exist":
            raise
        return []
    return [job] if job["state"] == "dead" else []


@journal.command()
@click.argument("domain", default="")
@click.option("--uri", default="", show_default=False, help="Only the job of this uri.")
@click.option("--limit", default=100, type=LIMIT, help="At most so many.")
@connected
def kick(client: Client, as_json: bool, domain: str, uri: str, limit: int) -> None:  # noqa: FBT001
    """Make delayed jobs of DOMAIN (or one uri) due at once."""
    if not domain and not uri:
        raise click.UsageError("name a DOMAIN or a --uri")
    answer = client.admin("kick", domain=domain, uri=uri, limit=limit)
    show(answer, as_json, f"kicked {answer['kicked']}")


@journal.command()
@click.argument("domain")
@connected
def pause(client: Client, as_json: bool, domain: str) -> None:  # noqa: FBT001
    """Hand out no jobs of DOMAIN until it is resumed."""
    answer = client.admin("configure", domain=domain, settings={"paused": True})
    show(answer, as_json, "paused")


@journal.command()
@click.argument("domain")
@connected
def resume(client: Client, as_json: bool, domain: str) -> None:  # noqa: FBT001
    """Hand out jobs of DOMAIN again."""
    answer = client.admin("configure", domain=domain, settings={"paused": False})
    show(answer, as_json, "resumed")


@journal.command()
@click.argument("domain")
@click.option("--deadline", type=float, help="Seconds a job may be worked on by default.")
@click.option(
    "--max-attempts", type=int, help="Failed attempts until a job is dead (25); 0: never."
)
@click.option(
    "--mode",
    type=click.Choice(["debounce", "throttle"]),
    help="What pushing again does to the start: put it off, or keep the earliest.",
)
@click.option(
    "--retry-delay",
    type=float,
    help="Seconds before a failed job is tried again (1), doubled each time; 0: at once.",
)
@click.option("--retry-delay-max", type=float, help="Longest delay in seconds (3600).")
@connected
def configure(client: Client, as_json: bool, domain: str, **settings: Any) -> None:  # noqa: FBT001
    """Change or show the settings of DOMAIN."""
    given = {name: value for name, value in settings.items() if value is not None}
    answer = client.admin("configure", domain=domain, settings=given)
    show(answer, as_json, table(answer))


def table(members: dict[str, Any]) -> str:
    return "\n".join(f"{name:14} {plain_text(value)}".rstrip() for name, value in members.items())


@journal.command()
@click.argument("name")
@click.argument("schedule", required=False)
@click.argument("uri", required=False)
@click.option(
    "--domain", default="", show_default=False, help="Where it waits; the uri's host by default."
)
@click.option("--priority", default=0, type=click.IntRange(0, 255), help="0 (first) to 255.")
@click.option("--payload", help="Data for the worker.")
@click.option(
    "--catch-up",
    default="none",
    type=click.Choice(["none", "once"]),
    help="What becomes of times that pass while the daemon is down: nothing, or one push for all.",
)
@click.option("--remove", is_flag=True, help="Let it no longer recur.")
@connected
def cron(
    client: Client,
    as_json: bool,  # noqa: FBT001
    name: str,
    schedule: str | None,
    uri: str | None,
    domain: str,
    priority: int,
    payload: str | None,
    catch_up: str,
    remove: bool,  # noqa: FBT001
) -> None:
    """Push URI by SCHEDULE ("*/5 * * * *", UTC, or "@every 30s"); with only NAME, show it."""
    key = f"virta:cron:{name}"
    if remove:
        removed = client.delete(key)
        show({"name": name, "removed": removed}, as_json, "ok" if removed else "was not there")
    elif schedule is not None and uri is None:
        raise click.UsageError("a SCHEDULE needs a URI to push")
    elif schedule is None or uri is None:
        stored = client.get(key)
        if stored is None:
            nothing(as_json, {"name": name, "found": False}, f"no recurring job {name}")
        show(json.loads(stored), as_json, table(json.loads(stored)))
    else:
        fields: dict[str, Any] = {
            "schedule": schedule,
            "uri": uri,
            "domain": domain,
            "priority": priority,
        }
        fields["catch_up"] = catch_up
        fields["payload"] = payload
        client.set(key, json.dumps(fields))
        show({"name": name, **fields}, as_json, "ok")


# Locks.


@journal.command(context_settings={"ignore_unknown_options": True})
@click.argument("key")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--seconds", default=3600.0, type=SECONDS, help="The lock ends after so long in any case."
)
@connected
def lock(
    client: Client,
    as_json: bool,  # noqa: FBT001
    key: str,
    command: tuple[str, ...],
    seconds: float,
) -> None:
    """Run COMMAND while nobody else can change KEY; exits with its code."""
    client.lock(key, seconds=seconds)
    try:
        code = run_to_end(command)
    except OSError as error:
        click.echo(f"error: cannot run {command[0]!r}: {error.strerror}", err=True)
        code = 127 if isinstance(error, FileNotFoundError) else 126
    if code < 0:
        code = 128 - code  # a signal, as shells say it
    if as_json:
        show({"key": key, "code": code}, as_json)
    sys.exit(code)


def run_to_end(command: tuple[str, ...]) -> int:
    """Its exit code. SIGTERM is passed on: the lock is not let go while the command still runs."""
    told: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        told.append(number)
        if process is not None:
            process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        with subprocess.Popen(command) as process:  # noqa: S603  (the user's own)
            try:
                for number in told:  # before there was anybody to pass it on to
                    process.send_signal(number)
                return process.wait()
            except BaseException:
                process.kill()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


@journal.command()
@click.argument("key")
@connected
def unlock(client: Client, as_json: bool, key: str) -> None:  # noqa: FBT001
    """Release a lock of this connection; locks of others end with them or their time."""
    client.unlock(key)
    show({"key": key, "locked": False}, as_json, "ok")


# Processes.


def run_until_signal(main: Coroutine[Any, Any, None]) -> None:
    """With uvloop where it is installed: it answers about a third more requests."""
    try:
        uvloop = import_module("uvloop")
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def stop_on_signal() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


def talk(verbose: bool) -> None:  # noqa: FBT001
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
    )


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
@click.option("--awake", is_flag=True, help="Wait for a lone, quick client without sleeping.")
@click.option(
    "--look-us-max",
    default=200,
    type=click.IntRange(0, 1_000),
    help="The same without being asked to; 0: never.",
)
@click.option(
    "--copies-timeout",
    default=10.0,
    type=SECONDS,
    help="Seconds until no-copies is the answer instead.",
)
@click.option("--verbose", is_flag=True, help="Say what happens.")
def serve(
    host: str,
    port: int,
    data_dir: Path,
    name: str,
    peers: tuple[str, ...],
    verbose: bool,  # noqa: FBT001
    **options: Any,
) -> None:
    """Serve the journal until SIGINT or SIGTERM."""
    talk(verbose)

    async def main() -> None:
        from virta.journal.replication.peers import Peer, Peers
        from virta.journal.serving.commit_loop import Node
        from virta.journal.serving.tcp import JournalServer

        copies, timeout = options.pop("copies"), options.pop("copies_timeout")
        awake, look = options.pop("awake"), options.pop("look_us_max") / 1e6
        if copies > 1 and not peers:
            raise JournalError(f"--copies {copies} needs a --peer to copy to", code="bad-peer")
        node = Node(data_dir / "journal", **options)
        if peers:
            if not name:
                raise JournalError("a daemon with peers needs a --name", code="bad-peer")
            others = [Peer.parse(text) for text in peers]
            directory = data_dir / "peers"
            node.peers = Peers(
                node.engine, directory, name, others, copies=copies, copies_timeout=timeout
            )
        server = JournalServer(host=host, port=port, node=node, awake=awake, look=look)
        stop = stop_on_signal()
        await server.start()
        # What is there stays; of what comes and goes with requests little refers in circles.
        gc.freeze()
        gc.set_threshold(*COLLECTOR)
        click.echo(f"journal ready on {server.address[0]}:{server.address[1]}")
        sys.stdout.flush()
        await stop.wait()
        await server.stop()

    with reported():
        run_until_signal(main())


@journal.command()
@click.argument("spool", type=click.Path(path_type=Path, file_okay=False))
@click.option("--host", default="127.0.0.1", envvar="VIRTA_JOURNAL_HOST", help="The daemon's host.")
@click.option(
    "--port", default=PORT, envvar="VIRTA_JOURNAL_PORT", type=PORTS, help="The daemon's port."
)
@click.option("--once", is_flag=True, help="Stop when nothing is pending.")
@click.option("--verbose", is_flag=True, help="Say what happens.")
def forward(spool: Path, host: str, port: int, once: bool, verbose: bool) -> None:  # noqa: FBT001
    """Deliver what is in the SPOOL directory, now and as it comes."""
    talk(verbose)

    async def main() -> None:
        from virta.journal.clients.forwarder import Forwarder

        stop = stop_on_signal()
        sender = Forwarder(spool, host, port)
        running = asyncio.create_task(sender.run(stop))
        if once:
            drained = asyncio.create_task(sender.drained.wait())
            await asyncio.wait([running, drained], return_when=asyncio.FIRST_COMPLETED)
            drained.cancel()
            stop.set()
        await running
        click.echo(f"forwarded {sender.forwarded}, rejected {sender.rejected}")

    with reported():
        run_until_signal(main())
