"""CESQL in the index: every expression gives what the evaluator gives, on both engines and from every kind of event."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from virta.errors import FilterError
from virta.filters import parse
from virta.filters.cesql import evaluate
from virta.match import Matcher

sys.path.insert(0, str(Path(__file__).parent.parent / "filters"))
from cesql_randoms import CesqlRandoms

# Expressions of a round; more rounds by the environment: 1,667 are 100,000 expressions.
EXPRESSIONS = 60
ROUNDS = int(os.environ.get("VIRTA_CESQL_ROUNDS", "12"))
EVENTS = 25


def passes(expression, event):
    """An event passes when the expression is the Boolean true without a problem."""
    value, problem = evaluate(expression, event)
    return value is True and problem is None


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_expressions(engine, seed):
    """Trees, index and the language itself agree on random expressions and events."""
    randoms = CesqlRandoms(seed)
    sources = {
        parse(text, "cesql").id: text for text in (randoms.expression() for _ in range(EXPRESSIONS))
    }
    matcher = Matcher(engine=engine)
    matcher.add_many(sources.values(), dialect="cesql")

    for event in [randoms.event() for _ in range(EVENTS)]:
        wanted = {id_ for id_, text in sources.items() if passes(text, event)}
        assert set(matcher.match(event)) == wanted, event
        assert set(matcher.match(json.dumps(event).encode())) == wanted, event
    for id_ in sources:
        assert matcher.remove(id_)
    if engine == "native":
        stats = matcher.stats()
        assert (stats["atoms"], stats["conditions"], stats["paths"]) == (0, 0, 0)


CASES = [
    ("n = 5", [5, "5", "+5", "005", 5.0], [6, "5.0", True, None, "x", 5.5, [5]]),
    ("n = 1", [1, True, "1"], [False, "true"]),
    ("n != 5", [6, True, "0"], [5, "05", "x", None, 5.5]),
    ("n > 2 AND n < 5", [3, 4, "4"], [2, 5, "x", True]),
    ("n + 1 > 2147483646", [2147483646], [2147483645, 2147483647]),
    ("-n = 2147483647", [-2147483647], [-2147483648]),
    ("ABS(n) = 3", [3, -3, "-3"], [4, -2147483648]),
    ("ABS(n) != 3", [4, 0], [3, -3, -2147483648]),
    ("n / 2 = 0", [0, 1, -1], [2, -2]),
    ("n / -2 >= 2", [-4, -5], [-3, 4]),
    ("n / 0 = 0", [], [0, 1]),
    ("n * -3 < 7", [-2, 0, 5], [-3, 2147483647]),
    ("n * 0 = 0", [4, "7"], ["x", None]),
    ("n % 3 = 1", [4, 1, "7"], [-4, 3]),
    ("10 - n = 4", [6], [5]),
    ("5 = n", [5, "5", True], ["05", False]),
    ("TRUE = n", [True, "true", 1], [False, "TRUE", 2]),
    ("n = TRUE", [True, "TRUE", 7], [False, "yes", 0]),
    ("n LIKE '%.v1'", ["a.v1", ".v1"], ["v1", "a.v12", 5]),
    ("n LIKE '%5'", ["a5", 15, 1.5, 5], [51, True]),
    ("n LIKE '_5'", ["a5", 15, "é5"], [5, 155]),
    ("n LIKE '%b%d_'", ["abcde", "bd1"], ["abcd", "db1"]),
    ("n NOT LIKE '%b%d_'", ["abcd", 5], ["abcde", None]),
    ("n LIKE 'a%b%c'", ["abc", "a1b2c"], ["ac", "abcd"]),
    ("LENGTH(n) = 3", ["abc", "zoé", 100, -10], ["ab", True, "abcd"]),
    ("LOWER(n) = 'àß'", ["Àß", "àß"], ["ÀSS", "a"]),
    ("UPPER(n) = 'SS'", ["ß", "ss", "Ss"], ["s"]),
    ("TRIM(n) = 'a'", ["a", " a ", "\u2003a\n", "\u3000a"], ["\x1ca", "b"]),
    ("LEFT(n, 2) = 'zo'", ["zoé", "zo"], ["z"]),
    ("RIGHT(n, 2) = 'oé'", ["zoé"], ["é"]),
    ("SUBSTRING(n, 2) = 'oé'", ["zoé"], ["z", "zo"]),
    ("SUBSTRING(n, -2, 1) = 'o'", ["zoé"], ["é", "o"]),
    ("SUBSTRING(n, 0) = ''", ["", "abc"], []),
    ("CONCAT(n, '-', n) = 'a-a'", ["a"], ["b"]),
    ("CONCAT_WS('.', n, 1, TRUE) = '5.1.true'", [5, "5"], [6]),
    ("IS_INT(n)", [5, "05", True], ["x", 5.5]),
    ("IS_BOOL(n)", ["FALSE", True, 5], ["x"]),
    ("STRING(n) IN ('5', 'true')", [5, "5", True], [6, "05"]),
    ("n IN ('2024-01-01', 'x')", ["2024-01-01", "x"], ["y", 5]),
    ("n IN (5, 'x')", [5, "5", "x", True], ["05", False]),
    ("n NOT IN (5, 7)", [6, "y", "05"], [5, "7", None]),
    ("LENGTH(n) IN (1, 'x', 2)", ["a"], ["ab"]),
    ("n AND TRUE", [True, "true", 2], [False, "x", None]),
    ("NOT n", [False, "false"], [0, 1, True, "x"]),
    ("n XOR TRUE", [False, 0], [True, "x"]),
    ("NOPE(n) = 1 OR TRUE", [], [1]),
    ("n = n", [5, "a", True], [None]),
    ("LENGTH(n) = LENGTH(type)", ["abcd", 1000], ["abc"]),
    ("n LIKE '%[%'", [[1]], ["a"]),
    ("n = '{\"x\":1}'", [{"x": 1}, '{"x":1}'], [{"x": 2}]),
    ("n = '1e+21'", [1e21 + 0.5, "1e+21"], []),
    ("n = '1000000000000000000000'", [10**21], []),
]


@pytest.mark.parametrize(("expression", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_meaning(engine, expression, good, bad):
    """One expression, values that pass and values that do not; an attribute that is missing never does."""
    matcher = Matcher(engine=engine)
    matcher.add(expression, dialect="cesql", id="it")

    for values, wanted in ((good, ["it"]), (bad, [])):
        for value in values:
            event = {"type": "abcd", "n": value}
            expected = ["it"] if passes(expression, event) else []
            assert matcher.match(event) == matcher.match(json.dumps(event)) == expected, value
            if not isinstance(value, float):
                assert expected == wanted, value
    assert matcher.match({"type": "abcd"}) == []


def test_like_on_hostile_text(engine):
    """A long text under a pattern of many wildcards takes time linear in the text."""
    matcher = Matcher(engine=engine)
    matcher.add("subject LIKE '%" + "_a" * 500 + "b%'", dialect="cesql", id="long")
    matcher.add("subject LIKE '%" + "_" * 900 + "é%'", dialect="cesql", id="any")

    assert matcher.match({"subject": "a" * 200_000}) == []
    assert sorted(matcher.match({"subject": "a" * 200_000 + "bé"})) == ["any", "long"]


def test_odd_attributes_are_written_once(engine):
    """Arrays and large numbers have their JSON text in every expression, from objects and from bytes."""
    matcher = Matcher(engine=engine)
    for number in range(50):
        matcher.add(f"n LIKE '%{number}%'", dialect="cesql", id=str(number))

    for event in ({"n": [17, 25]}, {"n": 10**30 + 17}, {"n": 1725.25}):
        wanted = {str(i) for i in range(50) if passes(f"n LIKE '%{i}%'", event)}
        assert set(matcher.match(event)) == set(matcher.match(json.dumps(event))) == wanted
        assert wanted


def test_expressions_beyond_the_core(engine):
    """More arguments than the core's stack has: Python evaluates, with the same answer."""
    matcher = Matcher(engine=engine)
    long = ", ".join(["subject"] * 1500)
    matcher.add(f"LENGTH(CONCAT({long})) = 1500", dialect="cesql", id="it")

    assert matcher.match({"subject": "x"}) == ["it"]
    assert matcher.match({"subject": "xy"}) == []


TCK = (
    Path(os.environ.get("VIRTA_SHARED", Path(__file__).parents[3] / "shared"))
    / "vectors"
    / "cesql_tck"
)


def suite_cases():
    """The conformance suite's expressions with their events."""
    cases = []
    for path in sorted(TCK.rglob("*.yaml")) if TCK.exists() else ():
        for case in yaml.safe_load(path.read_text()).get("tests", []):
            event = {"specversion": "1.0", "id": "1", "source": "s", "type": "t"}
            event |= case.get("event") or {}
            event |= case.get("eventOverrides") or {}
            cases.append((case["expression"], json.loads(json.dumps(event, default=str))))
    return cases


def test_the_conformance_suite(engine):
    """Every expression of the suite, all in one index: it passes the events that the language passes."""
    cases = suite_cases()
    if not cases:
        pytest.skip(f"no conformance suite in {TCK}")
    matcher = Matcher(engine=engine)
    names = {}
    for number, (expression, _) in enumerate(cases):
        try:
            names[matcher.add(expression, dialect="cesql", id=str(number))] = expression
        except FilterError:
            continue  # a syntax error, which the language's own tests list

    assert len(names) > 200
    for _, event in cases:
        wanted = {name for name, expression in names.items() if passes(expression, event)}
        assert set(matcher.match(event)) == set(matcher.match(json.dumps(event))) == wanted, event
