"""
Lines of files and pipes, read as they arrive; filters and documents, one a line.

Filters and documents are counted from 0, and a bad one is named by file and line. Bad input ends the command
with exit code 2 and one sentence; only blank lines between documents are skipped silently.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import click

from virta import jsontext
from virta.cli.report import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from virta.filters import Filter

# The largest record in base64 with its names; a longer line is a mistake.
LINE_BYTES_MAX = 16 * 1024 * 1024
READ_BYTES = 256 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Dialects of which a filter fits on a line.
DIALECTS = ("query-string", "koncorde", "cesql", "cloudevents")
# Filters after a refused one that are checked for the same other dialect.
ALIKE_LINES_MAX = 10_000
STDIN = "-"


class LineTooLongError(InputError):
    """`number` is that of the line, counted from 0."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number + 1} is longer than {LINE_BYTES_MAX} bytes")
        self.number = number


def read_lines(stream: BinaryIO, count_max: int | None = None) -> Iterator[list[bytes]]:
    """
    Yield the lines of a stream without their ends, in lists.

    A list is yielded when it has `count_max` lines, or when no more are waiting, so that the lines of a slow
    writer are used at once. Without `count_max` it is yielded after each read. The last line needs no end.

    Raises:
        LineTooLongError: a line has more than LINE_BYTES_MAX bytes.
    """
    try:
        descriptor: int | None = stream.fileno()
    except (OSError, ValueError):  # it is in memory, as in tests
        descriptor = None
    pending: list[bytes] = []
    number, rest = 0, b""
    while (
        chunk := stream.read(READ_BYTES) if descriptor is None else os.read(descriptor, READ_BYTES)
    ):
        *lines, rest = (rest + chunk).split(b"\n") if b"\n" in chunk else (rest + chunk,)
        number += len(lines)
        if len(rest) > LINE_BYTES_MAX:
            raise LineTooLongError(number)
        pending += lines
        while count_max is not None and len(pending) >= count_max:
            yield pending[:count_max]
            pending = pending[count_max:]
        if pending and (count_max is None or not _has_more(descriptor)):
            yield pending
            pending = []
    if rest:
        pending.append(rest)
    if pending:
        yield pending


def _has_more(descriptor: int | None) -> bool:
    return descriptor is None or bool(select.select([descriptor], [], [], 0)[0])


# Filters.


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
            raise InputError(f"{place}: {describe(error)}{_count_alike(error, others)}") from error
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
    Yield the lines of a file with filters, and their numbers.

    Blank lines are skipped, except for query strings: the empty one matches everything.
    """
    for number, line in enumerate(chain.from_iterable(_batches(path))):
        text = _decoded_line(line, path, number)
        if text.strip() or dialect == "query-string":
            yield number, text


def parse_filter(text: str, dialect: str) -> Filter:
    from virta.filters import parse

    return parse(text, dialect)


# Documents.


class Document(NamedTuple):
    """A line with a document, not yet parsed; `number` counts through all files."""

    number: int
    line: bytes
    path: str
    line_number: int

    def text(self) -> str:
        """Return the line; raise InputError if it is not UTF-8."""
        return _decoded_line(self.line, self.path, self.line_number)

    def value(self) -> Any:
        """Return the document; raise InputError if it is not JSON."""
        try:
            return jsontext.decode(self.text())
        except jsontext.JsonDepthError:
            problem = "nested too deeply"
        except ValueError as error:
            problem = f"not JSON: {error}"
        raise InputError(f"{_place(self.path, self.line_number, 'document')}: {problem}")


def read_documents(paths: Iterable[str]) -> Iterator[list[Document]]:
    """Yield the documents of all files, as many at once as have arrived."""
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


def describe(error: Any) -> str:
    """Return a FilterError as one line: the sentence, where in the filter, and the code."""
    where = f" (at {error.path})" if error.path else ""
    return f"{error.message}{where} [{error.code}]"


def print_text(text: str) -> None:
    """Print text; what the output's encoding cannot represent (a lone surrogate) is escaped."""
    click.echo(text.encode("utf-8", "backslashreplace").decode())


def _batches(path: str) -> Iterator[list[bytes]]:
    """Yield the lines of a file without byte order mark and line ends."""
    with _open_input(path) as stream:
        mark = BYTE_ORDER_MARK
        try:
            for lines in read_lines(stream):
                lines[0], mark = lines[0].removeprefix(mark), b""
                yield [line.removesuffix(b"\r") for line in lines]
        except LineTooLongError as error:
            place = _place(path, error.number)
            raise InputError(f"{place}: longer than {LINE_BYTES_MAX} bytes, the limit of a line") from error  # fmt: skip
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _open_input(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed below; the path is what was typed
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    with stream:
        yield stream


def _decoded_line(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{_place(path, number)}: not UTF-8 at byte {error.start + 1}") from error


def _place(path: str, number: int, noun: str = "number") -> str:
    """Return a line's place in both counts: editors count from 1, our output from 0."""
    name = "standard input" if path == STDIN else path
    return f"{name}, line {number + 1} ({noun} {number})"
