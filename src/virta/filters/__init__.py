"""
Filters: one tree for four languages.

`parse` turns a text or an object of a dialect into a `Filter`; every dialect is imported only when it is
asked for. The tree and the exact meaning of its conditions: `virta.filters.tree`.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from virta.errors import FilterError
from virta.filters.filter import Filter
from virta.filters.hints import other_dialect, with_dialect

__all__ = ["DIALECTS", "Filter", "FilterError", "parse", "preload"]

# Dialect -> the module whose parse(source) returns a Filter.
DIALECTS = {
    "query-string": "virta.filters.query_string",
    "koncorde": "virta.filters.koncorde",
    "cesql": "virta.filters.cesql",
    "cloudevents": "virta.filters.cloudevents",
}


def parse(source: Any, dialect: str = "query-string") -> Filter:
    """
    Parse a filter of a dialect; raise FilterError, which says what is wrong and where.

    `source` is a text, or, for koncorde and cloudevents, also the object the JSON text would give.
    """
    module = DIALECTS.get(dialect)
    if module is None:
        raise FilterError(
            f"unknown dialect {dialect!r}: expected one of {', '.join(DIALECTS)}",
            code="unknown_dialect",
        )
    try:
        filter_: Filter = import_module(module).parse(source)
    except FilterError as error:
        # No variable for the error: it would refer to this frame, and the frame to it.
        likely = other_dialect(error, source, dialect)
        if likely is None:
            raise
        raise with_dialect(error, likely) from error
    return filter_


def preload() -> None:
    """Import every dialect, and RE2 where it is installed: otherwise the first filter waits for them, about 20 ms."""
    for module in DIALECTS.values():
        import_module(module)
    with suppress(ImportError):
        import_module("re2")
