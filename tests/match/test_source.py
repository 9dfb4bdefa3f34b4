"""Filters compiled from their source: the native engine gives what the plain one gives, or leaves it to it."""

from __future__ import annotations

import contextlib
import pickle
import threading

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from source_randoms import SourceRandoms
from tests.filters import koncorde_vectors

from virta.errors import FilterError
from virta.filters import DIALECTS, parse
from virta.match import Matcher
from virta.match.compile import Compiled, compile_filter, compile_source
from virta.match.compile.source import SourceCompiled, _leaf, _pattern, _spelled
from virta.native import load

pytestmark = pytest.mark.skipif(
    load("virta.match._core") is None, reason="the native engine is not built"
)


def outcome(source, dialect, engine):
    """What registration makes of a source: the canonical form, id and program, or the error."""
    try:
        compiled = compile_source(source, dialect, engine=engine)
    except FilterError as exc:
        return (exc.code, exc.message, exc.keyword, exc.path, exc.members)
    return (compiled.canonical, compiled.id, compiled.digest, compiled.encoded)


def assert_equal(source, dialect):
    plain = outcome(source, dialect, "plain")
    assert outcome(source, dialect, "auto") == plain, source


def test_flags_and_pattern_are_not_confused():
    """A NUL in flags or in a pattern is not taken for what separates them."""
    for regexp in ({"value": "b", "flags": "i\0a"}, {"value": "a\0b", "flags": "i"}):
        assert_equal({"regexp": {"a": regexp}}, "koncorde")


# The forms that people write: these must not fall back.
COMMON = {
    "query-string": [
        "status=paid", "status=paid&total=>100", "total=>=10&total=<20", "../type=order;../type=refund", "name=~ab", "tags=[a&tags=[b",
        "status=!paid&total=0", "total=>0", "total=>=0", "/user/id=7", "a=true&b=null&c=%22x%22", "a=1;a=2;a=3", "a=&b=!", "é=zoé",
        "a=1.5&b=-2e3", 'name=>"a"&name=<"b"', "status=!a&status=!b", "a=1&a=!2",
    ],
    "cesql": [
        "type = 'com.example.order'", "type = 'a' AND n > 5 AND n <= 10", "type = 'a' OR type = 'b'", "n IN (1, 2)", "n != 5",
        "source IN ('/a', '/b')", "type LIKE 'com.%'", "type LIKE '%.v1'", "EXISTS subject", "subject != 'x' AND n = -5", "a <> '5'",
        "a = 'true'", "time = '2024-01-01'", 'TYPE = "a" and N<3',
    ],
    "koncorde": [
        {"equals": {"a": 1}}, {"and": [{"equals": {"a": "x"}}, {"range": {"b.c": {"gte": 1, "lt": 2.5}}}]}, {"in": {"a": ["x", "y"]}},
        {"or": [{"equals": {"a": 1}}, {"equals": {"b": None}}]}, {"not": {"equals": {"a": True}}}, {"exists": "a"}, {"missing": "a"},
        {"exists": 'tags["x"]'}, {"ids": {"values": ["a", "b"]}}, {"bool": {"must": [{"exists": "a"}], "must_not": [{"equals": {"b": 1}}]}},
        {"match": {"a": {"b": 1, "a": "x"}, "c": 5}}, {"match": {"tags": ["a", "b"]}}, {"regexp": {"a": "^ab.*c$"}},
        {"geoDistance": {"loc": {"lat": 48.8, "lon": 2.3}, "distance": "5km"}}, {"and": [{"equals": {"a": 1}}, {"equals": {"a": 2}}]},
        '{"equals": {"a": 1}}', b'{"and": [{"equals": {"a": 1}}, {"exists": "b"}]}',
    ],
    "cloudevents": [
        {"exact": {"type": "a", "source": "/b"}}, {"prefix": {"type": "com."}}, {"suffix": {"type": ".v1"}}, {"not": {"exact": {"a": "x"}}},
        {"all": [{"exact": {"type": "a"}}, {"any": [{"exact": {"b": "1"}}, {"prefix": {"c": "x"}}]}]}, [{"exact": {"a": "x"}}],
        {"sql": "n = 5"}, {"not": {"prefix": {"a": "b"}}}, '[{"exact": {"a": "x"}}]',
    ],
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_common_forms_are_compiled_natively(dialect):
    """Forms that people write are compiled by the native engine, and equal what the plain one makes."""
    for source in COMMON[dialect]:
        assert isinstance(compile_source(source, dialect), SourceCompiled), source
        assert_equal(source, dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_sources_are_equal(dialect, seed):
    """Random and damaged sources have one canonical form, id, program and error in both engines."""
    randoms = SourceRandoms(seed)
    natively = 0
    for _ in range(1000):
        source = randoms.source(dialect)
        assert_equal(source, dialect)
        with contextlib.suppress(FilterError):
            natively += isinstance(compile_source(source, dialect), SourceCompiled)
    assert natively > 100, "too few common sources: this compares the plain engine with itself"


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["query-string", "cesql"]), st.text(max_size=40))
def test_any_text_is_equal(dialect, text):
    """Any text gives the same answer in both engines."""
    assert_equal(text, dialect)


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=20), st.text(max_size=20), st.floats() | st.integers() | st.text(max_size=5)
)
def test_any_names_and_values_are_equal(name, text, value):
    """Any name, text and number gives the same answer in both engines."""
    for source in ({"equals": {name: value}}, {"in": {name: [text, "x"]}}, {"exists": name}):
        assert_equal(source, "koncorde")
    assert_equal({"exact": {name: text}}, "cloudevents")
    assert_equal(f"{name}={text}&n={value}", "query-string")
    assert_equal(f"a = '{text}' AND n = {value}", "cesql")


def circle(centre, distance="5km", **others):
    return {"geoDistance": {"loc": centre, "distance": distance, **others}}


CIRCLES = [
    circle({"lat": 48.8, "lon": 2.3}), circle({"lon": -4, "lat": 48}, "1234m"), circle({"lat": -0.0, "lon": -0.0}, "0m"),
    circle({"lat": 90, "lon": 400.5}, "999999999999999km"), {"geoDistance": {"distance": "7m", "a.b": {"lat": 1e-7, "lon": 1e300}}},
]  # fmt: skip
ODD_CIRCLES = [
    circle({"lat": 90.1, "lon": 2}), circle({"lat": True, "lon": 2}), circle({"lat": "48", "lon": 2}), circle([48, 2]), circle("48,2"),
    circle({"lat": 48, "lon": 2, "x": 1}), circle({"lat": 48}), circle({"lat": 1e999, "lon": 2}), circle({"lat": float("nan"), "lon": 2}),
    circle({"lat": 48, "lon": 2**60}), circle({"lat": 48, "lon": 2}, "5 km"), circle({"lat": 48, "lon": 2}, "1.5km"),
    circle({"lat": 48, "lon": 2}, "1,5km"), circle({"lat": 48, "lon": 2}, "-5km"), circle({"lat": 48, "lon": 2}, "5"),
    circle({"lat": 48, "lon": 2}, "km"), circle({"lat": 48, "lon": 2}, "5KM"), circle({"lat": 48, "lon": 2}, "5parsec"),
    circle({"lat": 48, "lon": 2}, "1234567890123456m"), circle({"lat": 48, "lon": 2}, 5), circle({"lat": 48, "lon": 2}, "\u0665m"),
    circle({"lat": 48, "lon": 2}, "5m", x=1), {"geoDistance": {"distance": "5m"}}, {"geoDistance": {"loc": {"lat": 1, "lon": 2}}},
    {"geoDistance": {"distance": "5m", "a" + ".b" * 30: {"lat": 1, "lon": 2}}}, {"geoDistance": []}, {"not": CIRCLES[0]},
    circle({"lat": 48, "lon": 2}, "5km\0"), {"geoDistance": {"\ud800": {"lat": 1, "lon": 2}, "distance": "5m"}},
]  # fmt: skip
PATTERNS = [
    {"regexp": {"a": "^ab.*c$"}}, {"regexp": {"a": "^ab"}}, {"regexp": {"a": "ab$"}}, {"regexp": {"a": "^ab$"}}, {"regexp": {"a": ""}},
    {"regexp": {"a.b": {"value": "x|y", "flags": "i"}}}, {"regexp": {"a": {"flags": "gsmi", "value": "^é\\u0041$"}}},
    {"regexp": {"a": {"value": "^v1"}}}, {"regexp": {"a": '"\\n\x00'}}, {"regexp": {"a": "x" * 300}},
]  # fmt: skip
ODD_PATTERNS = [
    {"regexp": {"a": "("}}, {"regexp": {"a": "(?=b)"}}, {"regexp": {"a": {"value": "(", "flags": "i"}}}, {"regexp": {"a": None}},
    {"regexp": {"a": {"value": "x", "flags": None}}}, {"regexp": {"a": {"value": "x", "flags": 5}}}, {"regexp": {"a": {"flags": "i"}}},
    {"regexp": {"a": {"value": "x", "flags": "i", "y": 1}}}, {"regexp": {"a": {"value": 5}}}, {"regexp": {"a": "\ud800"}},
    {"regexp": {"a": "x" * 100_000}}, {"regexp": {"a": "x", "b": "y"}}, {"regexp": {}}, {"regexp": "a"}, {"not": {"regexp": {"a": "^a"}}},
    {"regexp": {"a" + ".b" * 30: "x"}},
]  # fmt: skip


def test_circles_and_patterns_are_compiled_without_the_plain_parser():
    """Circles and regular expressions, as they are mostly written, are read natively; all spellings are equal."""

    def refuse(*condition):
        raise AssertionError(f"the plain parser was asked for {condition}")

    sources = load("virta.match._core").Sources(_spelled, _pattern, refuse)
    for source in (*CIRCLES, *PATTERNS):
        assert sources.compile("koncorde", source) is not None, source
    for source in (*CIRCLES, *ODD_CIRCLES, *PATTERNS, *ODD_PATTERNS):
        assert_equal(source, "koncorde")
        assert_equal({"and": [source, {"equals": {"x": 1}}, source]}, "koncorde")


@settings(max_examples=200, deadline=None)
@given(st.floats() | st.integers(), st.floats(), st.integers(0, 10**17), st.text(max_size=12))
def test_any_circle_and_pattern_is_equal(lat, lon, metres, text):
    """Any centre, radius and pattern gives the same answer in both engines."""
    for unit in ("m", "km", text[:2]):
        assert_equal(circle({"lat": lat, "lon": lon}, f"{metres}{unit}"), "koncorde")
    assert_equal({"regexp": {"a": text}}, "koncorde")
    assert_equal({"regexp": {"a": {"value": f"^{text}", "flags": text[:3]}}}, "koncorde")


def test_a_failing_callback_is_an_error():
    """An exception while a pattern is read is raised, and not remembered."""
    failures = [ValueError("once")]

    def pattern(text, flags):
        if failures:
            raise failures.pop()
        return _pattern(text, flags)

    sources = load("virta.match._core").Sources(_spelled, pattern, _leaf)
    with pytest.raises(ValueError, match="once"):
        sources.compile("koncorde", {"regexp": {"a": "^x"}})
    assert sources.compile("koncorde", {"regexp": {"a": "^x"}}) is not None


def test_vectors_are_equal():
    """Koncorde's recorded filters and the CESQL conformance suite are equal in both engines."""
    for vectors in (koncorde_vectors.kept(), koncorde_vectors.suite() or {}):
        for vector in (vector for kind in vectors.values() for vector in kind):
            for name in ("filter", "filters"):
                if name in vector:
                    assert_equal(vector[name], "koncorde")
    suite = koncorde_vectors.SHARED / "cesql_tck"
    for expression in (
        case["expression"]
        for path in suite.glob("*.yaml")
        for case in yaml.safe_load(path.read_text())["tests"]
    ):
        assert_equal(expression, "cesql")
        assert_equal({"sql": expression}, "cloudevents")


def test_a_matcher_adds_from_source(engine):
    """Filters added from source match as filters parsed first, whichever engine the index has."""
    matcher = Matcher(engine=engine)
    for dialect, sources in COMMON.items():
        for source in sources:
            id_ = matcher.add(source, dialect=dialect)
            filter_ = parse(source, dialect)
            assert id_ == filter_.id == Matcher.validate(source, dialect)
            assert matcher.get(id_).filter == filter_
    event = {"type": "a", "a": "x", "n": 5, "data": {"status": "paid", "total": 150}}
    wanted = {
        parse(source, dialect).id
        for dialect, sources in COMMON.items()
        for source in sources
        if parse(source, dialect).matches(event)
    }
    assert set(matcher.match(event)) == wanted


def test_compiled_sources_have_conjunctions_and_pickle():
    """A filter compiled from source can be pickled, priced and added to a plain index."""
    compiled = pickle.loads(pickle.dumps(compile_source("status=paid&total=>100")))
    plain = compile_filter(parse("status=paid&total=>100"))
    assert isinstance(compiled, Compiled)
    assert (compiled.id, compiled.conjunctions, compiled.tree) == (
        plain.id,
        plain.conjunctions,
        None,
    )
    matcher = Matcher(engine="plain")
    matcher.add(compiled)
    assert matcher.match({"data": {"status": "paid", "total": 101}}) == [plain.id]


def test_many_paths_and_threads():
    """Names without end are compiled from several threads; the native engine forgets and asks again."""
    found = {}

    def compile_some(part):
        for i in range(part, 70_000, 4):
            found[i] = compile_source({"exists": f"f{i}"}, "koncorde").canonical

    threads = [threading.Thread(target=compile_some, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 70_000
    assert all(found[i] == f'{{"exists":[[{{"flat":"f{i}"}}],null]}}' for i in range(0, 70_000, 97))
