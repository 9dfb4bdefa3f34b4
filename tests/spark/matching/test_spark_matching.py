"""Filters on Spark give the answers of `filter.matches`, as Columns, in the matcher, and on the vectors."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections import OrderedDict
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from spark_logs import fill

import virta
import virta.match
import virta.spark
from virta.errors import FilterError
from virta.filters import parse
from virta.match import compile_filter as match_compile
from virta.spark.matching import filter_set
from virta.spark.matching.columns import compile_filter
from virta.spark.matching.filter_set import (
    MatchError,
    document_of,
    joined,
    opened_set,
    plain_matcher,
    write_set,
)

pytestmark = pytest.mark.slow

VECTORS = Path(__file__).parents[2] / "vectors"
KONCORDE_STEP = 30  # every 30th vector: 240 of them, crossed with each other
EVENT_COLUMNS = ["id", "source", "type", "subject", "data", "value"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("matching") / "log")
    return path, fill(path, 400, seed=3)


def events_of(spark, path):
    return spark.read.format("virta").option("events", "true").load(path)


def write_values(path, values):
    with virta.open(path, durability="interval") as log:
        for at in range(0, len(values), 500):
            log.append_many([("docs", str(at + i), v) for i, v in enumerate(values[at : at + 500])])


def thorium():
    """(filter, event, expected) of the vectors that are filters."""
    found = []
    for line in (VECTORS / "thorium-vectors.jsonl").read_text().splitlines():
        vector = json.loads(line)
        if vector["expect"] in ("match", "no-match"):
            found.append((parse(vector["query"]), vector["event"], vector["expect"] == "match"))
    return found


COMPILED = [
    ("x=1", "query-string"),
    ("n=5", "query-string"),
    ("user=u3&ok=true", "query-string"),
    ("n=>=20&n=<40", "query-string"),
    ("price=1.5;price=2", "query-string"),
    ("user=!u3", "query-string"),
    ("/deep/city=null", "query-string"),
    ("../type=~order.&n=90", "query-string"),
    ("type = 'order.made'", "cesql"),
    ({"exact": {"type": "order.paid"}}, "cloudevents"),
    ({"prefix": {"type": "order."}}, "cloudevents"),
    ({"not": {"suffix": {"type": "paid"}}}, "cloudevents"),
    ({"range": {"n": {"gt": 10, "lte": 50}}}, "koncorde"),
    ({"and": [{"equals": {"deep.city": "Oslo"}}, {"not": {"exists": "gone"}}]}, "koncorde"),
    ({"exists": 'tags["red"]'}, "koncorde"),
    ({"regexp": {"user": "^u1.$"}}, "koncorde"),
    ({"ids": {"values": ["3", "5"]}}, "koncorde"),
]


@pytest.mark.parametrize(("source", "dialect"), COMPILED)
def test_where_keeps_what_matches(spark, filled, source, dialect):
    """`where` keeps exactly the events `filter.matches` holds for, whichever way it runs."""
    path, events = filled
    filter_ = parse(source, dialect)
    expected = [
        e["id"]
        for e in events
        if filter_.matches(
            json.loads(document_of(json.dumps(e).encode())) if dialect == "koncorde" else e
        )
    ]

    found = virta.spark.where(events_of(spark, path), filter_).select("id").collect()

    assert sorted(int(r.id) for r in found) == sorted(map(int, expected))


def test_columns_equal_matches_on_the_thorium_vectors(spark, tmp_path):
    """Every filter that compiles to a Column answers every vector's event as `filter.matches` does."""
    vectors = thorium()
    write_values(tmp_path / "log", [json.dumps(event).encode() for _, event, _ in vectors])
    df = events_of(spark, str(tmp_path / "log"))
    compiled = [(f, compile_filter(f, EVENT_COLUMNS)) for f, _, _ in vectors]
    exact = [(f, c) for f, c in compiled if c is not None]
    assert len(exact) > 150
    random.Random(4).shuffle(exact)
    # Filters of one select share a plan: more than some tens cost Spark minutes to compile.
    chosen = exact[:50]

    rows = (
        df.where("invalid IS NULL")
        .select("offset", *[c.alias(f"f{i}") for i, (_, c) in enumerate(chosen)])
        .collect()
    )

    for row in rows:
        event = vectors[row.offset][1]
        for i, (filter_, _) in enumerate(chosen):
            assert row[f"f{i}"] == filter_.matches(event), (filter_, event)


def test_match_equals_the_thorium_vectors(spark, tmp_path):
    """All the vectors' filters over all their events: the expected pairs and no other."""
    vectors = thorium()
    write_values(tmp_path / "log", [json.dumps(event).encode() for _, event, _ in vectors])
    named = {str(i): f for i, (f, _, _) in enumerate(vectors)}
    df = spark.read.format("virta").load(str(tmp_path / "log"))

    found = {
        (r.offset, int(r.filter_id))
        for r in virta.spark.match(df, named, keep=["offset"]).collect()
    }

    assert {(i, i) for i, (_, _, expected) in enumerate(vectors) if expected} == {
        (event, number) for event, number in found if event == number
    }
    sample = random.Random(1).sample(
        [(e, f) for e in range(len(vectors)) for f in range(len(vectors))], 5000
    )
    for event, number in sample:
        assert ((event, number) in found) == vectors[number][0].matches(vectors[event][1])


def test_match_equals_matches_on_the_koncorde_vectors(spark, tmp_path):
    """Koncorde's filters crossed with its documents: the pairs the plain evaluator finds."""
    with gzip.open(VECTORS / "koncorde-vectors.jsonl.gz", "rt", encoding="utf-8") as lines:
        vectors = [json.loads(line) for i, line in enumerate(lines) if i % KONCORDE_STEP == 0]
    filters, documents = {}, []
    for vector in vectors:
        if vector["kind"] != "match":
            continue
        for source in vector["filters"]:
            try:
                filter_ = parse(source, "koncorde")
            except FilterError:
                continue
            filters[filter_.id] = filter_
        documents += [d["doc"] for d in vector["documents"]]
    assert len(filters) > 100
    write_values(tmp_path / "log", [json.dumps(d).encode() for d in documents])
    df = spark.read.format("virta").load(str(tmp_path / "log"))

    found = {
        (r.offset, r.filter_id)
        for r in virta.spark.match(df, filters.values(), keep=["offset"]).collect()
    }

    assert found == {
        (i, name)
        for i, document in enumerate(documents)
        for name, filter_ in filters.items()
        if filter_.matches(document)
    }


def test_match_mixes_dialects_and_names(spark, filled):
    """One call takes filters of all dialects; each sees its own root; equal filters keep their names."""
    path, events = filled
    filters = {
        "a": parse("n=5"),
        "same": parse("n=5"),
        "k": parse({"equals": {"n": 5}}, "koncorde"),
        "c": parse("type = 'user.seen'", "cesql"),
    }

    found = virta.spark.match(events_of(spark, path), filters, keep=["id"]).collect()

    five = [e["id"] for e in events if e["data"]["n"] == 5]
    seen = [e["id"] for e in events if e["type"] == "user.seen"]
    expected = [(i, n) for n in ("a", "same", "k") for i in five] + [(i, "c") for i in seen]
    assert sorted((r.id, r.filter_id) for r in found) == sorted(expected)


def test_match_in_the_source_equals_match(spark, filled):
    """Decoding and matching in one process gives the pairs that `match` gives on the DataFrame."""
    path, _ = filled
    filters = {f"n{n}": parse({"equals": {"n": n}}, "koncorde") for n in range(30)}
    filters["order"] = parse({"regexp": {"user": "u1"}}, "koncorde")

    inside = virta.spark.match_log(path, filters, on="data", spark=spark, start=50)
    outside = virta.spark.match(events_of(spark, path).where("offset >= 50"), filters)

    assert inside.columns == ["topic", "offset", "timestamp", "key", "filter_id"]
    assert sorted((r.offset, r.filter_id) for r in inside.collect()) == sorted(
        (r.offset, r.filter_id) for r in outside.select("offset", "filter_id").collect()
    )


def test_rows_that_are_no_json_match_nothing(spark, tmp_path):
    """Junk in the log is neither kept by `where` nor found by `match`, not even by a negation."""
    write_values(tmp_path / "log", [b'{"a": 1}', b"junk", b"", b'{"a": 2}', b"\xff"])
    df = spark.read.format("virta").load(str(tmp_path / "log"))
    negation = parse({"not": {"equals": {"a": 1}}}, "koncorde")

    assert [r.offset for r in virta.spark.where(df, negation).collect()] == [3]
    assert [r.offset for r in virta.spark.match(df, [negation]).collect()] == [3]


def test_where_on_a_stream_is_where_on_the_log(spark, filled, tmp_path):
    """The same filter on a stream and on a bounded read keeps the same events."""
    path, _ = filled
    found = []
    for filter_ in (parse("n=>=50"), parse({"regexp": {"user": "u1"}}, "koncorde")):
        stream = spark.readStream.format("virta").option("events", "true").load(path)
        kept = []
        virta.spark.where(stream, filter_).writeStream.foreachBatch(
            lambda df, _, kept=kept: kept.extend(r.id for r in df.select("id").collect())
        ).trigger(availableNow=True).start().awaitTermination()
        found.append(sorted(kept))

        batch = virta.spark.where(events_of(spark, path), filter_).select("id").collect()
        assert sorted(r.id for r in batch) == found[-1]
    assert all(found)


def test_matching_needs_the_json(spark):
    """Without the column `value` there is nothing to ask; the message says so."""
    df = spark.createDataFrame([(1,)], "n int")

    with pytest.raises(MatchError, match="column 'value'"):
        virta.spark.match(df, [parse("n=1")])


def test_what_is_not_exact_is_not_compiled(spark):
    """Filters that Spark would answer differently have no Column."""
    for source, dialect in [
        ({"regexp": {"a": "x"}}, "koncorde"),
        ({"equals": {"a.b": 1}}, "koncorde"),
        ({"geoDistance": {"a": [0, 0], "distance": "1km"}}, "koncorde"),
        ("type LIKE 'a%b'", "cesql"),
    ]:
        assert compile_filter(parse(source, dialect), EVENT_COLUMNS) is None
    assert compile_filter(parse("n=5"), EVENT_COLUMNS) is not None


def test_an_id_that_is_a_number_is_asked_as_the_event_has_it(spark):
    """A number as id is text in the column: conditions that can tell the two apart are the matcher's."""
    for source in ({"exact": {"id": "5"}}, {"prefix": {"id": "-"}}, {"suffix": {"id": ".5"}}):
        assert compile_filter(parse(source, "cloudevents"), EVENT_COLUMNS) is None
    assert compile_filter(parse("id IN ('d1', 'd2', '5')", "cesql"), EVENT_COLUMNS) is None
    assert compile_filter(parse("id IN ('d1', 'd2', 'd5')", "cesql"), EVENT_COLUMNS) is not None
    assert compile_filter(parse({"prefix": {"id": "d"}}, "cloudevents"), EVENT_COLUMNS) is not None


def test_a_filter_file_is_what_its_name_says(tmp_path):
    """A filter set is unpickled, so bytes that do not fit the digest in the name are refused."""
    path = write_set({"a": parse("n=1")}, str(tmp_path))
    texts = joined([b'{"data": {"n": 1}}', b"{}", b"no JSON"])
    assert opened_set(path).hits(texts).tolist() == [True, False, False]
    forged = tmp_path / f"filters-{'0' * 64}.arrow"
    forged.write_bytes(Path(path).read_bytes())

    with pytest.raises(MatchError, match="is not the filter set it was"):
        opened_set(str(forged))


@pytest.mark.skipif(
    virta.match.Matcher().engine == "plain", reason="images are of the native matcher"
)
def test_a_large_set_becomes_an_image(tmp_path, monkeypatch):
    """A set is opened from its image with every name of every filter, also where only its bytes arrive."""
    monkeypatch.setattr(filter_set, "IMAGE_FILTERS_MIN", 1)
    monkeypatch.setattr(filter_set, "_sets", OrderedDict())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "machine"))
    (tmp_path / "machine").mkdir()
    filters = {f"f{n}": match_compile(parse(f"n={n % 40}")) for n in range(50)}
    texts = joined([b'{"data": {"n": 5}}', b"no JSON", b'{"data": {"n": 30}}'])
    path = Path(write_set(filters, str(tmp_path)))

    for _ in range(2):
        rows, names = opened_set(str(path)).pairs(texts)
        assert sorted(zip(rows.to_pylist(), names.to_pylist(), strict=True)) == [
            (0, "f45"), (0, "f5"), (2, "f30")
        ]  # fmt: skip
        filter_set._sets.clear()
    assert len(list(tmp_path.glob("filters-*.index"))) == 1

    packed = path.read_bytes()
    path.unlink()
    hits = opened_set(str(path), lambda: packed).hits(texts)
    assert hits.tolist() == [True, False, True]
    assert len(list((tmp_path / "machine").glob("*/filters-*.index"))) == 1


def test_many_filters_need_the_native_matcher():
    """A worker without it says what is missing instead of running for hours."""
    with pytest.raises(MatchError, match="need the native matcher"):
        plain_matcher(b"", 1_000_000)


def test_no_filters_match_nothing(tmp_path):
    """An empty set is a set."""
    texts = joined([b"{}"])
    assert opened_set(write_set({}, str(tmp_path))).hits(texts).tolist() == [False]
