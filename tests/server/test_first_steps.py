"""What a new user meets first: starting the server, its first line, and commands that end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.client import HTTPConnection

import pytest
from server_harness import DEADLINE_S, event, lasting_port


def virta(*arguments, **options):
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "virta", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
        **options,
    )


def started(*flags, stdout):
    command = [sys.executable, "-m", "virta", "serve", "--journal-port", "0", *map(str, flags)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTA_", "THORIUM_"))}
    return subprocess.Popen(command, stdout=stdout, env=clean)


def test_the_port_is_a_flag_of_its_own(tmp_path):
    """`virta serve --port N` listens there, and prints lines for programs into a pipe."""
    port = lasting_port()
    with started("--port", port, "--data-dir", tmp_path, stdout=subprocess.PIPE) as server:
        lines = []
        for line in server.stdout:
            lines.append(json.loads(line))
            if lines[-1]["message"] == "listening":
                break
        connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
        connection.close()
        server.send_signal(signal.SIGTERM)
        server.stdout.read()

    assert status == 200
    assert lines[-1]["url"] == f"http://127.0.0.1:{port}"


def test_the_port_of_a_kubernetes_service_is_no_setting(tmp_path):
    """Beside a service called virta every container has VIRTA_PORT=tcp://…, which means nothing here."""
    shown = virta("config", "--json", env=os.environ | {"VIRTA_PORT": "tcp://10.0.0.1:8232"})

    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["server_port"]["value"] == 8232


def test_a_terminal_is_greeted_with_the_address(tmp_path):
    """The first line is one to click on; the second says where the data is."""
    master, slave = os.openpty()
    data = tmp_path / "data"
    with (
        os.fdopen(master, "rb", buffering=0) as terminal,
        started("--port", "0", "--data-dir", data, stdout=slave) as server,
    ):
        os.close(slave)
        shown = b""
        while b"listening" not in shown:
            shown += terminal.read(65536)
        server.send_signal(signal.SIGTERM)
        try:
            while terminal.read(65536):
                pass
        except OSError:  # the other side is closed
            pass

    first, second, *_ = shown.decode().splitlines()
    assert first.startswith("Console at http://127.0.0.1:")
    assert second == f"Data in {data}"
    assert b"message" not in shown  # what happened leads its line, before the fields


def test_publish_says_when_it_was_a_repeat(server):
    """A repeat of a publication is reported as one; both succeed."""
    url = f"http://127.0.0.1:{server.port}"
    first, again = (
        virta("publish", "twice", "--data", "1", "--id", "x", "--url", url) for _ in range(2)
    )

    assert (first.returncode, first.stderr) == (0, "1 accepted\n")
    assert (again.returncode, again.stderr) == (0, "1 accepted: the server already had it\n")


def test_publish_on_a_terminal_says_that_it_reads(server):
    """Without a file or --data it reads lines from the terminal, and says so."""
    master, slave = os.openpty()
    command = [sys.executable, "-m", "virta", "publish", "typed"]
    command += ["--url", f"http://127.0.0.1:{server.port}"]
    with subprocess.Popen(command, stdin=slave, stderr=subprocess.PIPE) as publishing:
        os.close(slave)
        hint = publishing.stderr.readline()
        os.write(master, b'{"a": 1}\n\x04')
        said = publishing.stderr.read()
    os.close(master)

    assert hint == b"reading events from the terminal, one JSON object per line; Ctrl-D ends\n"
    assert (publishing.returncode, said) == (0, b"1 accepted\n")


def test_subscribe_ends_when_no_event_arrives(server):
    """All that is there is printed, and a pause ends it: exit code 0."""
    server.publish("pause", event("1"), event("2"))
    url = f"http://127.0.0.1:{server.port}"

    out = virta("subscribe", "pause", "--from", "earliest", "--timeout", "0.5", "--url", url)

    assert [json.loads(line)["id"] for line in out.stdout.splitlines()] == ["1", "2"]
    assert (out.returncode, out.stderr) == (0, "")


def test_subscribe_reports_when_fewer_events_arrived(server):
    """With --count a pause is a failure of its own: exit code 3."""
    server.publish("few", event("1"))
    url = f"http://127.0.0.1:{server.port}"
    options = ("--from", "earliest", "--timeout", "0.5", "--url", url)

    out = virta("subscribe", "few", "--count", "2", *options)
    assert (out.returncode, out.stderr) == (3, "1 of 2 events arrived; none for 0.5 s\n")

    out = virta("subscribe", "few", "--count", "1", *options)
    assert (out.returncode, out.stderr) == (0, "")


@pytest.mark.parametrize("value", ["0", "-1", "soon"])
def test_subscribe_refuses_a_timeout_that_is_none(value):
    """A pause is longer than nothing."""
    out = virta("subscribe", "c", "--timeout", value)

    assert (out.returncode, "--timeout" in out.stderr) == (2, True)


def test_subscribe_does_not_wait_for_ever_for_a_server():
    """Without any answer the exit code is not 0."""
    url = f"http://127.0.0.1:{lasting_port()}"
    out = virta("subscribe", "c", "--timeout", "0.5", "--url", url)

    assert out.returncode == 1
    assert "is `virta serve` running?" in out.stderr
    assert f"error: no answer from {url} for 0.5 s" in out.stderr
