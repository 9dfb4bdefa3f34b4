"""Types of data in a lake: written as DDL, inferred from events, refused with a reason."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimeType,
)

import virta
from virta.spark.lake.columns import check_type, name_problem
from virta.spark.lake.ddl import parse_type
from virta.spark.lake.directory import LakeError, table_name
from virta.spark.lake.inference import infer_schema


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("double", DoubleType()),
        ("DECIMAL(12,2)", DecimalType(12, 2)),
        ("decimal(5)", DecimalType(5, 0)),
        ("decimal", DecimalType(10, 0)),
        ("id BIGINT", StructType().add("id", LongType())),
        ("id: int, `a b` string", StructType().add("id", IntegerType()).add("a b", StringType())),
        ("struct<a: int>", StructType().add("a", IntegerType())),
        ("t array<map<string, double>>", StructType().add("t", ArrayType(MapType(StringType(), DoubleType())))),
        ("a struct<b struct<c:long>>, d int",
         StructType().add("a", StructType().add("b", StructType().add("c", LongType()))).add("d", IntegerType())),
        ("`x``y` int", StructType().add("x`y", IntegerType())),
    ],
)  # fmt: skip
def test_types_are_read_without_a_jvm(text, kind):
    """A type is read as Spark's SQL writes it."""
    assert parse_type(text) == kind


@pytest.mark.slow
def test_types_are_spark_s_own(spark):
    """Every type that is read here is the one that Spark reads."""
    text = (
        "a boolean, b tinyint, c smallint, d int, e bigint, f float, g double, h string, i binary,"
        " j date, k timestamp, l timestamp_ntz, m decimal(38,18), n array<int>, o map<string, byte>,"
        " p struct<q: long, r: array<struct<s: short>>>, t variant, u integer, v timestamp_ltz, w real, x dec(3,1)"
    )

    assert parse_type(text) == StructType.fromDDL(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected a name"),
        ("id", "'id' is none of"),
        ("id bigint,", "expected a name"),
        ("id bigint total", "expected ','"),
        ("array<int", "expected '>'"),
        ("decimal(39,2)", "at most 38 digits"),
        ("decimal(x)", "expected a number"),
        ("int>", "follows its end|expected"),
        ("a int; b int", "unexpected ';'"),
        ("array<" * 70 + "int" + ">" * 70, "nested deeper"),
    ],
)
def test_what_is_no_type_is_refused(text, reason):
    """The message names the place."""
    with pytest.raises(ValueError, match=reason):
        parse_type(text)


def test_declared_types_fit_their_format():
    """What a format cannot store is refused; Iceberg has no small integers."""
    assert check_type("a tinyint, b array<smallint>", "t", "delta")["fields"][0]["type"] == "byte"
    assert (
        check_type("a tinyint, b array<smallint>", "t", "iceberg")["fields"][0]["type"] == "integer"
    )
    assert check_type("a variant", "t", "parquet")
    for text, form, reason in (
        ("a variant", "delta", "only format parquet"),
        ("a int, A int", "parquet", "differ by case"),
        ("`a b` int", "parquet", "tables refuse"),
        ("a struct<>", "parquet", "without fields"),
        ("a map<int, int>", "parquet", "JSON has no values"),
        ("a", "parquet", "is none of"),
    ):
        with pytest.raises(LakeError, match=reason):
            check_type(text, "t", form)
    with pytest.raises(LakeError, match="which lakes do not have"):
        check_type(ArrayType(TimeType()), "t", "parquet")
    assert name_problem(["a", "b"]) is None


def write_data(path, values, topic="t"):
    with virta.open(path, durability="none") as log:
        for i, value in enumerate(values):
            log.append(
                topic, "", json.dumps({"id": str(i), "source": "/s", "data": value}).encode()
            )


def test_types_are_inferred_from_events(tmp_path):
    """Kinds are merged over all events; what has several is text, and what is never there is text."""
    log = tmp_path / "log"
    write_data(
        log,
        [
            {"n": 1, "x": 1, "mixed": 1, "deep": {"a": None}, "list": [], "odd": {"a b": 1}},
            {"n": 2, "x": 1.5, "mixed": "one", "deep": {"a": True, "b": [1, 2.5]}, "list": [None]},
            {"n": None, "big": 1 << 70, "rows": [{"p": 1}, {"q": "x"}], "none": {}, "Case": {"k": 1, "K": 2}},
        ],
    )  # fmt: skip
    with virta.open(log) as opened:
        opened.append("t", "", b"no event")
        opened.append("t", "", b'{"id": "b", "source": "/s", "data_base64": "AA=="}')
        opened.append("other", "", b'{"id": "c", "source": "/s", "data": {"z": 1}}')
        opened.append("empty", "", b'{"id": "d", "source": "/s"}')
    write_data(log, [3, 4.5], "scalars")

    expected = (
        "n long, x double, mixed string, deep struct<a: boolean, b: array<double>>, list array<string>,"
        " odd string, big double, rows array<struct<p: long, q: string>>, none string, Case string"
    )
    assert infer_schema(log, "t") == parse_type(expected)
    assert infer_schema(log, "scalars") == DoubleType()
    for topic in ("empty", "nowhere"):
        with pytest.raises(LakeError, match=f"no event of '{topic}'"):
            infer_schema(log, topic)


def test_the_newest_events_count(tmp_path):
    """Of a long topic the newest events are the sample, also between many others."""
    log = tmp_path / "log"
    write_data(log, [{"old": 1}] * 50)
    write_data(log, [{"new": 1}] * 5)
    write_data(log, [{"z": 1}] * 300, "other")

    assert infer_schema(log, "t", sample=5) == parse_type("new long")
    assert infer_schema(log, "t", sample=6) == parse_type("old long, new long")


def test_wide_objects_are_text(tmp_path):
    """An object with more fields than a table should have is stored as its text."""
    log = tmp_path / "log"
    write_data(
        log, [{"a": {f"k{i}": 1 for i in range(600)}}, {"a": {f"m{i}": 1 for i in range(600)}}]
    )
    write_data(log, [{f"k{i}": 1 for i in range(1001)}], "wide")
    nested: object = 1
    for _ in range(40):
        nested = {"d": nested}
    write_data(log, [nested], "deep")

    assert infer_schema(log, "t") == parse_type("a string")
    assert infer_schema(log, "wide") == StringType()
    assert infer_schema(log, "deep").simpleString().count("struct") == 16


def test_table_names_are_directories():
    """Any topic has a directory of its own, without characters that paths and URIs treat specially."""
    names = [
        table_name(t) for t in ("orders", "a/b", "a.b", "", "~", "å", "..", "a=b c", "%41", "A")
    ]

    assert names[0] == "topics/orders"
    assert names[1] == "topics/a~2Fb"
    assert len(set(names)) == len(names)
    assert all(name.count("/") == 1 and "." not in name for name in names)
