"""`virta publish` and `virta subscribe` against a real server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from server_harness import Server, command, event

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


# --- what is published ---


def test_lines_of_a_file_with_a_type_and_a_source(server, client, tmp_path):
    """JSON that is no event becomes the data of one; blank lines are none."""
    file = tmp_path / "lines"
    file.write_text('[1, 2]\n\n  \n"text"\nnull\n')
    done = command(server, "publish", "made", str(file), "--type", "t.x", "--source", "/s/x")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "3 accepted\n")
    with client.subscribe("made", start="earliest") as events:
        found = [next(events).event for _ in range(3)]
    assert [one.data for one in found] == [[1, 2], "text", None]
    assert {(one.type, one.source) for one in found} == {("t.x", "/s/x")}
    assert len({one.id for one in found}) == 3


def test_a_subject_is_the_key_of_a_row(server, client):
    """So that what is typed into a shell can be seen in a live view; an empty one is refused."""
    for subject, total in (("o-1", 50), ("o-2", 250), ("o-1", 300)):
        words = ("--subject", subject, "--data", json.dumps({"total": total}))
        assert command(server, "publish", "rows", *words).returncode == 0
    shown = command(server, "live", "rows", "total=>100", "--once").stdout.splitlines()
    refused = command(server, "publish", "rows", "--subject", "", "--data", "{}")

    rows = [one for one in map(json.loads, shown) if one["frame"] == "row"]
    assert {one["key"]: one["event"]["data"]["total"] for one in rows} == {"o-1": 300, "o-2": 250}
    assert refused.returncode == 1
    assert "subject" in refused.stderr


def test_a_repeated_event_is_accepted_once(server, client):
    """The same id again is no error: the server already had it."""
    words = ("publish", "twice", "--data", '{"n":1}', "--id", "one")

    assert command(server, *words).stderr == "1 accepted\n"
    assert command(server, *words).stderr == "1 accepted: the server already had it\n"
    with client.subscribe("twice", start="earliest") as events:
        assert next(events).event.id == "one"
        client.publish("twice", event("two"))
        assert next(events).event.id == "two"


def test_nothing_to_publish(server):
    """An empty input is no error and no request."""
    assert command(server, "publish", "none", text="").stderr == "0 accepted\n"
    assert command(server, "publish", "none", text="\n\n").stderr == "0 accepted\n"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ('{"n": 1}\n{"n": NaN,}\n', 2, "line 2 is not JSON"),
        ('{"specversion": "1.0"}\n', 1, "line 1: "),
        ("\ufeff{}\n\x00\n", 2, "is not JSON"),
    ],
)
def test_bad_lines_are_named(server, text, code, said):
    done = command(server, "publish", "bad", text=text)

    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_lines_after_a_bad_one_are_not_published(server, client):
    """A batch is published whole or not at all, so what was accepted can be counted."""
    lines = "".join(f'{{"n": {n}}}\n' for n in range(10))
    done = command(server, "publish", "whole", text=lines + "{\n" + lines)

    assert done.returncode == 2
    assert "line 11 is not JSON" in done.stderr
    assert "accepted" not in done.stderr
    client.publish("whole", event("first"))
    with client.subscribe("whole", start="earliest") as events:
        assert next(events).event.id == "first"


# --- what is subscribed to ---


def printed(server, *arguments):
    done = command(server, "subscribe", *arguments)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope="module")
def numbered(server):
    """A channel with five events."""
    answers = [server.publish("numbered", event(f"n{n}", {"n": n})) for n in range(5)]
    assert {answer.status for answer in answers} <= {200, 201, 202, 204}
    return "numbered"


def test_too_few_events_are_exit_code_3(server, numbered):
    """Those that arrived are printed; without --count the timeout is the end that was asked for."""
    wanted = ("--from", "earliest", "--timeout", "0.5")
    code, found, said = printed(server, numbered, *wanted, "--count", "6")
    assert (code, len(found)) == (3, 5)
    assert said == "5 of 6 events arrived; none for 0.5 s\n"

    code, found, said = printed(server, numbered, *wanted)
    assert (code, len(found), said) == (0, 5, "")


def test_a_timeout_restarts_with_every_event(server, client):
    """Events that come one by one, each within the time, are all printed."""
    whole = [sys.executable, "-m", "virta", "subscribe", "drip", "--from", "earliest"]
    whole += ["--timeout", "20", "--count", "3", "--url", f"http://127.0.0.1:{server.port}"]
    with subprocess.Popen(whole, stdout=subprocess.PIPE, text=True) as process:
        for n in range(3):
            client.publish("drip", event(f"d{n}"))
            assert json.loads(process.stdout.readline())["id"] == f"d{n}"
        assert process.wait(20) == 0


def test_where_to_begin(server, client, numbered):
    """At the first event, after the id of a frame, or at an offset."""
    with client.subscribe(numbered, start="earliest") as events:
        second, third = [next(events) for _ in range(3)][1:]
    end = ("--count", "1", "--timeout", "5")

    for words, first in (
        (("--from", "earliest"), "n0"),
        (("--last-event-id", second.id), "n2"),
        (("--from", str(third.offset)), "n2"),
    ):
        code, found, _ = printed(server, numbered, *words, *end)
        assert (code, [one["id"] for one in found]) == (0, [first]), words


def test_a_place_that_is_none(server, numbered):
    code, found, said = printed(server, numbered, "--from", "yesterday", "--count", "1")

    assert (code, found) == (1, [])
    assert "yesterday" in said


def test_offsets_that_are_gone_are_reported(server, numbered):
    """An unknown id is a gap on standard error; the events after it come all the same."""
    code, found, said = printed(
        server, numbered, "--last-event-id", "never-published", "--timeout", "1"
    )

    assert code == 0
    assert said.startswith("gap: ")
    assert json.loads(said.removeprefix("gap: "))["reason"]
    assert len(found) <= 5


def test_a_server_that_never_answers():
    """A port that accepts and is silent: the timeout says so, exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        whole = [sys.executable, "-m", "virta", "subscribe", "c", "--timeout", "0.5"]
        whole += ["--url", f"http://127.0.0.1:{port}"]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == 1
    assert done.stderr == f"error: no answer from http://127.0.0.1:{port} for 0.5 s\n"


def test_a_wrong_token(tmp_path):
    """The server's sentence, exit code 1, and nothing on standard output; without a token, how to give one."""
    tokens = tmp_path / "tokens"
    tokens.write_text("right-token-of-some-length\n")
    tokens.chmod(0o600)
    with Server(tmp_path / "data", "--durability", "none", "--token-file", str(tokens)) as guarded:
        for words in (
            ("publish", "c", "--data", "{}"),
            ("subscribe", "c", "--no-reconnect"),
            ("live", "c", "--once"),
        ):
            done = command(guarded, *words, "--token", "wrong")
            assert (done.returncode, done.stdout) == (1, "")
            assert "401" in done.stderr
            assert "--token" not in done.stderr
            without = command(guarded, *words)
            assert without.returncode == 1
            assert without.stderr.endswith(": give --token, or set VIRTA_TOKEN\n")
        right = command(
            guarded, "publish", "c", "--data", "{}", "--token", "right-token-of-some-length"
        )
        assert right.stderr == "1 accepted\n"


def test_an_interrupt_is_the_end_that_was_asked_for(server, client):
    """Ctrl-C: exit code 0, and every event printed before is whole."""
    whole = [sys.executable, "-m", "virta", "subscribe", "ctrl-c", "--from", "earliest"]
    whole += ["--url", f"http://127.0.0.1:{server.port}"]
    client.publish("ctrl-c", event("c1"))
    with subprocess.Popen(
        whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert json.loads(process.stdout.readline())["id"] == "c1"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)

    assert (process.returncode, out, err) == (0, "", "")
