"""
Kill real processes at random points, again and again, and check what they promised.

    python journal_crash_rounds.py daemon DIRECTORY ROUNDS SEED
    python journal_crash_rounds.py spool DIRECTORY ROUNDS SEED

Prints a JSON summary; exits with an assertion and the seed if a promise was broken. Children are forked
from this process, which has everything imported, so that a round takes milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import sys
import threading
import time
from pathlib import Path

from virta.errors import JournalError
from virta.journal import Client, Spool
from virta.journal.clients.forwarder import Forwarder
from virta.journal.protocol import commands
from virta.journal.protocol.messages import RefusedError
from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.tcp import JournalServer
from virta.journal.storage import directory as persistence

DOMAIN = "d"
STEPS_MAX = 5  # that a daemon surely carries out before it may be killed
SPOOLED_S_MAX = 60
# Snapshots all the time, so that rotation is killed, too.
persistence.ROTATE_RECORDS_MIN = 60
persistence.FINISHED_PER_RECORD = 1 << 40


def fork(main):
    child = os.fork()
    if child == 0:
        try:
            main()
        finally:
            os._exit(1)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def start_daemon(directory, port=0):
    reading, writing = os.pipe()

    def main():
        async def serve():
            server = JournalServer(port=port, node=CommitLoop(directory))
            await server.start()
            os.write(writing, b"%d\n" % server.address[1])
            await asyncio.Event().wait()

        asyncio.run(serve())

    child = fork(main)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.readline()
    assert answer, "the daemon did not start"
    return child, int(answer)


class Promises:
    """What was acknowledged, and what is in doubt because the connection went first."""

    def __init__(self):
        self.values = {}  # key -> last acknowledged number
        self.doubtful = {}  # key -> a larger number that may or may not be there
        self.pushed = set()
        self.done = set()
        self.perhaps_done = set()
        self.number = 0

    def step(self, client, rng):
        self.number += 1
        kind = rng.randrange(4)
        if kind == 0:
            key = f"k{rng.randrange(20)}"
            self.doubtful[key] = self.number
            client.set(key, self.number)
            self.values[key] = self.number
            del self.doubtful[key]
        elif kind == 1:
            uri = f"job:{self.number}"
            client.push(uri, domain=DOMAIN, payload="x" * rng.randrange(300))
            self.pushed.add(uri)
        elif kind == 2:
            batch = [f"job:{self.number}-{i}" for i in range(rng.randrange(1, 30))]
            client.pipeline([commands.push(uri, domain=DOMAIN) for uri in batch])
            self.pushed.update(batch)
        else:
            for job in client.next(DOMAIN, count=rng.randrange(1, 9)).jobs:
                uri = job.uri.decode()
                assert uri not in self.done, f"{uri} was acknowledged as done and came again"
                # Handed out for 24 hours, and marks survive a kill.
                assert uri not in self.perhaps_done, f"{uri} is worked on and came again"
                self.perhaps_done.add(uri)
                try:
                    client.done(job.key)
                except RefusedError:
                    continue
                self.done.add(uri)

    def check(self, client):
        for key, number in self.values.items():
            got = client.get(key)
            assert got in (number, self.doubtful.get(key, number)), f"{key}: {got}, not {number}"
            if got != number:
                self.values[key] = got
        self.doubtful.clear()
        waiting = set()
        while True:
            page = client.admin("list", limit=1000, offset=len(waiting))["jobs"]
            waiting |= {job["uri"] for job in page}
            if len(page) < 1000:
                break
        lost = self.pushed - self.done - self.perhaps_done - waiting
        assert not lost, f"lost {sorted(lost)[:5]}"
        again = waiting & self.done
        assert not again, f"done and waiting {sorted(again)[:5]}"


def daemon_rounds(directory, rounds, rng):
    promises = Promises()
    for _ in range(rounds):
        child, port = start_daemon(directory)
        with Client(port=port) as client:
            promises.check(client)
            for _ in range(rng.randrange(STEPS_MAX)):  # however slow the disk is
                promises.step(client, rng)
            killer = threading.Timer(rng.uniform(0.0, 0.03), os.kill, (child, signal.SIGKILL))
            killer.start()
            try:
                while True:
                    promises.step(client, rng)
            except JournalError as error:
                if error.code != "disconnected":
                    raise
            killer.join()
        os.waitpid(child, 0)
    child, port = start_daemon(directory)
    with Client(port=port) as client:
        promises.check(client)
    kill(child)
    return {
        "rounds": rounds,
        "values": len(promises.values),
        "pushed": len(promises.pushed),
        "done": len(promises.done),
    }


def start_writer(spool, pipe, first):
    def main():
        writer = Spool(spool)
        for number in range(first, 10**9):
            writer.put(commands.set_(f"s{number}", number).request)
            os.write(pipe, b"%d\n" % number)

    return fork(main)


def start_forwarder(spool, port):
    def main():
        asyncio.run(Forwarder(spool, "127.0.0.1", port).run(asyncio.Event()))

    return fork(main)


def spool_rounds(directory, rounds, rng):
    spool = directory / "spool"
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    acknowledged = set()
    rest = b""

    def listen(wanted=0):
        """Everything that was acknowledged by now, and at least so many."""
        nonlocal rest
        while True:
            try:
                data = os.read(reading, 65536)
            except BlockingIOError:
                if len(acknowledged) >= wanted:
                    return
                assert select.select([reading], [], [], SPOOLED_S_MAX)[0], "nothing is spooled"
                continue
            *lines, rest = (rest + data).split(b"\n")
            acknowledged.update(map(int, lines))

    daemon, port = start_daemon(directory / "journal")
    writer = start_writer(spool, writing, 0)
    forwarder = start_forwarder(spool, port)
    for round_ in range(1, rounds + 1):
        listen(len(acknowledged) + rng.randrange(1, 4))
        time.sleep(rng.uniform(0.0, 0.02))
        victim = rng.choice(["daemon", "writer", "forwarder"])
        if victim == "daemon":
            kill(daemon)
            daemon, _ = start_daemon(directory / "journal", port)
        elif victim == "writer":
            kill(writer)
            listen()
            rest = b""
            writer = start_writer(spool, writing, round_ * 1_000_000)
        else:
            kill(forwarder)
            forwarder = start_forwarder(spool, port)
    kill(writer)
    listen()
    deadline = time.monotonic() + 60
    with Client(port=port) as client:
        missing = acknowledged
        while missing and time.monotonic() < deadline:
            keys = sorted(missing)
            got = client.pipeline([commands.get(f"s{number}") for number in keys])
            missing = {key for key, value in zip(keys, got, strict=True) if value != key}
    kill(forwarder)
    kill(daemon)
    assert not missing, f"spooled and never arrived: {sorted(missing)[:5]}"
    return {"rounds": rounds, "spooled": len(acknowledged)}


def main():
    what, directory, rounds, seed = sys.argv[1:]
    run = {"daemon": daemon_rounds, "spool": spool_rounds}[what]
    print(json.dumps(run(Path(directory), int(rounds), random.Random(int(seed)))))


if __name__ == "__main__":
    main()
