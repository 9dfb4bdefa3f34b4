"""Stores behind a socket: Redis Streams and NATS JetStream, each driven by its own Python client."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

READY_S = 10
FETCH = 1000


class Missing(Exception):  # noqa: N818
    """The peer is not installed here."""


def find(program: str) -> str:
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.exists() else shutil.which(program)
    if not found:
        raise Missing(f"{program} is not installed")
    return found


def until_ready(check) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            check()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


class Server:
    """A peer whose first user in a directory starts the server and whose `stop` ends it."""

    process: subprocess.Popen | None = None

    def start(self, *command: str) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def stop(self) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait(READY_S)


class Redis(Server):
    name = "Redis Streams"
    levels: ClassVar = {"none": "everysec", "durable": "always"}

    def __init__(self, directory: Path, level: str):
        try:
            import redis  # noqa: PLC0415
        except ImportError as error:
            raise Missing("the Python package redis is not installed") from error
        path = directory / "redis.sock"
        if not path.exists():
            self.start(
                find("redis-server"), "--port", "0", "--unixsocket", str(path), "--dir", str(directory),
                "--save", "", "--appendonly", "yes", "--appendfsync", self.levels[level],
            )  # fmt: skip
        self.client = redis.Redis(unix_socket_path=str(path))
        until_ready(self.client.ping)

    def append(self, batch):
        pipe = self.client.pipeline(transaction=False)
        for topic, key, value in batch:
            pipe.xadd(topic, {b"k": key, b"v": value})
        pipe.execute()

    def append_one(self, record):
        topic, key, value = record
        self.client.xadd(topic, {b"k": key, b"v": value})

    def _read(self, last, **how):
        found = self.client.xread({b"events": last}, count=FETCH, **how)
        if isinstance(found, dict):  # RESP3
            found = list(found.items())
        if not found:
            return []
        rows = found[0][1]
        return rows[0] if rows and isinstance(rows[0], list) else rows

    def read_all(self):
        count, last = 0, b"0"
        while rows := self._read(last):
            count += len(rows)
            last = rows[-1][0]
        return count

    def follow(self):
        tail = self.client.xrevrange(b"events", count=1)
        last = tail[0][0] if tail else b"0"
        yield None
        while True:
            for entry, fields in self._read(last, block=1000):
                last = entry
                yield fields[b"v"]

    def close(self):
        self.client.close()
        self.stop()


class Nats(Server):
    name = "NATS JetStream"
    levels: ClassVar = {"none": "default", "durable": "sync always"}

    def __init__(self, directory: Path, level: str):
        try:
            import nats  # noqa: PLC0415
        except ImportError as error:
            raise Missing("the Python package nats-py is not installed") from error
        port_file = directory / "nats.port"
        if not port_file.exists():
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            config = directory / "nats.conf"
            sync = ", sync_interval: always" if level == "durable" else ""
            config.write_text(
                f'listen: "127.0.0.1:{port}"\njetstream: {{store_dir: "{directory}/js"{sync}}}\nmax_payload: 1MB\n'
            )
            self.start(find("nats-server"), "-c", str(config))
            port_file.write_text(str(port))
        port = int(port_file.read_text())
        self.loop = asyncio.new_event_loop()
        until_ready(lambda: socket.create_connection(("127.0.0.1", port)).close())
        self.nc = self.run(nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False))
        self.js = self.nc.jetstream(publish_async_max_pending=100_000)
        until_ready(lambda: self.run(self.js.add_stream(name="log", subjects=["events"])))

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def append(self, batch):
        async def publish():
            acks = [await self.js.publish_async("events", key + value) for _, key, value in batch]
            await asyncio.gather(*acks)

        self.run(publish())

    def append_one(self, record):
        self.run(self.js.publish("events", record[1] + record[2]))

    def read_all(self):
        async def fetch():
            total = (await self.js.stream_info("log")).state.messages
            sub = await self.js.subscribe(
                "events", ordered_consumer=True, pending_msgs_limit=-1, pending_bytes_limit=-1
            )
            count = 0
            async for _ in sub.messages:
                count += 1
                if count >= total:
                    break
            await sub.unsubscribe()
            return count

        return self.run(fetch())

    def follow(self):
        from nats.js.api import DeliverPolicy  # noqa: PLC0415

        sub = self.run(
            self.js.subscribe("events", ordered_consumer=True, deliver_policy=DeliverPolicy.NEW)
        )
        yield None
        while True:
            yield self.run(sub.next_msg(timeout=60)).data[16:]

    def close(self):
        self.run(self.nc.close())
        tasks = asyncio.all_tasks(self.loop)  # the client leaves some of its own behind
        for task in tasks:
            task.cancel()
        if tasks:
            self.run(asyncio.wait(tasks))
        self.loop.close()
        self.stop()


PEERS = (Redis, Nats)
