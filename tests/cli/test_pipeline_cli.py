"""`virta pipeline` without Spark: checking, listing and packaging files, and input that is refused."""

from __future__ import annotations

import json
import zipfile

import pytest
from click.testing import CliRunner

from virta.cli import main

GOOD = """
[pipeline]
name = "paid"
description = "Paid orders"
checkpoint = "checkpoint"

[source]
log = "data/log"
topics = ["orders"]

[[filter]]
match = "status=paid"

[[sink]]
kind = "channel"
topic = "copies"
"""
WRONG = [
    ('kind = "channel"', 'kind = "chanel"', "chanel"),
    ('match = "status=paid"', 'match = "{"\ndialect = "koncorde"', "filter"),
    ("[source]", "[sauce]", "sauce"),
    ('name = "paid"', "name = 5", "name"),
    ('[[sink]]\nkind = "channel"\ntopic = "copies"\n', "", "sink"),
    ('topics = ["orders"]', 'topics = ["orders"', "line"),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "paid.toml"
    path.write_text(GOOD)
    return path


def pipeline(*words):
    return CliRunner().invoke(main, ["pipeline", *map(str, words)])


def test_a_good_file(file):
    """In words, and as JSON."""
    shown = pipeline("check", file)
    assert (shown.exit_code, shown.stdout) == (0, f"{file}: ok\n")
    report = json.loads(pipeline("check", file, "--json").stdout)
    assert str(file) in json.dumps(report)


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_wrong_files(file, old, new, said):
    """Exit code 2, the file and what is wrong with it; no Spark is needed to say so."""
    assert old in GOOD
    file.write_text(GOOD.replace(old, new))
    shown = pipeline("check", file)

    assert shown.exit_code == 2, shown.output
    assert str(file) in shown.output
    assert said in shown.output
    assert "Traceback" not in shown.output


def test_several_files_are_all_checked(file, tmp_path):
    """One wrong file does not hide the others."""
    other = tmp_path / "wrong.toml"
    other.write_text("[pipeline]\n")
    shown = pipeline("check", other, file, tmp_path / "none.toml")

    assert shown.exit_code == 2
    assert f"{file}: ok" in shown.output
    assert str(other) in shown.output
    assert "none.toml" in shown.output


def test_the_list(file, tmp_path):
    """Each file of a directory with its state; wrong ones too."""
    (tmp_path / "wrong.toml").write_text("[pipeline]\nname = 5\n")
    shown = pipeline("list", tmp_path)
    lines = [json.loads(line) for line in pipeline("list", tmp_path, "--json").stdout.splitlines()]

    assert "paid" in shown.output
    assert "wrong.toml" in shown.output
    assert len(lines) == 2


def test_the_status_of_one_that_never_ran(file):
    """It is said, as text and as JSON."""
    assert "never run" in pipeline("status", file).output
    assert json.loads(pipeline("status", file, "--json").stdout)["state"] == "never run"


def test_a_package_for_executors(tmp_path):
    """A zip that Python can import from."""
    archive = tmp_path / "virta.zip"
    shown = pipeline("package", archive)

    assert shown.exit_code == 0, shown.output
    with zipfile.ZipFile(archive) as packed:
        assert "virta/__init__.py" in packed.namelist()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topic", "a", "--parquet", "b"], "--parquet"),
        (["--filter", "total=>1&total=>2&a=<3&b=<4"], "on 'total'"),
        (["--filter", "a=1", "--dialect", "sql"], "sql"),
        (["--from", "soon"], "soon"),
    ],
)
def test_replay_refuses_before_spark_starts(tmp_path, words, said):
    """Exit code 2 and the value."""
    shown = pipeline("replay", tmp_path, *words)

    assert shown.exit_code == 2, shown.output
    assert said in shown.output
    assert "Traceback" not in shown.output


def test_a_log_that_is_not_there(tmp_path):
    """The path is named."""
    shown = pipeline("replay", tmp_path / "none")

    assert shown.exit_code == 2
    assert str(tmp_path / "none") in shown.output.replace("\n", "")
