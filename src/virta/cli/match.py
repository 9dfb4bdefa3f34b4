"""
`virta match`: a grep for events, with many filters at once.

Exit codes as grep's: 0 when some document matched some filter, 1 when none did, 2 on an error.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from virta.cli.input_lines import STDIN, dialect_option, read_documents, read_filters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from virta.cli.input_lines import Document
    from virta.filters import Filter

EXIT_NONE = 1


@click.command()
@dialect_option
@click.option(
    "--filters",
    "filters_path",
    required=True,
    metavar="FILE",
    help="Filters, one a line (JSON for koncorde and cloudevents, text otherwise).",
)
@click.option(
    "--explain", is_flag=True, help="Print for each filter which conditions decided, and why."
)
@click.option(
    "--documents", is_flag=True, help="Print the documents that match, as they came, and no others."
)
@click.option(
    "-q", "--quiet", is_flag=True, help="Print nothing; stop at the first document that matches."
)
@click.option("--line-buffered", is_flag=True, help="Write each line as soon as it is known.")
@click.argument("docs", nargs=-1, metavar="[DOCS]...")
@click.pass_context
def match(
    ctx: click.Context,
    dialect: str,
    filters_path: str,
    docs: tuple[str, ...],
    *,
    explain: bool,
    documents: bool,
    quiet: bool,
    line_buffered: bool,
) -> None:
    """
    Print which filters each document matches.

    DOCS are files with one JSON document a line; none, or -, is standard input. For each document
    prints {"document": n, "matches": [filter line numbers]}; both count from 0, documents through
    all files. Query strings and CESQL look at documents as CloudEvents in JSON form.

    Exit code: 0 some document matched, 1 none did, 2 error.
    """
    if documents and explain:
        raise click.UsageError("--documents prints documents only: leave --explain out")
    if filters_path == STDIN and (not docs or STDIN in docs):
        raise click.UsageError("filters and documents cannot both come from standard input")
    filters = list(read_filters(filters_path, dialect))
    find = matching(filters)
    found = False
    for batch in read_documents(docs or (STDIN,)):
        for document, matches in zip(batch, find(batch), strict=True):
            found = found or bool(matches)
            if quiet and found:
                ctx.exit(0)
            if quiet or (documents and not matches):
                continue
            reasons = explained(filters, document) if explain else None
            text = document.text() if documents else _match_line(document, matches, reasons)
            sys.stdout.write(text + "\n")
        if line_buffered:
            sys.stdout.flush()
    ctx.exit(0 if found else EXIT_NONE)


def matching(
    filters: Iterable[tuple[int, Filter]],
) -> Callable[[list[Document]], Iterator[list[int]]]:
    """Return a function from documents to the sorted numbers of the filters that each matches."""
    from virta.errors import EventError
    from virta.match import Matcher

    matcher = Matcher()
    # Equal filters share an id.
    lines_of: dict[str, list[int]] = {}
    for number, filter_ in filters:
        lines_of.setdefault(matcher.add(filter_), []).append(number)

    def find(documents: list[Document]) -> Iterator[list[int]]:
        found: Iterable[list[str]]
        try:
            found = matcher.match_many([document.line for document in documents])
        except EventError:
            # Some document is not JSON: those before it are matched, and its `value` raises.
            found = (matcher.match(document.value()) for document in documents)
        for ids in found:
            yield sorted(line for id_ in ids for line in lines_of[id_])

    return find


def explained(filters: Iterable[tuple[int, Filter]], document: Document) -> list[dict[str, Any]]:
    """Return for each filter whether it matches the document, and the conditions that decided."""
    value = document.value()
    explanations = ((number, filter_.explain(value)) for number, filter_ in filters)
    return [
        {"filter": number, "matches": explanation.matches, "reasons": explanation.reasons}
        for number, explanation in explanations
    ]


def _match_line(
    document: Document, matches: list[int], reasons: list[dict[str, Any]] | None
) -> str:
    if reasons is None:
        return f'{{"document": {document.number}, "matches": {matches}}}'
    return json.dumps({"document": document.number, "matches": matches, "explain": reasons})
