"""`virta serve` and `virta config`: settings that cannot be used are named, with what would be right."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from virta.cli import main
from virta.server.settings import SETTINGS

# Whole numbers have a range; everything is text on the command line.
NUMBERS = [setting for setting in SETTINGS if setting.kind is int]
CHOICES = [setting for setting in SETTINGS if setting.choices]


def config(*words, environ=None):
    return CliRunner().invoke(main, ["config", *words], env=environ)


def serve(*words):
    """Run the real command, which is expected to end by itself."""
    command = [sys.executable, "-m", "virta", "serve", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda one: one.name)
@pytest.mark.parametrize("value", ["many", "-99999999999", "1.5"])
def test_a_number_that_is_none(setting, value):
    """The setting, the value and the kind or the range are in the sentence."""
    shown = config(setting.flags[0], value)

    assert shown.exit_code == 2, shown.output
    assert setting.name in shown.stderr.replace("-", "_")
    assert value in shown.stderr
    assert "Traceback" not in shown.output


@pytest.mark.parametrize("setting", CHOICES, ids=lambda one: one.name)
def test_a_choice_that_is_none(setting):
    """All choices are listed."""
    shown = config(setting.flags[0], "sideways")

    assert shown.exit_code == 2
    assert "sideways" in shown.stderr
    assert all(choice in shown.stderr for choice in setting.choices)


def test_the_origin_of_each_value(tmp_path):
    """Flag before variable before file before default."""
    file = tmp_path / "own.toml"
    file.write_text(
        '[server]\ndurability = "none"\nlog_level = "error"\ntcp_idle_timeout_ms = 1000\n'
    )
    environ = {"VIRTA_LOG_LEVEL": "warn", "VIRTA_TCP_IDLE_TIMEOUT_MS": "2000"}
    words = ["--config", str(file), "--tcp-idle-timeout-ms", "3000", "--json"]
    shown = json.loads(config(*words, environ=environ).stdout)

    found = {name: (one["value"], one["origin"]) for name, one in shown.items()}
    assert found["tcp_idle_timeout_ms"][0] == 3000
    assert "flag" in found["tcp_idle_timeout_ms"][1]
    assert found["log_level"][0] == "warn"
    assert "VIRTA_LOG_LEVEL" in found["log_level"][1]
    assert found["durability"][0] == "none"
    assert "own.toml" in found["durability"][1]
    assert "default" in found["host"][1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[server]\ndurabilty = 'none'\n", "durabilty"),
        ("[server\n", "own.toml"),
        ("[server]\ntcp_idle_timeout_ms = 'long'\n", "tcp_idle_timeout_ms"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, said):
    """An unknown name is an error, so a misspelled setting is not silently the default."""
    file = tmp_path / "own.toml"
    file.write_text(content)
    shown = config("--config", str(file))

    assert shown.exit_code == 2, shown.output
    assert said in shown.stderr


def test_a_file_that_is_not_there(tmp_path):
    """The path is named."""
    shown = config("--config", str(tmp_path / "none.toml"))

    assert shown.exit_code == 2
    assert "none.toml" in shown.stderr


def test_passwords_are_not_shown():
    """Neither in the table nor as JSON."""
    for more in ([], ["--json"]):
        shown = config("--cdc", "shop=postgres://virta:geheim@db/shop", *more)
        assert shown.exit_code == 0, shown.output
        assert "geheim" not in shown.stdout
        assert "db/shop" in shown.stdout


def test_a_port_that_is_taken(tmp_path):
    """Exit code 1, one sentence with the port, no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = serve(
            "--data-dir", tmp_path / "data", "--server-port", port, "--journal-port", "none"
        )

    assert ran.returncode == 1
    assert str(port) in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr


def test_a_data_directory_that_is_used(server):
    """A second server on the same directory does not start, and says why."""
    ran = serve("--data-dir", server.data_dir, "--server-port", 0, "--journal-port", 0)

    assert ran.returncode == 1
    assert str(server.data_dir) in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr
