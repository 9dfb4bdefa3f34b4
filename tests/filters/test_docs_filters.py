"""The examples in docs/filters.md run, and its limits equal the code's."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

from virta.filters import limits, parse
from virta.filters.tree import OPS

TEXT = (Path(__file__).parent.parent.parent / "docs" / "filters.md").read_text(encoding="utf-8")
KONCORDE = TEXT.partition("## Koncorde\n")[2].partition("\n## ")[0]


def test_examples_run():
    """The session at the top gives what it shows."""
    test = doctest.DocTestParser().get_doctest(TEXT, {}, "filters.md", "docs/filters.md", 0)

    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("example", re.findall(r"`(\{[^`…]+\})`", KONCORDE))
def test_koncorde_examples_are_filters(example):
    """Every example filter parses; notations of points and documents are none."""
    if example.startswith(('{"lat', '{"n"')) or example == "{}":
        return
    parse(json.loads(example), "koncorde")


def test_every_condition_is_documented():
    """The table of conditions has them all."""
    assert {op for op in OPS if f"`{op}`" not in TEXT} == set()


def test_every_limit_is_documented():
    """The table of limits has them all, with their values."""
    names = [name for name in vars(limits) if name.endswith("_MAX")]

    assert {name for name in names if f"`{name}`" not in TEXT} == set()
    for name in ("DEPTH_MAX", "CONDITIONS_MAX", "IN_VALUES_MAX", "REGEXP_CHARS_MAX"):
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}`"))
        assert f"{getattr(limits, name):,}" in row


def test_cesql_goes_left_to_right():
    """The page's example of AND and OR without parentheses."""
    example = "FALSE AND FALSE OR TRUE"

    assert f"`{example}`" in TEXT
    assert parse(example, "cesql").matches({})
    assert not parse("FALSE AND (FALSE OR TRUE)", "cesql").matches({})
