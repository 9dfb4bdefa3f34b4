"""
What access costs: the server's CPU per POST and per delivery, without credentials, with a token, with a row filter.

    python bench/server_access.py [--rounds 80] [--starts 5] [--check]

The requests are those of `make bench-server`: 64 publishers with one event a request, and a fan-out to 1,000
consumers. Four servers run at once and are measured in turn, in short rounds: one without credentials, a second one
like it (the control: its ratio is what the measurement itself adds), one whose requests carry a token, and one
whose token has a row filter. All are started again several times, since a process is up to 3 % faster or slower for
its whole life than another one of the same program.

Load and servers share one core, and the servers are batch processes for the scheduler, so a server sees all
requests of a burst together however busy the machine is. CPU time is compared, not the rate. Other programs can only
add to it (they evict caches), so the cost of a start is the first decile of its rounds, and a ratio is that of two
such costs of the same start. The result is the median of the starts' ratios, shown with all of them.
`--check` ends with 1 unless every result is within 5 %.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import server_load
from server_bench import Target, pin
from virta.access import TokenStore
from virta.access.grants import make_grant

PUBLISHERS, CONSUMERS = 64, 1000
FANOUT_EVENTS = 4  # at once
POST_BURSTS, FANOUT_BURSTS = 8, 2  # a round: 512 POSTs, 8,000 deliveries
# Holds for every event of the load.
ROW_FILTER = "user=someone"
VERBS = ["publish", "read"]
LIMIT = 1.05
WAIT_S = 30


class Kind:
    """A server and its connections."""

    def __init__(self, name, data_dir, row_filter=None, *, token=False):
        self.name = name
        self.headers = b""
        command = [sys.executable, "-m", "virta", "serve", "--server-port", "0"]
        command += ["--journal-port", "none", "--durability", "none", "--data-dir", str(data_dir)]
        if token:
            text, _ = TokenStore(data_dir).create((make_grant(VERBS, "**", row_filter),))
            self.headers = b"Authorization: Bearer %b\r\n" % text.encode()
            command.append("--require-token")
        self.target = Target(command)
        os.sched_setscheduler(self.target.process.pid, os.SCHED_BATCH, os.sched_param(0))
        self.number = 0
        self.publishers = [self._connect() for _ in range(PUBLISHERS)]
        self.consumers = []

    def _connect(self):
        connection = socket.create_connection(("127.0.0.1", self.target.port))
        connection.settimeout(WAIT_S)
        return connection

    def consume(self):
        """Connect the consumers; POSTs are measured before, as in `make bench-server`."""
        self.consumers = [self._connect() for _ in range(CONSUMERS)]
        server_load.AUTH = self.headers
        for consumer in self.consumers:
            consumer.sendall(server_load.get("/channels/fanout"))
        receive(self.consumers, b"event: connect", 1)

    def cpu_s(self):
        """CPU time of the server, all threads, to the nanosecond."""
        return time.clock_gettime((~self.target.process.pid << 3) | 2)

    def post(self, channel, publishers):
        """Publish one event on each connection, all at once, and wait for the responses."""
        server_load.AUTH = self.headers
        for publisher in publishers:
            self.number += 1
            publisher.sendall(server_load.post(channel, server_load.event(self.number)))
        receive(publishers, b"HTTP/1.1 202", 1)

    def posts(self):
        """Return the CPU microseconds of one POST."""
        before = self.cpu_s()
        for _ in range(POST_BURSTS):
            self.post(b"posts", self.publishers)
        return 1e6 * (self.cpu_s() - before) / (POST_BURSTS * PUBLISHERS)

    def fanout(self):
        """Return the CPU microseconds of one delivery."""
        before = self.cpu_s()
        for _ in range(FANOUT_BURSTS):
            self.post(b"fanout", self.publishers[:FANOUT_EVENTS])
            receive(self.consumers, b"event: data", FANOUT_EVENTS)
        return 1e6 * (self.cpu_s() - before) / (FANOUT_BURSTS * FANOUT_EVENTS * CONSUMERS)

    def stop(self):
        for connection in self.publishers + self.consumers:
            connection.close()
        self.target.stop()


def receive(connections, marker, number):
    """Read until every connection has received a marker that many times; nothing may be lost."""
    left = {connection.fileno(): (connection, number) for connection in connections}
    poll = select.epoll()
    for fileno in left:
        poll.register(fileno, select.EPOLLIN)
    while left:
        ready = poll.poll(WAIT_S)
        assert ready, f"nothing arrived for {WAIT_S} s, {len(left)} connections still wait"
        for fileno, _ in ready:
            connection, wanted = left[fileno]
            data = connection.recv(1 << 16)
            assert data, "the server closed a connection"
            wanted -= data.count(marker)
            left[fileno] = (connection, wanted)
            if wanted <= 0:
                poll.unregister(fileno)
                del left[fileno]
    poll.close()


def start(base):
    return [
        Kind("open", base / "open"),
        Kind("open, control", base / "control"),
        Kind("token", base / "token", token=True),
        Kind("row filter", base / "rows", ROW_FILTER, token=True),
    ]


def measure(kinds, rounds, found):
    """Add the costs of one start to `found`; the order turns, so that no server is always the first."""
    for scenario in ("posts", "fanout"):
        if scenario == "fanout":
            for kind in kinds:
                kind.consume()
        costs = {kind.name: [] for kind in kinds}
        for number in range(-2, rounds):
            turn = number % len(kinds)
            for kind in kinds[turn:] + kinds[:turn]:
                cost = getattr(kind, scenario)()
                if number >= 0:  # the first ones fill caches
                    costs[kind.name].append(cost)
        deciles = {name: statistics.quantiles(all_, n=10)[0] for name, all_ in costs.items()}
        for name, cost in deciles.items():
            found.setdefault((scenario, name), []).append((cost, cost / deciles["open"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pin(0, 0)
    found = {}
    for _ in range(options.starts):
        with tempfile.TemporaryDirectory() as directory:
            kinds = start(Path(directory))
            try:
                measure(kinds, options.rounds, found)
            finally:
                for kind in kinds:
                    kind.stop()
    beyond = report(found)
    if options.check and beyond:
        raise SystemExit(f"beyond {LIMIT}: {', '.join(beyond)}")


def report(found):
    """Print the costs; return what costs more than the limit."""
    beyond = []
    for (scenario, name), pairs in found.items():
        ratios = [ratio for _, ratio in pairs]
        cost, median = statistics.median([cost for cost, _ in pairs]), statistics.median(ratios)
        print(
            f"{scenario:8} {name:14}{cost:7.2f} us CPU each  ratio {median:5.3f}"
            f"  starts {' '.join(f'{one:.3f}' for one in sorted(ratios))}"
        )
        if median > LIMIT:
            beyond.append(f"{scenario} {name} {median:.3f}")
    return beyond


if __name__ == "__main__":
    main()
