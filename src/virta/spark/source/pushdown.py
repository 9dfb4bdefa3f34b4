"""
Conditions of a query that the source applies itself: on topic, offset and timestamp.

They are applied exactly; all others are returned to Spark. On `topic` equality and IN are supported, on `offset` and
`timestamp` comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

TOPICS_MAX = 64  # the decoder's limit; longer IN lists are left to Spark
NEVER_NULL = {"topic", "offset", "timestamp", "key", "value"}
COMPARISONS = (EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


@dataclass(frozen=True)
class Bounds:
    """Half-open ranges of offset and time, and the topics to read (None: all)."""

    topics: tuple[bytes, ...] | None
    start: int
    stop: int | None
    time_from: int
    time_to: int


def push(filters: Sequence[Filter], bounds: Bounds) -> tuple[list[Filter], Bounds]:
    """Return the filters that are left to Spark, and the bounds narrowed by the others."""
    rest: list[Filter] = []
    for condition in filters:
        narrowed = narrow(condition, bounds)
        if narrowed is None:
            rest.append(condition)
        else:
            bounds = narrowed
    return rest, bounds


def narrow(condition: Filter, bounds: Bounds) -> Bounds | None:
    """Return the bounds narrowed by a condition, None if it is left to Spark."""
    if isinstance(condition, IsNotNull) and condition.attribute[0] in NEVER_NULL:
        return bounds
    name = getattr(condition, "attribute", None)
    if name == ("topic",):
        return narrow_topics(condition, bounds)
    if not isinstance(condition, COMPARISONS):
        return None
    if name == ("offset",) and isinstance(condition.value, int):
        low, high = interval(condition, condition.value)
        stop = bounds.stop if high is None else high
        if bounds.stop is not None and stop is not None:
            stop = min(stop, bounds.stop)
        return replace(bounds, start=max(bounds.start, low or 0), stop=stop)
    if name == ("timestamp",) and isinstance(condition.value, datetime):
        low, high = interval(condition, microseconds(condition.value))
        return replace(
            bounds,
            time_from=max(bounds.time_from, low or 0),
            time_to=bounds.time_to if high is None else max(min(bounds.time_to, high), 0),
        )
    return None


def narrow_topics(condition: Filter, bounds: Bounds) -> Bounds | None:
    if isinstance(condition, EqualTo):
        values: tuple[Any, ...] = (condition.value,)
    elif isinstance(condition, In):
        values = tuple(condition.value)
    else:
        return None
    # U+FFFD may replace bytes that are not text; only Spark sees the replaced text.
    if len(values) > TOPICS_MAX or not all(isinstance(v, str) and "�" not in v for v in values):
        return None
    topics = tuple(dict.fromkeys(v.encode() for v in values))
    if bounds.topics is not None:
        topics = tuple(t for t in topics if t in bounds.topics)
    return replace(bounds, topics=topics)


def interval(condition: Filter, value: int) -> tuple[int | None, int | None]:
    """Return the half-open interval of whole numbers that satisfy a comparison."""
    if isinstance(condition, EqualTo):
        return value, value + 1
    if isinstance(condition, GreaterThan):
        return value + 1, None
    if isinstance(condition, GreaterThanOrEqual):
        return value, None
    if isinstance(condition, LessThan):
        return None, value
    return None, value + 1


def microseconds(time: datetime) -> int:
    # A timestamp comes with a zone, or as local time without one.
    whole = time.replace(microsecond=0).timestamp()
    return int(whole) * 1_000_000 + time.microsecond
