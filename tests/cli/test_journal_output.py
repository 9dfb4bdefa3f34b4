"""What `virta journal` prints: JSON that loses nothing, lines that stay lines, errors in one sentence."""

from __future__ import annotations

import errno
import json
import math
import time

import pytest

from virta.cli.journal.output import (
    Output,
    aligned,
    errors_reported,
    local_time,
    plain_text,
    row,
    to_json,
)
from virta.errors import JournalError
from virta.journal.protocol.messages import RefusedError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (2**70, 2**70),
        (0.5, 0.5),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (b"text", "text"),
        (b"\xff", {"base64": "/w=="}),
        ("\udcff", {"base64": "/w=="}),
        ("ä", "ä"),
        ({"a": (b"\xff", [math.nan])}, {"a": [{"base64": "/w=="}, ["nan"]]}),
    ],
)
def test_values_as_json(value, expected):
    """Strict JSON: it is parsed again without constants that JSON does not have."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    made = to_json(value)
    assert made == expected
    json.loads(json.dumps(made), parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "true"), (False, "false"), (7, "7"), (b"\xff", "\ufffd"), ("x", "x")],
)
def test_values_as_text(value, text):
    assert plain_text(value) == text


def test_a_row_is_one_line_of_cells():
    """Line ends, tabs and control sequences in a cell are escaped; the tabs between cells are not."""
    shown = row("a\tb", b"c\nd", "\x1b[2J", None)

    assert shown.count("\t") == 3
    assert shown.split("\t") == ["a\\tb", "c\\nd", "\\x1b[2J", ""]


def test_columns_are_aligned():
    assert aligned({"a": 1, "long name": True, "empty": None}, 10) == (
        "a          1\nlong name  true\nempty"
    )


def test_times_are_local(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        assert local_time(0) == "1970-01-01 02:00:00"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert local_time(None) == "-"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RefusedError("does-not-exist"), 3, "error: does-not-exist: 'k'"),
        (RefusedError("locked", "somebody has it"), 1, "error: locked: somebody has it"),
        (JournalError("no journal here", code="unreachable"), 1, "unreachable: no journal here"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 1, "'k' is not UTF-8"),
        (OSError(errno.EACCES, "Permission denied", "file"), 1, "Permission denied: 'file'"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(error, code, said, capsys):
    with pytest.raises(SystemExit) as caught, errors_reported("k"):
        raise error

    assert caught.value.code == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_closed_reader_is_not_reported_here(capsys):
    """The command line as a whole ends quietly then."""
    with pytest.raises(BrokenPipeError), errors_reported():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert capsys.readouterr().err == ""


def test_nothing_found_is_exit_code_3(capsys):
    """A sentence for people on standard error, an object for programs on standard output."""
    with pytest.raises(SystemExit) as caught:
        Output(as_json=False).exit_nothing({"found": False}, "no such key")
    assert caught.value.code == 3
    assert capsys.readouterr() == ("", "no such key\n")
    with pytest.raises(SystemExit):
        Output(as_json=True).exit_nothing({"found": False}, "no such key")
    assert capsys.readouterr() == ('{"found": false}\n', "")
