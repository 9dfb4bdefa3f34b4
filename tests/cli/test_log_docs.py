"""docs/cli-log.md is true: its examples are run, its tables are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from virta.cli import main
from virta.cli.log import log

DOCS = Path(__file__).parents[2] / "docs" / "cli-log.md"


def examples() -> list[tuple[str, str]]:
    """Each command of the page with the output printed under it."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", DOCS.read_text(), re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


@pytest.mark.slow
def test_examples_print_what_they_say(tmp_path):
    """Every console example, run in order in one directory, prints what stands under it."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert len(examples()) > 15
    for command, expected in examples():
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, text=True, timeout=60, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        pattern = ".*".join(re.escape(piece) for piece in expected.split("…"))
        assert re.fullmatch(pattern, done.stdout), f"$ {command}\n{done.stdout}"


@pytest.mark.parametrize("name", sorted(log.commands))
def test_every_option_is_documented(name):
    """Each command has its section, and each of its flags stands in it."""
    section = re.search(
        rf"^## `virta log {name} .*?(?=^## |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL
    )
    assert section, f"docs/cli-log.md has no section for {name}"
    for option in log.commands[name].params:
        for flag in option.opts if isinstance(option, click.Option) else ():
            assert f"`{flag}" in section[0], f"{name} {flag} is not documented"


def test_group_is_registered():
    """`virta log` is reached through the main command."""
    assert main.get_command(click.Context(main), "log") is log
