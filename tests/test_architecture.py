"""docs/architecture.md: a table per package with every module, and walks through functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "virta"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = sorted(path.parent.name for path in SRC.glob("*/__init__.py"))
WALKS = {
    "POST to SSE bytes": 19,
    "Append to follower": 14,
    "A job pushed over TCP": 15,
    "Spark read and match": 20,
}


def section(title: str) -> str:
    """Return the text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/architecture.md has no heading {title}"
    return found[1]


def table(title: str) -> list[list[str]]:
    """Return the cells of the rows below a heading, without the table's head."""
    rows = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def named_modules(package: str) -> list[str]:
    """Return the modules in the first column; one without a folder is in that of the one before it."""
    names = []
    for row in table(package):
        folder = ""
        for name in re.findall(r"`([^`]+\.py)`", row[0]):
            if "/" in name:
                folder = name.rpartition("/")[0] + "/"
                names.append(name)
            else:
                names.append(folder + name)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in_its_table_once(package):
    modules = {
        str(path.relative_to(SRC / package))
        for path in (SRC / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    named = named_modules(package)

    assert (modules - set(named), set(named) - modules) == (set(), set())
    assert len(named) == len(set(named))


def test_every_root_module_is_in_its_table_once():
    modules = sorted(path.name for path in SRC.glob("*.py") if path.name != "__init__.py")

    assert sorted(named_modules("Root modules")) == modules


def test_native_files_exist():
    """What the page names in native/ is there; `*` and folders stand for several."""
    for name in re.findall(r"`(native/[^`]+)`", PAGE):
        assert list(ROOT.glob(name)), f"docs/architecture.md names {name}"


def defined(path: Path) -> set[str]:
    """Return the functions of a module, methods as Class.method; of a native file its words."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", text))
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
            names.add(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_leads_through_functions_that_exist(walk):
    """Each hop names a function and the file that has it; there are no more hops than the bound."""
    rows = table(walk)
    hops = int(re.split(r"\D+", rows[-1][0])[-1])

    assert hops <= WALKS[walk]
    for row in rows:
        [file] = re.findall(r"`([^`]+)`", row[2])
        path = ROOT / file if file.startswith("native/") else SRC / file
        names = defined(path)
        for function in re.findall(r"`([\w.]+)`", row[1]):
            if function not in {"write", "pwrite", "fdatasync"}:  # of others
                assert any(name == function or name.endswith(f".{function}") for name in names), (
                    f"{file} has no {function}"
                )
