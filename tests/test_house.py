"""The house rules that a machine can check: who may import whom, and how large things may grow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "virta"
MODULES = sorted(SRC.rglob("*.py"))

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

# Modules at the root, which import nothing of ours.
ROOT_MODULES = {"backoff", "clock", "errors", "files", "jsontext", "native"}

# Room -> rooms it may import (DESIGN: imports go only rightwards). Every room may import itself.
ALLOWED: dict[str, set[str]] = {
    **{module: set() for module in ROOT_MODULES},
    "event": ROOT_MODULES,
    "log": {*ROOT_MODULES, "event"},
    "interop": {*ROOT_MODULES, "log"},
    "filters": ROOT_MODULES,
    "match": {*ROOT_MODULES, "event", "filters"},
    "streams": {"errors"},
    "journal": {*ROOT_MODULES, "log"},
    "hub": {*ROOT_MODULES, "event", "log", "filters", "match", "streams"},
    "server": {
        *ROOT_MODULES,
        "event",
        "log",
        "filters",
        "match",
        "streams",
        "hub",
        "journal",
        "auth",
        "spark",
    },
    "client": {*ROOT_MODULES, "event"},
    "spark": {*ROOT_MODULES, "event", "log", "filters", "match"},
    "cdc": {*ROOT_MODULES, "event", "log"},
}
ROOT_ROOMS = {"cli", "__init__", "__main__"}  # these may import anything


def room_of(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST, path: Path) -> set[str]:
    """Rooms of ours that a module imports, at any depth of the code (lazy imports count)."""
    rooms: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it out"
            if node.module == "virta":
                names = [f"virta.{alias.name}" for alias in node.names]
            elif node.module:
                names = [node.module]
        rooms |= {name.split(".")[1] for name in names if name.startswith("virta.")}
    return rooms


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_only_rightwards(path):
    """A room imports only the rooms that DESIGN draws to its right."""
    room = room_of(path)
    if room in ROOT_ROOMS:
        return

    foreign = imported_rooms(ast.parse(path.read_text()), path) - {room} - ALLOWED[room]

    assert foreign <= {"__version__"}, f"{path} imports {foreign}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_modules_and_functions_fit(path):
    """Modules stay under 500 lines, functions on a screen."""
    text = path.read_text()
    assert text.count("\n") <= MODULE_LINES_MAX

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{path}:{node.lineno} {node.name}: {lines} lines"


def test_nothing_unfinished():
    """FIXME never merges; a TODO names an issue."""
    for path in [*MODULES, *(ROOT / "native").glob("*.[ch]*")]:
        assert "FIXME" not in path.read_text(), path


def test_log_imports_nothing_heavy():
    """`import virta.log` pulls in the standard library and ourselves, nothing else."""
    import subprocess
    import sys

    code = (
        "import sys; before = set(sys.modules); import virta.log; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(out.stdout.split()) <= set(sys.stdlib_module_names) | {"virta"}


def commands():
    """Every command of `virta` with its path of names."""
    import click

    from virta.cli import main

    def walk(command, names):
        yield names, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                yield from walk(command.get_command(context, name), (*names, name))

    return list(walk(main, ("virta",)))


def test_every_command_and_flag_is_documented():
    """docs/cli*.md name every command and every flag of it."""
    pages = "\n".join(p.read_text() for p in sorted((ROOT / "docs").glob("cli*.md")))
    for names, command in commands():
        assert " ".join(names) in pages, f"{' '.join(names)} is in no docs/cli*.md"
        for parameter in command.params:
            long = [o for o in parameter.opts if o.startswith("--")]
            for flag in long:
                if flag not in {"--help", "--version"}:
                    assert flag in pages, f"{' '.join(names)} {flag} is in no docs/cli*.md"


def test_every_command_has_help():
    """Each command and each option says what it does."""
    for names, command in commands():
        assert command.help, names
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, (names, parameter.name)


def test_the_changelog_has_each_section_and_line_once():
    """Merges leave no doubled section, no doubled line and no line outside of a list."""
    versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    for version in versions:
        lines = [line for line in version.splitlines()[1:] if line]

        assert [line for line in lines if not line.startswith(("### ", "- ", "  "))] == []
        assert [line for line in set(lines) if lines.count(line) > 1] == []
