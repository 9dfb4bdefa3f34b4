"""Clients that lie, against a daemon that is a process of its own: it stays small, and serves others."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from journal_support import Daemon

from virta.journal import Client
from virta.journal.protocol import commands
from virta.journal.protocol.messages import RefusedError

HEAD = b"FJ\0\1\0\2\0\1\0\6" + bytes(8)  # a SET with a 32-bit value size
GROWTH_BYTES_MAX = 48 * 1024 * 1024


def resident_bytes(process):
    fields = Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


def ended(sock):
    """Read until the daemon closes."""
    sock.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True


def test_announced_sizes_cost_nothing(tmp_path):
    """4 GB announced ends the connection; 8 MB announced and not sent costs what was sent."""
    with Daemon(tmp_path) as daemon, contextlib.ExitStack() as stack:
        with Client(port=daemon.port) as client:
            client.set("k", "v")
        before = resident_bytes(daemon.process)
        for _ in range(50):
            liar = stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            liar.sendall(HEAD + b"\1k\xff\xff\xff\xff")
            assert ended(liar)
        for _ in range(200):
            waiting = stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            waiting.sendall(HEAD + b"\1k\0\x7f\xff\xff\2" + bytes(1000))
        with Client(port=daemon.port) as client:
            assert client.get("k") == "v"
        grown = resident_bytes(daemon.process) - before

    assert grown < GROWTH_BYTES_MAX


def test_patterns_and_floods_stay_bounded(tmp_path):
    """Hundreds of patterns that hang others and of skewed clocks: coded errors, no growth."""
    with Daemon(tmp_path) as daemon, Client(port=daemon.port) as client:
        for number in range(200):
            client.set(f"{'a' * 60}{number}", number, persist=False)
        before = resident_bytes(daemon.process)
        bombs = [
            commands.search(f"({'a?' * 60}){{1}}{'a' * 60}x{number}$") for number in range(300)
        ]
        answers = client.pipeline(bombs)
        ahead = [commands.set_("k", 1, timestamp=1 << 62) for _ in range(300)]
        skewed = client.pipeline(ahead)
        grown = resident_bytes(daemon.process) - before

    assert all(isinstance(answer, RefusedError) or answer.items == [] for answer in answers)
    assert {answer.code for answer in skewed} == {"clock-skew"}
    assert grown < GROWTH_BYTES_MAX
