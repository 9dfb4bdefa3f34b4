"""
The options of the `virta` data source, checked once, in one place.

Names are case-insensitive, as in Spark; unknown ones are refused, so that a typing error does not silently read
everything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import StructField, StructType

from virta.errors import VirtaError
from virta.event.times import parse_moment
from virta.log.reader import FOREVER
from virta.spark.source.decode import ROWS_MAX
from virta.spark.source.splits import SPLIT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

READ_OPTIONS = (
    "path",
    "events",
    "topics",
    "start",
    "end",
    "startTime",
    "endTime",
    "onGap",
    "onCorruption",
    "problems",
    "splitBytes",
    "batchRows",
    "maxRecordsPerTrigger",
    "maxBytesPerTrigger",
    "filters",
    "on",
    "consumer",
)
SPARKS_OWN = ("checkpointLocation", "queryName")  # Spark passes its own options to a sink
WRITE_OPTIONS = ("path", "topic", "durability", "queryId", "sequence", *SPARKS_OWN)
# Set by the rule of virta.spark.launch.plan_rule in each scan; no option of users.
# What CREATE TABLE passes besides the options of the statement.
TABLE_PROPERTIES = (
    "location",
    "owner",
    "provider",
    "comment",
    "external",
    "is_managed_location",
    "collation",
)
IN_SCHEMA = "virta.options"  # metadata of a table's first column: the options of its CREATE TABLE
OWN_PLAN = "__virta_own_plan"
SPLIT_BYTES_MIN = 64 * 1024
BATCH_ROWS_MAX = 1_000_000


class OptionError(VirtaError):
    """An option with a wrong name or value."""

    default_code = "option_invalid"


@dataclass(frozen=True)
class ReadOptions:
    """A checked set of reading options; times are microseconds since 1970."""

    path: str
    events: bool
    topics: tuple[bytes, ...] | None
    start: int | str
    end: int | str
    time_from: int
    time_to: int
    skip_gaps: bool
    skip_corruption: bool
    problems: str | None
    split_bytes: int
    batch_rows: int
    max_records: int | None
    max_bytes: int | None
    pushdown: bool  # this scan has a plan of its own
    filters: str | None
    on: str
    consumer: str | None  # streams: the name under which the position is stored in the log


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """
    Check the options of a read.

    Raises:
        OptionError: an unknown name or an invalid value.
    """
    given = by_name(options, (*READ_OPTIONS, OWN_PLAN), hidden=OWN_PLAN)
    topics = given.get("topics")
    return ReadOptions(
        path=required(given, "path", "the log's directory, as in .load(directory)"),
        events=choice(given, "events", {"true": True, "false": False}, "false"),
        topics=None if topics is None else tuple(t.encode() for t in topics.split(",") if t),
        start=position(given, "start", "earliest"),
        end=position(given, "end", "latest"),
        time_from=time_bound(given, "startTime", 0),
        time_to=time_bound(given, "endTime", FOREVER),
        skip_gaps=choice(given, "onGap", {"raise": False, "skip": True}, "raise"),
        skip_corruption=choice(given, "onCorruption", {"raise": False, "skip": True}, "raise"),
        problems=given.get("problems"),
        split_bytes=number(given, "splitBytes", SPLIT_BYTES, SPLIT_BYTES_MIN, FOREVER),
        batch_rows=number(given, "batchRows", ROWS_MAX, 1, BATCH_ROWS_MAX),
        max_records=optional_number(given, "maxRecordsPerTrigger"),
        max_bytes=optional_number(given, "maxBytesPerTrigger"),
        pushdown=OWN_PLAN in given,
        filters=given.get("filters"),
        on=given.get("on", "event"),
        consumer=given.get("consumer"),
    )


def table_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a read or write, without the properties that Spark adds for CREATE TABLE."""
    given = dict(options)
    if "provider" not in given:
        return given
    path = given.get("path", "").removeprefix("file:")
    kept = {n: v for n, v in given.items() if n not in TABLE_PROPERTIES and n[:7] != "option."}
    return {**kept, "path": path} if path else kept


def keep_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """
    Return a table's schema with the options of its CREATE TABLE in it.

    Spark keeps the schema of a table and forgets its options when it reads from a Python source.
    """
    first = schema.fields[0]
    metadata = {**first.metadata, IN_SCHEMA: json.dumps(table_options(options))}
    kept = StructField(first.name, first.dataType, first.nullable, metadata)
    return StructType([kept, *schema.fields[1:]])


def with_kept_options(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Return the options of a query; those of its CREATE TABLE if it reads a table."""
    given = table_options(options)
    for field in schema.fields:
        if IN_SCHEMA in field.metadata:
            kept = json.loads(field.metadata[IN_SCHEMA])
            return {**kept, **given, "path": kept["path"]}
    return given


def by_name(
    options: Mapping[str, str], known: tuple[str, ...], hidden: str | None = None
) -> dict[str, str]:
    """Return the options under the spelling of `known`, from any case."""
    names = {name.lower(): name for name in known}
    given: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() not in names:
            shown = ", ".join(one for one in known if one != hidden)
            raise OptionError(f"unknown option {name!r}: choose from {shown}")
        given[names[name.lower()]] = str(value)
    return given


def required(given: Mapping[str, str], name: str, meaning: str) -> str:
    value = given.get(name)
    if not value:
        raise OptionError(
            f"option {name!r} is missing: give {meaning}; a table needs CREATE TABLE without columns,"
            " because Spark forgets its options otherwise"
        )
    return value


def choice(given: Mapping[str, str], name: str, values: Mapping[str, bool], default: str) -> bool:
    value = given.get(name, default)
    if value.lower() not in values:
        raise OptionError(f"option {name} is {value!r}: expected {' or '.join(values)}")
    return values[value.lower()]


def position(given: Mapping[str, str], name: str, default: str) -> int | str:
    value = given.get(name, default)
    if value in {"earliest", "latest"}:
        return value
    if not value.isdecimal():
        raise OptionError(f"option {name} is {value!r}: expected an offset, earliest or latest")
    return int(value)


def time_bound(given: Mapping[str, str], name: str, default: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if value.isdecimal():
        return int(value)
    try:
        time = parse_moment(value)
    except ValueError as exc:
        raise OptionError(
            f"option {name} is {value!r}: expected ISO 8601 or microseconds since 1970"
        ) from exc
    # Whole seconds first: a float would round the microseconds. The log has no times before 1970.
    seconds = round(time.replace(microsecond=0).timestamp())
    return max(0, seconds * 1_000_000 + time.microsecond)


def number(given: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if not value.isdecimal() or not least <= int(value) <= most:
        raise OptionError(f"option {name} is {value!r}: expected a number from {least} to {most}")
    return int(value)


def optional_number(given: Mapping[str, str], name: str) -> int | None:
    return number(given, name, 0, 1, FOREVER) or None
