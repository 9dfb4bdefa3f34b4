"""More of `virta journal`: taking jobs by hand, and what becomes of those that were taken."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from virta.cli.journal.keys import SECONDS, connected, journal
from virta.cli.journal.output import EXIT_NOTHING, line, moment, nothing, show
from virta.journal.jobs.domain import parse_key
from virta.journal.protocol.commands import Next, next_
from virta.journal.protocol.messages import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.clients.client import Client

WORK_FOR = click.FloatRange(min=0, min_open=True)


@journal.command("next")
@click.argument("domain", default="")
@click.option("--count", default=1, type=click.IntRange(1, 1_000), help="Take up to so many.")
@click.option("--work-for", type=WORK_FOR, help="Seconds until they count as lapsed.")
@click.option("--remove", is_flag=True, help="Count them as done at once.")
@click.option("--wait", default=0.0, type=SECONDS, help="Seconds to wait for one.")
@connected
def take(
    client: Client,
    as_json: bool,  # noqa: FBT001
    domain: str,
    count: int,
    work_for: float | None,
    remove: bool,  # noqa: FBT001
    wait: float,
) -> None:
    """Take due jobs, of DOMAIN or of all; acknowledge each with `done KEY`."""
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
        wake_up = found.wake_up
        text = "nothing waits" if wake_up is None else f"nothing due before {moment(wake_up)}"
        nothing(as_json, {"jobs": [], "wake_up": wake_up}, text)
    if as_json:
        show({"jobs": [job._asdict() for job in found.jobs], "wake_up": None}, as_json)
        return
    for job in found.jobs:
        click.echo(line(job.key, job.uri))


@journal.command()
@click.argument("keys", nargs=-1, required=True)
@connected
def done(client: Client, as_json: bool, keys: tuple[str, ...]) -> None:  # noqa: FBT001
    """Acknowledge the jobs with these KEYS, as `next` printed them."""
    for_each(keys, client.done, "done", as_json)


@journal.command()
@click.argument("keys", nargs=-1, required=True)
@click.option("--seconds", default=60.0, type=WORK_FOR, help="So much longer from now.")
@connected
def extend(client: Client, as_json: bool, keys: tuple[str, ...], seconds: float) -> None:  # noqa: FBT001
    """Keep the jobs with these KEYS for longer: a heartbeat."""
    for_each(keys, lambda key: client.extend(key, seconds), "extended", as_json)


@journal.command("give-back")
@click.argument("keys", nargs=-1, required=True)
@connected
def give_back(client: Client, as_json: bool, keys: tuple[str, ...]) -> None:  # noqa: FBT001
    """Let somebody else do the jobs with these KEYS, at once; that counts as no attempt."""
    for_each(keys, client.give_back, "given_back", as_json)


@journal.command()
@click.argument("keys", nargs=-1, required=True)
@click.option("--reason", default="", show_default=False, help="Why, for whoever looks later.")
@click.option("--delay", type=SECONDS, help="Seconds until it is tried again; else the domain's.")
@click.option("--dead", is_flag=True, help="Mark the job as dead: no further attempt.")
@connected
def fail(
    client: Client,
    as_json: bool,  # noqa: FBT001
    keys: tuple[str, ...],
    reason: str,
    delay: float | None,
    dead: bool,  # noqa: FBT001
) -> None:
    """Say that the jobs with these KEYS failed: tried again, or dead after too many attempts."""
    for_each(keys, lambda key: client.fail(key, reason, delay=delay, dead=dead), "failed", as_json)


def for_each(
    keys: tuple[str, ...],
    act: Callable[[bytes], object],
    what: str,
    as_json: bool,  # noqa: FBT001
) -> None:
    """All of them, whatever becomes of one; exit code 3 if an attempt was over."""
    missing = 0
    for key in keys:
        problem = attempt(key.encode(errors="surrogateescape"), act)
        if problem:
            missing += 1
            click.echo(f"error: does-not-exist: {key!r}: {problem}", err=True)
        if as_json or not problem:
            show({"key": key, what: not problem}, as_json, "ok")
    if missing:
        sys.exit(EXIT_NOTHING)


def attempt(key: bytes, act: Callable[[bytes], object]) -> str:
    """Why there is no such job, or nothing: other keys are left alone."""
    if parse_key(key) is None:
        return "`next` prints no such key"
    try:
        act(key)
    except RefusedError as refused:
        if refused.code != "does-not-exist":
            raise
        return "that attempt is over"
    return ""
