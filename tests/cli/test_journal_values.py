"""`virta journal`: values of every type, their life, details and long lists."""

from __future__ import annotations

import pytest
from journal_shell import Shell
from journal_support import daemon_thread

from virta.cli.journal import journal
from virta.journal import Client


@pytest.mark.parametrize(
    ("kind", "text", "shown", "value"),
    [
        ("string", "blue", "blue", "blue"),
        ("string", "", "", ""),
        ("buffer", "raw", "raw", "raw"),
        ("integer", "-9223372036854775808", "-9223372036854775808", -(2**63)),
        ("float", "1e300", "1e+300", 1e300),
        ("float", "nan", "nan", "nan"),
        ("boolean", "1", "true", True),
        ("boolean", "false", "false", False),
        ("void", "anything", "", None),
    ],
)
def test_what_is_set_is_what_is_read(shell, kind, text, shown, value):
    """For people as `set` accepts it, for programs with its type."""
    shell("set", "k", text, "--type", kind)

    assert shell("get", "k") == shown
    assert shell.json("get", "k") == [{"key": "k", "type": kind, "value": value}]


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("integer", "1.5", "'1.5' is not of type integer"),
        ("integer", "", "'' is not of type integer"),
        ("float", "much", "'much' is not of type float"),
        ("boolean", "yes", "'yes' is not true or false"),
        ("date", "today", "'date' is not one of"),
    ],
)
def test_text_of_another_type_is_refused(shell, kind, text, said):
    """Before anything is sent: the key does not exist afterwards."""
    assert said in shell("set", "k", text, "--type", kind, code=2)
    assert "no such key" in shell("get", "k", code=3)


def test_standard_input_is_stored_byte_for_byte(shell):
    """Strings and buffers keep every byte, also line ends; numbers are stripped."""
    data = bytes(range(256)) + b"\n\n"
    shell("set", "b", input=data)
    shell("set", "s", "-", "--type", "string", input=b"two\nlines\n")
    shell("set", "f", "--type", "float", input=b"  2.5\n")
    with Client(port=shell.port) as client:
        assert client.get("b") == data
        assert client.get("s") == "two\nlines\n"
        assert client.get("f") == 2.5


def test_a_value_in_memory_is_lost_at_a_restart(tmp_path):
    """And one without --memory is not."""
    with daemon_thread(tmp_path / "journal") as daemon:
        shell = Shell(daemon.address[1])
        shell("set", "kept", "1")
        shell("set", "lost", "1", "--memory")
        assert "persist" in shell("get", "kept", "--details")
        assert "persist" not in shell("get", "lost", "--details")
    with daemon_thread(tmp_path / "journal") as daemon:
        shell = Shell(daemon.address[1])
        assert shell("get", "kept") == "1"
        shell("get", "lost", code=3)


def test_the_life_of_a_value(shell):
    """An expired value is gone; a touch puts the end off by its ttl."""
    shell("set", "short", "v", "--expires-in", "0")
    shell("get", "short", code=3)
    shell("set", "touched", "v", "--expires-in", "100", "--ttl", "5000")
    (before,) = shell.json("get", "touched", "--details")
    shell("get", "touched", "--touch")
    (after,) = shell.json("get", "touched", "--details")

    assert before["ttl"] == after["ttl"] == 5_000_000_000
    assert after["expires"] - before["expires"] > 4_000_000_000


def test_details_for_people(shell):
    """Dates and words instead of microseconds and bits."""
    shell("set", "k", "12345", "--ttl", "90")
    shown = dict(line.split(maxsplit=1) for line in shell("get", "k", "--details").splitlines()
                 if not line.startswith("worked"))  # fmt: skip

    assert shown["size"] == "5 bytes"
    assert shown["ttl"] == "90 s"
    assert shown["expires"] == "-"
    assert shown["created"] == shown["modified"]
    assert shown["state"] == "persist"
    shell("lock", "k", "--", "true")
    with Client(port=shell.port) as client:
        client.lock("k", seconds=60)
        assert shell("get", "k", "--details").endswith("persist, locked")


def test_long_lists_are_printed_whole(shell):
    """Beyond one page of the daemon, up to the limit, and only what begins with the prefix."""
    with Client(port=shell.port) as client:
        for n in range(1500):
            client.set(f"many/{n:04}", "v")
        client.set("more", "v")

    assert len(shell("ls", "many/", "--limit", "5000").splitlines()) == 1500
    assert len(shell("ls", "many/").splitlines()) == 1000  # the default limit
    assert shell("ls", "many/", "--limit", "0") == ""
    assert len(shell("ls", "--regex", "many/0..7", "--limit", "5000").splitlines()) == 100
    assert shell("ls", "mor") == "more\tv"


def test_a_rename_does_not_replace_unless_asked(shell):
    shell("set", "a", "1")
    shell("set", "b", "2")

    assert "already-exists" in shell("rename", "a", "b", code=1)
    assert (shell("get", "a"), shell("get", "b")) == ("1", "2")
    shell("rename", "a", "b", "--overwrite")
    assert shell("get", "b") == "1"
    shell("get", "a", code=3)


def test_two_keys_of_one_value(shell):
    """Changing it under one key changes it under the other; the last unlink removes it."""
    shell("set", "n", "5", "--type", "integer")
    shell("link", "n", "m")
    shell("add", "m", "2")

    assert shell("get", "n") == "7"
    shell("unlink", "n")
    assert shell("get", "m") == "7"
    shell("unlink", "m")
    shell("get", "m", code=3)


def test_sums_of_integers_and_floats(shell):
    """The first amount decides the type; what does not fit is refused by the daemon."""
    assert shell("add", "i", "-3") == "-3"
    assert shell("add", "i", "+10") == "7"
    assert shell("add", "f", "0.5") == "0.5"
    assert shell("add", "f", "-1e3") == "-999.5"
    shell("set", "text", "x")
    assert "error: " in shell("add", "text", "1", code=1)
    assert shell("get", "text") == "x"


def test_the_daemon_from_the_environment(shell):
    """VIRTA_JOURNAL_PORT instead of --port; the option wins."""
    shell("set", "k", "v")
    environment = {"VIRTA_JOURNAL_PORT": str(shell.port)}
    found = shell.runner.invoke(journal, ["get", "k"], env=environment)
    assert found.output == "v\n"
    refused = shell.runner.invoke(journal, ["get", "k", "--port", "1"], env=environment)
    assert (refused.exit_code, "127.0.0.1:1" in refused.output) == (1, True)


def test_a_file_of_authorities_that_cannot_be_used(shell, tmp_path):
    """The file and what is needed, before anything is sent."""
    (tmp_path / "empty.pem").write_text("")
    for name in ("missing.pem", "empty.pem"):
        said = shell("get", "k", "--ca", str(tmp_path / name), code=1)
        assert f"cannot use --ca {tmp_path / name}" in said.replace("\n", "")
        assert "a PEM file of certificates is needed" in said
