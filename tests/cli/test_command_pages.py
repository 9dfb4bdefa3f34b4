"""The pages of the commands: each command and option is there, and what pages, examples and units call exists."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import click
import pytest

from virta.cli import main

ROOT = Path(__file__).parents[2]
# The page of each group of commands; the others are on the page of operating.
PAGES = {
    "cdc": "cli-cdc",
    "demo": "cli-demo",
    "journal": "cli-journal",
    "lake": "cli-pipeline",
    "log": "cli-log",
    "pipeline": "cli-pipeline",
    "serve": "cli-serve",
    "token": "cli-token",
}
ALL_PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMAND_PAGES = "\n".join(path.read_text() for path in ALL_PAGES if path.name.startswith("cli-"))
# Every text that shows commands.
SHOWN = sorted(
    path
    for path in chain(
        [ROOT / "README.md"],
        ALL_PAGES,
        (ROOT / "examples").rglob("*.py"),
        (ROOT / "deploy").rglob("*"),
        (ROOT / "clients").rglob("*.md"),
    )
    if path.is_file()
)
CALL = re.compile(r"(?:^|[`$(|]|bin/)\s*virta ((?:[a-z][a-z-]*)(?: [^`|\n#]*)?)", re.MULTILINE)
FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def commands(command, path=()):
    context = click.Context(command)
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), (*path, name))


ALL = dict(commands(main))
OWN_OPTIONS = ("journal", "lock")  # the rest of the line is a command of its own


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_a_command_and_its_options_are_on_its_page(path):
    """An option that no page names is found by nobody."""
    page = PAGES.get(path[0])
    text = (ROOT / "docs" / f"{page}.md").read_text() if page else COMMAND_PAGES
    options = [one for one in ALL[path].params if isinstance(one, click.Option)]

    assert f"virta {' '.join(path)}" in text or f"`{path[-1]}" in text
    assert [o.opts for o in options if not any(re.search(rf"{re.escape(n)}\b", text) for n in o.opts)] == []  # fmt: skip


@pytest.mark.parametrize("shown", SHOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_calls_exists(shown):
    """Each `virta …` names a command, and options of it."""
    unknown = []
    for call in CALL.findall(shown.read_text()):
        words = re.split(r"\s(?:&&|;|\|)\s", call)[0].split()
        path = next((p for n in (3, 2, 1) if (p := tuple(words[:n])) in ALL), None)
        if path is None:
            context = click.Context(main)
            if main.get_command(context, words[0].strip(".,:;)'\"")) is None:
                unknown.append(call)
            continue
        if path == OWN_OPTIONS:
            continue
        known = {name for one in ALL[path].params for name in (*one.opts, *one.secondary_opts)}
        unknown += [(call, flag) for flag in FLAG.findall(" ".join(words)) if flag not in {*known, "--help"}]  # fmt: skip

    assert unknown == []
