"""
What access costs: server CPU per publication without credentials, with a token, and with a row filter, in turn.

    python bench/server_access.py [--seconds 2] [--rounds 3]

Prints the ratio of each to the server without credentials; both run at once and are asked in turn. CPU time is compared,
not the rate: it depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from virta.access import TokenStore
from virta.access.grants import make_grant

CONNECTIONS = 16


def serve(data_dir, *flags):
    command = [
        sys.executable,
        "-m",
        "virta",
        "serve",
        "--server-port",
        "0",
        "--journal-port",
        "none",
    ]
    command += ["--durability", "none", "--data-dir", str(data_dir), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in process.stdout:
        if b'"listening"' in line:
            return process, int(json.loads(line)["url"].rsplit(":", 1)[1])
    raise SystemExit("the server did not start")


def cpu_seconds(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(process, port, token, seconds):
    """Microseconds of the server's CPU per publication, over connections with one request at a time."""
    auth = f"Authorization: Bearer {token}\r\n" if token else ""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    count, began, cpu = 0, time.perf_counter(), cpu_seconds(process)
    while time.perf_counter() - began < seconds:
        for one in sockets:
            count += 1
            id_ = f"{time.monotonic_ns():020}{count:012}"
            event = {
                "specversion": "1.0",
                "id": id_,
                "source": "b",
                "type": "t",
                "data": {"tenant": 42},
            }
            body = json.dumps(event)
            one.sendall(
                f"POST /channels/bench HTTP/1.1\r\nHost: localhost\r\n{auth}Content-Type: application/cloudevents+json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
        for one in sockets:
            assert one.recv(65536).startswith(b"HTTP/1.1 202 ")
    used = cpu_seconds(process) - cpu
    for one in sockets:
        one.close()
    return used / count * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        store = TokenStore(base / "tokens")
        plain = store.create((make_grant(["publish"], "**"),))[0]
        row = store.create((make_grant(["publish"], "**", "tenant=42"),))[0]
        open_server, open_port = serve(base / "open")
        asking, port = serve(base / "tokens", "--require-token")
        kinds = {
            "open": (open_server, open_port, None),
            "token": (asking, port, plain),
            "row filter": (asking, port, row),
        }
        found = {name: [] for name in kinds}
        try:
            for _ in range(options.rounds):
                for name, asked in kinds.items():
                    found[name].append(cost(*asked, options.seconds))
        finally:
            for process in (open_server, asking):
                process.terminate()
                process.wait(20)
    reference = statistics.median(found["open"])
    for name, rates in found.items():
        middle = statistics.median(rates)
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        print(f"{name:12}{middle:8.1f} us CPU a POST  {middle / reference:5.2f}  ({spread})")


if __name__ == "__main__":
    main()
