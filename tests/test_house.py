"""The house rules that a machine can check: who may import whom, and how large things may grow."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "virta"
MODULES = sorted(SRC.rglob("*.py"))

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
FOLDER_MODULES_MAX = 12  # without __init__.py
NATIVE_LINES_MAX = 600
NATIVE_COLUMNS_MAX = 110

# Modules at the root, which import nothing of ours.
ROOT_MODULES = {
    "backoff", "clock", "errors", "files", "jsontext", "log_lines", "malloc", "native", "quantities",
}  # fmt: skip

# Package -> packages it may import. Every package may import itself.
ALLOWED: dict[str, set[str]] = {
    **{module: set() for module in ROOT_MODULES},
    "event": ROOT_MODULES,
    "log": {*ROOT_MODULES, "event"},
    "tier": {*ROOT_MODULES, "log"},
    "interop": {*ROOT_MODULES, "log"},
    "filters": ROOT_MODULES,
    "match": {*ROOT_MODULES, "event", "filters"},
    "streams": {"errors"},
    "access": {*ROOT_MODULES, "filters", "streams"},
    "journal": {*ROOT_MODULES, "log"},
    "hub": {*ROOT_MODULES, "event", "log", "filters", "match", "streams"},
    "views": {*ROOT_MODULES, "event", "log", "filters", "match", "streams", "hub"},
    "server": {
        *ROOT_MODULES,
        "access",
        "cdc",
        "event",
        "filters",
        "hub",
        "journal",
        "log",
        "match",
        "spark",
        "streams",
        "tier",
        "views",
    },
    "console": set(),  # static files, served by the server
    "client": {*ROOT_MODULES, "event"},
    "outbox": {*ROOT_MODULES, "event"},
    "spark": {*ROOT_MODULES, "event", "log", "filters", "match", "tier"},
    "cdc": {*ROOT_MODULES, "event", "log", "outbox"},
    "kafka": {*ROOT_MODULES, "event", "log"},
}
UNRESTRICTED = {"cli", "__init__", "__main__"}  # these may import anything
# Private metaphors that were replaced by the field's own terms; they must not come back.
RETIRED_WORDS = r"asker|awake|hearers?|keepers?|lanes?|parcels?|settle[ds]?|shelf|shelves|steward|told|twins?|whoever|whoso"
# As names of functions, classes and modules they meant several things each.
RETIRED_NAMES = {"gone", "hear", "held", "hold", "look", "room", "settle", "spot", "tell", "told"}
# The blocking and asyncio clients of the journal have the names of the server's clients on purpose.
SHARED_CLASS_NAMES = {"AsyncClient", "Client"}


def package_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_packages(tree: ast.AST, path: Path) -> set[str]:
    """Packages of ours that a module imports, at any depth of the code (lazy imports count)."""
    packages: set[str] = set()
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
        packages |= {name.split(".")[1] for name in names if name.startswith("virta.")}
    return packages


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_only_downwards(path):
    """A package imports only the packages below it."""
    package = package_of(path)
    if package in UNRESTRICTED:
        return

    foreign = imported_packages(ast.parse(path.read_text()), path) - {package} - ALLOWED[package]

    assert foreign <= {"__version__"}, f"{path} imports {foreign}"


def test_folders_fit():
    """A folder has at most 12 modules, so that a reader can take in its list."""
    for folder in {path.parent for path in MODULES}:
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]

        assert len(modules) <= FOLDER_MODULES_MAX, f"{folder}: {len(modules)} modules"


def test_public_class_names_are_unique():
    """One class name, one class."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SRC)))

    shared = {name: where for name, where in places.items() if len(where) > 1}

    assert set(shared) <= SHARED_CLASS_NAMES, shared


def test_test_modules_have_unique_names():
    """pytest imports test modules by their bare name: two of one name stop the whole run."""
    found = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))

    assert [name for name, count in found.items() if count > 1] == []


def test_native_files_fit():
    """C and C++ files stay under 600 lines of at most 110 columns."""
    for path in sorted((ROOT / "native").glob("*.[ch]*")):
        lines = path.read_text().splitlines()
        wide = [n for n, line in enumerate(lines, 1) if len(line) > NATIVE_COLUMNS_MAX]

        assert len(lines) <= NATIVE_LINES_MAX, f"{path.name}: {len(lines)} lines"
        assert wide == [], f"{path.name}: lines {wide} are wider than {NATIVE_COLUMNS_MAX} columns"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_modules_and_functions_fit(path):
    """Modules stay under 500 lines, functions on a screen."""
    text = path.read_text()
    assert text.count("\n") <= MODULE_LINES_MAX

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{path}:{node.lineno} {node.name}: {lines} lines"


TEXTS = [
    *(
        path
        for folder in ("src", "tests", "bench", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ),
    *(ROOT / "native").glob("*.[ch]*"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
]


def test_retired_words():
    """Code, comments, tests and docs use the field's own terms."""
    retired = re.compile(rf"\b({RETIRED_WORDS})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in TEXTS
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := retired.search(line))
    ]

    assert found == []


def test_retired_names():
    """One verb, one meaning: nothing we define has a name that meant several things."""
    found = []
    for path in MODULES:
        names = [(path.stem, 1)] + [
            (node.name, node.lineno)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        found += [
            f"{path.relative_to(SRC)}:{line}: {name}"
            for name, line in names
            if name.lower().strip("_") in RETIRED_NAMES
        ]

    assert found == []


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
