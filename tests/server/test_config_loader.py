"""Settings: precedence, origins, ranges, and every spelling of every name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from virta.cli import main
from virta.errors import ConfigError
from virta.server.config_loader import load
from virta.server.settings import SETTINGS


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    """The first place that has a value wins, and is its origin."""
    file = tmp_path / "virta.toml"
    file.write_text("[server]\nserver_port = 1\n")
    environ = {"THORIUM_SERVER_PORT": "2"}

    assert load(file=file).values["server_port"].value == 1
    assert load(file=file, environ=environ).server_port == 2
    assert load(file=file, environ=environ | {"VIRTA_SERVER_PORT": "3"}).server_port == 3
    flagged = load({"server_port": "4"}, file=file, environ=environ).values["server_port"]
    assert (flagged.value, flagged.origin) == (4, "flag --server-port")
    assert load().values["server_port"].origin == "default"


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("THORIUM_QUERY_THREADS", "router_threads"),
        ("THORIUM_ROUTER_THREADS", "router_threads"),
        ("VIRTA_QUERY_THREADS", "router_threads"),
        (
            "THORIUM_MAX_OUTSTANDING_EVENTS_PER_QUERY_THREAD",
            "max_outstanding_events_per_router_thread",
        ),
        ("SUBTUB_BIND_PORT", "server_port"),
        ("SUBTUB_SHARD_COUNT", "shard_count"),
    ],
)
def test_seed_variables_are_honoured(variable, name):
    """Both spellings of renamed settings and the variables of both seeds work."""
    loaded = load(environ={variable: "1"}).values[name]

    assert (loaded.value, loaded.origin) == (1, f"variable {variable}")


def test_out_of_range_is_refused_with_the_range():
    """A value out of range is refused, not clamped, and the message says what is allowed."""
    with pytest.raises(ConfigError, match="from 100 to") as caught:
        load({"body_timeout_ms": "99"})

    assert caught.value.setting == "body_timeout_ms"


def test_all_problems_are_listed_at_once(tmp_path):
    """One error lists every invalid value."""
    file = tmp_path / "virta.toml"
    file.write_text("[server]\nserver_prot = 1\ndurability = 'later'\n")

    with pytest.raises(ConfigError) as caught:
        load({"server_port": "x"}, file=file)

    assert "server_port is 'x'" in caught.value.message
    assert "one of none, interval, group, fsync" in caught.value.message
    assert "unknown key 'server_prot'" in caught.value.message


@pytest.mark.parametrize(
    "text", ["[server]\nserver_port = 81", "server_port = 81", "[server]\nserver-port = 81"]
)
def test_spellings_of_the_file(tmp_path, text):
    """With or without a table, with hyphens or underscores; nothing is ignored."""
    file = tmp_path / "virta.toml"
    file.write_text(text + "\n[other]\nx = 1\n")

    assert load(file=file).server_port == 81
    file.write_text(text.replace("port", "prot"))
    with pytest.raises(ConfigError, match="unknown key"):
        load(file=file)


@pytest.mark.parametrize("number", ["8_0", "\u0661", "1" * 5000, "0x50", ""])
def test_numbers_are_plain(number):
    """Spellings that only Python reads as numbers are refused."""
    with pytest.raises(ConfigError, match="from 0 to 65535"):
        load({"server_port": number})


@pytest.mark.parametrize("text", ["[server", "server = 1", "\xff"])
def test_a_broken_file_is_named(tmp_path, text):
    """An invalid file is an error that names it."""
    file = tmp_path / "odd.toml"
    file.write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match=r"odd\.toml"):
        load(file=file)


def test_missing_file_is_an_error_only_when_asked_for(tmp_path):
    """Without --config there need not be a file."""
    with pytest.raises(ConfigError, match="cannot read"):
        load(file=tmp_path / "none.toml")


@pytest.mark.parametrize("word", ["true", "1", "yes"])
def test_booleans_from_text(word):
    """A switch can be set from the environment."""
    assert load(environ={"VIRTA_INSECURE": word}).insecure is True
    assert load(environ={"VIRTA_INSECURE": "off"}).insecure is False


def test_every_setting_has_flag_variable_and_help():
    """Every setting has a flag, a variable and a help text."""
    result = CliRunner().invoke(main, ["serve", "--help"])

    for setting in SETTINGS:
        assert setting.help
        for flag in setting.flags:
            assert flag in result.output
