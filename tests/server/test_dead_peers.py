"""A peer that vanishes without closing is detected: sockets have the options, and a cut cable ends a consumer."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import uuid

import pytest
from server_harness import Server

from waiting import wait_until

# Of the network for measurements (RFC 2544), which no machine has.
OURS, THEIRS = "198.18.77.1", "198.18.77.2"
# Connects, asks for a stream, says when it is there, and stays.
CONSUMER = """
import socket, sys
made = socket.create_connection((sys.argv[1], int(sys.argv[2])))
made.sendall(b"GET /channels/x HTTP/1.1\\r\\nHost: %b:%b\\r\\n\\r\\n" % (sys.argv[1].encode(), sys.argv[2].encode()))
said = b""
while b"connect" not in said:
    said += made.recv(65536) or sys.exit("closed")
print("connected", flush=True)
sys.stdin.read()
"""


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def accepted(port):
    """Return what `ss` shows of the server's connections, timers included."""
    return run("ss", "-Htnoe", "state", "established", "sport", "=", f":{port}")


def test_accepted_sockets_have_keepalive(tmp_path):
    """A connection without traffic has a running keepalive timer; `none` leaves it out."""
    asked = ("--tcp-keepalive-ms", 40_000)
    with Server(tmp_path / "a", *asked) as server, consumer([], "127.0.0.1", server.port):
        shown = accepted(server.port)
        assert re.search(r"timer:\(keepalive,[1-4][0-9]sec", shown), shown
    off = ("--tcp-keepalive-ms", "none", "--tcp-user-timeout-ms", "none")
    with Server(tmp_path / "b", *off) as server, consumer([], "127.0.0.1", server.port):
        assert "keepalive" not in accepted(server.port)


@contextlib.contextmanager
def consumer(before, host, port):
    command = [*before, sys.executable, "-c", CONSUMER, host, str(port)]
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert made.stdout.readline() == "connected\n"
        yield
    finally:
        made.kill()
        made.wait()
        made.stdin.close()
        made.stdout.close()


@pytest.fixture
def two_machines():
    """A network namespace and a cable to it: (its name, our address, how to cut the cable)."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"virta{uuid.uuid4().hex[:6]}"
    ours, theirs = f"{name}a", f"{name}b"
    try:
        run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        run("ip", "address", "add", f"{OURS}/30", "dev", ours)
        run("ip", "link", "set", ours, "up")
        run("ip", "-n", name, "address", "add", f"{THEIRS}/30", "dev", theirs)
        run("ip", "-n", name, "link", "set", theirs, "up")
        yield name, OURS, lambda: run("ip", "-n", name, "link", "set", theirs, "down")
    finally:
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)
        run("ip", "netns", "del", name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        # Silence: only keepalive notices. Pings in flight: only the user timeout does within minutes.
        ("--tcp-keepalive-ms", 1000, "--tcp-user-timeout-ms", "none"),
        ("--tcp-keepalive-ms", "none", "--tcp-user-timeout-ms", 1500, "--ping-interval-ms", 300),
    ],
    ids=["keepalive", "user-timeout"],
)
def test_a_cut_cable_ends_a_consumer(two_machines, tmp_path, flags):
    """A consumer whose cable is cut is removed soon, although it sends nothing."""
    namespace, address, cut = two_machines
    flags = ("--host", address, "--insecure", "--journal-port", "none", *flags)
    inside = ["ip", "netns", "exec", namespace]
    with Server(tmp_path / "data", *flags) as server, consumer(inside, address, server.port):
        assert accepted(server.port).count(f"{address}:{server.port}") == 1
        cut()
        wait_until(lambda: not accepted(server.port), "the end of the connection", pause=0.1)
