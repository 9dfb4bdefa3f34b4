"""`virta top` against a running server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from server_harness import Server, event

from virta.access import TokenStore
from virta.access.grants import make_grant
from virta.cli.operating.top import CLEAR, drawn, spark


def top(*arguments):
    command = [sys.executable, "-m", "virta", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def test_one_sample_as_text_and_json(tmp_path):
    """The figures of /stats, readable and as JSON."""
    with Server(tmp_path / "data", "--durability", "none") as server:
        server.publish("orders", event("1"))
        url = f"http://127.0.0.1:{server.port}"
        while server.request("GET", "/stats").json["now"]["nextOffset"] == 0:
            pass  # the next sample is at most a second away
        text, data = top("--url", url), top("--url", url, "--json", "--once")

    assert "events in" in text.stdout
    assert "next offset 1" in text.stdout
    assert json.loads(data.stdout)["nextOffset"] == 1


def test_a_server_that_is_not_there():
    """One line says what is wrong."""
    done = top("--url", "http://127.0.0.1:9")

    assert done.returncode == 1
    assert "does not answer" in done.stderr


SAMPLE = {
    "time": 1_700_000_000.0,
    "eventsPerSecond": 1234.4,
    "bytesPerSecond": 2048,
    "deliveriesPerSecond": 5.0,
    "p50Ms": 0.256,
    "p99Ms": 12.34,
    "subscribers": 1_000,
    "filters": 12,
    "logBytes": 3 * 1024 * 1024,
    "nextOffset": 9_876_543,
    "diskBytes": 400,
    "diskFreeBytes": 100,
    "fullInSeconds": 86_400 * 3,
    "channels": [{"name": "orders", "eventsPerSecond": 12.34}],
    "jobs": {"ready": 3, "dead": 1_000},
}


def screen(**changes):
    return drawn("http://h", SAMPLE | changes, [1.0])


def line_with(text, lines):
    (found,) = (line for line in lines if text in line)
    return found.split()


def test_the_figures_of_a_screen():
    """With units and thousands separators, each on its line."""
    lines = screen()

    assert lines[0] == "Virta at http://h"
    assert line_with("events in", lines) == ["events", "in", "1,234", "/s", "2.0", "KiB/s"]
    assert line_with("publish to", lines)[3:] == ["0.26", "ms", "p50,", "12.3", "ms", "p99"]
    assert line_with("subscribers", lines) == ["subscribers", "1,000", "12", "distinct", "filters"]
    assert line_with("next offset", lines)[-1] == "9,876,543"
    assert line_with("disk", lines) == ["disk", "75%", "full", "in", "3", "days"]
    assert line_with("orders", lines) == ["orders", "12.3"]
    assert line_with("jobs", lines) == ["jobs", "ready", "3", "dead", "1,000"]


def test_what_a_server_does_not_have_is_left_out():
    """No latency before the first delivery, no end of the disk, no channels, no journal."""
    lines = screen(p50Ms=None, p99Ms=None, fullInSeconds=None, channels=[], jobs=None)

    assert line_with("publish to", lines)[-1] == "none"
    assert line_with("disk", lines)[-3:] == ["does", "not", "grow"]
    assert not [line for line in lines if "channel" in line or "jobs" in line]


def test_a_screen_is_bounded():
    """Ten channels at most, and no line is longer than the terminal."""
    many = [{"name": f"{n}" * 100, "eventsPerSecond": 1.0} for n in range(12)]
    lines = screen(channels=many)

    assert len([line for line in lines if line.endswith(" 1.0")]) == 10
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([0.0, 0.0], "▁▁"), ([1.0], "█"), ([0.0, 3.5, 7.0], "▁▄█"), ([7.0, 0.9], "█▁")],
)
def test_bars(values, bars):
    assert spark(values) == bars


class Canned(BaseHTTPRequestHandler):
    """Answers every request with the bytes of its server."""

    def do_GET(self):
        self.server.asked = (self.path, self.headers.get("Authorization"))
        self.wfile.write(self.server.answer)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def canned():
    """Return a function that runs an HTTP server with one answer and gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Canned) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def start(status, body):
            server.answer = b"HTTP/1.0 %s\r\n\r\n%s" % (status, body)
            return f"http://127.0.0.1:{server.server_address[1]}"

        start.server = server
        yield start
        server.shutdown()
        thread.join()


def frame(**changes):
    return b"data: " + json.dumps(SAMPLE | changes, separators=(",", ":")).encode() + b"\n\n"


def test_every_frame_is_a_line_of_json(canned):
    """Comments and other events of the stream are none; the end of the stream ends the command."""
    body = b": hello\n\n" + frame(nextOffset=1) + b"event: x\ndata: [1]\n\n" + frame(nextOffset=2)

    done = top("--url", canned(b"200 OK", body), "--json")

    assert [json.loads(line)["nextOffset"] for line in done.stdout.splitlines()] == [1, 2]
    assert (done.returncode, done.stderr) == (0, "")


def test_the_path_and_the_token_are_sent(canned):
    """A server behind a proxy has a prefix."""
    url = canned(b"200 OK", frame())

    assert top("--url", f"{url}/virta/", "--token", "secret", "--once").returncode == 0
    assert canned.server.asked == ("/virta/stats/stream", "Bearer secret")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (b"401 Unauthorized", b"who are you?", "the server answered 401: who are you?"),
        (b"404 Not Found", b"\xff", "the server answered 404"),
        (b"200 OK", b'data: {"time":\n\n', "does not answer as a Virta server"),
    ],
)
def test_other_answers_are_one_line(canned, status, body, said):
    done = top("--url", canned(status, body))

    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_terminal_is_redrawn(canned):
    """Each sample clears the screen; with the history as bars."""
    url = canned(b"200 OK", frame(eventsPerSecond=1) + frame(eventsPerSecond=8))
    master, slave = os.openpty()
    command = [sys.executable, "-m", "virta", "top", "--url", url]
    with os.fdopen(master, "rb", buffering=0) as terminal:
        subprocess.run(command, stdout=slave, timeout=30, check=True)
        os.close(slave)
        shown = b""
        with suppress(OSError):  # the other side is closed
            while piece := terminal.read(65536):
                shown += piece
    screens = shown.decode().split(CLEAR)

    assert len(screens) == 3
    assert screens[0] == ""
    assert "▁█" in screens[2]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "does not grow"),
        (5e9, "full in over 10 years"),
        (3_600_000, "full in 42 days"),
        (86_400, "full in 24 hours"),
        (1_800, "full in 30 min"),
    ],
)
def test_when_the_disk_is_full(seconds, said):
    """In a unit that fits, as in the console."""
    (line,) = [line for line in screen(fullInSeconds=seconds) if "disk" in line]

    assert line.split("%")[1].strip() == said


def test_a_server_that_asks_for_a_token(tmp_path):
    """Its own sentence and what to do, not its JSON."""
    limited, _ = TokenStore(tmp_path / "data").create((make_grant(["read"], "**"),))
    with Server(tmp_path / "data", "--require-token", "--durability", "none") as server:
        url = f"http://127.0.0.1:{server.port}"
        none, few = top("--url", url), top("--url", url, "--token", limited)

    assert none.returncode == few.returncode == 1
    assert none.stderr.startswith("error: the server answered 401: no credential: ")
    assert none.stderr.endswith(": give --token, or set VIRTA_TOKEN\n")
    assert few.stderr.endswith("has no right to `admin`\n")
