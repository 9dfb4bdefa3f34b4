"""`virta journal`: reserve jobs by hand, and report what became of them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from virta.cli.journal.group import SECONDS, connected, journal
from virta.cli.journal.output import EXIT_NOTHING, local_time, row
from virta.journal.jobs.job import parse_key
from virta.journal.protocol.commands import Next, next_
from virta.journal.protocol.messages import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.cli.journal.output import Output
    from virta.journal.clients.client import Client

WORK_FOR = click.FloatRange(min=0, min_open=True)


@journal.command("next")
@click.argument("domain", default="")
@click.option("--count", default=1, type=click.IntRange(1, 1_000), help="Reserve up to so many.")
@click.option("--work-for", type=WORK_FOR, help="Seconds until they count as lapsed.")
@click.option("--remove", is_flag=True, help="Count them as done at once.")
@click.option("--wait", default=0.0, type=SECONDS, help="Seconds to wait for one.")
@connected
def reserve(
    client: Client, out: Output, domain: str, *, count: int, work_for: float | None, remove: bool,
    wait: float,
) -> None:  # fmt: skip
    """Reserve due jobs, of DOMAIN or of all; acknowledge each with `done KEY`."""
    end = time.monotonic() + wait
    while True:
        found: Next = client.call(
            next_(domain, count=count, work_for=work_for, remove=remove, listen=wait > 0)
        )
        left = end - time.monotonic()
        if found.jobs or left <= 0:
            break
        if found.wake_up is not None:
            left = min(left, max(found.wake_up - time.time(), 0.001))
        client.wait(left)
    if not found.jobs:
        due = found.wake_up
        text = "nothing waits" if due is None else f"nothing due before {local_time(due)}"
        out.exit_nothing({"jobs": [], "wake_up": due}, text)
    if out.as_json:
        out.show({"jobs": [job._asdict() for job in found.jobs], "wake_up": None})
        return
    for job in found.jobs:
        click.echo(row(job.key, job.uri))


@journal.command()
@click.argument("keys", nargs=-1, required=True)
@connected
def done(client: Client, out: Output, keys: tuple[str, ...]) -> None:
    """Acknowledge the jobs with these KEYS, as `next` printed them."""
    report_all(keys, client.done, "done", out)


@journal.command()
@click.argument("keys", nargs=-1, required=True)
@click.option("--seconds", default=60.0, type=WORK_FOR, help="So much longer from now.")
@connected
def extend(client: Client, out: Output, keys: tuple[str, ...], *, seconds: float) -> None:
    """Keep the jobs with these KEYS for longer: a heartbeat."""
    report_all(keys, lambda key: client.extend(key, seconds), "extended", out)


@journal.command("give-back")
@click.argument("keys", nargs=-1, required=True)
@connected
def give_back(client: Client, out: Output, keys: tuple[str, ...]) -> None:
    """Return the jobs with these KEYS to the queue, due at once; that counts as no attempt."""
    report_all(keys, client.give_back, "given_back", out)


@journal.command()
@click.argument("keys", nargs=-1, required=True)
@click.option(
    "--reason", default="", show_default=False, help="Why; `virta journal dead` shows it."
)
@click.option("--delay", type=SECONDS, help="Seconds until it is tried again; else the domain's.")
@click.option("--dead", is_flag=True, help="Mark the job as dead: no further attempt.")
@connected
def fail(
    client: Client, out: Output, keys: tuple[str, ...], *, reason: str, delay: float | None, dead: bool
) -> None:  # fmt: skip
    """Report that the jobs with these KEYS failed: tried again, or dead after too many attempts."""
    report_all(keys, lambda key: client.fail(key, reason, delay=delay, dead=dead), "failed", out)


def report_all(
    keys: tuple[str, ...], act: Callable[[bytes], object], what: str, out: Output
) -> None:
    """Do something to each job, also after one fails; exit with code 3 if an attempt was over."""
    missing = False
    for key in keys:
        problem = try_one(key.encode(errors="surrogateescape"), act)
        if problem:
            missing = True
            click.echo(f"error: does-not-exist: {key!r}: {problem}", err=True)
        if out.as_json or not problem:
            out.show({"key": key, what: not problem}, "ok")
    if missing:
        sys.exit(EXIT_NOTHING)


def try_one(key: bytes, act: Callable[[bytes], object]) -> str:
    """Return why there is no such job, empty if there is; raise other refusals."""
    if parse_key(key) is None:
        return "`next` prints no such key"
    try:
        act(key)
    except RefusedError as refused:
        if refused.code != "does-not-exist":
            raise
        return "that attempt is over"
    return ""
