"""What commands share: exit codes, errors as one sentence, tables and progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from virta import errors
from virta.cli import report

CORRUPTION = errors.LogCorruptionError(
    "damaged", segment="1", byte_from=0, byte_to=1, offset_from=0, offset_to=1, reason="crc"
)


def outcome(error):
    """Run a command of a reporting group that raises."""

    @click.group(cls=report.ReportingGroup)
    def group():
        pass

    @group.command()
    def fail():
        raise error

    return CliRunner().invoke(group, ["fail"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.LogNotFoundError("no log"), 3),
        (CORRUPTION, 4),
        (errors.LogGapError("a gap", first=1, next=2), 4),
        (errors.LogLimitError("too large"), 2),
        (errors.EventError("no event"), 2),
        (errors.LogWriteError("disk full"), 5),
        (errors.VirtaError("anything else"), 5),
        (report.InputError("bad input"), 2),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_exit_codes(error, code):
    """Each kind of error has the exit code of the module's docstring, and at most one sentence."""
    result = outcome(error)

    assert result.exit_code == code
    if isinstance(error, errors.VirtaError | report.InputError):
        assert result.output == f"error: {error.message}\n"


def test_errors_of_files_name_them():
    """The file and the reason, not a traceback."""
    result = outcome(FileNotFoundError(2, "No such file or directory", "/nowhere"))

    assert (result.exit_code, result.output) == (5, "error: /nowhere: No such file or directory\n")


def test_a_reader_that_closes_our_output_is_no_error(tmp_path):
    """`virta log read … | head -1` ends quietly."""
    code = (
        "import click\nfrom virta.cli.report import ReportingGroup\n"
        "@click.group(cls=ReportingGroup)\ndef g(): pass\n"
        "@g.command()\ndef talk():\n    while True: click.echo('x' * 1000)\n"
        "g(['talk'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(30) == 0

    assert said == b""


def test_tables_are_aligned():
    """Texts to the left, the last columns to the right, no blanks at the end."""
    lines = report.table(("name", "count"), [("a", 1), ("long name", 1234)], numbers=1)

    assert lines == ["name       count", "a              1", "long name   1234"]


def test_reports_are_lines_or_json():
    """The same report for people and for programs."""

    @click.command()
    @report.json_option
    def command(as_json):
        report.print_report({"records": 2}, ["2 records"], as_json=as_json)

    runner = CliRunner()
    assert runner.invoke(command).output == "2 records\n"
    assert json.loads(runner.invoke(command, ["--json"]).output) == {"records": 2}


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"text", {"key": "text"}), (b"\xff\x00", {"key_base64": "/wA="})],
)
def test_bytes_as_members(data, expected):
    """What is not UTF-8 is base64 under another name."""
    assert report.text_member("key", data) == expected


def test_one_line_shows_no_control_characters():
    """A key with a line end or an escape sequence stays on its line."""
    assert report.one_line("a\nb\x1b[2J\u202e é") == "a\\nb\\x1b[2J\\u202e é"


def test_progress_is_silent_without_a_terminal(capsys):
    """A pipe or a test gets no progress line."""
    with report.progress("reading") as update:
        update(1, 2)

    assert capsys.readouterr() == ("", "")


def test_plain_progress_cleans_up_after_itself():
    """On a terminal without rich a line is drawn and removed."""
    code = (
        "import sys; sys.modules['rich.console'] = None\n"
        "from virta.cli.report import progress\n"
        "with progress('reading') as update: update(1, 2)\n"
    )
    main, terminal = os.openpty()
    with os.fdopen(main, "rb", buffering=0) as shown:
        subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True, timeout=30)
        os.close(terminal)
        text = shown.read(1000)

    assert text.startswith(b"\rreading  50 %")
    assert text.endswith(b"\r" + b" " * 13 + b"\r")
