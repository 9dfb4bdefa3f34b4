"""Every command: help that says what it does, and errors that name what was wrong."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from virta.cli import main


def commands(command, path=()):
    context = click.Context(command)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), (*path, name))
    else:
        yield path, command


ALL = dict(commands(main))


def run(*words):
    return CliRunner().invoke(main, list(words))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help(path):
    """The first line says what the command does, and every option has a help text."""
    shown = run(*path, "--help")

    assert shown.exit_code == 0
    assert f"virta {' '.join(path)}" in shown.output.replace("main", "virta")
    command = ALL[path]
    assert command.help
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert [one.name for one in options if not one.help] == []


# `virta journal lock KEY COMMAND` passes options on to the command.
OWN_OPTIONS = [path for path in ALL if path != ("journal", "lock")]


@pytest.mark.parametrize("path", OWN_OPTIONS, ids=" ".join)
def test_an_unknown_option(path, tmp_path, monkeypatch):
    """It is named, the exit code is 2, and nothing is done."""
    monkeypatch.chdir(tmp_path)
    shown = run(*path, "--no-such-option")

    assert shown.exit_code == 2
    assert "--no-such-option" in shown.output
    assert "Traceback" not in shown.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [path for path, command in ALL.items() if any(one.required for one in command.params)],
    ids=" ".join,
)
def test_a_missing_argument(path):
    """The first that is missing is named."""
    required = next(one for one in ALL[path].params if one.required)
    shown = run(*path)

    assert shown.exit_code == 2
    named = required.opts[0] if isinstance(required, click.Option) else required.human_readable_name
    assert named.strip("[].") in shown.output


def choices():
    for path, command in ALL.items():
        for one in command.params:
            if isinstance(one, click.Option) and isinstance(one.type, click.Choice):
                yield path, one


@pytest.mark.parametrize(("path", "option"), list(choices()), ids=str)
def test_a_choice_that_is_none(path, option):
    """The value is named, and so is what would be right."""
    shown = run(*path, option.opts[0], "sideways")

    assert shown.exit_code == 2
    assert "'sideways' is not one of" in shown.output
    assert all(str(choice) in shown.output for choice in option.type.choices)


@pytest.mark.parametrize("name", ["serv", "jurnal", ""])
def test_an_unknown_command(name):
    """It is named."""
    shown = run(name)

    assert shown.exit_code == 2
    assert f"No such command '{name}'" in shown.output


def test_no_command_shows_the_list():
    """`virta` alone is a question, not an error without words."""
    shown = run()

    assert "Commands:" in shown.output
    for name in ("serve", "publish", "subscribe", "log", "journal", "token", "doctor"):
        assert f"\n  {name} " in shown.output
