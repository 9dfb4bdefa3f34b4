"""`virta journal`: keys, their values and locks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from virta.cli.journal.group import (
    LIMIT,
    SECONDS,
    STDIN,
    TakesNumbers,
    connected,
    deliver,
    journal,
    memory_option,
    spool_option,
)
from virta.cli.journal.output import aligned, local_time, row
from virta.journal.protocol.commands import Plain, get_detailed, set_, to_plain
from virta.journal.protocol.commands import delete as delete_command
from virta.journal.protocol.messages import Type, Value

if TYPE_CHECKING:
    from pathlib import Path

    from virta.cli.journal.output import Output
    from virta.journal.clients.client import Client
    from virta.journal.protocol.messages import Details

TYPES = click.Choice(["string", "buffer", "integer", "float", "boolean", "void"])
STATE_BITS = {"persist": 1, "locked": 2, "worked on": 4}


def read_value(kind: str) -> Plain:
    """Return the value on standard input: bytes as they are, numbers and booleans stripped."""
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
    stored = Type.STRING if kind == "string" else Type.BUFFER
    return Value(stored, text.encode(errors="surrogateescape"))


@journal.command("set", cls=TakesNumbers)
@click.argument("key")
@click.argument("value", default=STDIN)
@click.option(
    "--type", "kind", type=TYPES, help="How to store it: a string, or a buffer from standard input."
)
@click.option("--expires-in", type=SECONDS, help="Seconds it lives.")
@click.option("--ttl", type=SECONDS, help="Seconds a touch extends its life by.")
@memory_option
@click.option("--no-overwrite", is_flag=True, help="Refuse if the key exists.")
@spool_option
@connected
def set_value(
    client: Client | None, out: Output, key: str, value: str, *, kind: str | None,
    expires_in: float | None, ttl: float | None, memory: bool, no_overwrite: bool, spool: Path | None,
) -> None:  # fmt: skip
    """Store VALUE (or standard input, if it is - or left out) under KEY."""
    given = value != STDIN
    command = set_(
        key,
        parse_value(value, kind or "string") if given else read_value(kind or "buffer"),
        overwrite=not no_overwrite,
        persist=not memory,
        expires=None if expires_in is None else time.time() + expires_in,
        ttl=ttl,
    )
    timestamp = deliver(client, command, spool)
    out.show({"key": key, "timestamp": timestamp}, "spooled" if spool else "ok")


@journal.command()
@click.argument("key")
@click.option("--touch", is_flag=True, help="Extend its life by its ttl.")
@click.option("--details", is_flag=True, help="Show times and state instead of the value.")
@connected
def get(client: Client, out: Output, key: str, *, touch: bool, details: bool) -> None:
    """Print the value of KEY."""
    found = client.call(get_detailed(key, touch=touch))
    if found is None:
        out.exit_nothing({"key": key, "found": False}, f"no such key: {key}")
    if details:
        show_details(found.details, out)
        return
    value, kind = to_plain(found.value), Type(found.value.type).name.lower()
    if kind == "string" and not out.as_json:
        value = found.value.data + b"\n"  # as it is, whether it is UTF-8 or not
    out.show({"key": key, "type": kind, "value": value} if out.as_json else value)


def show_details(details: Details, out: Output) -> None:
    """Print details: for programs in microseconds and bits, for people as dates and words."""
    members = {name: getattr(details, name) for name in details.__struct_fields__}
    state = ", ".join(name for name, bit in STATE_BITS.items() if members["bits"] & bit)
    shown: dict[str, Any] = {
        name.replace("_", " "): local_time(members[name] / 1e6) if members[name] else "-"
        for name in ("created", "modified", "accessed", "expires", "worked_until")
    }
    shown |= {
        "ttl": f"{members['ttl'] / 1e6:g} s",
        "size": f"{members['size']} bytes",
        "attempts": members["attempts"],
        "state": state or "-",
    }
    out.show(members, aligned(shown, 12))


@journal.command()
@click.argument("key")
@click.option("--complete", is_flag=True, help="Leave no tombstone: an older SET may revive it.")
@spool_option
@connected
def delete(
    client: Client | None, out: Output, key: str, *, complete: bool, spool: Path | None
) -> None:
    """Delete KEY: a value, or a job by its uri or key."""
    deleted = deliver(client, delete_command(key, complete=complete), spool)
    text = "spooled" if spool else "deleted" if deleted else "was not there"
    out.show({"key": key, "deleted": deleted}, text)


@journal.command(cls=TakesNumbers)
@click.argument("key")
@click.argument("amount")
@connected
def add(client: Client, out: Output, key: str, amount: str) -> None:
    """Add AMOUNT (an integer or a float) to the number under KEY and print the sum."""
    whole = re.fullmatch(r"[+-]?[0-9]+", amount)
    try:
        number = int(amount) if whole else float(amount)
    except ValueError as error:
        raise click.BadParameter(f"{amount!r} is neither an integer nor a float") from error
    # ADD alone creates a number in memory only, which is of no use from the command line.
    client.pipeline([set_(key, type(number)(0), overwrite=False)])
    total = client.add(key, number)
    out.show({"key": key, "value": total} if out.as_json else total)


@journal.command("not")
@click.argument("key")
@connected
def invert(client: Client, out: Output, key: str) -> None:
    """Flip the boolean under KEY and print it."""
    flipped = client.invert(key)
    out.show({"key": key, "value": flipped} if out.as_json else flipped)


@journal.command(cls=TakesNumbers)
@click.argument("key")
@click.argument("size", type=click.IntRange(min=0))
@connected
def truncate(client: Client, out: Output, key: str, size: int) -> None:
    """Cut the string or buffer under KEY to SIZE bytes, or fill it up with zeros."""
    client.truncate(key, size)
    out.show({"key": key, "size": size}, "ok")


@journal.command()
@click.argument("key")
@click.argument("new")
@click.option("--overwrite", is_flag=True, help="Replace what is under NEW.")
@connected
def rename(client: Client, out: Output, key: str, new: str, *, overwrite: bool) -> None:
    """Move the value under KEY to NEW."""
    timestamp = client.rename(key, new, overwrite=overwrite)
    out.show({"key": new, "timestamp": timestamp}, "ok")


@journal.command()
@click.argument("key")
@click.argument("additional")
@connected
def link(client: Client, out: Output, key: str, additional: str) -> None:
    """Add ADDITIONAL as another key of the value under KEY."""
    client.link(key, additional)
    out.show({"key": key, "additional": additional}, "ok")


@journal.command()
@click.argument("key")
@connected
def unlink(client: Client, out: Output, key: str) -> None:
    """Remove KEY from its value; removing the last key removes the value."""
    out.show({"key": key, "deleted": client.unlink(key)}, "ok")


@journal.command()
@click.argument("prefix", default="")
@click.option("--regex", help="Keys that this RE2 pattern is found in, instead of a prefix.")
@click.option("--limit", default=1000, type=LIMIT, help="Print at most so many.")
@connected
def ls(client: Client, out: Output, prefix: str, *, regex: str | None, limit: int) -> None:
    """List keys and values, all or those that start with PREFIX."""
    start = prefix.encode()
    page = client.search(regex) if regex else client.scan(start)
    left = limit
    while True:
        for key, value in page.items:
            if left <= 0 or not (regex or key.startswith(start)):
                return
            left -= 1
            out.show({"key": key, "value": value}, row(key, value))
        if page.cursor is None:
            return
        page = client.more(page.cursor)


@journal.command(context_settings={"ignore_unknown_options": True})
@click.argument("key")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--seconds", default=3600.0, type=SECONDS, help="The lock ends after so long in any case."
)
@connected
def lock(
    client: Client, out: Output, key: str, command: tuple[str, ...], *, seconds: float
) -> None:
    """Run COMMAND while no other client can change KEY; exits with its code."""
    client.lock(key, seconds=seconds)
    try:
        code = run_to_end(command)
    except OSError as error:
        click.echo(f"error: cannot run {command[0]!r}: {error.strerror}", err=True)
        code = 127 if isinstance(error, FileNotFoundError) else 126
    if code < 0:
        code = 128 - code  # a signal, as shells report it
    if out.as_json:
        out.show({"key": key, "code": code})
    sys.exit(code)


def run_to_end(command: tuple[str, ...]) -> int:
    """Return a command's exit code. SIGTERM is passed on: the lock lasts until the command has ended."""
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        with subprocess.Popen(command) as process:  # noqa: S603  (the user's own)
            try:
                for number in received:  # before the process was known
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
def unlock(client: Client, out: Output, key: str) -> None:
    """Release a lock of this connection; locks of others end with them or their time."""
    client.unlock(key)
    out.show({"key": key, "locked": False}, "ok")
