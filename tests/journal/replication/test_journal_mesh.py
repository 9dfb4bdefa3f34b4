"""Real daemons joined by a line that loses, doubles, delays and reorders messages, and is cut."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from journal_support import Daemon, Port

from virta.errors import JournalError
from virta.journal import Client
from virta.journal.protocol import commands
from virta.journal.protocol.messages import RefusedError

# In CI always the same commands; what the lines do with them depends on time as well.
SEED = int(
    os.environ.get("VIRTA_SEED")
    or (1 if "CI" in os.environ else random.SystemRandom().randrange(10**9))
)
STEPS = int(os.environ.get("VIRTA_MESH_STEPS", "150"))
KEYS = [f"k{number}" for number in range(8)]
URIS = [f"http://h/{number}" for number in range(8)]
FURTHER_STEPS_MAX = 5000  # until each kind of fault has happened
HEALED_S_MAX = 60
CHECK_S = 0.02  # daemons that are asked all the time have none left to converge in


def request_size(data):
    """How long the first request in `data` is; None if it is not all there."""
    if len(data) < 18:
        return None
    (flags,) = struct.unpack_from(">H", data, 8)
    at = 18 + 8 * bool(flags & 8) + 8 * bool(flags & 1 << 14)
    query = flags >> 7 & 3
    at += 2 * bool(query == 1 or flags & 1 << 13)
    wide = 2 if flags & 1 else 1
    for _ in range(2 if query == 1 else 1):
        size = int.from_bytes(data[at : at + wide])
        at += wide + size
    width = (0, 1, 2, 4)[flags >> 1 & 3]
    if width:
        size = int.from_bytes(data[at : at + width])
        at += width + size
    return at if at <= len(data) else None


class Line:
    """A TCP proxy between two daemons that treats whole requests badly until healed."""

    def __init__(self, target, rng):
        self.target = target
        self.rng = rng
        self.healed = False
        self.stopped = False
        self.faults = dict.fromkeys(("dropped", "doubled", "delayed", "reordered", "cut"), 0)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.1)
        self.port = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while not self.stopped:
            with contextlib.suppress(TimeoutError):
                near, _ = self._server.accept()
                thread = threading.Thread(target=self._carry, args=(near,))
                self._threads.append(thread)
                thread.start()

    def _carry(self, near):
        with (
            near,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target), timeout=5) as far,
        ):
            pending = b""
            while not self.stopped:
                for ready in select.select([near, far], [], [], 0.1)[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is far:
                        near.sendall(data)
                        continue
                    requests, pending = self._split(pending + data)
                    if not self._forward(requests, far):
                        self.faults["cut"] += 1
                        return

    def _split(self, data):
        requests = []
        while (size := request_size(data)) is not None:
            requests.append(data[:size])
            data = data[size:]
        return requests, data

    def _forward(self, requests, far):
        """False: cut the line, as one on which something was lost must be."""
        if self.healed:
            far.sendall(b"".join(requests))
            return True
        if len(requests) > 1 and self.rng.random() < 0.5:
            self.rng.shuffle(requests)
            self.faults["reordered"] += 1
        for request in requests:
            fate = self.rng.random()
            if fate < 0.1:
                self.faults["dropped"] += 1
                return False
            if fate < 0.2:
                self.faults["delayed"] += 1
                time.sleep(self.rng.uniform(0, 0.02))
            far.sendall(request)
            if fate > 0.9:
                self.faults["doubled"] += 1
                far.sendall(request)
        return True

    def close(self):
        self.stopped = True
        for thread in self._threads:
            thread.join(10)
        self._server.close()


class Mesh:
    """Daemons that know each other only through bad lines."""

    def __init__(self, directory, names, rng):
        self.directory = directory
        self.names = names
        self.rng = rng
        self.reserved = {name: Port() for name in names}
        self.ports = {name: port.number for name, port in self.reserved.items()}
        self.lines = {
            (one, other): Line(self.ports[other], rng)
            for one in names
            for other in names
            if one != other
        }
        self.daemons = {}

    def start(self, name):
        peers = [
            argument
            for other in self.names
            if other != name
            for argument in ("--peer", f"{other}=127.0.0.1:{self.lines[name, other].port}")
        ]
        self.daemons[name] = Daemon(
            self.directory / name, "--name", name, *peers, port=self.ports[name]
        )

    def met(self, *kinds):
        """Whether each of these faults has happened somewhere."""
        return all(sum(line.faults[kind] for line in self.lines.values()) for kind in kinds)

    def client(self, name):
        return Client(port=self.ports[name])

    def close(self):
        for daemon in self.daemons.values():
            daemon.kill()
        for line in self.lines.values():
            line.close()
        for port in self.reserved.values():
            port.close()


def step(client, rng, leases):
    """One random command; what it says of missing keys and the like does not matter."""
    key, other, uri = rng.choice(KEYS), rng.choice(KEYS), rng.choice(URIS)
    kind = rng.randrange(14)
    if kind < 3:
        client.set(key, rng.randrange(1000), persist=rng.random() < 0.7)
    elif kind == 3:
        client.delete(key)
    elif kind == 4:
        client.add(key, 1)
    elif kind == 5:
        client.rename(key, other, overwrite=True)
    elif kind == 6:
        client.link(key, other)
    elif kind == 7:
        client.unlink(key)
    elif kind < 11:
        client.push(uri, priority=rng.randrange(3), payload=f"p{rng.randrange(99)}")
    elif kind == 11:
        leases += client.next(count=2, work_for=600).jobs
    elif kind == 12 and leases:
        client.done(leases.pop().key)
    elif leases:
        client.fail(leases.pop().key, "no good")


def state(client):
    """What users can see."""
    keys = []
    page = client.call(commands.scan(count=1000))
    for key, value in page.items:
        if key.startswith(b"k"):
            keys.append((key, value))
    jobs = client.admin("list", limit=1000)["jobs"]
    return keys, sorted(
        (
            job["uri"],
            job["timestamp"],
            job["state"],
            job["priority"],
            job["attempts"],
            job.get("reason"),
        )
        for job in jobs
    )


@pytest.mark.slow
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_daemons_converge_over_bad_lines(names, tmp_path):
    """Random commands on all daemons, one of which is killed: healed, all have the same."""
    print("seed", SEED)
    rng = random.Random(SEED)
    mesh = Mesh(tmp_path, names, rng)
    try:
        with ThreadPoolExecutor() as starting:
            list(starting.map(mesh.start, names))
        victim = rng.choice(names)
        leases = []
        clients = {name: mesh.client(name) for name in names}
        for number in range(STEPS):
            if number == STEPS // 2:
                clients.pop(victim).close()
                mesh.daemons[victim].kill()
            if number == STEPS * 3 // 4:
                mesh.start(victim)
                clients[victim] = mesh.client(victim)
            with contextlib.suppress(RefusedError):
                step(rng.choice(list(clients.values())), rng, leases)
        for _ in range(FURTHER_STEPS_MAX):
            if mesh.met("dropped", "doubled", "cut"):
                break
            with contextlib.suppress(RefusedError):
                step(rng.choice(list(clients.values())), rng, leases)
        for line in mesh.lines.values():
            line.healed = True
        deadline = time.monotonic() + HEALED_S_MAX
        states = []
        while time.monotonic() < deadline:
            states = [state(client) for client in clients.values()]
            if all(each == states[0] for each in states):
                break
            threading.Event().wait(CHECK_S)
        for client in clients.values():
            client.close()
    except JournalError as error:
        raise AssertionError(f"seed {SEED}: {error}") from error
    finally:
        mesh.close()

    assert all(each == states[0] for each in states), f"seed {SEED}"
    assert len(states[0][0]) > 0
    assert len(states[0][1]) > 0
    assert mesh.met("dropped", "doubled", "cut")


def test_what_a_crash_forgot_comes_back_from_the_spool(tmp_path):
    """A value that need not survive a crash, on its way to a peer: after the crash both have it."""
    reserved = {name: Port() for name in "ab"}
    ports = {name: port.number for name, port in reserved.items()}
    daemons = {}

    def start(name, other):
        peer = f"{other}=127.0.0.1:{ports[other]}"
        daemons[name] = Daemon(tmp_path / name, "--name", name, "--peer", peer, port=ports[name])

    try:
        start("a", "b")
        with Client(port=ports["a"]) as client:
            client.set("k", 7, persist=False)
        daemons["a"].kill()
        start("b", "a")
        start("a", "b")
        for port in ports.values():
            with Client(port=port) as client:
                deadline = time.monotonic() + HEALED_S_MAX
                while client.get("k") != 7:
                    assert time.monotonic() < deadline
                    threading.Event().wait(CHECK_S)
    finally:
        for each in daemons.values():
            each.kill()
        for port in reserved.values():
            port.close()
