"""A daemon on a real port inside the test's event loop, a clock to set, and a bare connection."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from virta.journal.engine import JournalEngine
from virta.journal.jobs.job import STATE_NAMES
from virta.journal.protocol import commands
from virta.journal.protocol.codec import ReplyParser, encode_request
from virta.journal.protocol.messages import Function, Request
from virta.journal.replication.peers import Peer, Peers
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.tcp import JournalServer
from virta.journal.sessions import Session
from virta.journal.storage.directory import Persistence
from waiting import until

REPLY_WAIT_S = 10
CONSOLE_US = 1_700_000_000_000_000  # where the clock of a `Console` starts
GATE_S_MAX = 30
TURNS = 50  # of the event loop: enough for everything that does not wait
VIRTA = Path(sys.executable).with_name("virta")


class Port:
    """A port for daemons that come and go: until it is closed no other process gets its number."""

    def __init__(self):
        self._bound = socket.socket()
        # Who names the port may listen there although it is bound, as long as both say this.
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bound.bind(("127.0.0.1", 0))
        self.number = self._bound.getsockname()[1]

    def close(self):
        self._bound.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Clock:
    """Time as the test says."""

    def __init__(self, now=0):
        self.now = now

    def __call__(self):
        return self.now


class Wire:
    """One connection that sends requests and keeps every message it receives."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.parser = ReplyParser()
        self.received = []
        self.identifier = 0

    @classmethod
    async def open(cls, address):
        return cls(*await asyncio.open_connection(*address))

    def send(self, request):
        if not request.identifier:
            self.identifier = self.identifier % 0xFFFF + 1
            request.identifier = self.identifier
        self.writer.write(encode_request(request))
        return request.identifier

    async def receive(self, wanted=lambda _: True):
        """The next message that is wanted; others are kept."""
        while True:
            for message in self.received:
                if wanted(message):
                    self.received.remove(message)
                    return message
            data = await asyncio.wait_for(self.reader.read(65536), REPLY_WAIT_S)
            if not data:
                raise EOFError
            self.received += self.parser.feed(data)

    async def ask(self, request):
        identifier = self.send(request)
        return await self.receive(lambda reply: reply.identifier == identifier)

    async def close(self):
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def daemon(directory=None, **options):
    """A started server; `options` are the node's."""
    server = JournalServer(port=0, node=CommitLoop(directory, **options))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(server):
    wire = await Wire.open(server.address)
    try:
        yield wire
    finally:
        await wire.close()


def nop():
    return Request(Function.NOP)


@contextmanager
def daemon_thread(directory=None, **options):
    """A daemon in a thread of its own, for code that blocks."""
    started = threading.Event()
    box = {}

    async def main():
        stop = asyncio.Event()
        async with daemon(directory, **options) as server:
            box["server"] = server
            box["stop"] = lambda: box["loop"].call_soon_threadsafe(stop.set)
            box["loop"] = asyncio.get_running_loop()
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(REPLY_WAIT_S)
    try:
        yield box["server"]
    finally:
        box["stop"]()
        thread.join(REPLY_WAIT_S)
        assert not thread.is_alive()


async def eventually(condition, seconds=10):
    """Wait until a condition of this process is true; the deadline is an error."""
    await until(condition, seconds=seconds)


class Mesh:
    """Two daemons that know each other, on fixed ports, to be started and stopped."""

    def __init__(self, directory, **options):
        self.directory = directory
        self.options = options
        self.reserved = {name: Port() for name in ("a", "b")}
        self.ports = {name: port.number for name, port in self.reserved.items()}
        self.servers = {}

    async def start(self, name):
        other = "b" if name == "a" else "a"
        directory = self.directory / name
        node = CommitLoop(directory / "journal")
        peer = Peer(other, "127.0.0.1", self.ports[other])
        node.peers = Peers(node.engine, directory, name, [peer], **self.options)
        server = JournalServer(port=self.ports[name], node=node)
        await server.start()
        self.servers[name] = server
        return server

    async def stop(self, name):
        await self.servers.pop(name).stop()


@asynccontextmanager
async def mesh(directory, **options):
    both = Mesh(directory, **options)
    try:
        yield both
    finally:
        for name in list(both.servers):
            await both.stop(name)
        for port in both.reserved.values():
            port.close()


class Daemon:
    """A daemon that is a process of its own, to be killed at any time."""

    def __init__(self, data_dir, *words, port=0, ready=True, env=None):
        self.process = subprocess.Popen(
            [VIRTA, "journal", "serve", "--port", str(port), "--data-dir", str(data_dir), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.port = port
        if ready:
            self.wait()

    def wait(self):
        """Until it says where it listens."""
        ready = self.process.stdout.readline()
        assert ready, self.process.communicate(timeout=REPLY_WAIT_S)[1]
        self.port = int(ready.rpartition(":")[2])

    def kill(self):
        self.process.kill()
        return self.process.communicate(timeout=REPLY_WAIT_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Gate:
    """Calls in a thread other than the test's wait until the gate is opened; then `error` is raised, if any."""

    def __init__(self, error=None):
        self.reached = threading.Event()
        self.open = threading.Event()
        self.error = error

    def __call__(self):
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.open.wait(GATE_S_MAX)
            if self.error is not None:
                raise self.error


class Disks:
    """Opens journal directories for a test: `on_commit` is called before each commit, and may raise or wait."""

    def __init__(self, on_commit=lambda: None):
        self.on_commit = on_commit
        self.opened = None

    def __call__(self, directory, **options):
        disks = self

        class Disk(Persistence):
            def commit(self, records):
                disks.on_commit()
                super().commit(records)

        self.opened = Disk(directory, **options)
        return self.opened


def raising(errors):
    """Raise each of these errors once, then do nothing."""

    def on_commit():
        if errors:
            raise errors.pop()

    return on_commit


async def turns():
    for _ in range(TURNS):
        await asyncio.sleep(0)


@asynccontextmanager
async def slow_node(directory, error=None):
    """A journal whose commits are made in a thread, and the gate they pass."""
    gate = Gate(error)
    running = CommitLoop(directory, inline_s_max=-1, open_disk=Disks(gate))
    await running.start()
    try:
        yield running, gate
    finally:
        gate.open.set()
        await running.stop()


class Console:
    """Admin commands on an engine with a clock to set."""

    def __init__(self):
        self.clock = Clock(CONSOLE_US)
        self.engine = JournalEngine(self.clock)
        self.session = Session()

    def __call__(self, do, **fields):
        return self.call(commands.admin(do, **fields))

    def call(self, command):
        return command.result(self.engine.handle(command.request, self.session))


def state(engine):
    """Everything that must survive."""
    values = {}
    for entry in engine.store.entries():
        if entry.persist:
            for key in entry.keys:
                values[key] = (
                    sorted(entry.keys),
                    None if entry.tombstone else engine.store.value(entry),
                    entry.timestamp,
                    entry.expires,
                    entry.ttl,
                    entry.worked_until,
                )
    jobs = {
        (job.uri, job.timestamp): (
            job.domain.name,
            job.id,
            job.priority,
            job.start,
            job.payload,
            job.attempts,
            job.reason,
            STATE_NAMES[job.state],
            job.lease,
            job.worked_until,
        )
        for job in engine.jobs.all()
        if job.persist
    }
    return values, jobs, dict(engine.jobs.finished.commands)


def committed(disk, engine):
    """What the daemon does with every batch."""
    disk.commit(disk.changes(engine, engine.clock()) or [])
    disk.committed()
