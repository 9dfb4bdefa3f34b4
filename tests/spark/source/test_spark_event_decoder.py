"""The native event decoder: equal to the plain one on ordinary, odd and mutated events; without a JVM."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from virta.spark.matching.filter_set import joined
from virta.spark.schemas import ATTRIBUTES
from virta.spark.source import events
from virta.spark.source.events import EventColumns, EventDecoder

pytestmark = pytest.mark.skipif(events.native is None, reason="the native decoder is not built")

EVENT = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
ODD = [
    b"", b"x", b"{}", b"[]", b"null", b'"x"', b"{" * 2000, b"\xff", b'{"id":"1"}', b'{"id":1,"source":"/s"}',
    b'{"id":"","source":""}', b'{"id":"1","source":"/s","data":}', b'{"id":"1","source":"/s"} x',
    b' {"id" : "1" , "source" : "/s" , "data" : { "a" : [ 1 , { } ] } } ',
    b'{"id":"1","source":"/s","id":"2","data":1,"data":{"a":2}}', b'{"\\u0069d":"1","source":"/s","d\\u0061ta":[1]}',
    b'{"id":"1","source":"/s","data":"\\ud83d\\ude00\\n\\u0000"}', b'{"id":"1","source":"/s","data":"\\ud800"}',
    b'{"id":"1","source":"/s","data_base64":"QUE="}', b'{"id":"1","source":"/s","data_base64":5,"data":1}',
    b'{"id":"1","source":"/s","time":null,"subject":null}', b'{"id":"1","source":"/s","time":"noon","subject":5}',
    b'{"id":"1","source":"/s","e":"x","f":5,"g":-0,"h":1.5,"i":true,"j":null,"k":[1]}',
    b'{"id":"1","source":"/s","e":"x","f":5,"i":false}', b'{"id":"1","source":"/s","e":1,"e":2}',
    b'{"id":"1","source":"/s","data":1E400}', b'{"id":"1","source":"/s","data":123456789012345678901234567890}',
    b'{"id":"1","source":"/s","data":-9223372036854775808}', b'{"id":"1","source":"/s","data":-0}',
    b'{"id":"1","source":"/s","data":{"b":1,"a":2,"b":3,"":4}}', b'{"id":"1","source":"/s","":"x"}',
    b'{"id":"1","source":"/s","data":' + b"[" * 300 + b"]" * 300 + b"}",
    b'{"id":"1","source":"/s","data":' + b"[" * 1000 + b"]" * 1000 + b"}",
    json.dumps({**EVENT, "data": {f"k{i}": i for i in range(300)}}).encode(),
    json.dumps({**EVENT, "data": {f"k{i}": [i] * i for i in range(100)}}).encode(),
    json.dumps({**EVENT, "data": list(range(70000))}).encode(),
    json.dumps({**EVENT, **{f"x{i}": "v" for i in range(40)}}).encode(),
    *[json.dumps({**EVENT, "time": f"2026-01-01T00:00:00{end}"}).encode()
      for end in ("Z", "z", ".1Z", ".1234567+01:00", "-23:59", "", " Z", ".Z", "+24:00", "+0100")],
    *[json.dumps({**EVENT, "time": time}).encode()
      for time in ("2026-02-29T00:00:00Z", "2024-02-29T23:59:60Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z")],
]  # fmt: skip
STRUCT = StructType(
    [
        StructField("a", IntegerType()),
        StructField("b", StringType()),
        StructField("c", DecimalType(10, 2)),
        StructField("d", ArrayType(StructType([StructField("x", ShortType())]))),
        StructField("e", MapType(StringType(), DoubleType())),
        StructField("f", DateType()),
        StructField("g", TimestampType()),
        StructField("h", TimestampNTZType()),
        StructField("i", VariantType()),
        StructField("j", BooleanType()),
        StructField("k", FloatType()),
        StructField("l", MapType(StringType(), ArrayType(LongType()))),
    ]
)
KINDS: list[DataType] = [VariantType(), StringType(), STRUCT, ArrayType(STRUCT), LongType()]


def both(values, kind):
    """The columns of both engines, all of the event's and `rescued`."""
    fields = {field.name: field.dataType for field in ATTRIBUTES.fields}
    fields |= {"data": kind, "rescued": StringType()}
    decoder, plain = EventDecoder(fields), EventColumns(fields)
    for value in values:
        plain.add(value)
    native = decoder.decode(*joined(values))
    for array in native.values():
        array.validate(full=True)
    assert decoder.misfits == plain.misfits
    return native, {name: array.cast(native[name].type) for name, array in plain.arrays().items()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.simpleString()[:20])
def test_odd_events_are_equal(kind):
    """Whatever the value: both engines make the same rows, in the same order."""
    native, plain = both([*ODD, json.dumps(EVENT).encode(), *ODD[::-1]], kind)

    for name, array in native.items():
        assert array.to_pylist() == plain[name].to_pylist(), name


LEAVES = [
    None, True, 0, -1, 127, 40000, 2**31, 2**63 - 1, 1.5, 1e3, 0.005, 99999999.995, "", "x", "é日", "12", "2026-01-01",
    "2026-01-01T01:02:03Z", "2026-01-01 01:02:03.5", "2026-02-30", "NaN", "a" * 70,
]  # fmt: skip


def random_json(rng, depth=0):
    if depth > 3 or rng.random() < 0.5:
        return rng.choice(LEAVES)
    if rng.random() < 0.5:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice("abcdefghijklx"): random_json(rng, depth + 1) for _ in range(rng.randrange(8))
    }


def test_random_events_are_equal():
    """Random data in every type, some of it with random bytes changed."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(30):
        values = []
        for _ in range(50):
            data = (
                random_json(rng)
                if rng.random() < 0.5
                else {c: random_json(rng, 2) for c in "abcdefghijkl"}
            )
            raw = bytearray(
                json.dumps({**EVENT, "data": data}, ensure_ascii=rng.random() < 0.5).encode()
            )
            if rng.random() < 0.2:
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            values.append(bytes(raw))
        for kind in KINDS:
            native, plain = both(values, kind)
            for name, array in native.items():
                rows = zip(array.to_pylist(), plain[name].to_pylist(), values, strict=True)
                wrong = [row for row in rows if repr(row[0]) != repr(row[1])]
                assert wrong == [], (name, kind)


def test_a_plan_serves_many_batches():
    """Each batch is its own, also an empty one and one that is all left over."""
    decoder = EventDecoder({"id": StringType(), "invalid": StringType()})
    found = [
        decoder.decode(*joined(values))["id"].to_pylist()
        for values in ([json.dumps(EVENT).encode()] * 3, [], [b"x"], [json.dumps(EVENT).encode()])
    ]

    assert found == [["1"] * 3, [], [None], ["1"]]


def test_wrong_buffers_are_refused():
    """Ends that do not fit the data are an error, not a crash."""
    decoder = EventDecoder({"id": StringType()})
    for ends in ((0, 5), (0, 2, 1), (-1, 0)):
        with pytest.raises(ValueError, match="the ends do not fit the data"):
            decoder.decode(
                memoryview(b"".join(n.to_bytes(4, "little", signed=True) for n in ends)), b"abc"
            )
