"""
`virta journal`: keys, values and jobs from the shell; one command per operation, human or `--json`.

Exit codes: 0 done, 1 refused or out of reach, 2 wrong use, 3 nothing there (no such key, no job).
"""

from __future__ import annotations

import re
import sys
import time
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from virta.cli.journal.output import line, moment, nothing, reported, show
from virta.journal.clients.client import Client
from virta.journal.clients.spool import Spool
from virta.journal.protocol.commands import Command, Plain, look, set_, to_plain
from virta.journal.protocol.commands import delete as delete_command
from virta.journal.protocol.commands import push as push_command
from virta.journal.protocol.messages import PORT, Type, Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.protocol.messages import Details

F = TypeVar("F", bound="Callable[..., Any]")
SECONDS = click.FloatRange(min=0)
LIMIT = click.IntRange(min=0)
PORTS = click.IntRange(0, 65_535)


@click.group(context_settings={"show_default": True})
def journal() -> None:
    """Keys, values and jobs that are never lost."""


# What all commands share.

# Arguments that say what a command is about, for errors that do not.
ABOUT = ("key", "new", "additional", "uri", "domain")


class TakesNumbers(click.Command):
    """A command whose arguments may be numbers below 0, which look like options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = any(re.fullmatch(r"-[0-9.]+.*", word) for word in args)
        return super().parse_args(ctx, args)


def connected(function: F) -> F:
    """Options for the daemon's address and output; the client is the first argument."""

    @click.option(
        "--host", default="127.0.0.1", envvar="VIRTA_JOURNAL_HOST", help="The daemon's host."
    )
    @click.option(
        "--port", default=PORT, envvar="VIRTA_JOURNAL_PORT", help="The daemon's port.", type=PORTS
    )
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @wraps(function)
    def wrapper(host: str, port: int, as_json: bool, **arguments: Any) -> None:  # noqa: FBT001
        with reported(*(arguments[name] for name in ABOUT if arguments.get(name))):
            if arguments.get("spool") is not None:
                function(None, as_json, **arguments)
                return
            with Client(host, port) as client:
                function(client, as_json, **arguments)

    return wrapper  # type: ignore[return-value]


# Values.

STDIN = "-"
TYPES = click.Choice(["string", "buffer", "integer", "float", "boolean", "void"])
spool_option = click.option(
    "--spool",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write to this spool directory instead; `virta journal forward` delivers it.",
)


def read_value(kind: str) -> Plain:
    """Standard input: bytes as they are, numbers and booleans without what surrounds them."""
    data = sys.stdin.buffer.read()
    if kind == "string":
        return Value(Type.STRING, data)
    if kind == "buffer":
        return Value(Type.BUFFER, data)
    return parse_value(data.decode(errors="replace").strip(), kind)


def parse_value(text: str, kind: str) -> Plain:
    try:
        if kind == "integer":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not of type {kind}") from error
    if kind == "boolean":
        if text not in ("true", "false", "1", "0"):
            raise click.BadParameter(f"{text!r} is not true or false")
        return text in ("true", "1")
    if kind == "void":
        return None
    return Value(
        Type.STRING if kind == "string" else Type.BUFFER, text.encode(errors="surrogateescape")
    )


def deliver(client: Client | None, command: Command[Any], spool: Path | None) -> Any:
    """To the daemon, or into a spool; None for the latter."""
    if spool is None:
        assert client is not None
        return client.call(command)
    writer = Spool(spool)
    try:
        writer.put(command.request)
    finally:
        writer.close()
    return None


@journal.command("set", cls=TakesNumbers)
@click.argument("key")
@click.argument("value", default=STDIN)
@click.option(
    "--type", "kind", type=TYPES, help="How to store it: a string, or a buffer from standard input."
)
@click.option("--expires-in", type=SECONDS, help="Seconds it lives.")
@click.option("--ttl", type=SECONDS, help="Seconds a touch extends its life by.")
@click.option("--memory", is_flag=True, help="Keep it in memory only: lost at a restart.")
@click.option("--no-overwrite", is_flag=True, help="Refuse if the key exists.")
@spool_option
@connected
def set_value(
    client: Client | None,
    as_json: bool,  # noqa: FBT001
    key: str,
    value: str,
    kind: str | None,
    expires_in: float | None,
    ttl: float | None,
    memory: bool,  # noqa: FBT001
    no_overwrite: bool,  # noqa: FBT001
    spool: Path | None,
) -> None:
    """Store VALUE (or standard input, if it is - or left out) under KEY."""
    given = value != STDIN
    plain = parse_value(value, kind or "string") if given else read_value(kind or "buffer")
    command = set_(
        key,
        plain,
        overwrite=not no_overwrite,
        persist=not memory,
        expires=None if expires_in is None else time.time() + expires_in,
        ttl=ttl,
    )
    timestamp = deliver(client, command, spool)
    show({"key": key, "timestamp": timestamp}, as_json, "spooled" if spool else "ok")


@journal.command()
@click.argument("key")
@click.option("--touch", is_flag=True, help="Extend its life by its ttl.")
@click.option("--details", is_flag=True, help="Show times and state instead of the value.")
@connected
def get(client: Client, as_json: bool, key: str, touch: bool, details: bool) -> None:  # noqa: FBT001
    """Print the value of KEY."""
    found = client.call(look(key, touch=touch))
    if found is None:
        nothing(as_json, {"key": key, "found": False}, f"no such key: {key}")
    if details:
        show_details(found.details, as_json)
        return
    value, kind = to_plain(found.value), Type(found.value.type).name.lower()
    if kind == "string" and not as_json:
        value = found.value.data + b"\n"  # as it is, text or not
    show({"key": key, "type": kind, "value": value} if as_json else value, as_json)


def show_details(known: Details, as_json: bool) -> None:  # noqa: FBT001
    """For programs in microseconds and bits, for people as dates and words."""
    view = {name: getattr(known, name) for name in known.__struct_fields__}
    bits = {"persist": 1, "locked": 2, "worked on": 4}
    lines = [
        f"{name.replace('_', ' '):12} {moment(view[name] / 1e6) if view[name] else '-'}"
        for name in ("created", "modified", "accessed", "expires", "worked_until")
    ]
    lines += [
        f"{'ttl':12} {view['ttl'] / 1e6:g} s",
        f"{'size':12} {view['size']} bytes",
        f"{'attempts':12} {view['attempts']}",
        f"{'state':12} {', '.join(n for n, bit in bits.items() if view['bits'] & bit) or '-'}",
    ]
    show(view, as_json, "\n".join(lines))


@journal.command()
@click.argument("key")
@click.option("--complete", is_flag=True, help="Leave no tombstone: an older SET may revive it.")
@spool_option
@connected
def delete(
    client: Client | None,
    as_json: bool,  # noqa: FBT001
    key: str,
    complete: bool,  # noqa: FBT001
    spool: Path | None,
) -> None:
    """Delete KEY: a value, or a job by its uri or key."""
    deleted = deliver(client, delete_command(key, complete=complete), spool)
    text = "spooled" if spool else "deleted" if deleted else "was not there"
    show({"key": key, "deleted": deleted}, as_json, text)


@journal.command(cls=TakesNumbers)
@click.argument("key")
@click.argument("amount")
@connected
def add(client: Client, as_json: bool, key: str, amount: str) -> None:  # noqa: FBT001
    """Add AMOUNT (an integer or a float) to the number under KEY and print the sum."""
    whole = re.fullmatch(r"[+-]?[0-9]+", amount)
    try:
        number = int(amount) if whole else float(amount)
    except ValueError as error:
        raise click.BadParameter(f"{amount!r} is neither an integer nor a float") from error
    # By itself ADD makes a number in memory only, which no command line is about.
    client.pipeline([set_(key, type(number)(0), overwrite=False)])
    total = client.add(key, number)
    show({"key": key, "value": total} if as_json else total, as_json)


@journal.command("not")
@click.argument("key")
@connected
def invert(client: Client, as_json: bool, key: str) -> None:  # noqa: FBT001
    """Flip the boolean under KEY and print it."""
    flipped = client.invert(key)
    show({"key": key, "value": flipped} if as_json else flipped, as_json)


@journal.command(cls=TakesNumbers)
@click.argument("key")
@click.argument("size", type=click.IntRange(min=0))
@connected
def truncate(client: Client, as_json: bool, key: str, size: int) -> None:  # noqa: FBT001
    """Cut the string or buffer under KEY to SIZE bytes, or fill it up with zeros."""
    client.truncate(key, size)
    show({"key": key, "size": size}, as_json, "ok")


@journal.command()
@click.argument("key")
@click.argument("new")
@click.option("--overwrite", is_flag=True, help="Replace what is under NEW.")
@connected
def rename(client: Client, as_json: bool, key: str, new: str, overwrite: bool) -> None:  # noqa: FBT001
    """Move the value under KEY to NEW."""
    timestamp = client.rename(key, new, overwrite=overwrite)
    show({"key": new, "timestamp": timestamp}, as_json, "ok")


@journal.command()
@click.argument("key")
@click.argument("additional")
@connected
def link(client: Client, as_json: bool, key: str, additional: str) -> None:  # noqa: FBT001
    """Let ADDITIONAL lead to the value under KEY, too."""
    client.link(key, additional)
    show({"key": key, "additional": additional}, as_json, "ok")


@journal.command()
@click.argument("key")
@connected
def unlink(client: Client, as_json: bool, key: str) -> None:  # noqa: FBT001
    """Let KEY no longer lead to its value; the last key takes the value with it."""
    show({"key": key, "deleted": client.unlink(key)}, as_json, "ok")


@journal.command()
@click.argument("prefix", default="")
@click.option("--regex", help="Keys that this RE2 pattern is found in, instead of a prefix.")
@click.option("--limit", default=1000, type=LIMIT, help="Print at most so many.")
@connected
def ls(client: Client, as_json: bool, prefix: str, regex: str | None, limit: int) -> None:  # noqa: FBT001
    """List keys and values, all or those that start with PREFIX."""
    start = prefix.encode()
    page = client.search(regex) if regex else client.scan(start)
    left = limit
    while True:
        for key, value in page.items:
            if left <= 0 or not (regex or key.startswith(start)):
                return
            left -= 1
            row = {"key": key, "value": value}
            show(row, as_json, line(key, value))
        if page.cursor is None:
            return
        page = client.more(page.cursor)


# Jobs.


@journal.command()
@click.argument("uri")
@click.option(
    "--domain", default="", show_default=False, help="Where it waits; the uri's host by default."
)
@click.option("--priority", default=0, type=click.IntRange(0, 255), help="0 (first) to 255.")
@click.option("--delay", default=0.0, type=SECONDS, help="Seconds until it is due.")
@click.option("--payload", help="Data for the worker; - reads standard input.")
@click.option("--memory", is_flag=True, help="Keep it in memory only: lost at a restart.")
@spool_option
@connected
def push(
    client: Client | None,
    as_json: bool,  # noqa: FBT001
    uri: str,
    domain: str,
    priority: int,
    delay: float,
    payload: str | None,
    memory: bool,  # noqa: FBT001
    spool: Path | None,
) -> None:
    """Ask for work on URI; asking again before it starts replaces the request."""
    data: Plain = payload
    if payload == STDIN:
        data = sys.stdin.buffer.read()
    command = push_command(
        uri, domain=domain, priority=priority, delay=delay, payload=data, persist=not memory
    )
    timestamp = deliver(client, command, spool)
    show({"uri": uri, "timestamp": timestamp}, as_json, "spooled" if spool else "ok")
