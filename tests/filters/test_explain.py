"""Explanations agree with the evaluator and name what decided."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from strategies import documents, trees

from virta.filters import parse
from virta.filters.evaluate import holds
from virta.filters.explain import explain
from virta.filters.tree import And, Condition, Flat, Not, Or, Regexp


@settings(max_examples=300, deadline=None)
@given(trees, documents)
def test_agrees_with_the_evaluator(tree, doc):
    """The verdict is the evaluator's, and there is always a reason, in text and in JSON."""
    found = explain(tree, doc)

    assert found.matches is holds(tree, doc)
    assert str(found).startswith("matches" if found.matches else "does not match")
    assert json.loads(json.dumps(found.to_json()))["matches"] is found.matches


def test_names_the_condition_that_failed():
    """Of a conjunction only what failed is a reason, with what was found."""
    filter_ = parse(
        {"and": [{"equals": {"city": "Oslo"}}, {"range": {"age": {"gte": 3, "lt": 8}}}]}, "koncorde"
    )

    found = filter_.explain({"city": "Oslo", "age": 9})

    assert not found.matches
    assert found.reasons == ["age should be >= 3 and < 8: it is 9"]
    assert str(found) == (
        "does not match\n"
        "  - all of\n"
        '    + city should equal "Oslo": it is "Oslo"\n'
        "    - age should be >= 3 and < 8: it is 9"
    )


def test_negations_say_should_not():
    """The words follow the negation."""
    filter_ = parse({"not": {"regexp": {"name": "^bo"}}}, "koncorde")

    assert filter_.explain({"name": "bob"}).reasons == [
        'name should not match, as text, /^bo/: it is "bob"'
    ]
    assert str(filter_.explain({})).endswith(
        "+ name should not match, as text, /^bo/: it is missing"
    )


@pytest.mark.parametrize(
    ("source", "doc", "reason"),
    [
        ({"exists": "a.b"}, {}, "a.b should be there: it is missing"),
        ({"exists": "a"}, {"a": None}, "a should be there: it is there: null"),
        ({"exists": 'a["x"]'}, {"a": ["y"]}, 'a should be an array with "x": it is ["y"]'),
        ({"in": {"a": ["x", "y"]}}, {"a": 1}, 'a should be one of ["x","y"]: it is 1'),
        ({"match": {"a": {"b": [1]}}}, {"a": 1}, 'a should contain {"b":[1]}: it is 1'),
        (
            {"geoDistance": {"p": [0, 0], "distance": "1 km"}},
            {"p": [0, 1]},
            "p should be within 1,000 m of 0.0, 0.0: it is [0,1], 111,319 m from 0.0, 0.0",
        ),
        (
            {"geoDistanceRange": {"p": [0, 0], "from": "1 km", "to": "2 km"}},
            {"p": "no"},
            'p should be 1,000 to 2,000 m from 0.0, 0.0: it is "no"',
        ),
        (
            {"geoBoundingBox": {"p": {"top": 2, "left": 3, "bottom": 1, "right": 4}}},
            {},
            "p should be between 1.0 and 2.0 north, 3.0 and 4.0 east: it is missing",
        ),
        (
            {"geoPolygon": {"p": {"points": [[0, 0], [0, 1], [1, 1]]}}},
            {},
            "p should be in a polygon of 3 points: it is missing",
        ),
        (
            {"select": {"field": "a", "index": 0, "query": {"exists": "value"}}},
            {"a": []},
            "a should have an element 0 that passes a filter: it is []",
        ),
        ({"nothing": True}, {}, "nothing can match"),
        ({}, {}, "everything matches"),
    ],
)
def test_reasons(source, doc, reason):
    """Every condition has its sentence."""
    assert parse(source, "koncorde").explain(doc).reasons == [reason]


def test_structure():
    """Programs get paths, operators, expected and actual values."""
    tree = Or(
        (Condition(("data", "items", 0, "n"), "eq", 1), Not(Condition((Flat("a.b"),), "exists")))
    )

    found = explain(tree, {"data": {"items": [{"n": 2}]}, "a": {"b": 1}})

    assert found.to_json()["children"][0] == {
        "matches": False,
        "kind": "condition",
        "path": "data.items[0].n",
        "op": "eq",
        "expected": "equal 1",
        "actual": "2",
        "reason": "data.items[0].n should equal 1: it is 2",
    }


def test_long_and_strange_values_are_elided():
    """A reason stays a line, whatever the document holds."""
    deep = 1
    for _ in range(100_000):
        deep = [deep]
    tree = And((Condition(("a",), "regexp", Regexp("x")), Condition(("a",), "eq", 1)))

    for value in ("y" * 10_000, deep, object(), ["z"] * 10_000, "\ud800"):
        assert all(len(reason) < 300 for reason in explain(tree, {"a": value}).reasons)
