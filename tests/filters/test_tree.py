"""The tree: equality by meaning, limits, and the meaning of every condition."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from strategies import documents, trees, values

from virta.errors import FilterError
from virta.filters import DIALECTS, Filter, parse
from virta.filters.evaluate import MISSING, flat_member, holds, resolve
from virta.filters.limits import CONDITIONS_MAX, DEPTH_MAX, IN_VALUES_MAX, REGEXP_CHARS_MAX
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    OPS,
    And,
    Circle,
    Condition,
    Flat,
    JsonPattern,
    LikeText,
    Not,
    Or,
    Regexp,
    Select,
    ValueRange,
    all_of,
    any_of,
    conditions,
    negate,
)

A = ("a",)


# Nodes.


def test_nodes_are_values():
    """Equal nodes are equal, hash alike, survive pickling, and cannot be changed."""
    tree = And((Condition(A, "eq", 1), Not(Condition(A, "in", ["y", "x", "y"])), EVERYTHING))
    same = And((Condition(A, "eq", 1.0), Not(Condition(A, "in", ("x", "y"))), EVERYTHING))

    assert tree == same
    assert hash(tree) == hash(same)
    assert pickle.loads(pickle.dumps(tree)) == tree
    with pytest.raises(AttributeError):
        tree.children = ()


def test_true_is_not_one():
    """Python's True == 1 does not leak into filters."""
    assert Condition(A, "eq", True) != Condition(A, "eq", 1)
    assert Condition(A, "in", [True]) != Condition(A, "in", [1])
    assert len(Condition(A, "in", [True, 1, 1.0, "1", None]).value) == 4
    assert ValueRange(False, True) != ValueRange(0, 1)


@pytest.mark.parametrize(
    ("op", "value"),
    [
        ("nope", None),
        ("eq", [1]),
        ("eq", {}),
        ("eq", math.nan),
        ("eq", object()),
        ("in", []),
        ("in", "abc"),
        ("in", 5),
        ("in", [[1]]),
        ("exists", 1),
        ("type", "int"),
        ("prefix", 5),
        ("range", (1, 2)),
        ("regexp", "a"),
        ("opaque", 5),
    ],
)
def test_refuses_values_that_are_none(op, value):
    """A condition that could not be evaluated cannot be made."""
    with pytest.raises(FilterError):
        Condition(A, op, value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueRange(None, None),
        lambda: ValueRange(1, "x"),
        lambda: ValueRange(0, True),
        lambda: ValueRange([], None),
        lambda: Regexp("x" * (REGEXP_CHARS_MAX + 1)),
        lambda: Regexp("x", "g"),
        lambda: Condition(A, "in", range(IN_VALUES_MAX + 1)),
        lambda: Condition("a", "exists"),
        lambda: Condition((Flat("a"), "b"), "exists"),
        lambda: Flat(5),
        lambda: Flat("." * 1000),
        lambda: JsonPattern.of([[]] * 1000),
        lambda: JsonPattern.of({"a": object()}),
    ],
)
def test_refuses_what_is_malformed_or_too_large(make):
    """Values have one shape and a limit."""
    with pytest.raises(FilterError):
        make()


def nested(wrap):
    tree = Condition(A, "eq", 1)
    for _ in range(DEPTH_MAX + 1):
        tree = wrap(tree)
    return tree


@pytest.mark.parametrize(
    "wrap",
    [
        Not,
        lambda tree: And((tree,)),
        lambda tree: Condition(A, "select", Select(0, tree)),
        lambda tree: Or((Condition(A, "select", Select(0, tree)),)),
    ],
)
def test_refuses_trees_that_are_too_deep(wrap):
    """A tree that exists can be walked recursively."""
    with pytest.raises(FilterError, match="deeper than") as caught:
        nested(wrap)
    assert caught.value.code == "too_complex"


def test_refuses_trees_that_are_too_large():
    """A tree that exists can be canonicalised in no time."""
    with pytest.raises(FilterError, match="conditions"):
        Or((Condition(A, "eq", 1),) * (CONDITIONS_MAX + 1))


def test_builders_leave_out_what_is_neutral():
    """all_of, any_of and negate make the plainest node."""
    one = Condition(A, "eq", 1)

    assert all_of([]) == EVERYTHING
    assert any_of([]) == NOTHING
    assert all_of([EVERYTHING, one]) == one
    assert any_of([NOTHING, one]) == one
    assert all_of([one, NOTHING]) == NOTHING
    assert any_of([one, EVERYTHING]) == EVERYTHING
    assert negate(negate(one)) == one
    assert negate(EVERYTHING) == NOTHING
    assert negate(NOTHING) == EVERYTHING
    assert list(conditions(Or((one, Not(And((one, EVERYTHING))))))) == [one, one]


# Paths.


@pytest.mark.parametrize(
    ("path", "doc", "expected"),
    [
        ((), {"a": 1}, {"a": 1}),
        (("a", "b"), {"a": {"b": None}}, None),
        (("a", "b"), {"a.b": 1}, MISSING),
        (("a", "b"), {"a": None}, MISSING),
        (("a", "0"), {"a": [1]}, MISSING),
        (("a", 0), {"a": [1]}, 1),
        (("a", 1), {"a": [1]}, MISSING),
        (("a", -1), {"a": [1]}, MISSING),
        (("a", 0), {"a": {"0": 1}}, 1),
        (("a", 0), {"a": "text"}, MISSING),
        (("",), {"": 1}, 1),
        ((Flat("a.b"),), {"a": {"b": 1}}, 1),
        ((Flat("a.b"),), {"a.b": 1}, 1),
        ((Flat("a.b"),), {"a": {"b": 1}, "a.b": 2}, 2),
        ((Flat("a.b"),), {"a.b": 2, "a": {"b": 1}}, 1),
        ((Flat("a.b.c"),), {"a.b": {"c": 1}}, 1),
        ((Flat("a.b.c"),), {"a": {"b.c": 1}}, 1),
        ((Flat("a.b.c"),), {"a": {"b": {"c": 1}, "b.c": 3}, "a.b": {"d": 2}}, 3),
        ((Flat("a.0"),), {"a": [1]}, MISSING),
        ((Flat("a.0"),), {"a": {"0": 1}}, 1),
        ((Flat("b"),), {"": {"b": 2}}, 2),
        ((Flat("b"),), {"b": 1, "": {"b": 2}}, 2),
        ((Flat("b"),), {"": {"b": 2}, "b": 1}, 1),
        ((Flat(".b"),), {"": {"b": 2}}, MISSING),
        ((Flat("a."),), {"a": {"": 1}}, 1),
        ((Flat(""),), {"": {"": 5}}, {"": 5}),
        ((Flat("a"),), [1], MISSING),
        ((Flat("a"),), None, MISSING),
    ],
)
def test_paths(path, doc, expected):
    """Steps find members and elements; flat names find the flattened members."""
    found = resolve(doc, path)

    assert found is expected if expected is MISSING else found == expected


def flattened(doc):
    """Koncorde's flattening, word for word."""
    output = {}

    def step(members, prefix):
        for key, value in members.items():
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(value, dict):
                output[name] = value
                step(value, name)
            output[name] = value

    step(doc, "")
    return output


@settings(max_examples=300, deadline=None)
@given(documents)
def test_flat_names_are_those_of_the_flattened_document(doc):
    """Looking a name up is the same as flattening everything first."""
    flat = flattened(doc)

    for name in [*flat, "a.b", "b", "", "a.b.c", "a."]:
        assert flat_member(doc, name) is flat.get(name, MISSING)


# Conditions.

MEANING = [
    ("exists", None, [None, 0, [], {}], []),
    ("type", "number", [1, 1.5], [True, "1", None]),
    ("type", "boolean", [True], [1]),
    ("type", "array", [[], [1]], [{}, "a"]),
    ("type", "object", [{}], [[]]),
    ("type", "null", [None], [0, ""]),
    ("eq", 1, [1, 1.0], [True, "1", [1], None]),
    ("eq", True, [True], [1, "true", False]),
    ("eq", None, [None], [0, "", False, []]),
    ("eq", 0, [0, -0.0, 0.0], [False, ""]),
    ("eq", 9007199254740993, [9007199254740992, 9007199254740993], [9007199254740994]),
    ("eq", 10**400, [10**500, math.inf], [1e308]),
    ("eq", "\ud800", ["\ud800"], ["?", "\ufffd"]),
    ("in", [1, "a", None], [1, 1.0, "a", None], [True, "1", [1], "b"]),
    (
        "in",
        [str(i) for i in range(20)] + [7, None, True],
        ["3", 7, 7.0, None, True],
        [3, 1, [], False],
    ),
    ("contains", 1, [[1], ["x", 1.0]], [1, [[1]], [True], ["1"], {}, []]),
    ("contains", None, [[None]], [None, []]),
    ("range", ValueRange(1, 2), [1, 1.5, 2], [0, 3, True, "1", None, math.nan]),
    ("range", ValueRange(1, 2, lower_open=True, upper_open=True), [1.5], [1, 2]),
    ("range", ValueRange(lower=1), [10**400, 1], [0.999]),
    ("range", ValueRange("b", "d"), ["b", "bz", "d"], ["a", "da", 3]),
    ("range", ValueRange(lower="\uffff"), ["\U0001f600"], ["\ufffe"]),
    ("range", ValueRange(False, True, lower_open=True), [True], [False, 1]),
    ("prefix", "ab", ["ab", "abc"], ["a", 5, ["ab"], None]),
    ("suffix", "bc", ["bc", "abc"], ["b", 5]),
    ("like", LikeText("a%c_"), ["acd", "a1c2"], ["ac", "abcde", 5]),
    ("regexp", Regexp("^b.b$"), ["bob"], ["bobb", 5, ["bob"], None]),
    ("regexp", Regexp("^B", "i"), ["bob"], ["ab\nb"]),
    ("regexp", Regexp("^b", "im"), ["a\nB"], ["ab"]),
    ("regexp", Regexp("a.b", "s"), ["a\nb"], ["ab"]),
    ("regexp", Regexp("a$"), ["a"], ["a\n"]),
    ("regexp", Regexp("^\\w$"), ["a"], ["é"]),
    ("regexp", Regexp("^.$"), ["\ud800", "é"], ["ab"]),
    ("regexp_text", Regexp("^12$"), [12, 12.0, "12", [12]], [None, [1, 2], {}]),
    ("regexp_text", Regexp("^null$"), [None, "null"], [[None]]),
    ("regexp_text", Regexp("^1,,true,2,$"), [[1, None, True, [2, []]]], []),
    ("regexp_text", Regexp("object Object"), [{}, [{}]], [[]]),
    ("match", JsonPattern.of({"b": 1}), [{"b": 1, "c": 2}], [{"b": 2}, {"c": 1}, [1], 1]),
    ("match", JsonPattern.of({"b": None}), [{"b": None}], [{}]),
    ("match", JsonPattern.of({}), [{}, {"a": 1}], [[], None]),
    ("match", JsonPattern.of([]), [[], [1]], [{}, None]),
    ("match", JsonPattern.of([1, 2]), [[2, 1], [1, 3, 2.0]], [[1], [1, 1], [True, 2]]),
    ("match", JsonPattern.of([1, 1]), [[1, 1]], [[1, 2]]),
    ("match", JsonPattern.of([{"x": 1}, {"x": 1, "y": 2}]), [[{"x": 1}, {"x": 1, "y": 2}]], []),
    # Greedy: the first element of the pattern takes the only one the second could have had.
    ("match", JsonPattern.of([{"x": 1}, {"x": 1, "y": 2}]), [], [[{"x": 1, "y": 2}, {"x": 1}]]),
    ("match", JsonPattern.of([[1]]), [[[1, 2]], [0, [1]]], [[1], [[2]]]),
    ("select", Select(0, Condition((Flat("value"),), "eq", 1)), [[1], [1, 2]], [[], [2, 1], 1]),
    ("select", Select(-1, Condition((Flat("value.k"),), "eq", 1)), [[0, {"k": 1}]], [[1]]),
    ("select", Select(-3, EVERYTHING), [[1, 2, 3]], [[1, 2], "abc"]),
    ("geo_distance", Circle(0.0, 0.0, 1000.0), [[0, 0.001]], [[1, 1], None, "no", 5, True]),
    ("geo_junk", None, [5, "no", True, [], {}, {"lat": 1}], [None, 0, "", False, [0, 0]]),
    ("negative_zero", None, [-0.0], [0, 0.0, "-0"]),
]


@pytest.mark.parametrize(("op", "value", "good", "bad"), MEANING)
def test_meaning(op, value, good, bad):
    """Each condition holds for the one kind of value and not for the other; missing never does."""
    condition = Condition(A, op, value)

    assert [v for v in good if not holds(condition, {"a": v})] == []
    assert [v for v in bad if holds(condition, {"a": v})] == []
    assert not holds(condition, {})
    assert holds(Not(condition), {})


class Long:
    """An opaque expression: more than three members."""

    def evaluate(self, obj):
        return len(obj) > 3

    def canonical_json(self):
        return {"long": 3}


def test_opaque_conditions_see_the_whole_object():
    """An opaque expression is evaluated on the root."""
    condition = Condition((), "opaque", Long())

    assert holds(condition, {"a": 1, "b": 2, "c": 3, "d": 4})
    assert not holds(condition, {})
    assert Filter(condition).canonical() == '{"opaque":[[],{"long":3}]}'


def test_every_condition_has_a_meaning():
    """The table of meanings leaves none out."""
    assert {op for op, *_ in MEANING} | {"opaque"} | {
        "geo_distance_range",  # the shapes have a module of their own
        "geo_box",
        "geo_polygon",
    } == set(OPS)


@settings(max_examples=300, deadline=None)
@given(trees, documents | values)
def test_any_tree_on_any_object(tree, obj):
    """No object makes a filter raise, and Not is plain negation."""
    before = json.dumps(obj)
    verdict = holds(tree, obj)

    assert isinstance(verdict, bool)
    assert holds(Not(tree), obj) is not verdict
    assert json.dumps(obj) == before


# The front door.


def test_parse_knows_its_dialects():
    """An unknown dialect is refused with the known ones."""
    with pytest.raises(FilterError, match="query-string, koncorde, cesql, cloudevents") as caught:
        parse("x", dialect="sql")
    assert caught.value.code == "unknown_dialect"
    assert list(DIALECTS) == ["query-string", "koncorde", "cesql", "cloudevents"]


def test_filters_compare_by_meaning():
    """Filters are equal, and hash alike, when their canonical forms are."""
    one = parse({"in": {"a": ["x", "y"]}}, "koncorde")
    two = parse({"or": [{"equals": {"a": "y"}}, {"equals": {"a": "x"}}]}, "koncorde")

    assert one == two
    assert len({one, two}) == 1
    assert pickle.loads(pickle.dumps(one)) == two
    assert "koncorde" in repr(one)


def test_regexps_ask_for_re2_when_it_is_missing():
    """Without google-re2 everything but regular expressions works, and they say what to install."""
    code = (
        "import sys; sys.modules['re2'] = None\n"
        "from virta.filters import parse, FilterError\n"
        "assert parse({'equals': {'a': 1}}, 'koncorde').matches({'a': 1})\n"
        "try: parse({'regexp': {'a': 'x'}}, 'koncorde')\n"
        "except FilterError as exc: print(exc.code, exc.message)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.startswith("regexp_engine_missing")
    assert "pip install virta[match]" in out.stdout
