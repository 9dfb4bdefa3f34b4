"""
What `virta journal` prints: results for people or as JSON, errors as one line.

Invariant: with `--json` the output is strict JSON and loses nothing: bytes that are not UTF-8 are
`{"base64": …}`, numbers that JSON does not have are strings.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from virta.cli.report import one_line
from virta.errors import VirtaError
from virta.journal.protocol.messages import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_NOTHING = 3


class Output:
    """Prints results: as JSON with `--json`, else as text."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def show(self, value: Any, text: str | None = None) -> None:
        """Print a value; `text` is what people get instead."""
        if self.as_json:
            click.echo(json.dumps(to_json(value)))
        elif text is not None:
            click.echo(text)
        elif isinstance(value, bytes):
            sys.stdout.buffer.write(value)
        else:
            click.echo(plain_text(value))

    def exit_nothing(self, value: Any, text: str) -> NoReturn:
        """Print that nothing was found and exit with code 3."""
        if self.as_json:
            click.echo(json.dumps(value))
        else:
            click.echo(text, err=True)
        sys.exit(EXIT_NOTHING)


@contextmanager
def errors_reported(*about: str) -> Iterator[None]:
    """Print an error as one line and exit; `about` names the key or uri for errors that do not."""
    named = " ".join(map(repr, about))
    try:
        yield
    except (VirtaError, OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # the reader of our output has closed it
        if isinstance(error, RefusedError):
            bare = error.message == error.code
            message = f"{error.message}: {named}" if bare and named else error.message
            if error.code == "locked" and error.timeout:
                message += f" until {local_time(error.timeout / 1e6)}"
        elif isinstance(error, VirtaError):
            message = f"{error.code}: {error.message}"
        elif isinstance(error, UnicodeError):
            message = f"{named or 'an argument'} is not UTF-8"
        else:
            message = str(error)
        click.echo(f"error: {message}", err=True)
        missing = isinstance(error, RefusedError) and error.code == "does-not-exist"
        sys.exit(EXIT_NOTHING if missing else 1)


def to_json(value: Any) -> Any:
    """Return a value that JSON can represent; text that is not UTF-8 becomes bytes in base64."""
    if isinstance(value, dict):
        return {name: to_json(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        value = value.encode(errors="surrogateescape")
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def plain_text(value: Any) -> str:
    """Return a value as `set` accepts it: `true`, not Python's `True`."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def row(*cells: Any) -> str:
    """Return a line of cells; characters that would end it or control the terminal are escaped."""
    return "\t".join(one_line(plain_text(cell)) for cell in cells)


def aligned(members: dict[str, Any], width: int) -> str:
    """Return lines of names and values, the values in one column."""
    return "\n".join(
        f"{name:{width}} {plain_text(value)}".rstrip() for name, value in members.items()
    )


def local_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
