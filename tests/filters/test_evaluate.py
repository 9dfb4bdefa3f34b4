"""The reference evaluator: paths, flattened names, containment in arrays, and objects that are not from JSON."""

from __future__ import annotations

import random

import pytest

from virta.filters.evaluate import MISSING, condition_holds, flat_member, holds, resolve, same
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    And,
    Condition,
    Flat,
    JsonPattern,
    Not,
    Or,
    Select,
)

A = ("a",)


@pytest.mark.parametrize(
    ("path", "obj", "found"),
    [
        ((), 5, 5),
        (("a",), {"a": None}, None),
        (("a",), {}, MISSING),
        (("a",), [1], MISSING),
        (("a", "b"), {"a": {"b": 2}}, 2),
        (("a", "b"), {"a": [2]}, MISSING),
        ((0,), [7], 7),
        ((1,), [7], MISSING),
        ((-1,), [7], MISSING),
        ((0,), {"0": 8}, 8),
        (("a", 1), {"a": (1, 2)}, 2),
        ((0,), "text", MISSING),
        (("a",), None, MISSING),
    ],
)
def test_paths(path, obj, found):
    """Names are members of objects, numbers are elements of arrays or members; anything else is missing."""
    value = resolve(obj, path)

    assert value is found or value == found
    assert holds(Condition(path, "exists"), obj) is (found is not MISSING)


FLAT = [
    ("a", {"a": 1}, 1),
    ("a.b", {"a": {"b": 1}}, 1),
    ("a.b", {"a.b": 2}, 2),
    ("a.b", {"a": {"b": 1}, "a.b": 2}, 2),
    ("a.b", {"a.b": 2, "a": {"b": 1}}, 1),
    ("a.b.c", {"a": {"b.c": 3}}, 3),
    ("a.b.c", {"a.b": {"c": 4}}, 4),
    ("a", {"a": {"b": 1}}, {"b": 1}),
    ("a.0", {"a": [1]}, MISSING),
    ("a.0", {"a": {"0": 5}}, 5),
    ("", {"": 6}, 6),
    ("a", {"": {"a": 7}}, 7),
    ("a.", {"a": {"": 8}}, 8),
    (".a", {"": {"a": 7}}, MISSING),
    ("a.b", {"a": None}, MISSING),
    ("a", [], MISSING),
]


@pytest.mark.parametrize(("name", "obj", "found"), FLAT)
def test_flat_names(name, obj, found):
    """A dotted name finds what flattening the object would put there; the later member wins."""
    value = flat_member(obj, name)

    assert value is found or value == found
    assert value is resolve(obj, (Flat(name),)) or value == resolve(obj, (Flat(name),))


def flattened(obj):
    """The whole flattened object, as the specification describes it."""
    found = {}

    def walk(members, prefix):
        for key, value in members.items():
            path = f"{prefix}.{key}" if prefix else key
            found[path] = value
            if isinstance(value, dict):
                walk(value, path)

    walk(obj, "")
    return found


@pytest.mark.parametrize("seed", range(30))
def test_flat_names_against_the_whole_object(seed):
    """Looking one name up gives what flattening everything gives."""
    rng = random.Random(seed)

    def members(depth):
        return {
            rng.choice(["a", "b", "a.b", "b.a", "", "c."]): members(depth - 1)
            if depth and rng.random() < 0.6
            else rng.randint(0, 9)
            for _ in range(rng.randint(0, 4))
        }

    for _ in range(40):
        obj = members(3)
        everything = flattened(obj)
        everything.pop("", None)  # only the root's own member has the empty name
        for name in [*everything, "a", "a.b", "a.b.a", "b", "c", "a..b"]:
            assert flat_member(obj, name) == everything.get(name, MISSING), (seed, obj, name)


@pytest.mark.parametrize(
    ("expected", "equal", "different"),
    [
        (1, [1, 1.0], [True, "1", None, 2, [1]]),
        (True, [True], [1, "true", False]),
        (None, [None], [0, "", False]),
        ("a", ["a"], ["A", ["a"], None]),
        (2**53, [2**53 + 1, 2.0**53], [2**53 + 2]),
        (0, [0, -0.0], [False, None]),
    ],
)
def test_equality(expected, equal, different):
    """Same JSON type, numbers as doubles."""
    assert all(same(expected, value) for value in equal)
    assert not any(same(expected, value) for value in different)


def contains(pattern, value):
    return condition_holds(Condition(A, "match", JsonPattern.of(pattern)), {"a": value})


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ({}, [{}, {"x": 1}], [[], None, "x"]),
        ({"x": 1}, [{"x": 1, "y": 2}], [{"x": 2}, {"y": 1}, [{"x": 1}]]),
        ([], [[], [1]], [{}, None]),
        ([1, 1], [[1, 1], [1, 2, 1]], [[1], [1, 2]]),
        ([1, "a"], [["a", 1]], [[1], ["a", "a"]]),
        ([{"x": 1}], [[{"x": 1, "y": 2}]], [[{"x": 2}], [[1]], {"x": 1}]),
        ([{"x": 1}, {"x": 1}], [[{"x": 1}, {"x": 1}]], [[{"x": 1}]]),
        ([{}, {"x": 1}], [[{}, {"x": 1}], [{"y": 1}, {"x": 1}]], [[{"x": 1}]]),
        ([[1]], [[[1, 2]], [3, [1]]], [[1], [[2]]]),
        ({"x": [{"y": {"z": 1}}]}, [{"x": [{"y": {"z": 1, "w": 2}}]}], [{"x": [{"y": 1}]}]),
    ],
)
def test_containment(pattern, good, bad):
    """Objects by members, arrays element by element: each part takes the first that contains it."""
    assert all(contains(pattern, value) for value in good)
    assert not any(contains(pattern, value) for value in bad)
    assert not holds(Condition(A, "match", JsonPattern.of(pattern)), {})


def naive(pattern, value):
    """Containment as the table of conditions words it, without any index."""
    if isinstance(pattern, dict):
        return isinstance(value, dict) and all(
            key in value and naive(part, value[key]) for key, part in pattern.items()
        )
    if not isinstance(pattern, list):
        return same(pattern, value)
    if not isinstance(value, list):
        return False
    left = list(value)
    for part in pattern:
        at = next((i for i, item in enumerate(left) if naive(part, item)), None)
        if at is None:
            return False
        del left[at]
    return True


@pytest.mark.parametrize("seed", range(20))
def test_containment_against_a_naive_rule(seed):
    """Counting scalars and looking up candidates changes no answer."""
    rng = random.Random(seed)

    def value(depth):
        roll = rng.random()
        if not depth or roll < 0.5:
            return rng.choice([1, 2, "a", "b", None, True, 2**53 + 1, 1.0])
        if roll < 0.75:
            return [value(depth - 1) for _ in range(rng.randint(0, 4))]
        return {rng.choice("xyz"): value(depth - 1) for _ in range(rng.randint(0, 3))}

    for _ in range(150):
        pattern, document = value(3), value(4)
        normal = JsonPattern.of(pattern).value
        assert contains(pattern, document) is naive(normal, document), (seed, pattern, document)


@pytest.mark.parametrize(
    ("index", "array", "found"),
    [
        (0, [1, 2], True),
        (1, [1, 2], False),
        (-1, [2, 1], True),
        (-3, [1, 1], False),
        (2, [1], False),
    ],
)
def test_select(index, array, found):
    """An element by its position, from the end if negative; the tree is on {"value": element}."""
    condition = Condition(A, "select", Select(index, Condition(("value",), "eq", 1)))

    assert holds(condition, {"a": array}) is found
    assert holds(Not(condition), {"a": array}) is not found
    assert not holds(condition, {"a": {"0": 1}})


def test_logic():
    """And, Or, Not, Everything and Nothing; of no children too."""
    yes, no = Condition(A, "exists"), Condition(("b",), "exists")
    obj = {"a": 1}

    assert holds(And(()), obj)
    assert not holds(Or(()), obj)
    assert holds(And((yes, Not(no), EVERYTHING)), obj)
    assert holds(Or((no, yes, NOTHING)), obj)
    assert not holds(And((yes, no)), obj)
    assert not holds(NOTHING, obj)


class Strange:
    """An object whose comparison must not be called."""

    def __eq__(self, other):
        raise AssertionError

    __hash__ = None


@pytest.mark.parametrize("op", ["eq", "contains", "match", "prefix", "range"])
def test_objects_that_are_no_json(op):
    """A value without a JSON type satisfies only `exists`, and is never compared by its own rules."""
    from virta.filters.tree import ValueRange

    value = {"range": ValueRange(1, 2), "match": JsonPattern.of([{"x": 1}])}.get(op, "a")
    condition = Condition(A, op, value)

    for odd in (Strange(), [Strange()], [{"x": Strange()}], {Strange: 1}):
        assert not holds(condition, {"a": odd})
        assert holds(Condition(A, "exists"), {"a": odd})
    assert repr(MISSING) == "missing"
