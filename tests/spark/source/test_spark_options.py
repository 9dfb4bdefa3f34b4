"""The source's options, the schemas it accepts, and the conditions it takes over from a query; without a JVM."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from virta.log.reader import FOREVER
from virta.spark import reading
from virta.spark.schemas import EVENT, RECORD, SchemaError, check_schema
from virta.spark.source.decode import ROWS_MAX
from virta.spark.source.options import READ_OPTIONS, OptionError, read_options
from virta.spark.source.pushdown import TOPICS_MAX, Bounds, push
from virta.spark.source.splits import SPLIT_BYTES

ALL = Bounds(None, 0, None, 0, FOREVER)


def test_defaults():
    """Only the path is needed; everything else reads the whole log and raises on gaps and damage."""
    options = read_options({"path": "log"})

    assert (options.path, options.events, options.topics) == ("log", False, None)
    assert (options.start, options.end) == ("earliest", "latest")
    assert (options.time_from, options.time_to) == (0, FOREVER)
    assert (options.skip_gaps, options.skip_corruption, options.problems) == (False, False, None)
    assert (options.split_bytes, options.batch_rows) == (SPLIT_BYTES, ROWS_MAX)
    assert (options.max_records, options.max_bytes) == (None, None)
    assert (options.pushdown, options.filters, options.on) == (False, None, "event")


@pytest.mark.parametrize("spell", [str.lower, str.upper, str.title], ids=lambda f: f.__name__)
def test_names_are_case_insensitive(spell):
    """Spark lower-cases option names on the way; users write them in any case."""
    given = {"path": "log", "onGap": "SKIP", "splitBytes": "70000", "events": "True", "start": "5"}

    options = read_options({spell(name): value for name, value in given.items()})

    assert (options.skip_gaps, options.split_bytes, options.events) == (True, 70000, True)
    assert options.start == 5


def test_topics_are_a_list_of_names():
    """Commas separate topics, empty names are left out, and an empty option means no topic at all."""
    assert read_options({"path": "x", "topics": "a,b,,näme"}).topics == (
        b"a",
        b"b",
        "näme".encode(),
    )
    assert read_options({"path": "x", "topics": ""}).topics == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "option 'path' is missing: give the log's directory"),
        ({"path": ""}, "option 'path' is missing"),
        ({"path": "x", "topic": "a"}, "unknown option 'topic': choose from path, events, topics"),
        ({"path": "x", "events": "yes"}, "option events is 'yes': expected true or false"),
        ({"path": "x", "onGap": "ignore"}, "option onGap is 'ignore': expected raise or skip"),
        ({"path": "x", "onCorruption": ""}, "option onCorruption is '': expected raise or skip"),
        (
            {"path": "x", "start": "-1"},
            "option start is '-1': expected an offset, earliest or late",
        ),
        (
            {"path": "x", "end": "1.5"},
            "option end is '1.5': expected an offset, earliest or latest",
        ),
        (
            {"path": "x", "startTime": "noon"},
            "option startTime is 'noon': expected ISO 8601 or mic",
        ),
        (
            {"path": "x", "splitBytes": "1"},
            "option splitBytes is '1': expected a number from 65536",
        ),
        (
            {"path": "x", "batchRows": "0"},
            "option batchRows is '0': expected a number from 1 to 100",
        ),
        ({"path": "x", "batchRows": "many"}, "option batchRows is 'many': expected a number"),
        ({"path": "x", "maxRecordsPerTrigger": "0"}, "option maxRecordsPerTrigger is '0'"),
        ({"path": "x", "pushdown": "true"}, "unknown option 'pushdown': choose from path, events"),
    ],
)
def test_wrong_options_are_refused(given, message):
    """Every error names the option, its value and what is expected."""
    with pytest.raises(OptionError) as caught:
        read_options(given)

    assert caught.value.message.startswith(message)
    assert caught.value.code == "option_invalid"


def test_arguments_of_read_are_options():
    """Each argument becomes an option of the source; None is left out and unknown ones are refused."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    given = reading.options(
        ["a", "b"], {"events": True, "since": noon, "end": 7, "on_gap": "skip", "problems": None}
    )

    assert given == {
        "topics": "a,b",
        "events": "true",
        "startTime": "2026-01-01T12:00:00+00:00",
        "end": "7",
        "onGap": "skip",
    }
    assert set(reading.ARGUMENTS.values()) <= set(READ_OPTIONS)
    assert read_options({"path": "x", **given}).time_from == 1_767_268_800_000_000
    with pytest.raises(TypeError, match="unknown argument 'until_time': choose from events"):
        reading.options(None, {"until_time": noon})


# Conditions that a query pushes down.


@pytest.mark.parametrize(
    ("condition", "start", "stop"),
    [
        (EqualTo(("offset",), 5), 5, 6),
        (GreaterThan(("offset",), 5), 6, None),
        (GreaterThanOrEqual(("offset",), 5), 5, None),
        (LessThan(("offset",), 5), 0, 5),
        (LessThanOrEqual(("offset",), 5), 0, 6),
        (GreaterThan(("offset",), -9), 0, None),
    ],
)
def test_offsets_become_half_open_ranges(condition, start, stop):
    """A comparison with an offset narrows the range and is not left to Spark."""
    rest, bounds = push([condition], ALL)

    assert rest == []
    assert (bounds.start, bounds.stop) == (start, stop)


def test_ranges_are_intersected():
    """Several conditions narrow the range together, whatever their order."""
    conditions = [
        GreaterThanOrEqual(("offset",), 3),
        LessThan(("offset",), 90),
        LessThanOrEqual(("offset",), 50),
        GreaterThan(("offset",), 9),
    ]
    for given in (conditions, conditions[::-1]):
        assert push(given, ALL) == ([], Bounds(None, 10, 51, 0, FOREVER))


def test_times_are_exact_microseconds():
    """Times with and without a zone name instants; microseconds are not rounded."""
    instant = datetime(2026, 7, 1, 12, 0, 0, 123_457, tzinfo=UTC)
    east = instant.astimezone(timezone(timedelta(hours=5, minutes=30)))
    local = instant.astimezone().replace(tzinfo=None)
    expected = 1_782_907_200_123_457
    for time in (instant, east, local):
        rest, bounds = push([GreaterThanOrEqual(("timestamp",), time)], ALL)

        assert (rest, bounds.time_from, bounds.time_to) == ([], expected, FOREVER)
    _, bounds = push([EqualTo(("timestamp",), instant)], ALL)
    assert (bounds.time_from, bounds.time_to) == (expected, expected + 1)


def test_times_before_1970_select_nothing():
    """The log has no earlier times: an upper bound there is an empty range, a lower one is none."""
    early = datetime(1960, 1, 1, tzinfo=UTC)

    assert push([LessThan(("timestamp",), early)], ALL)[1].time_to == 0
    assert push([GreaterThan(("timestamp",), early)], ALL)[1].time_from == 0


def test_topics_are_narrowed():
    """Equality and IN on topics are applied, together with those of the options."""
    assert push([EqualTo(("topic",), "a")], ALL)[1].topics == (b"a",)
    assert push([In(("topic",), ("a", "b", "a"))], ALL)[1].topics == (b"a", b"b")
    some = Bounds((b"b", b"c"), 0, None, 0, FOREVER)
    assert push([In(("topic",), ("a", "b"))], some)[1].topics == (b"b",)
    assert push([EqualTo(("topic",), "a")], some)[1].topics == ()


@pytest.mark.parametrize(
    "condition",
    [
        EqualTo(("type",), "a"),
        EqualTo(("data", "offset"), 5),
        EqualTo(("offset",), "5"),
        EqualTo(("timestamp",), 5),
        EqualTo(("topic",), "a\ufffd"),
        In(("topic",), tuple(map(str, range(TOPICS_MAX + 1)))),
        In(("topic",), (1, 2)),
        In(("offset",), (1, 2)),
        IsNull(("topic",)),
        IsNotNull(("subject",)),
        StringStartsWith(("topic",), "a"),
    ],
    ids=repr,
)
def test_everything_else_is_left_to_spark(condition):
    """What the source cannot apply exactly is returned, and changes no bounds."""
    assert push([condition], ALL) == ([condition], ALL)


def test_record_columns_are_never_null():
    """IS NOT NULL on a column of the record always holds, so it is dropped."""
    for name in RECORD.names:
        assert push([IsNotNull((name,))], ALL) == ([], ALL)


# Schemas.


def schema(**types):
    return StructType([StructField(name, kind()) for name, kind in types.items()])


def texts():
    return MapType(StringType(), StringType())


def lists():
    return StructType([StructField("a", IntegerType()), StructField("b", ArrayType(StringType()))])


@pytest.mark.parametrize(
    ("columns", "events"),
    [
        ({"offset": LongType}, False),
        ({"value": StringType, "key": StringType, "topic": BinaryType}, False),
        ({"timestamp": TimestampType, "id": StringType, "extensions": texts}, True),
        ({"data": lists, "invalid": StringType}, True),
        ({"data": StringType, "data_binary": BinaryType}, True),
        ({"data": VariantType}, True),
    ],
)
def test_schemas_that_can_be_read(columns, events):
    """Any selection of columns; text columns as text or bytes, data as any type."""
    check_schema(schema(**columns), events=events)


@pytest.mark.parametrize(
    ("columns", "events", "message"),
    [
        ({"offset": IntegerType}, False, "column 'offset' cannot be int: it is bigint"),
        ({"value": LongType}, False, "column 'value' cannot be bigint: it is string or binary"),
        ({"id": StringType}, False, "there is no column 'id' (with option events=true): choose fr"),
        ({"name": StringType}, True, "there is no column 'name': choose from topic, offset"),
        ({"time": StringType}, True, "column 'time' cannot be string: it is timestamp"),
        ({"filter_id": StringType}, False, "there is no column 'filter_id'"),
    ],
)
def test_schemas_that_cannot_be_read(columns, events, message):
    """The error names the column, and the columns or types there are."""
    with pytest.raises(SchemaError) as caught:
        check_schema(schema(**columns), events=events)

    assert caught.value.message.startswith(message)


def test_filter_ids_are_a_column_of_matches():
    """With the option `filters` there is one more column, and only with it."""
    matches = schema(offset=LongType, filter_id=StringType)

    check_schema(matches, events=False, filters=True)
    with pytest.raises(SchemaError):
        check_schema(matches, events=False)
    assert "filter_id" not in EVENT.names
