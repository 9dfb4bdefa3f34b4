"""`virta log ship | restore | inspect | verify` with a store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

import virta
from virta.cli import main


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/store"


@pytest.fixture
def log_path(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=4096) as log:
        for number in range(100):
            log.append("orders", b"", b"%d" % number * 50)
    return tmp_path / "log"


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_ship_inspect_verify_restore(log_path, store, tmp_path):
    assert "has the log up to offset 100" in run("log", "ship", log_path, store)
    shown = json.loads(run("log", "inspect", store, "--json"))
    assert (shown["first_offset"], shown["next_offset"]) == (0, 100)
    assert "offsets    0 to 100" in run("log", "inspect", store)
    assert "no damage" in run("log", "verify", store)
    assert json.loads(run("log", "verify", store, "--json"))["problems"] == []

    report = json.loads(run("log", "restore", store, tmp_path / "copy", "--json"))

    assert report["next"] == 100
    assert run("log", "tail", tmp_path / "copy") == run("log", "tail", log_path)
    assert run("log", "tail", store) == run("log", "tail", log_path)


def test_verify_ends_with_1_when_an_object_is_missing(log_path, store, tmp_path):
    run("log", "ship", log_path, store)
    next((tmp_path / "store" / "segments").glob("*")).unlink()

    assert "has no object segments/" in run("log", "verify", store, code=1)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("inspect", "file:///nowhere/at-all"), 3, "has no log; ship one there"),
        (("restore", "ftp://x/y", "/tmp/unused"), 2, "is not the URL of a store"),
    ],
)
def test_errors_are_one_sentence(arguments, code, said, tmp_path):
    if arguments[0] == "inspect":
        arguments = ("inspect", f"file://{tmp_path}/empty")

    output = run("log", *arguments, code=code)

    assert output.startswith("error: ")
    assert said in output
    assert output.count("\n") == 1


def test_follow_ships_until_it_is_stopped(log_path, store):
    """What is appended before SIGTERM is in the store when the command ends."""
    child = subprocess.Popen(
        [sys.executable, "-m", "virta", "log", "ship", log_path, store, "--follow", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert "interrupt to stop" in child.stderr.readline()
    with virta.open(log_path) as log:
        log.append("orders", b"", b"last")
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=60)

    assert child.returncode == 0
    assert json.loads(output)["next_offset"] == 101
