"""Events as Arrow columns: attributes, extensions, data of every type, and values that are not events; without a JVM."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from virta.event import EVENT_BYTES_MAX
from virta.spark.schemas import ATTRIBUTES
from virta.spark.source.events import EventColumns, PlainEvent, parse_lenient

EVENT = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def columns(*values, types=None):
    """The columns of some values as lists, by name."""
    found = EventColumns(types or {field.name: field.dataType for field in ATTRIBUTES.fields})
    for value in values:
        found.add(value if isinstance(value, bytes) else json.dumps(value).encode())
    return {name: array.to_pylist() for name, array in found.arrays().items()}


def struct(**types):
    return StructType([StructField(name, kind) for name, kind in types.items()])


def test_attributes_are_columns():
    """Text attributes as they are, missing and empty ones null, the time typed."""
    full = {
        **EVENT,
        "subject": "a",
        "dataschema": "urn:x",
        "datacontenttype": "application/json",
        "time": "2026-01-01T13:00:00+01:00",
    }
    found = columns(EVENT, full, {**EVENT, "subject": ""})

    assert found["id"] == ["1"] * 3
    assert found["source"] == ["/s"] * 3
    assert found["subject"] == [None, "a", None]
    assert found["dataschema"] == [None, "urn:x", None]
    assert found["datacontenttype"] == [None, "application/json", None]
    assert found["time"] == [None, NOON, None]
    assert found["invalid"] == [None] * 3


def test_extensions_are_text_by_name():
    """Every extension is kept: strings as they are, other values as JSON."""
    found = columns(
        {**EVENT, "trace": "a", "n": 5, "flag": True}, EVENT, {"id": "2", "source": "/s"}
    )

    assert sorted(found["extensions"][0]) == [("flag", "true"), ("n", "5"), ("trace", "a")]
    assert found["extensions"][1:] == [[], []]
    assert found["invalid"] == [None] * 3


@pytest.mark.parametrize("time", ["noon", "2026-01-01", "2026-13-01T00:00:00Z", ""])
def test_a_text_that_is_no_time_is_null(time):
    """Lenient events may have any text as time: it does not make the event invalid."""
    found = columns({**EVENT, "time": time})

    assert (found["time"], found["invalid"]) == ([None], [None])


def test_binary_data_has_its_own_column():
    """data_base64 is decoded to `data_binary`; `data` is null then."""
    found = columns({**EVENT, "data_base64": base64.b64encode(b"\x00\xff").decode()}, EVENT)

    assert found["data_binary"] == [b"\x00\xff", None]
    assert found["data"][0] is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"no json",
        b"[]",
        b"5",
        b"{}",
        b'{"id": "1"}',
        b'{"source": "/s"}',
        b'{"id": "1", "source": "/\\ud800"}',
        b'{"id": "1", "source": "/s", "data": {"a": "\\udfff"}}',
        b"\xff\xfe",
        b"[" * 5000,
        b'{"id": "1", "source": "' + b"a" * EVENT_BYTES_MAX + b'"}',
    ],
    ids=lambda value: repr(value[:30]),
)
def test_a_value_that_is_no_event_keeps_its_row(value):
    """All attributes are null and `invalid` says why; rows around it are not affected."""
    found = columns(EVENT, value, EVENT)

    assert found["id"] == ["1", None, "1"]
    assert all(column[1] is None for name, column in found.items() if name != "invalid")
    assert found["invalid"][0] is found["invalid"][2] is None
    assert len(found["invalid"][1]) > 5


def test_only_asked_columns_are_made():
    """A schema with few columns decodes just these."""
    found = columns(EVENT, b"x", types={"type": StringType(), "invalid": StringType()})

    assert list(found) == ["type", "invalid"]
    assert found["type"] == ["t", None]


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (StringType(), ["a", 5, None, {"b": [1]}, True], ["a", "5", None, '{"b": [1]}', "true"]),
        (
            LongType(),
            [1, -1, 2**63 - 1, 2**63, 1.0, "1", True, None],
            [1, -1, 2**63 - 1] + [None] * 5,
        ),
        (
            IntegerType(),
            [2**31 - 1, 2**31, -(2**31), -(2**31) - 1],
            [2**31 - 1, None, -(2**31), None],
        ),
        (DoubleType(), [1, 1.5, "1", True, None], [1.0, 1.5, None, None, None]),
        (BooleanType(), [True, False, 1, "true", None], [True, False, None, None, None]),
        (ArrayType(IntegerType()), [[1, "a", 2], [], {}, 5], [None, [], None, None]),
        (
            MapType(StringType(), IntegerType()),
            [{"a": 1, "b": "x"}, [], 5],
            [None, None, None],
        ),
        (
            struct(a=IntegerType(), b=struct(c=StringType())),
            [{"a": 1, "b": {"c": "x"}}, {"b": 5}, {}, []],
            [
                {"a": 1, "b": {"c": "x"}},
                {"a": None, "b": None},
                {"a": None, "b": None},
                None,
            ],
        ),
        (
            TimestampType(),
            ["2026-01-01T12:00:00Z", 1_767_268_800, "noon", True, 1e300],
            [NOON, NOON, None, None, None],
        ),
    ],
)
def test_data_as_a_type(kind, given, expected):
    """Values that fit a type are converted, others become null; the event stays valid."""
    events = [{**EVENT, "data": value} for value in given]

    assert columns(*events, types={"data": kind})["data"] == expected


@pytest.mark.parametrize(
    ("event", "is_plain"),
    [
        (EVENT, True),
        ({**EVENT, "data": {"a": [1]}, "subject": "x", "time": "noon"}, True),
        ({**EVENT, "trace": "a"}, False),
        ({**EVENT, "data_base64": "QQ=="}, False),
        ({"id": 5, "source": "/s"}, False),
    ],
)
def test_the_common_case_is_read_as_the_general_one(event, is_plain):
    """Both readers give the same attributes and data."""
    raw = json.dumps(event).encode()
    found = parse_lenient(raw)
    general = parse_lenient(json.dumps({**event, "extra": "1"}).encode())

    assert isinstance(found, PlainEvent) is is_plain
    for name in ("id", "source", "type", "specversion", "subject", "time", "data"):
        assert getattr(found, name) == getattr(general, name), name
