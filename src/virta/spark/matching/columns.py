"""
Filters as Spark columns, where that is exact.

`compile_filter` returns a Column that is true exactly for the events for which `filter.matches` is, or None if a part
of the filter has no such Column: regular expressions (RE2 differs from Java), geo, text order, Koncorde's
flattened paths, attributes that are not text columns. The caller then uses the matcher; there is no approximation.

The columns are those of `virta.spark.schemas.EVENT`: attributes that are text, and paths into `data`, a VARIANT whose
numbers are integers or doubles.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from virta.filters.tree import And, Condition, Everything, Node, Not, Nothing, Or, ValueRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.filters import Filter

TEXT_ATTRIBUTES = frozenset(("id", "source", "type", "subject", "datacontenttype", "dataschema"))
CONDITIONS_MAX = 20  # beyond this a plan costs more than the matcher
NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
REPLACEMENT = "�"  # in columns it may replace bytes that are not text

TYPES = {
    "null": ("VOID",),
    "boolean": ("BOOLEAN",),
    "number": ("BIGINT", "DOUBLE"),
    "string": ("STRING",),
}


class InexactError(Exception):
    """A part of a filter has no exact Column."""


def compile_filter(filter_: Filter, columns: Sequence[str]) -> Column | None:
    """Return the filter as a Column over event columns, or None."""
    if filter_.tree.count > CONDITIONS_MAX:
        return None
    try:
        return compile_node(filter_.tree, frozenset(columns))
    except InexactError:
        return None


def compile_node(node: Node, columns: frozenset[str]) -> Column:
    if isinstance(node, Everything):
        return F.lit(True)
    if isinstance(node, Nothing):
        return F.lit(False)
    if isinstance(node, Not):
        return ~compile_node(node.child, columns)
    if isinstance(node, And):
        parts = [compile_node(child, columns) for child in node.children]
        return reduce(Column.__and__, parts, F.lit(True))
    if isinstance(node, Or):
        parts = [compile_node(child, columns) for child in node.children]
        return reduce(Column.__or__, parts, F.lit(False))
    # Two-valued logic: a condition on something missing is false, never NULL.
    return F.coalesce(compile_condition(node, columns), F.lit(False))


def compile_condition(condition: Condition, columns: frozenset[str]) -> Column:
    path = condition.path
    if len(path) == 1 and path[0] in TEXT_ATTRIBUTES and path[0] in columns:
        return compile_attribute(F.col(str(path[0])), condition)
    if path and path[0] == "data" and "data" in columns:
        return compile_data(variant_path(path[1:]), condition)
    raise InexactError


def compile_attribute(column: Column, condition: Condition) -> Column:
    """Return a test with the same result for a missing and an empty attribute: the column is NULL for both."""
    op, value = condition.op, condition.value
    if condition.path[0] == "id" and any(map(like_number, value if op == "in" else (value,))):
        raise InexactError
    if op == "eq" and is_plain_text(value) and value:
        return column == F.lit(value)
    if op == "in" and all(is_plain_text(v) and v for v in value):
        return column.isin(*value)
    if op == "prefix" and is_plain_text(value) and value:
        return column.startswith(value)
    if op == "suffix" and is_plain_text(value) and value:
        return column.endswith(value)
    raise InexactError


def compile_data(path: str, condition: Condition) -> Column:
    op, value = condition.op, condition.value
    there = F.col("data") if path == "$" else F.try_variant_get("data", path, "variant")
    kind = F.schema_of_variant(there)
    if op == "exists":
        return there.isNotNull()
    if op == "type" and value in TYPES:
        return kind.isin(*TYPES[value])
    if op == "eq":
        return equals(path, kind, value)
    if op == "in":
        return reduce(
            Column.__or__, [F.coalesce(equals(path, kind, v), F.lit(False)) for v in value]
        )
    if op == "range":
        return between(path, kind, value)
    if op in {"prefix", "suffix"} and is_plain_text(value):
        text = F.try_variant_get("data", path, "string")
        found = text.startswith(value) if op == "prefix" else text.endswith(value)
        return (kind == "STRING") & found
    raise InexactError


def equals(path: str, kind: Column, value: object) -> Column:
    if value is None:
        return kind == "VOID"
    if isinstance(value, bool):
        return (kind == "BOOLEAN") & (F.try_variant_get("data", path, "boolean") == F.lit(value))
    if isinstance(value, int | float):
        number = F.try_variant_get("data", path, "double")
        return kind.isin(*TYPES["number"]) & (number == F.lit(as_double(value)))
    if is_plain_text(value):
        return (kind == "STRING") & (F.try_variant_get("data", path, "string") == F.lit(value))
    raise InexactError


def between(path: str, kind: Column, bounds: ValueRange) -> Column:
    """Return a test of a range of numbers; text order needs the event, as a column may have U+FFFD in it."""
    for bound in (bounds.lower, bounds.upper):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
            raise InexactError
    number = F.try_variant_get("data", path, "double")
    inside = kind.isin(*TYPES["number"])
    if bounds.lower is not None:
        low = F.lit(as_double(bounds.lower))
        inside &= (number > low) if bounds.lower_open else (number >= low)
    if bounds.upper is not None:
        high = F.lit(as_double(bounds.upper))
        inside &= (number < high) if bounds.upper_open else (number <= high)
    return inside


def as_double(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # callers pass numbers only
    except OverflowError as exc:
        raise InexactError from exc


def like_number(value: object) -> bool:
    """Return whether text may be part of a number: an id that is a number in the event is text in the column."""
    return isinstance(value, str) and set(value) <= NUMBER_CHARACTERS


def is_plain_text(value: object) -> bool:
    """Return whether a text is the same in a column as in the event."""
    if not isinstance(value, str) or REPLACEMENT in value:
        return False
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def variant_path(steps: Sequence[object]) -> str:
    """Return a path in Spark's syntax, which cannot express a number that may be an index or a name."""
    path = "$"
    for step in steps:
        if not isinstance(step, str) or not is_plain_text(step) or not step or "'" in step:
            raise InexactError
        if "\\" in step or "]" in step:
            raise InexactError
        path += f"['{step}']"
    return path
