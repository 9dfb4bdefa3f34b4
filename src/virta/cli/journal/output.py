"""
What `virta journal` says: results for people or as JSON, errors as one line.

Invariant: with `--json` what is written is JSON by everybody's rules and loses nothing: bytes that are no
text are `{"base64": …}`, numbers that JSON does not know are words.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import sys
import time
from typing import Any, NoReturn

import click

from virta.errors import VirtaError
from virta.journal.protocol.messages import RefusedError

EXIT_NOTHING = 3


class reported:  # noqa: N801  (reads as a statement: `with reported():`)
    """What went wrong as one line, with what it was about, and an exit code."""

    def __init__(self, *about: str) -> None:
        self._about = " ".join(map(repr, about))

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RefusedError):
            bare = error.message == error.code
            message = f"{error.message}: {self._about}" if bare and self._about else error.message
            if error.code == "locked" and error.timeout:
                message += f" until {moment(error.timeout / 1e6)}"
        elif isinstance(error, VirtaError):
            message = f"{error.code}: {error.message}"
        elif isinstance(error, OSError) and error.errno != errno.EPIPE:  # whoever reads has enough
            message = str(error)
        elif isinstance(error, UnicodeError):
            message = f"{self._about or 'an argument'} is not UTF-8"
        else:
            return
        click.echo(f"error: {message}", err=True)
        missing = isinstance(error, RefusedError) and error.code == "does-not-exist"
        sys.exit(EXIT_NOTHING if missing else 1)


def show(value: Any, as_json: bool, text: str | None = None) -> None:  # noqa: FBT001
    """A result for programs or for people."""
    if as_json:
        click.echo(json.dumps(jsonable(value)))
    elif text is not None:
        click.echo(text)
    elif isinstance(value, bytes):
        sys.stdout.buffer.write(value)
    else:
        click.echo(plain_text(value))


def jsonable(value: Any) -> Any:
    """The same as JSON knows it; text that is none, as bytes."""
    if isinstance(value, dict):
        return {name: jsonable(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(member) for member in value]
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
    """A value as it is set: `true`, not Python's `True`."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def line(*cells: Any) -> str:
    """A row for people: what would end it, or speak to the terminal, is escaped."""
    texts = (plain_text(cell) for cell in cells)
    return "\t".join(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        for text in texts
    )


def nothing(as_json: bool, answer: Any, text: str) -> NoReturn:  # noqa: FBT001
    if as_json:
        click.echo(json.dumps(answer))
    else:
        click.echo(text, err=True)
    sys.exit(EXIT_NOTHING)


def moment(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
