"""`virta token`: create, list and revoke."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from virta.access import TokenStore
from virta.cli import main

TOKEN = re.compile(r"virta_[a-z2-7]{8}_[A-Za-z0-9_-]{43}")


@pytest.fixture
def token(tmp_path):
    def run(*words, environ=None):
        given = [*words] if environ else [*words, "--data-dir", str(tmp_path / "data")]
        return CliRunner().invoke(main, ["token", *given], env=environ)

    return run


def listed(token):
    return json.loads(token("list", "--json").stdout)


def test_a_token_is_alone_on_standard_output(token, tmp_path):
    """So that `TOKEN=$(virta token create …)` works; the rest goes to standard error."""
    made = token("create", "--read", "orders.*")

    assert made.exit_code == 0
    assert TOKEN.fullmatch(made.stdout.removesuffix("\n"))
    text = made.stdout.strip()
    assert "cannot be shown again" in made.stderr
    assert text not in made.stderr
    assert TokenStore(tmp_path / "data").find(text).id == "_".join(text.split("_")[:2])
    assert text.split("_", 2)[2] not in (tmp_path / "data" / "access" / "tokens.json").read_text()


def test_rights_filter_expiry_and_name(token):
    """Verbs of one pattern are one grant; the row filter holds for all of them."""
    token(
        "create", "--read", "orders.*", "--publish", "orders.*", "--jobs", "mail", "--filter", "tenant=42",
        "--expires", "30d", "--name", "shop",
    )  # fmt: skip
    (one,) = listed(token)

    assert [(g["verbs"], g["pattern"], g["filter"]) for g in one["grants"]] == [
        (["read", "publish"], "orders.*", "tenant=42"),
        (["jobs"], "mail", "tenant=42"),
    ]
    assert one["name"] == "shop"
    assert one["expires"] > one["created"]
    assert one["expired"] is False
    (line,) = token("list").stdout.splitlines()[1:]
    assert "read,publish orders.* if tenant=42; jobs mail if tenant=42" in line


def test_all_rights(token):
    """`--all` is every verb on every name."""
    token("create", "--all")
    (one,) = listed(token)

    assert one["grants"] == [
        {
            "verbs": ["read", "publish", "jobs", "filters", "webhooks", "pipelines", "admin"],
            "pattern": "**",
        }
    ]
    assert one["expires"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a token needs a right: give at least one of --read"),
        (["--read", ""], "pattern"),
        (["--read", "a", "--filter", "total=>x&total=>y&n=<1&m=<2"], "the row filter"),
        (["--read", "a", "--filter", "a ==", "--dialect", "cesql"], "the row filter 'a =='"),
        (["--read", "a", "--filter", "{", "--dialect", "koncorde"], "the row filter"),
        (["--read", "a", "--expires", "soon"], "soon"),
        (["--read", "a", "--name", "x" * 201], "at most 200"),
        (["--read", "a", "--name", "two\nlines"], "printable"),
    ],
)
def test_what_is_refused(token, words, said):
    """The value is named with what would be right; nothing is stored."""
    made = token("create", *words)

    assert made.exit_code == 2, made.output
    assert said in made.stderr
    assert made.stdout == ""
    assert "Traceback" not in made.output
    assert listed(token) == []


def test_an_empty_list(token):
    """In words, and as JSON."""
    assert token("list").stdout == "no tokens\n"
    assert listed(token) == []


def test_the_directory_from_the_environment(token, tmp_path):
    """VIRTA_DATA_DIR, as for the server."""
    environ = {"VIRTA_DATA_DIR": str(tmp_path / "data")}

    assert token("create", "--read", "a", environ=environ).exit_code == 0
    assert len(listed(token)) == 1


def test_revoking(token):
    """By the whole prefix or its beginning; the name is shown, and a second time there is none."""
    first = token("create", "--read", "a", "--name", "old").stdout.strip()
    token("create", "--read", "b")
    prefix = "_".join(first.split("_")[:2])

    assert token("revoke", prefix).stdout == f"revoked {prefix} (old)\n"
    assert len(listed(token)) == 1
    again = token("revoke", prefix)
    assert again.exit_code == 2
    assert f"no token begins with {prefix!r}" in again.stderr


def test_revoking_what_is_ambiguous(token):
    """`virta_` begins all of them: none is revoked."""
    token("create", "--read", "a")
    refused = token("revoke", "virta_")

    assert refused.exit_code == 2
    assert "no token begins with" in refused.stderr
    assert len(listed(token)) == 1


def test_a_damaged_store(token, tmp_path):
    """The file is named; it is not replaced by an empty one."""
    token("create", "--read", "a")
    file = tmp_path / "data" / "access" / "tokens.json"
    file.write_text("{")
    for words in (["list"], ["create", "--read", "a"], ["revoke", "x"]):
        refused = token(*words)
        assert refused.exit_code != 0
        assert str(file) in refused.stderr
    assert file.read_text() == "{"


def test_expired_tokens_are_marked(token):
    """They stay in the list until they are revoked."""
    token("create", "--read", "a", "--expires", "0.001s")

    assert any(one["expired"] for one in listed(token)) or "ms" in token("list").stdout
    assert "(expired)" in token("list").stdout
