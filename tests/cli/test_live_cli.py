"""`virta live`: rows of a live view as JSON lines, or a table on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner
from server_harness import event

from virta.cli import main
from virta.cli.operating.live import CELL_CHARS_MAX, COLUMNS_MAX, table_lines


def order(n, status, total):
    return event(f"{n}-{status}", {"status": status, "total": total}, subject=f"o-{n}")


@pytest.fixture(scope="module")
def filled(server):
    server.publish("shop", order(1, "paid", 10), order(2, "open", 20), order(3, "paid", 30))
    return f"http://127.0.0.1:{server.port}"


def live(url, *words):
    return CliRunner().invoke(main, ["live", *words, "--url", url])


def frames(shown):
    assert shown.exit_code == 0, shown.output
    return [json.loads(line) for line in shown.stdout.splitlines()]


def test_once_prints_the_rows_that_match(filled):
    """One frame a line, and the last one says that the result is complete."""
    found = frames(live(filled, "shop", "status=paid", "--once"))

    assert [one["key"] for one in found if one["frame"] == "row"] == ["o-1", "o-3"]
    assert found[-1]["frame"] == "live"


@pytest.mark.parametrize(
    "words",
    [
        ["--filter", "status=paid"],
        ["--filter", '{"equals": {"status": "paid"}}', "--dialect", "koncorde"],
        ["--filter", "subject IN ('o-1', 'o-3')", "--dialect", "cesql"],
    ],
)
def test_filters_in_every_dialect(filled, words):
    """The same rows by each of them."""
    found = frames(live(filled, "shop", *words, "--once"))

    assert [one["key"] for one in found if one["frame"] == "row"] == ["o-1", "o-3"]


def test_aggregates(filled):
    """`--select` and `--group` give figures instead of rows."""
    words = ["--select", "count,sum(/data/total)", "--group", "/data/status", "--once"]
    found = frames(live(filled, "shop", *words))
    text = json.dumps(found)

    assert '"paid"' in text
    assert "40" in text
    assert "o-1" not in text


def test_another_key(filled):
    """`--key` names what identifies a row."""
    found = frames(live(filled, "shop", "--key", "/data/status", "--once"))

    assert sorted(one["key"] for one in found if one["frame"] == "row") == ["open", "paid"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shop", "total=>1&total=>2&a=<3&b=<4"], ""),
        (["shop", "--filter", "{", "--dialect", "koncorde"], "$filter is no JSON"),
        (["shop", "--filter", "a=1", "--dialect", "sql"], "sql"),
        (["shop", "a=1", "--filter", "b=2"], "not both"),
        (["shop", "--select", "median(/data/total)"], "median"),
    ],
)
def test_what_the_server_refuses(filled, words, said):
    """Exit code 1 and the server's sentence."""
    shown = live(filled, *words, "--once")

    assert shown.exit_code == 1, shown.output
    assert shown.stderr.startswith("error: ")
    assert said in shown.stderr
    assert "Traceback" not in shown.output


def test_a_server_that_is_not_there(server):
    """The address is named."""
    shown = live("http://127.0.0.1:1", "shop", "--once")

    assert shown.exit_code == 1
    assert "127.0.0.1:1" in shown.stderr


def test_a_terminal_gets_a_table(filled):
    """Rows of aligned columns that replace what was on the screen."""
    near, far = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "virta",
        "live",
        "shop",
        "status=paid",
        "--once",
        "--url",
        filled,
    ]
    try:
        ran = subprocess.run(command, stdout=far, stderr=subprocess.PIPE, timeout=60, check=False)
        os.set_blocking(near, False)
        said = os.read(near, 65536).decode()
    finally:
        os.close(near)
        os.close(far)

    assert ran.returncode == 0, ran.stderr
    last = said.split("\x1b[H\x1b[2J")[-1].replace("\r", "")
    assert last.splitlines() == [
        "shop: 2 rows", "", "key  status  total", "o-1  paid    10", "o-3  paid    30",
    ]  # fmt: skip


def test_columns_and_cells_are_bounded():
    """Wide rows and long texts are cut; control characters of events do not reach the terminal."""
    wide = {"k": {"data": {f"m{n}": n for n in range(20)}}}
    assert len(table_lines(wide, {})[0].split()) == COLUMNS_MAX
    long = table_lines({"k": {"data": {"text": "x" * 100 + "\x1b[2J"}}}, {})
    assert long[1].endswith("…")
    assert len(long[1].split()[1]) == CELL_CHARS_MAX
    odd = table_lines({"k": {"data": "\x1b[31mred"}}, {})
    assert "\x1b" not in odd[1]
    assert table_lines({}, {}) == [""]
    grouped = table_lines({}, {"a": {"group": "a", "count": 2}})
    assert grouped == ["group  count", "a      2"]
