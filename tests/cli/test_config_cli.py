"""`virta config`: every setting, its value and where it came from."""

from __future__ import annotations

import json

from click.testing import CliRunner

from virta.cli import main
from virta.server.settings import SETTINGS


def test_config_command_shows_origins():
    """`virta config` shows value and origin of each setting, as text and as JSON."""
    runner = CliRunner()
    arguments = ["config", "--query-threads", "1"]

    text = runner.invoke(main, arguments, env={"VIRTA_HOST": "::1"}).output
    report = json.loads(runner.invoke(main, [*arguments, "--json"], env={}).output)

    assert "variable VIRTA_HOST" in text
    assert report["router_threads"] == {"value": 1, "origin": "flag --router-threads"}
    assert set(report) == {setting.name for setting in SETTINGS}


def test_config_command_refuses_bad_values():
    """A bad value ends with exit code 2 and its range on standard error."""
    result = CliRunner().invoke(main, ["config", "--server-port", "65536"])

    assert result.exit_code == 2
    assert "from 0 to 65535" in result.output
