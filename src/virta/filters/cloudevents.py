"""
The filter dialects of the CloudEvents Subscriptions API: exact, prefix, suffix, all, any, not, and sql.

    {"exact": {"type": "com.example.done", "subject": "a"}}     every attribute equals its text
    {"prefix": {"type": "com.example."}}, {"suffix": {…}}       every attribute starts, ends with it
    {"all": [filter, …]}, {"any": [filter, …]}, {"not": filter}
    {"sql": "source LIKE '%cloudevents%'"}                      a CESQL expression, coerced to Boolean

A list is what a subscription's `filters` is: all of them must hold, none is everything. Attributes are
compared as text, case-sensitively; a missing one equals, starts with and ends with nothing, and `not`
is plain negation (so `not exact` holds for it). An sql filter that meets a problem is false.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from virta import jsontext
from virta.errors import FilterError
from virta.filters.cesql.attributes import text_equals, text_prefix, text_suffix
from virta.filters.cesql.parser import parse_expression
from virta.filters.cesql.syntax import Call
from virta.filters.cesql.trees import static_type, tree_of
from virta.filters.cesql.values import DATA_MEMBERS
from virta.filters.filter import Filter
from virta.filters.limits import CONDITIONS_MAX, DEPTH_MAX, TEXT_BYTES_MAX
from virta.filters.tree import Node, all_of, any_of, negate

if TYPE_CHECKING:
    from collections.abc import Callable


# Characters of one text to compare an attribute with; longer than any attribute should be (the
# specification asks for 64 KiB events to be forwarded).
TEXT_CHARS_MAX = 65_536

_NAME = re.compile(r"[a-z0-9]+")


def parse(source: Any) -> Filter:
    """
    Return the filter of an object, a list of objects, or the JSON text of either.

    Raises FilterError whose `path` names the place (`all[1].exact.type`) and `keyword` the dialect.
    """
    if isinstance(source, str | bytes):
        source = _decode_filter(source)
    reader = _Reader()
    if isinstance(source, list | tuple):
        tree = all_of([reader.filter(x, f"[{i}]", 1) for i, x in enumerate(source)])
    else:
        tree = reader.filter(source, "", 1)
    return Filter(tree, dialect="cloudevents")


def _decode_filter(text: str | bytes) -> Any:
    if len(text) > TEXT_BYTES_MAX:
        raise FilterError(
            f"filter of {len(text)} characters: at most {TEXT_BYTES_MAX} are allowed",
            code="too_long",
        )
    try:
        return jsontext.decode(text)
    except jsontext.JsonDepthError:
        raise FilterError(
            f"filter nests deeper than {DEPTH_MAX} levels", code="too_complex"
        ) from None
    except ValueError as error:
        raise FilterError(f"filter is not JSON: {error}", code="invalid_json") from None


class _Reader:
    """Reads one filter with all its nested ones, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def filter(self, source: Any, path: str, depth: int) -> Node:
        self._count_conditions(1, path)
        if depth > DEPTH_MAX:
            raise FilterError(
                f"filter nests deeper than {DEPTH_MAX} levels", code="too_complex", path=path[:100]
            )
        if not isinstance(source, dict) or len(source) != 1:
            raise _invalid(
                f"a filter is an object with one member, the dialect, got {_short_repr(source)}",
                path,
            )
        ((dialect, argument),) = source.items()
        inner = f"{path}.{dialect}" if path else str(dialect)
        if dialect in COMPARISONS:
            return self._comparison(dialect, argument, inner)
        if dialect in {"all", "any"}:
            return self._nested(dialect, argument, inner, depth)
        if dialect == "not":
            return negate(self.filter(argument, inner, depth + 1))
        if dialect == "sql":
            return _sql(argument, inner)
        raise FilterError(
            f"unknown filter dialect {_short_repr(dialect)}: expected one of"
            f" {', '.join(COMPARISONS)}, all, any, not, sql",
            code="dialect_unsupported",
            keyword=str(dialect)[:100],
            path=path,
        )

    def _nested(self, dialect: str, filters: Any, path: str, depth: int) -> Node:
        if not isinstance(filters, list | tuple) or not filters:
            raise _invalid(
                f"{dialect} takes a list of at least one filter, got {_short_repr(filters)}",
                path,
                dialect,
            )
        self._count_conditions(len(filters), path)
        nodes = [self.filter(x, f"{path}[{i}]", depth + 1) for i, x in enumerate(filters)]
        return all_of(nodes) if dialect == "all" else any_of(nodes)

    def _comparison(self, dialect: str, attributes: Any, path: str) -> Node:
        if not isinstance(attributes, dict) or not attributes:
            raise _invalid(
                f"{dialect} takes an object of attributes and texts, got {_short_repr(attributes)}",
                path,
                dialect,
            )
        self._count_conditions(len(attributes), path)
        nodes = []
        for name, text in attributes.items():
            inner = f"{path}.{name}"[:200]
            if not isinstance(name, str) or _NAME.fullmatch(name) is None or name in DATA_MEMBERS:
                raise _invalid(
                    f"{_short_repr(name)} is no attribute of events: names have lower-case letters and"
                    " digits, and data is none",
                    inner,
                    dialect,
                )
            if not isinstance(text, str) or not 0 < len(text) <= TEXT_CHARS_MAX:
                raise _invalid(
                    f"{dialect} compares {name} with a text of 1 to {TEXT_CHARS_MAX} characters,"
                    f" got {_short_repr(text)}",
                    inner,
                    dialect,
                )
            nodes.append(COMPARISONS[dialect](name, text))
        return all_of(nodes)

    def _count_conditions(self, more: int, path: str) -> None:
        """Count conditions and refuse a filter that is too large before reading on."""
        self.count += more
        if self.count > 2 * CONDITIONS_MAX:
            raise FilterError(
                f"filter has more than {CONDITIONS_MAX} conditions",
                code="too_complex",
                path=path[:100],
            )


def _sql(source: Any, path: str) -> Node:
    if not isinstance(source, str):
        raise _invalid(
            f"sql takes a CESQL expression as text, got {_short_repr(source)}", path, "sql"
        )
    try:
        expression = parse_expression(source)
        # The API coerces the result to Boolean, where the language itself wants one.
        is_boolean = static_type(expression) is bool
        return tree_of(expression if is_boolean else Call("BOOL", (expression,)))
    except FilterError as error:
        raise FilterError(error.message, code=error.code, keyword="sql", path=path) from error


COMPARISONS: dict[str, Callable[[str, str], Node]] = {
    "exact": text_equals,
    "prefix": text_prefix,
    "suffix": text_suffix,
}


def _short_repr(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:39] + "…")
    if isinstance(value, dict | list | tuple):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)} members"
    return f"a {type(value).__name__}"


def _invalid(message: str, path: str, dialect: str | None = None) -> FilterError:
    return FilterError(message, keyword=dialect, path=path)
