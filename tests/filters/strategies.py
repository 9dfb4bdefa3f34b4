"""
Hypothesis strategies for documents, trees and Koncorde filters.

Names and values come from small sets, so that a random condition has a fair chance on a random document.
"""

from __future__ import annotations

from hypothesis import strategies as st

from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    And,
    Annulus,
    Box,
    Circle,
    Condition,
    Flat,
    JsonPattern,
    LikeText,
    Not,
    Or,
    Polygon,
    Regexp,
    Select,
    ValueRange,
)

NAMES = ["a", "b", "c", "a.b", "0", "", "é"]
TEXTS = [
    "",
    "a",
    "ab",
    "abc",
    "b",
    "bob",
    "zoé",
    "1",
    "true",
    "null",
    "\U0001f600",
    "\ud800",
    "A\nb",
]
NUMBERS = [0, 1, -1, 2, 2.5, 1.0, 1e21, 9007199254740993, 9007199254740992.0, -0.0, 1e-7, 10**400]
PATTERNS = ["a", "^a", "b$", "^$", "[0-9]", ".", "^ab?c*$", "(?i)BOB", "null|true", "a|b"]

texts = st.sampled_from(TEXTS)
numbers = st.sampled_from(NUMBERS) | st.integers(-3, 3) | st.floats(-3, 3)
scalars = st.none() | st.booleans() | numbers | texts
latitudes = st.floats(-60, 60).map(lambda x: round(x, 3))
longitudes = st.floats(-200, 200).map(lambda x: round(x, 3))
points = st.tuples(latitudes, longitudes)
geopoints = st.one_of(
    points.map(list),
    points.map(lambda p: f"{p[0]}, {p[1]}"),
    points.map(lambda p: {"lat": p[0], "lon": p[1]}),
    points.map(lambda p: {"latLon": [str(p[0]), p[1]]}),
    st.sampled_from(["u09t", "spf8prntv18e", "paris", "x, y", {"latLon": None}, [1, 2, 3]]),
)
names = st.sampled_from(NAMES)
values = st.recursive(
    scalars | geopoints,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)
documents = st.dictionaries(names, values, max_size=6)

flat_paths = st.sampled_from(["a", "b", "c", "a.b", "a.b.c", "0", "a.0", "", "a."]).map(
    lambda name: (Flat(name),)
)
exact_paths = st.lists(names | st.integers(0, 3), max_size=3).map(tuple)
paths = flat_paths | exact_paths


LIKES = [LikeText(pattern) for pattern in ("%a%", "_b", "a%b_%", "", "%", "%_%_")]


@st.composite
def ranges(draw):
    """Ranges of one kind of value, empty ones too."""
    bound = draw(st.sampled_from([numbers, texts, st.booleans()]))
    lower, upper = draw(st.none() | bound), draw(bound)
    if draw(st.booleans()):
        lower, upper = upper, lower
    return ValueRange(lower, upper, lower_open=draw(st.booleans()), upper_open=draw(st.booleans()))


regexps = st.builds(Regexp, st.sampled_from(PATTERNS), st.sampled_from(["", "i", "m", "s", "ims"]))
radii = st.floats(1, 5e6)
annuli = st.builds(
    lambda p, inner, width: Annulus(*p, inner, inner + width), points, radii, st.floats(1, 5e6)
)
boxes = st.builds(
    lambda p, height, width: Box(p[0] + height, p[1], p[0], p[1] + width),
    points,
    st.floats(0.001, 90),
    st.floats(0.001, 180),
)
polygons = st.lists(points, min_size=3, max_size=6).map(lambda p: Polygon(tuple(p)))


def conditions(*, at=paths, trees=None):
    """Conditions of every kind but opaque, on the paths given."""
    plain = st.one_of(
        st.builds(Condition, at, st.just("exists")),
        st.builds(
            Condition,
            at,
            st.just("type"),
            st.sampled_from(["null", "boolean", "number", "string", "array", "object"]),
        ),
        st.builds(Condition, at, st.sampled_from(["eq", "contains"]), scalars),
        st.builds(Condition, at, st.just("in"), st.lists(scalars, min_size=1, max_size=5)),
        st.builds(Condition, at, st.just("range"), ranges()),
        st.builds(Condition, at, st.sampled_from(["prefix", "suffix"]), texts),
        st.builds(Condition, at, st.just("like"), st.sampled_from(LIKES)),
        st.builds(Condition, at, st.sampled_from(["regexp", "regexp_text"]), regexps),
        st.builds(Condition, at, st.just("match"), values.map(JsonPattern.of)),
        st.builds(Condition, at, st.sampled_from(["geo_junk", "negative_zero"])),
        st.builds(
            Condition,
            at,
            st.just("geo_distance"),
            st.builds(lambda p, r: Circle(*p, r), points, radii),
        ),
        st.builds(Condition, at, st.just("geo_distance_range"), annuli),
        st.builds(Condition, at, st.just("geo_box"), boxes),
        st.builds(Condition, at, st.just("geo_polygon"), polygons),
    )
    if trees is None:
        return plain
    select = st.builds(Select, st.integers(-3, 3), trees)
    return plain | st.builds(Condition, at, st.just("select"), select)


def _grown(inner):
    several = st.lists(inner, max_size=4).map(tuple)
    return st.one_of(st.builds(And, several), st.builds(Or, several), st.builds(Not, inner))


_element_trees = st.recursive(
    conditions(at=st.sampled_from([(Flat("value"),), (Flat("value.a"),)])), _grown, max_leaves=3
)
trees = st.recursive(
    conditions(trees=_element_trees) | st.sampled_from([EVERYTHING, NOTHING]), _grown, max_leaves=12
)

# Koncorde filters, as JSON.

fields = st.sampled_from(["a", "b", "c", "a.b", "a.b.c"])
json_scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(TEXTS[:10])


@st.composite
def _koncorde_ranges(draw):
    low = draw(st.integers(-3, 3))
    lower = {draw(st.sampled_from(["gt", "gte"])): low}
    upper = {draw(st.sampled_from(["lt", "lte"])): low + draw(st.integers(1, 4))}
    return {"range": {draw(fields): draw(st.sampled_from([lower, upper, lower | upper]))}}


def _pair(keyword, value):
    return st.builds(lambda f, v: {keyword: {f: v}}, fields, value)


_koncorde_leaves = st.one_of(
    _pair("equals", json_scalars),
    _pair("in", st.lists(texts, min_size=1, max_size=4)),
    st.lists(texts, min_size=1, max_size=3).map(lambda v: {"ids": {"values": v}}),
    st.builds(lambda k, f: {k: f}, st.sampled_from(["exists", "missing"]), fields),
    st.builds(lambda k, f: {k: f'{f}["a"]'}, st.sampled_from(["exists", "missing"]), fields),
    _koncorde_ranges(),
    _pair("regexp", st.sampled_from(PATTERNS)),
    st.builds(lambda f, v: {"match": {f: v}}, fields, values),
    st.builds(
        lambda f, p, r: {"geoDistance": {f: list(p), "distance": f"{r:.3f} m"}},
        fields,
        points,
        radii,
    ),
    st.just({"nothing": True}),
)


def _koncorde_grown(inner):
    some = st.lists(inner, min_size=1, max_size=3)
    clauses = st.sampled_from(["must", "must_not", "should", "should_not"])
    return st.one_of(
        st.builds(lambda k, v: {k: v}, st.sampled_from(["and", "or"]), some),
        inner.map(lambda v: {"not": v}),
        st.dictionaries(clauses, some, min_size=1).map(lambda v: {"bool": v}),
    )


koncorde_filters = st.recursive(_koncorde_leaves, _koncorde_grown, max_leaves=8)
