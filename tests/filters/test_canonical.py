"""Canonical forms keep the meaning, do not depend on order or process, and stay small."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import documents, koncorde_filters, trees

from virta.filters import Filter, parse
from virta.filters.canonical import canonical_text, canonicalise, conjunctions
from virta.filters.evaluate import holds
from virta.filters.tree import EVERYTHING, NOTHING, And, Condition, Flat, Not, Or, ValueRange
from virta.filters.values import Circle, Regexp, json_text

A = ("a",)
NEGATIVE_ZERO = Condition(A, "negative_zero")


def eq(value, path=A):
    return Condition(path, "eq", value)


def between(lower, upper, **kinds):
    return Condition(A, "range", ValueRange(lower, upper, **kinds))


def shuffled(node, rng):
    """The same tree with all operands in another order, some of them twice."""
    if isinstance(node, Not):
        return Not(shuffled(node.child, rng))
    if isinstance(node, And | Or):
        children = [shuffled(child, rng) for child in node.children]
        children += children[:1]
        rng.shuffle(children)
        return type(node)(tuple(children))
    return node


@settings(max_examples=400, deadline=None)
@given(trees, st.lists(documents, min_size=3, max_size=3))
def test_keeps_the_meaning(tree, docs):
    """The canonical tree, and its conjunctions where there are few, hold for the same objects."""
    canonical = canonicalise(tree)
    terms = conjunctions(canonical)

    for doc in docs:
        expected = holds(tree, doc)
        assert holds(canonical, doc) == expected
        if terms is not None:
            assert any(all(holds(c, doc) for c in term) for term in terms) == expected


@settings(max_examples=500, deadline=None)
@given(trees, st.integers())
def test_does_not_depend_on_order(tree, seed):
    """Operands in any order, repeated or not: one canonical form; and its own canonical form is itself."""
    canonical = canonicalise(tree)

    assert canonicalise(shuffled(tree, random.Random(seed))) == canonical
    assert canonicalise(canonical) == canonical
    assert canonicalise(Not(Not(tree))) == canonical


@settings(max_examples=200, deadline=None)
@given(koncorde_filters)
def test_koncorde_spellings_share_an_id(source):
    """bool, De Morgan and nested operands are spellings: the id is the same."""
    one = parse(source, "koncorde")

    assert parse({"bool": {"must": [source]}}, "koncorde").id == one.id
    assert parse({"or": [source, source]}, "koncorde").id == one.id
    assert parse({"not": {"not": source}}, "koncorde").id == one.id
    assert len(one.id) == 64


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (Or((eq(1), eq(2.0), eq("x"))), Condition(A, "in", [1, 2, "x"])),
        (Condition(A, "in", ["x"]), eq("x")),
        (And((Condition(A, "in", [1, 2]), Condition(A, "in", [2, 3]))), eq(2)),
        (And((eq(1), eq(2))), NOTHING),
        (And((eq(1), eq(True))), NOTHING),
        (And((eq(1), Not(eq(1.0)))), NOTHING),
        (Or((eq(1), Not(eq(1)))), EVERYTHING),
        (And((eq(1), Not(eq(2)))), eq(1)),
        (And((Not(eq(1)), Not(eq(2)))), Not(Condition(A, "in", [1, 2]))),
        (And((Condition(A, "exists"), eq(1))), eq(1)),
        (Or((Condition(A, "exists"), eq(1))), Condition(A, "exists")),
        (And((Not(Condition(A, "exists")), eq(1))), NOTHING),
        (And((Not(Condition(A, "exists")), Not(eq(1)))), Not(Condition(A, "exists"))),
        (Or((Not(Condition(A, "exists")), Not(eq(1)))), Not(eq(1))),
        (And((between(1, None), between(None, 3))), between(1, 3)),
        (And((between(1, 3), between(2, 5, lower_open=True))), between(2, 3, lower_open=True)),
        (And((between(1, 2), between(3, 4))), NOTHING),
        (And((between(1, 2), between("a", None))), NOTHING),
        (And((between(1, 2), eq(5))), NOTHING),
        (And((between(1, 2), eq(1))), eq(1)),
        (And((eq(0), Not(NEGATIVE_ZERO))), And((eq(0), Not(NEGATIVE_ZERO)))),
        (And((eq(0), NEGATIVE_ZERO)), And((eq(0), NEGATIVE_ZERO))),
        (And((eq(1), Not(NEGATIVE_ZERO))), eq(1)),
        (And((eq(1), NEGATIVE_ZERO)), NOTHING),
        (And((eq(False), NEGATIVE_ZERO)), NOTHING),
        (And((Condition(A, "in", [0, 1]), NEGATIVE_ZERO)), And((eq(0), NEGATIVE_ZERO))),
        (between(1, 1), eq(1)),
        (between(1, 1, lower_open=True), NOTHING),
        (Not(between(2, 1)), EVERYTHING),
        (Condition(A, "prefix", ""), Condition(A, "type", "string")),
        (Condition(A, "type", "null"), eq(None)),
        (And((eq(1), Or((eq(1), eq(2, ("b",)))))), eq(1)),
        (Or((eq(1), And((eq(1), eq(2, ("b",)))))), eq(1)),
        (And(()), EVERYTHING),
        (Or(()), NOTHING),
        (And((And((eq(1), And(()))),)), eq(1)),
        (Not(Or((eq(1), eq(2, ("b",))))), And((Not(eq(1)), Not(eq(2, ("b",)))))),
    ],
)
def test_simplifies(tree, expected):
    """What can be said in fewer conditions is."""
    assert canonical_text(canonicalise(tree)) == canonical_text(expected)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (eq(1), eq(True)),
        (eq(1), eq("1")),
        (eq(None), Not(Condition(A, "exists"))),
        (eq(1), eq(1, (Flat("a"),))),
        (eq(1, ("a", "b")), eq(1, ("a.b",))),
        (eq(1, ("0",)), eq(1, (0,))),
        (between(False, None), between(0, None)),
        (between(1, None), between(1, None, lower_open=True)),
    ],
)
def test_different_filters_have_different_ids(one, two):
    """Types, paths and bounds are part of a filter."""
    assert Filter(one) != Filter(two)
    assert Filter(one).id != Filter(two).id
    assert len({one, two}) == 2


def test_id_is_the_same_in_every_process():
    """Ids do not depend on hash randomisation."""
    source = {"or": [{"in": {"a": ["x", "y", "z"]}}, {"match": {"b": {"c": [1, {"d": None}]}}}]}
    code = f"from virta.filters import parse; print(parse({source!r}, 'koncorde').id)"
    ids = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "2")
    }

    assert ids == {parse(source, "koncorde").id}


def test_conjunctions_of_plain_trees():
    """Everything is one empty conjunction, Nothing is none, a condition is itself."""
    assert conjunctions(EVERYTHING) == [()]
    assert conjunctions(NOTHING) == []
    assert conjunctions(eq(1)) == [(eq(1),)]
    assert conjunctions(Or((eq(1), eq(2, ("b",))))) == [(eq(1),), (eq(2, ("b",)),)]


def test_conjunctions_give_up_at_the_limit():
    """2^40 terms are counted, not built."""
    pairs = tuple(Or((eq(1, (f"x{i}",)), eq(1, (f"y{i}",)))) for i in range(40))
    started = time.process_time()

    assert conjunctions(canonicalise(And(pairs))) is None
    assert len(conjunctions(canonicalise(And(pairs[:6]))) or ()) == 64
    assert time.process_time() - started < 0.4


def test_long_lists_stay_apart():
    """Two lists whose union would be over the limit are not joined, and not an error."""
    lists = [[f"{name}{i}" for i in range(40_000)] for name in "xy"]
    tree = canonicalise(Or(tuple(Condition(A, "in", values) for values in lists)))

    assert isinstance(tree, Or)
    assert holds(tree, {"a": "y39999"})


def test_conjunctions_leave_out_what_cannot_hold():
    """A term that contradicts itself is no term."""
    tree = canonicalise(And((Or((eq(1), eq(1, ("b",)))), Or((eq(2), eq(2, ("c",)))))))

    terms = conjunctions(tree)

    assert terms is not None
    assert len(terms) == 3


@pytest.mark.parametrize(
    ("op", "value"),
    [
        ("regexp", Regexp('a"\\.\u00e9\u2028*', "mi")),
        ("geo_distance", Circle(1.5, -0.0, 1e22)),
        ("geo_distance", Circle(48, 2, 100)),
        ("geo_distance", Circle(1.0, 2.0, math.inf)),
    ],
)
def test_frequent_shapes_have_the_text_of_all_others(op, value):
    """The quick texts of patterns and circles are those of sorted JSON, so that ids stay as they were."""
    text = canonical_text(Condition(("a",), op, value))

    assert json_text(asdict(value)) in text
