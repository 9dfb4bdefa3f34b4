"""Input that cannot be used: exit codes as documented, and one sentence with the value and what would be right."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from virta.cli import main

NO_LOG = "no log at none: there is no META file in it"
NOWHERE = "http://127.0.0.1:1"
REFUSED = [
    # Commands of the log: 3 is no log there, 2 is bad input.
    (["log", "tail", "none"], 3, NO_LOG),
    (["log", "verify", "none"], 3, NO_LOG),
    (["log", "inspect", "none"], 3, NO_LOG),
    (["log", "repair", "none"], 3, NO_LOG),
    (["log", "compact", "none"], 3, NO_LOG),
    (["log", "retain", "none", "--max-bytes", "1MiB"], 3, NO_LOG),
    (["log", "ship", "none", "file:///tmp/store"], 3, NO_LOG),
    (["log", "retain", "none", "--max-bytes", "lots"], 2, "lots"),
    (["log", "retain", "none", "--max-age", "old"], 2, "old"),
    (["log", "append", "none"], 2, "--topic is needed"),
    (["log", "restore", "ftp://x", "out"], 2, "'ftp://x' is not the URL of a store; give s3://"),
    (["log", "restore", "file:///nowhere/at/all", "out"], 3, "has no log; ship one there"),
    # Commands that talk to a server: 1 is refused or unreachable, 2 is bad input.
    (["publish", "c", "--data", "{}", "--url", NOWHERE], 1, "is `virta serve` running?"),
    (["publish", "c", "--data", "nojson"], 2, "--data is not JSON"),
    (["publish", "c", "--data", "{}", "--url", "nonsense"], 1, "nonsense"),
    (["subscribe", "c", "--url", NOWHERE, "--no-reconnect"], 1, "127.0.0.1:1"),
    (["subscribe", "c", "--url", NOWHERE, "--timeout", "x"], 2, "'x' is not a valid float"),
    (["live", "c", "--url", NOWHERE, "--no-reconnect"], 1, "127.0.0.1:1"),
    (["top", "--url", NOWHERE, "--once"], 1, "does not answer as a Virta server"),
    (["top", "--url", "nonsense", "--once"], 1, "'nonsense' is no http or https address"),
    # Commands of a data directory.
    (["backup", "out", "--data-dir", "none"], 1, "none is no data directory: it has no log"),
    (["restore", "none", "--data-dir", "out"], 1, "none has no backup.json"),
    (["token", "revoke", "x", "--data-dir", "none"], 2, "no token begins with 'x'"),
    # Others.
    (["cdc", "sqlite", "none.db", "--data-dir", "d", "--once"], 5, "no database file none.db"),
    (["lake", "compact", "none", "lake"], 2, "'none' does not exist"),
    (["filter", "canonical", "a=1&a=2"], 2, "filter 0"),
    (["filter", "validate", "--dialect", "sql", "a"], 2, "'sql' is not one of"),
    (["journal", "push", "x://a", "--port", "1"], 1, "no journal at 127.0.0.1:1"),
    (["journal", "stats", "--port", "99999"], 2, "99999"),
]


@pytest.mark.parametrize(
    ("words", "code", "said"), REFUSED, ids=[" ".join(one[0]) for one in REFUSED]
)
def test_what_is_refused(words, code, said, tmp_path, monkeypatch):
    """Nothing is created, nothing is printed on standard output, no traceback is shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTA_URL", raising=False)
    shown = CliRunner().invoke(main, words)

    assert said in shown.stderr.replace("\n", " "), shown.output
    assert shown.exit_code == code, shown.output
    assert "Traceback" not in shown.output
    assert shown.stdout == ""
