"""
`virta filter`: validate, canonicalise and explain filters.

Every command takes filters as arguments, or one a line from `--filters FILE` or standard input.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from virta.cli.input_lines import (
    STDIN,
    describe,
    dialect_option,
    filter_lines,
    parse_filter,
    print_text,
    read_documents,
    read_filters,
)
from virta.cli.report import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.filters import Filter

EXIT_INVALID = 1
EXIT_NONE = 1

filters_option = click.option(
    "--filters",
    "filters_path",
    default=STDIN,
    metavar="FILE",
    help="Filters, one a line; - is standard input.  [default: -, unless FILTER is given]",
)


@click.group(name="filter")
def filter_group() -> None:
    """Validate, canonicalise and explain filters."""


@filter_group.command()
@dialect_option
@filters_option
@click.argument("filters", nargs=-1, metavar="[FILTER]...")
@click.pass_context
def validate(ctx: click.Context, dialect: str, filters_path: str, filters: tuple[str, ...]) -> None:
    """
    Say of each filter whether it is valid, and what is wrong with it.

    Prints {"filter": n, "valid": true} or {"filter": n, "valid": false, "code", "message",
    "keyword", "path"} for each; a valid filter that looks like another dialect's has a "warning".

    Exit code: 0 all are valid, 1 some are not, 2 error.
    """
    from virta.errors import FilterError
    from virta.filters.hints import doubt

    all_valid = True
    for number, text in enumerate(filters) if filters else filter_lines(filters_path, dialect):
        answer: dict[str, Any] = {"filter": number, "valid": True}
        try:
            parse_filter(text, dialect)
            odd = doubt(text, dialect)
            if odd is not None:
                answer["warning"] = odd
        except FilterError as error:
            all_valid = False
            answer = {
                "filter": number,
                "valid": False,
                "code": error.code,
                "message": error.message,
                "keyword": error.keyword,
                "path": error.path,
            }
        click.echo(json.dumps(answer))
    ctx.exit(0 if all_valid else EXIT_INVALID)


@filter_group.command()
@dialect_option
@filters_option
@click.argument("filters", nargs=-1, metavar="[FILTER]...")
def canonical(dialect: str, filters_path: str, filters: tuple[str, ...]) -> None:
    """
    Print each filter's canonical form and its id.

    Filters that mean the same in any order of operands have the same id, in every process.
    Prints {"filter": n, "id": "…", "canonical": …} for each.

    Exit code: 0 done, 2 error (an invalid filter is one).
    """
    for number, filter_ in _read_filters(filters, filters_path, dialect):
        form = json.loads(filter_.canonical())
        click.echo(json.dumps({"filter": number, "id": filter_.id, "canonical": form}))


@filter_group.command()
@dialect_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a document.")
@click.option("--cost", is_flag=True, help="Print what FILTER costs an index; no document is read.")
@click.argument("filter_text", metavar="FILTER")
@click.argument("docs", nargs=-1, metavar="[DOCS]...")
@click.pass_context
def explain(
    ctx: click.Context,
    dialect: str,
    filter_text: str,
    docs: tuple[str, ...],
    *,
    as_json: bool,
    cost: bool,
) -> None:
    """
    Say for each document why FILTER matches it or not.

    DOCS are files with one JSON document a line; none, or -, is standard input. With --cost, say instead how events
    find the filter in an index, and what is evaluated in Python.

    Exit code: 0 some document matched, 1 none did, 2 error.
    """
    ((_, filter_),) = _read_filters((filter_text,), STDIN, dialect)
    if cost:
        from virta.match import filter_cost

        price = filter_cost(filter_)
        print_text(json.dumps(price.to_json()) if as_json else str(price))
        return
    found = False
    for document in chain.from_iterable(read_documents(docs or (STDIN,))):
        value = document.value()
        explanation = filter_.explain(value)
        found = found or explanation.matches
        if as_json:
            click.echo(json.dumps({"document": document.number, **explanation.to_json()}))
        else:
            print_text(f"document {document.number} {explanation}")
        if dialect == "cesql" and not as_json:
            click.echo(f"  = {_evaluated(filter_text, value)}")
    ctx.exit(0 if found else EXIT_NONE)


def _read_filters(
    filters: tuple[str, ...], filters_path: str, dialect: str
) -> Iterator[tuple[int, Filter]]:
    """Yield the filters of the arguments, else of the file; raise InputError at the first invalid one."""
    from virta.errors import FilterError
    from virta.filters.hints import doubt

    if not filters:
        yield from read_filters(filters_path, dialect)
        return
    for number, text in enumerate(filters):
        try:
            yield number, parse_filter(text, dialect)
        except FilterError as error:
            raise InputError(f"filter {number}: {describe(error)}") from error
        odd = doubt(text, dialect)
        if odd is not None:
            click.echo(f"warning: filter {number}: {odd}", err=True)


def _evaluated(expression: str, document: Any) -> str:
    """Return the value of a CESQL expression, and the error it met, as text."""
    from virta.filters.cesql import evaluate

    value, problem = evaluate(expression, document)
    shown = json.dumps(value)
    return shown if problem is None else f"{shown}, {problem}"
