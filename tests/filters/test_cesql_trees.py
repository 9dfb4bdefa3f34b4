"""Expressions as trees: exact for every event, decomposed where a literal is compared, and bounded."""

from __future__ import annotations

import pickle

import pytest
from cesql_randoms import CesqlRandoms

from virta.errors import FilterError
from virta.filters import parse
from virta.filters.cesql import computed_expression, evaluate
from virta.filters.cesql.computed import CesqlExpression, read_always
from virta.filters.cesql.parser import parse_expression
from virta.filters.cesql.syntax import attributes, children
from virta.filters.cesql.trees import CONDITIONS_MAX, static_type, tree_of
from virta.filters.evaluate import MISSING, resolve
from virta.filters.explain import path_text
from virta.filters.tree import NOTHING, Condition, conditions


@pytest.mark.parametrize("seed", range(40))
def test_trees_are_exact(seed):
    """A random expression's tree holds exactly when the expression is true without a problem."""
    randoms = CesqlRandoms(90_000 + seed)
    for _ in range(20):
        text = randoms.expression()
        filter_ = parse(text, "cesql")
        for event in [randoms.event() for _ in range(6)]:
            value, problem = evaluate(text, event)
            assert filter_.matches(event) is (value is True and problem is None), (text, event)


SHAPES = [
    ("LENGTH(subject) > 5", [("LENGTH(subject)", "range")]),
    ("LENGTH(subject) = 5 OR LENGTH(subject) = 6", [("LENGTH(subject)", "eq")] * 2),
    ("LOWER(type) = 'a'", [("LOWER(type)", "eq")]),
    ("LOWER(type) LIKE 'a%'", [("LOWER(type)", "prefix")]),
    ("LOWER(type) LIKE '%a'", [("LOWER(type)", "suffix")]),
    ("LOWER(type) LIKE '%a%'", [("LOWER(type)", "like")]),
    ("UPPER(type) IN ('A', 'B')", [("UPPER(type)", "in")]),
    ("LENGTH(type) IN ('1', '2')", [("LENGTH(type)", "in")]),
    ("n = 5", [("INT(n)", "eq")]),
    ("n = '2024-01-01'", [("STRING(n)", "eq")]),
    ("n LIKE '5%'", [("STRING(n)", "prefix")]),
    ("type LIKE 'a%b%c'", [("type", "prefix"), ("type", "suffix"), ("type", "like")]),
    ("type LIKE '%1'", [("STRING(type)", "suffix")]),
    ("a = b", [("a = b", "eq")]),
    ("a < b AND n = 1", [("a < b", "eq"), ("INT(n)", "eq")]),
    ("a AND b", [("BOOL(a)", "eq"), ("BOOL(b)", "eq")]),
    ("NOT a", [("NOT a", "eq")]),
    ("n NOT IN (1, 2)", [("n", "exists"), ("n", "in")]),
    ("IS_INT(n)", [("IS_INT(n)", "eq")]),
    ("n = TRUE", [("BOOL(n)", "eq")]),
    ("LENGTH(a) = LENGTH(b)", [("LENGTH(a) = LENGTH(b)", "eq")]),
]


@pytest.mark.parametrize(("text", "wanted"), SHAPES, ids=[text for text, _ in SHAPES])
def test_comparisons_are_conditions(text, wanted):
    """A comparison with a literal is a condition on the value of the other side."""
    found = [
        (path_text(condition.path), condition.op)
        for condition in conditions(parse(text, "cesql").tree)
    ]

    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    "text",
    [
        "n / 0 = 1",
        "n > 'x'",
        "'x' = LENGTH(n)",
        "data = 'a'",
        "data LIKE '%a%'",
        "data IN (1)",
        "5",
        "'true'",
    ],
)
def test_what_never_passes(text):
    """Comparisons that always have a problem, data, and what is no Boolean: the tree is Nothing."""
    assert tree_of(parse_expression(text)) == NOTHING


def test_large_expressions_are_computed_as_a_whole():
    """Above the limits an expression is one condition; it still gives the right answer."""
    wide = " OR ".join(f"(a{i} = {i} AND b{i} = {i})" for i in range(40))
    event = {f"{name}{i}": i for name in "ab" for i in range(40)}

    filter_ = parse(wide, "cesql")

    assert filter_.tree.count <= CONDITIONS_MAX
    assert filter_.matches(event)
    assert not filter_.matches({**event, "a0": "x"})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1", int),
        ("'a'", str),
        ("TRUE", bool),
        ("a", None),
        ("-a", int),
        ("NOT a", bool),
        ("a + b", int),
        ("a = b", bool),
        ("a AND b", bool),
        ("LENGTH(a)", int),
        ("LOWER(a)", str),
        ("NOPE(a)", bool),
        ("a LIKE 'x'", bool),
        ("a IN (1)", bool),
        ("EXISTS a", bool),
    ],
)
def test_static_types(text, kind):
    """Every expression but an attribute has one type."""
    assert static_type(parse_expression(text)) is kind


@pytest.mark.parametrize(
    ("text", "names", "required"),
    [
        ("a", {"a"}, {"a"}),
        ("a AND b", {"a", "b"}, {"a"}),
        ("a XOR b", {"a", "b"}, {"a", "b"}),
        ("a + b * c", {"a", "b", "c"}, {"a", "b", "c"}),
        ("a IN (b, c)", {"a", "b", "c"}, {"a", "b"}),
        ("EXISTS a", {"a"}, set()),
        ("LENGTH(a) > b", {"a", "b"}, {"a", "b"}),
        ("NOPE(a)", {"a"}, set()),
        ("NOT a LIKE 'x'", {"a"}, {"a"}),
        ("1 = 1", set(), set()),
    ],
)
def test_attributes_that_are_read(text, names, required):
    """All attributes of an expression, and those without which it has no value."""
    expression = parse_expression(text)

    assert attributes(expression) == names
    assert read_always(expression) == required
    assert all(child.depth < expression.depth for child in children(expression))


def test_computed_paths():
    """A computed step is equal by meaning, hashable, picklable, and missing where the expression fails."""
    one, two = computed_expression("LENGTH( subject )"), computed_expression("length(subject)")
    path = (one,)

    assert one == two != computed_expression("LENGTH(type)")
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    assert str(one) == "LENGTH(subject)"
    assert isinstance(one, CesqlExpression)
    assert (one.names, one.required) == (("subject",), ("subject",))
    assert resolve({"subject": "abc"}, path) == 3
    assert resolve({}, path) is MISSING
    assert resolve([], path) is MISSING
    assert one.canonical_json() == {"cesql": "LENGTH(subject)"}


def test_a_computed_step_stands_alone():
    """A path with a computed step has no other step."""
    step = computed_expression("LENGTH(subject)")

    assert Condition((step,), "exists").path == (step,)
    with pytest.raises(FilterError, match="not a path"):
        Condition((step, "a"), "exists")


def test_reasons_name_the_expression():
    """An explanation shows the expression and its value."""
    explanation = parse("LENGTH(subject) > 5 AND type LIKE '%a%b'", "cesql").explain(
        {"subject": "abc", "type": "xayb"}
    )

    assert str(explanation).splitlines() == [
        "does not match",
        "  - all of",
        "    - LENGTH(subject) should be >= 6: it is 3",
        "    + all of",
        '      + type should end with "b": it is "xayb"',
        '      + type should be LIKE "%a%b": it is "xayb"',
    ]
