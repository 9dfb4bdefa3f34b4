"""Typed data: every type and kind of value against Spark's own from_json, and what does not fit is rescued."""

from __future__ import annotations

import math
import pickle
from datetime import UTC, datetime
from decimal import Decimal

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    DayTimeIntervalType,
    GeographyType,
    GeometryType,
    IntegerType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    VarcharType,
    YearMonthIntervalType,
)
from pyspark.sql.variant_utils import VariantUtils

import virta
from virta.spark.matching.filter_set import joined
from virta.spark.schemas import SchemaError, check_schema
from virta.spark.source import events
from virta.spark.source.events import EventDecoder
from virta.spark.source.source import VirtaSource
from virta.spark.versions import HAS_READ_LIMITS

TYPES = (
    "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "decimal(10,2)", "decimal(38,0)",
    "decimal(38,38)", "decimal(5,0)", "string", "binary", "date", "timestamp", "timestamp_ntz", "array<int>",
    "array<string>", "array<struct<x:int,y:string>>", "map<string,int>", "map<string,struct<x:int>>",
    "struct<x:int,y:string>", "array<array<date>>", "map<string,decimal(4,1)>", "array<smallint>", "struct<p:decimal(12,2),d:date,t:timestamp,b:binary>",
    *(("time(6)", "array<time(0)>") if HAS_READ_LIMITS else ()),  # Spark 4.1 refuses it
)  # fmt: skip
MISSING = ""  # the member is not there
CLOCKS = (
    '"10:11:12"', '"10:11:12.123456"', '"10:11:12.1234567891"', '"10:11:12."', '"10:11"', '"10"', '"10:"', '"10:11:"',
    '"1:2:3"', '"1:2"', '"010:11:12"', '"10:011:12"', '" 10:11:12.5 "', '"T10:11:12"', '"T10:11"', '"T10"', '"T10 pm"', '"T"', '"t10:11:12"',
    '"24:00:00"', '"23:59:59.999999999"', '"10:60:00"', '"10:11:60"', '"10:11:12Z"', '"10:11:12+01:00"', '"10:11:12 UTC"',
    '"10:11:12 AM"', '"10:11:12.5pm"', '"10:11  Pm"', '"12:00 AM"', '"12:30:00 PM"', '"13:00:00 PM"', '"00:00:00 AM"',
    '"10 PM"', '"PM"', '"10:11:12\\tPM"', '"10:11:12 M"', '"T1:2:3.5 aM"', '"-1:00:00"', '"10:11 : 12"', '"10:11:12.5x"',
)  # fmt: skip
TEXTS = (
    MISSING, "null", "true", "false", "0", "-0", "1", "-1", "127", "128", "-128", "32767", "32768", "2147483647", "2147483648",
    "-2147483648", "9223372036854775807", "9223372036854775808", "1767225600", "1767225600000", "1767225600.5",
    "1.0", "1.5", "-1.5", "1.50", "1e3", "1E-3", "123.455", "123.445", "-123.455", "99999999.994", "99999999.995",
    "1E400", "-1E400", "1e40", "1e39", "0.1", "3.4e38", "12345678901234567890.123", "1e-40",
    '""', '"12"', '"12.5"', '" 12 "', '"+12"', '".5"', '"5."', '"1e2"', '"x"', '"true"', '"NaN"', '"Infinity"',
    '"-Infinity"', '"+INF"', '"-INF"', '"INF"', '"+Infinity"', '"QUE="', '"QQ=="', '"QUFB"', '"Q"', '"Q Q="',
    '"2026"', '"2026-01"', '"2026-1-2"', '"2026-01-01"', '"2026-02-30"', '"2026-13-01"', '" 2026-01-01 "',
    '"12026-01-01"', '"-2026-01-01"', '"2026-01-01T10"', '"2026-01-01T10:11"', '"2026-01-01 10:11:12"',
    '"2026-01-01T10:11:12.123456789Z"', '"2026-01-01T10:11:12.5+05:30"', '"2026-01-01T10:11:12-8"',
    '"2026-01-01T10:11:12+0530"', '"2026-01-01T10:11:12 Europe/Oslo"', '"2026-07-01T10:11:12Europe/Oslo"',
    '"2026-01-01T10:11:12UTC+1"', '"2026-01-01T10:11:12Nowhere"', '"2026-01-01T24:00:00"', '"2026-01-01T00:00Z"',
    '"0001-01-01"', '"9999-12-31T23:59:59.999999Z"', '"2026-01-01x"', '"2026-01-01T"', '"2026-01-01T10:11:12."',
    "{}", "[]", "[1,2]", "[1,null,3]", '["x",null,3]', "[[1],null]", '[["2026-01-01"],null]', '[{"x":1,"y":"a"},{"x":"b"}]',
    '{"x":1}', '{"x":1,"y":null}', '{"x":"b","y":"a"}', '{"x":{"x":5}}', '{"x":1,"z":5,"y":true}',
    '{"p":1.005,"d":"2026-01-01","t":"2026-01-01T00:00:00Z","b":"QQ=="}', '{"p":"x","d":5,"t":[],"b":1}',
    *CLOCKS, '["10:11:12",null]', '["10:11:12","x"]',
    r'"a\u00e9\n\"b"', r'"\u0000"', '"日本"',
)  # fmt: skip
# Where we do not follow Spark; docs/spark.md has the reasons. None: a misfit.
OURS = {
    ("tinyint", "128"): None,  # Spark wraps to -128
    ("timestamp", "9223372036854775807"): None,  # Spark wraps
    ("binary", r'"\u0000"'): None,  # Spark skips control characters
}


def clock(text):
    """A time of day as Spark writes it: Arrow has all nine digits of a second."""
    return text and text.rstrip("0").rstrip(".") if "." in (text or "") else text


def normal(value):
    """A value that can be compared: NaN equals itself, rows and pairs are plain."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, dict):
        return {name: normal(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [normal(item) for item in value]
    return bytes(value) if isinstance(value, bytearray) else value


def data_of(text):
    return f'{{"a":{text}}}' if text != MISSING else "{}"


def spelling(column, kind):
    """A Spark column as values that Python can have: times as microseconds or text, dates as days."""
    if kind == "date":
        return F.unix_date(column)
    if kind == "timestamp":
        return F.unix_micros(column)
    if kind == "timestamp_ntz":
        return F.unix_micros(column.cast("timestamp"))
    return column.cast("string") if kind == "time(6)" else column


@pytest.fixture(scope="module")
def judged(spark):
    """What from_json makes of every text as every type: (value, is it corrupt)."""
    rows = spark.createDataFrame([(text, data_of(text)) for text in TEXTS], "text string, v string")
    columns = []
    for i, kind in enumerate(TYPES):
        parsed = F.from_json("v", f"a {kind}, _corrupt_record string", {"mode": "PERMISSIVE"})
        columns += [
            spelling(parsed["a"], kind).alias(f"v{i}"),
            parsed["_corrupt_record"].isNotNull().alias(f"c{i}"),
        ]
    return {row.text: row.asDict(recursive=True) for row in rows.select("text", *columns).collect()}


@pytest.fixture(params=["native", "plain"])
def engine(request, monkeypatch):
    """Run the test with the native decoder, and with the plain one."""
    if request.param == "plain":
        monkeypatch.setattr(events, "native", None)
    elif events.native is None:
        pytest.skip("the native decoder is not built")


def ours(kind, texts):
    schema = StructType.fromDDL(f"data struct<a: {kind}>, rescued string, invalid string")
    values = [f'{{"id":"1","source":"/s","data":{data_of(text)}}}'.encode() for text in texts]
    decoder = EventDecoder({field.name: field.dataType for field in schema.fields})
    return decoder.decode(*joined(values))


def plain_values(array, kind):
    column = array["data"].field("a")
    if kind in {"date", "timestamp", "timestamp_ntz"}:
        import pyarrow as pa

        return column.view(pa.int32() if kind == "date" else pa.int64()).to_pylist()
    if kind == "time(6)":
        return [clock(text) for text in column.cast("string").to_pylist()]
    values = column.to_pylist()
    return [dict(v) if v is not None else None for v in values] if kind[:3] == "map" else values


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_of_from_json(judged, engine, kind):
    """Same value, and rescued exactly when Spark calls the record corrupt."""
    arrays = ours(kind, TEXTS)
    number = TYPES.index(kind)
    assert arrays["invalid"].null_count == len(TEXTS)
    wrong = []
    for text, value, rescued in zip(
        TEXTS, plain_values(arrays, kind), arrays["rescued"].to_pylist(), strict=True
    ):
        expected = judged[text][f"v{number}"]
        corrupt = judged[text][f"c{number}"]
        if (kind, text) in OURS:
            expected, corrupt = OURS[kind, text], True
        if kind == "timestamp" and text in CLOCKS:
            expected, corrupt = None, True  # Spark takes the current day
        if kind == "string" and text[:1] in set("-0123456789"):
            expected = text  # Spark writes fractions as Java does
        found = normal(value)
        if (found, rescued is not None) != (normal(expected), corrupt):
            wrong.append((text, found, rescued, normal(expected), corrupt))
    assert wrong == []


@pytest.mark.parametrize(
    "kind",
    [
        DayTimeIntervalType(),
        ArrayType(YearMonthIntervalType()),
        MapType(IntegerType(), StringType()),
        StructType([StructField("a", NullType())]),
        GeometryType(4326),
        GeographyType(4326),
        CharType(3),
        VarcharType(3),
    ],
    ids=DataType.simpleString,
)
def test_types_that_are_not_read_are_refused(kind):
    """A type that fits no JSON value, or that we do not read, is an error that names it, not a column of nulls."""
    with pytest.raises(SchemaError, match="column 'data' cannot have a part of type"):
        check_schema(StructType([StructField("data", kind)]), events=True)


def test_variant_inside_of_a_struct(spark, engine):
    """A nested VARIANT holds any value; a missing member is null, a JSON null is the null variant."""
    arrays = ours("struct<v: variant>", ['{"v":{"b":[1,"x"]}}', '{"v":null}', "{}", "5"])
    values = [item and item["v"] for item in arrays["data"].field("a").to_pylist()]

    assert VariantUtils.to_python(values[0]["value"], values[0]["metadata"]) == {"b": [1, "x"]}
    assert VariantUtils.to_python(values[1]["value"], values[1]["metadata"]) is None
    assert values[2:] == [None, None]
    assert arrays["rescued"].to_pylist() == [None, None, None, '{"a":5}']


def python_variant(value):
    """A VARIANT in Python; Spark has decimals where ours has doubles."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {name: python_variant(item) for name, item in value.items()}
    return [python_variant(item) for item in value] if isinstance(value, list) else value


def test_a_variant_is_that_of_from_json(spark, engine):
    """Everything fits a VARIANT, with Spark's value; missing and null differ."""
    rows = spark.createDataFrame([(data_of(text),) for text in TEXTS], "v string").coalesce(1)
    parsed = F.from_json("v", "a variant, _corrupt_record string", {"mode": "PERMISSIVE"})
    judged = rows.select(parsed.alias("p")).select("p.a", "p._corrupt_record").collect()
    arrays = ours("variant", TEXTS)
    values = arrays["data"].field("a").to_pylist()

    wrong = []
    for text, value, row in zip(TEXTS, values, judged, strict=True):
        found = value and [
            python_variant(VariantUtils.to_python(value["value"], value["metadata"]))
        ]
        expected = row.a and [python_variant(row.a.toPython())]
        if (found, row._corrupt_record) != (expected, None):
            wrong.append((text, found, expected, row._corrupt_record))
    assert wrong == []
    assert arrays["rescued"].null_count == arrays["invalid"].null_count == len(TEXTS)


def test_what_does_not_fit_is_rescued(spark, tmp_path):
    """Through the source: the good fields stay, `rescued` has the text, and the row is no dead letter."""
    texts = ['{"price": 12.345, "n": 7}', '{"price": "many", "n": 7}', "[]", '{"price": null}']
    with virta.open(tmp_path / "log") as log:
        for i, text in enumerate(texts):
            log.append("t", "", f'{{"id":"{i}","source":"/s","data": {text} }}'.encode())
    rows = (
        spark.read.format("virta")
        .option("events", "true")
        .schema(
            "offset long, data struct<price: decimal(12,2), n: smallint>, rescued string, invalid string"
        )
        .load(str(tmp_path / "log"))
        .selectExpr("data.price", "data.n", "rescued", "invalid")
        .collect()
    )

    assert [(row.price and str(row.price), row.n) for row in rows] == [
        ("12.35", 7),
        (None, 7),
        (None, None),
        (None, None),
    ]
    assert [row.rescued for row in rows] == [None, *texts[1:3], None]
    assert [row.invalid for row in rows] == [None] * 4


def warnings_of_tasks(path, ddl, caplog):
    """Read a log as its tasks do, in batches of two rows, each with a reader of its own; return what each task logs."""
    reader = VirtaSource({"path": path, "events": "true", "batchRows": "2"}).reader(
        StructType.fromDDL(ddl)
    )
    found = []
    for partition in reader.partitions():
        caplog.clear()
        task = pickle.loads(pickle.dumps(reader))
        for batch in task.read(partition):
            assert batch.num_rows
        found.append([record.getMessage() for record in caplog.records])
    return found


def test_without_rescued_a_task_warns_once(spark, tmp_path, caplog, engine):
    """A schema without `rescued` gets nulls, and one warning a task that names the remedy; with it there is none."""
    path = str(tmp_path / "log")
    with virta.open(path, segment_bytes=64 * 1024) as log:
        for i in range(30):
            text = '"many"' if i % 2 else "7"
            pad = "x" * 10_000
            event = f'{{"id":"{i}","source":"/s","data":{{"a":{text}}},"e":"{pad}"}}'
            log.append("t", "", event.encode())

    warnings = warnings_of_tasks(path, "data struct<a: int>", caplog)

    assert len(warnings) > 1
    for task in warnings:
        (said,) = task
        assert said.endswith("add the column `rescued string` to the schema for its text")
    for fits in ("data struct<a: int>, rescued string", "data struct<a: string>"):
        assert not any(warnings_of_tasks(path, fits, caplog))
