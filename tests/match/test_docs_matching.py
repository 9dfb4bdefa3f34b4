"""The examples in docs/matching.md run and give the results in their comments."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "matching.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_give_what_they_say(example):
    """Each statement runs; where a comment is an expression (up to `;` or `,`), it is the result."""
    lines = example.splitlines()
    names: dict[str, object] = {}
    compared = 0
    for statement in ast.parse(example).body:
        comment = lines[(statement.end_lineno or 1) - 1].partition("  # ")[2]
        wanted = comment.partition(";")[0].strip()
        if not isinstance(statement, ast.Expr):
            exec(compile(ast.Module([statement], []), "matching.md", "exec"), names)
            continue
        found = eval(compile(ast.Expression(statement.value), "matching.md", "eval"), names)
        if wanted and "…" not in wanted:
            assert found == eval(wanted, names), ast.unparse(statement)
            compared += 1
    assert compared >= 2
