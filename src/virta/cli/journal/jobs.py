"""`virta journal`: push jobs, list and manage them, and configure their domains."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from virta.cli.journal.group import (
    LIMIT,
    SECONDS,
    STDIN,
    connected,
    deliver,
    domain_option,
    journal,
    memory_option,
    priority_option,
    spool_option,
    uri_option,
)
from virta.cli.journal.output import EXIT_NOTHING, aligned, local_time, row
from virta.journal.protocol.commands import Plain
from virta.journal.protocol.commands import push as push_command
from virta.journal.protocol.messages import RefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from virta.cli.journal.output import Output
    from virta.journal.clients.client import Client


@journal.command()
@click.argument("uri")
@domain_option
@priority_option
@click.option("--delay", default=0.0, type=SECONDS, help="Seconds until it is due.")
@click.option("--payload", help="Data for the worker; - reads standard input.")
@memory_option
@spool_option
@connected
def push(
    client: Client | None, out: Output, uri: str, *, domain: str, priority: int, delay: float,
    payload: str | None, memory: bool, spool: Path | None,
) -> None:  # fmt: skip
    """Ask for work on URI; asking again before it starts replaces the request."""
    data: Plain = sys.stdin.buffer.read() if payload == STDIN else payload
    command = push_command(
        uri, domain=domain, priority=priority, delay=delay, payload=data, persist=not memory
    )
    timestamp = deliver(client, command, spool)
    out.show({"uri": uri, "timestamp": timestamp}, "spooled" if spool else "ok")


@journal.command()
@click.argument("domain", default="")
@connected
def stats(client: Client, out: Output, domain: str) -> None:
    """Figures of the journal, and of DOMAIN or the first domains."""
    answer = client.admin("stats", domain=domain)
    figures = {
        "keys": answer["keys"],
        "memory": f"{answer['memory_bytes']} of {answer['memory_bytes_max']} bytes",
        "values on disk only": answer["values_spilled"],
        "disk": f"{answer['disk_bytes']} bytes",
        "recurring jobs": answer["recurring"],
        **{f"jobs {state}": count for state, count in answer["jobs"].items()},
        "oldest ready": f"{answer['oldest_ready_seconds']:.1f} s",
        **{f"since start {name}": count for name, count in answer["totals"].items()},
    }
    lines = [aligned(figures, 22)]
    for place in answer["domains"]:
        counts = " ".join(f"{s}={place[s]}" for s in answer["jobs"] if place[s])
        paused = " (paused)" if place["settings"]["paused"] else ""
        lines.append(row(f"  {place['domain']:20} {counts or 'empty'}{paused}"))
    out.show(answer, "\n".join(lines))


@journal.command()
@click.argument("domain", default="")
@click.option(
    "--state",
    type=click.Choice(["delayed", "ready", "held", "working", "dead"]),
    help="Only jobs in this state.",
)
@click.option("--limit", default=100, type=LIMIT, help="Print at most so many.")
@connected
def jobs(client: Client, out: Output, domain: str, *, state: str | None, limit: int) -> None:
    """List jobs, of DOMAIN or of all."""
    answer = client.admin("list", domain=domain, state=state or "", limit=limit)
    for job in answer["jobs"]:
        due = local_time(job["start"] / 1e6)
        text = f"{job['state']:8} {job['priority']:3} {due} {job['uri']} {job.get('reason', '')}"
        out.show(job, row(text.rstrip()))


@journal.command()
@click.argument("domain", default="")
@click.option("--limit", default=100, type=LIMIT, help="At most so many.")
@click.option("--requeue", is_flag=True, help="Send them back to work.")
@click.option("--drop", is_flag=True, help="Forget them.")
@uri_option
@click.option("--traceback", is_flag=True, help="Show where the last attempt failed.")
@connected
def dead(
    client: Client, out: Output, domain: str, *, limit: int, requeue: bool, drop: bool, uri: str,
    traceback: bool,
) -> None:  # fmt: skip
    """Jobs that failed too often: list them with their reasons, requeue or drop them."""
    if requeue and drop:
        raise click.UsageError("--requeue and --drop exclude each other")
    if requeue or drop:
        action = "requeue" if requeue else "drop"
        answer = client.admin(action, domain=domain, uri=uri, limit=limit)
        out.show(answer, " ".join(f"{name} {count}" for name, count in answer.items()))
        return
    if uri:
        found = dead_job(client, uri)
    else:
        found = client.admin("list", domain=domain, state="dead", limit=limit)["jobs"]
    if not found:
        if not out.as_json:  # else there is a line per job, so none
            click.echo("no dead jobs", err=True)
        sys.exit(EXIT_NOTHING)
    for job in found:
        died = local_time(job["died"] / 1e6)
        out.show(job, row(f"{died} {job['uri']} attempts={job['attempts']} {job['reason']}"))
        if traceback and not out.as_json:
            for text in job.get("traceback", "").splitlines():
                click.echo(row(f"  {text}"))
            for failure in job.get("failures", ()):  # of one uri only
                ended = local_time(failure["ended"] / 1e6)
                click.echo(row(f"  attempt {failure['attempt']} {ended} {failure['reason']}"))


def dead_job(client: Client, uri: str) -> list[dict[str, Any]]:
    """Return the job of a uri if it is dead, however many others are."""
    try:
        job = client.admin("show", uri=uri)
    except RefusedError as refused:
        if refused.code != "does-not-exist":
            raise
        return []
    return [job] if job["state"] == "dead" else []


@journal.command()
@click.argument("domain", default="")
@uri_option
@click.option("--limit", default=100, type=LIMIT, help="At most so many.")
@connected
def kick(client: Client, out: Output, domain: str, *, uri: str, limit: int) -> None:
    """Make delayed jobs of DOMAIN (or one uri) due at once."""
    if not domain and not uri:
        raise click.UsageError("name a DOMAIN or a --uri")
    answer = client.admin("kick", domain=domain, uri=uri, limit=limit)
    out.show(answer, f"kicked {answer['kicked']}")


@journal.command()
@click.argument("domain")
@connected
def pause(client: Client, out: Output, domain: str) -> None:
    """Reserve no jobs of DOMAIN until it is resumed."""
    out.show(client.admin("configure", domain=domain, settings={"paused": True}), "paused")


@journal.command()
@click.argument("domain")
@connected
def resume(client: Client, out: Output, domain: str) -> None:
    """Reserve jobs of DOMAIN again."""
    out.show(client.admin("configure", domain=domain, settings={"paused": False}), "resumed")


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
def configure(client: Client, out: Output, domain: str, **settings: Any) -> None:
    """Change or show the settings of DOMAIN."""
    given = {name: value for name, value in settings.items() if value is not None}
    answer = client.admin("configure", domain=domain, settings=given)
    out.show(answer, aligned(answer, 14))


@journal.command()
@click.argument("name")
@click.argument("schedule", required=False)
@click.argument("uri", required=False)
@domain_option
@priority_option
@click.option("--payload", help="Data for the worker.")
@click.option(
    "--catch-up",
    default="none",
    type=click.Choice(["none", "once"]),
    help="What becomes of times that pass while the daemon is down: nothing, or one push for all.",
)
@click.option("--remove", is_flag=True, help="Remove it.")
@connected
def cron(
    client: Client, out: Output, name: str, schedule: str | None, uri: str | None, *, remove: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Push URI by SCHEDULE ("*/5 * * * *", UTC, or "@every 30s"); with only NAME, show it."""
    key = f"virta:cron:{name}"
    if remove:
        removed = client.delete(key)
        out.show({"name": name, "removed": removed}, "ok" if removed else "was not there")
    elif schedule is not None and uri is None:
        raise click.UsageError("a SCHEDULE needs a URI to push")
    elif schedule is None or uri is None:
        stored = client.get(key)
        if stored is None:
            out.exit_nothing({"name": name, "found": False}, f"no recurring job {name}")
        out.show(json.loads(stored), aligned(json.loads(stored), 14))
    else:
        fields = {"schedule": schedule, "uri": uri} | {
            field: options[field] for field in ("domain", "priority", "catch_up", "payload")
        }
        client.set(key, json.dumps(fields))
        out.show({"name": name, **fields}, "ok")
