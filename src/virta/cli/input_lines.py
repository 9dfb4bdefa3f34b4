"""
Filters and documents as lines: one a line, counted from 0, and a bad one named by file and line.

Whatever is wrong with the input ends the command with exit code 2 and one sentence; nothing is skipped
silently but blank lines between documents.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from virta import jsontext

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedReader

    from virta.filters import Filter

# A document larger than this is no event but a mistake (a server takes 10 MiB).
LINE_BYTES_MAX = 16 << 20

# Bytes asked for at once: enough that a batch of documents is worth a call of the matcher.
READ_BYTES = 1 << 18

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# What can stand in a file with one filter a line.
DIALECTS = ("query-string", "koncorde", "cesql", "cloudevents")

# Filters after a refused one that are checked for the same other dialect.
ALIKE_LINES_MAX = 10_000

STDIN = "-"


class InputError(click.ClickException):
    """Bad input: exit code 2, as grep has it."""

    exit_code = 2


dialect_option = click.option(
    "--dialect",
    type=click.Choice(DIALECTS),
    default="query-string",
    show_default=True,
    help="The language the filters are written in.",
)


def read_filters(path: str, dialect: str) -> Iterator[tuple[int, Filter]]:
    """
    Return the filters of a file with their line numbers; raise InputError at the first invalid one.

    Filters that parse but look like another dialect's are counted in a warning on standard error.
    """
    from virta.errors import FilterError
    from virta.filters.hints import doubt

    lines = filter_lines(path, dialect)
    count = odd = 0
    first = ""
    for number, line in lines:
        try:
            yield number, parse_filter(line, dialect)
        except FilterError as error:
            place = _place(path, number, "filter")
            others = chain([line], (text for _, text in lines))
            raise InputError(f"{place}: {told(error)}{_count_alike(error, others)}") from error
        count += 1
        doubtful = doubt(line, dialect)
        if doubtful is not None:
            odd += 1
            first = first or f"{_place(path, number, 'filter')}: {doubtful}"
    if odd:
        click.echo(
            f"warning: {odd} of {count} filters may not say what you mean: {first}", err=True
        )


def _count_alike(error: Any, lines: Iterable[str]) -> str:
    """Return a note on how many of the filters from a refused one on look like its likely dialect."""
    from virta.filters.hints import likely_dialect

    likely = error.members.get("likelyDialect")
    if likely is None:
        return ""
    found = [likely_dialect(line) == likely for line in islice(lines, ALIKE_LINES_MAX)]
    if len(found) == 1:
        return f"; try --dialect {likely}"
    return f"; {sum(found)} of the {len(found)} filters from here on do: try --dialect {likely}"


def filter_lines(path: str, dialect: str) -> Iterator[tuple[int, str]]:
    """
    The lines of a file that hold filters.

    A blank line holds none, except for query strings, of which the empty one matches everything.
    """
    for number, line in _lines(path):
        text = _text(line, path, number)
        if text.strip() or dialect == "query-string":
            yield number, text


def parse_filter(text: str, dialect: str) -> Filter:
    from virta.filters import parse

    return parse(text, dialect)


class Document(NamedTuple):
    """A line that holds a document, not yet looked into; `number` counts through all files."""

    number: int
    line: bytes
    path: str
    line_number: int

    def text(self) -> str:
        """The line as it came; InputError if it is not UTF-8."""
        return _text(self.line, self.path, self.line_number)

    def value(self) -> Any:
        """The document itself; InputError if it is not JSON."""
        return _value(self.line, self.path, self.line_number)


def read_documents(paths: Iterable[str]) -> Iterator[list[Document]]:
    """
    The documents of all files, as many at once as are there: a slow writer's do not wait for more.
    """
    count = 0
    for path in paths:
        line_number = 0
        for batch in _batches(path):
            found = []
            for line in batch:
                if line and not line.isspace():
                    found.append(Document(count, line, path, line_number))
                count += 1
                line_number += 1
            yield found


def told(error: Any) -> str:
    """A FilterError in one line: the sentence, where in the filter, and the code."""
    where = f" (at {error.path})" if error.path else ""
    return f"{error.message}{where} [{error.code}]"


def print_text(text: str) -> None:
    """Print for people; what the output's encoding cannot say (a lone surrogate) is shown escaped."""
    click.echo(text.encode("utf-8", "backslashreplace").decode())


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    for batch in _batches(path):
        for line in batch:
            yield number, line
            number += 1


def _batches(path: str) -> Iterator[list[bytes]]:
    """The lines of a file without their ends, in lists of what one read gave."""
    with _opened(path) as stream:
        number = 0
        rest = b""
        while chunk := _read(stream, path):
            if number == 0 and not rest:
                chunk = chunk.removeprefix(BYTE_ORDER_MARK)  # no part of the text
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                yield [line.removesuffix(b"\r") for line in lines]
            number += len(lines)
            if len(rest) > LINE_BYTES_MAX:
                raise InputError(
                    f"{_place(path, number)}: longer than {LINE_BYTES_MAX} bytes, the limit of a line"
                )
        if rest:
            yield [rest.removesuffix(b"\r")]


def _read(stream: BufferedReader, path: str) -> bytes:
    try:
        return stream.read1(READ_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _opened(path: str) -> Iterator[BufferedReader]:
    if path == STDIN:
        yield sys.stdin.buffer  # type: ignore[misc]  # a BufferedReader, typed as any binary stream
        return
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed below; the path is what was typed
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    with stream:
        yield stream


def _text(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{_place(path, number)}: not UTF-8 at byte {error.start + 1}") from error


def _value(line: bytes, path: str, number: int) -> Any:
    try:
        return jsontext.decode(_text(line, path, number))
    except jsontext.JsonDepthError:
        problem = "nested too deeply"
    except ValueError as error:
        problem = f"not JSON: {error}"
    raise InputError(f"{_place(path, number, 'document')}: {problem}")


def _place(path: str, number: int, noun: str = "number") -> str:
    """People's editors count lines from 1, our output from 0: say both."""
    name = "standard input" if path == STDIN else path
    return f"{name}, line {number + 1} ({noun} {number})"
