"""
What commands share: exit codes, errors as one sentence, reports, progress.

Exit codes: 0 done; 1 done, and problems were found; 2 wrong usage or bad input; 3 no such log, or not
one we can open; 4 the log is damaged or has a gap there; 5 reading or writing failed; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import time
from base64 import b64encode
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from virta.errors import (
    AccessError,
    EventError,
    LogCorruptionError,
    LogFormatError,
    LogGapError,
    LogLimitError,
    LogNotFoundError,
    LogTypeError,
    VirtaError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

EXIT_OK: Final = 0
EXIT_PROBLEMS: Final = 1
EXIT_USAGE: Final = 2
EXIT_NO_LOG: Final = 3
EXIT_DAMAGED: Final = 4
EXIT_FAILED: Final = 5
EXIT_INTERRUPTED: Final = 130

_EXITS: Final[tuple[tuple[tuple[type[VirtaError], ...], int], ...]] = (
    ((LogTypeError, LogLimitError, EventError, AccessError), EXIT_USAGE),
    ((LogNotFoundError, LogFormatError), EXIT_NO_LOG),
    ((LogCorruptionError, LogGapError), EXIT_DAMAGED),
)
# Errors of one class that mean different things.
_EXITS_BY_CODE: Final = {"tier_url": EXIT_USAGE, "tier_empty": EXIT_NO_LOG}
# A progress line is drawn at most this often.
PROGRESS_S: Final = 0.1


class ReportingGroup(click.Group):
    """A group whose commands handle closed pipes, Ctrl-C and errors, each with its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(EXIT_OK)  # the reader of our output has closed it
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except VirtaError as error:
            click.echo(f"error: {error.message}", err=True)
            ctx.exit(_exit_code(error))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"error: {where}{error.strerror or error}", err=True)
            ctx.exit(EXIT_FAILED)
        return result


def _exit_code(error: VirtaError) -> int:
    by_class = (code for kinds, code in _EXITS if isinstance(error, kinds))
    return _EXITS_BY_CODE.get(error.code) or next(by_class, EXIT_FAILED)


def _silence_stdout() -> None:
    """Redirect stdout to nowhere: the interpreter flushes it once more at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # stdout is not a real file (a test's buffer): nothing to silence
    finally:
        os.close(devnull)


class InputError(click.ClickException):
    """Bad input: one sentence, exit code 2."""

    exit_code = EXIT_USAGE

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=file is None, file=file)


json_option = click.option("--json", "as_json", is_flag=True, help="Report as one JSON object.")


def print_report(members: Any, text: Sequence[str], *, as_json: bool) -> None:
    """Print a report: the members as JSON for programs, or the lines for people."""
    if as_json:
        import msgspec  # not needed to show help

        click.echo(msgspec.json.encode(members))
        return
    for line in text:
        click.echo(line)


def one_line(text: str) -> str:
    """Return a text with unprintable characters escaped, so it stays on its line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def text_member(name: str, data: bytes) -> dict[str, Any]:
    """Return a member with a text, or with its base64 under another name if it is not UTF-8."""
    try:
        return {name: bytes(data).decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(data).decode()}


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: int = 0) -> list[str]:
    """Return rows as lines of aligned cells; the last `numbers` columns are aligned right."""
    cells = [[*head], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    left = len(head) - numbers
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


@contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (done, total) that draws progress on stderr, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    try:
        from rich.console import Console  # optional, and slow to import
        from rich.progress import Progress
    except ImportError:
        with _plain_progress(what) as update:
            yield update
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _plain_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    drawn = 0.0

    def update(done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn >= PROGRESS_S:
            drawn = now
            click.echo(f"\r{what} {100 * done // max(total, 1):3} %", nl=False, err=True)

    try:
        yield update
    finally:
        if drawn:
            click.echo("\r" + " " * (len(what) + 6) + "\r", nl=False, err=True)
