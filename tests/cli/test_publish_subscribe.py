"""`virta publish` and `virta subscribe` against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from server_harness import command, event

import virta

# Ids and types with control sequences, and data that is no text.
TERMINAL_EVENT = {
    "source": "/s b",
    "id": "c d\x1b[2J\n",
    "type": "\x1b]0;title\x07",
    "data_base64": "AAEC",
}


@pytest.fixture
def client(server):
    with virta.Client(f"http://127.0.0.1:{server.port}") as made:
        yield made


def test_commands(server):
    """`virta publish` takes lines and single events, `virta subscribe` prints one event a line."""
    lines = json.dumps(event("l1", {"n": 1})) + '\n\n{"n": 2}\n'
    assert command(server, "publish", "cli", text=lines).stderr == "2 accepted\n"
    assert command(server, "publish", "cli", "--data", '{"n":3}', "--id", "l3").returncode == 0

    out = command(server, "subscribe", "cli", "n=>1", "--from", "earliest", "--count", "2")

    first, second = map(json.loads, out.stdout.splitlines())
    assert first["data"] == {"n": 2}
    assert first["source"] == "/virta/cli"
    assert (second["id"], second["data"]) == ("l3", {"n": 3})


def test_commands_fail_with_sentences(server):
    """Bad input is exit 2, a refusal 1, each with a sentence on standard error."""
    bad = command(server, "publish", "cli", text="{\n")
    assert (bad.returncode, "line 1 is not JSON" in bad.stderr) == (2, True)
    refused = command(server, "publish", "meta", text="{}\n")
    assert (refused.returncode, "403" in refused.stderr) == (1, True)
    query = command(server, "subscribe", "cli", "x=~5")
    assert (query.returncode, "Starts-with" in query.stderr) == (1, True)


def test_commands_say_which_line(server):
    """Something that is no event is reported with its line, and what was accepted before it."""
    good = json.dumps(event("ok", {})) + "\n"
    bad = json.dumps({"specversion": "1.0", "source": "/s", "id": "x"})
    done = command(server, "publish", "cli2", text=good * 500 + bad)

    assert done.returncode == 1
    assert "line 501: " in done.stderr
    assert "(500 events were accepted before)" in done.stderr


def test_a_terminal_is_shown_text_only(server, client):
    """On a terminal events are pretty, binary data is shown, and no event speaks to the terminal."""
    offset = client.publish("tty", TERMINAL_EVENT).offset
    master, slave = os.openpty()
    whole = [sys.executable, "-m", "virta", "subscribe", "tty", "--from", "earliest"]
    whole += ["--count", "1", "--url", f"http://127.0.0.1:{server.port}"]
    with os.fdopen(master, "rb", buffering=0) as terminal:
        subprocess.run(whole, stdout=slave, timeout=30, check=True)
        os.close(slave)
        shown = terminal.read(65536).decode()

    assert f"@{offset} " in shown
    assert "data_base64: AAEC" in shown
    assert "\ufffd]0;title\ufffd" in shown
    assert "\x1b]0" not in shown


def test_a_slow_pipe_is_published_as_it_comes(server, client):
    """`tail -f … | virta publish`: a line is heard before the next one is written."""
    whole = [sys.executable, "-m", "virta", "publish", "slow-pipe"]
    whole += ["--url", f"http://127.0.0.1:{server.port}"]
    with (
        subprocess.Popen(whole, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as pipe,
        client.subscribe("slow-pipe", start="earliest") as events,
    ):
        for n in range(3):
            pipe.stdin.write(b'{"n":%d}\n' % n)
            pipe.stdin.flush()
            assert next(events).event.data == {"n": n}
        pipe.stdin.write(b'{"n":"last"}')  # and no line end
        said = pipe.communicate(timeout=20)[1]
        assert next(events).event.data == {"n": "last"}

    assert said == b"4 accepted\n"
