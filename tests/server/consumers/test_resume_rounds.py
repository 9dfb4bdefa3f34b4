"""Rounds of publishing, killing and coming back: whatever id was seen last, nothing is skipped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal

import pytest
from server_harness import STRUCTURED, Consumer, event
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

import virta

CHANNEL = "rounds"
FLAGS = ("--ping-interval-ms", 100, "--idempotency-expiration-ms", 50)
CONSUMERS = 6
CUT = (ConnectionError, asyncio.IncompleteReadError, EOFError, OSError, AssertionError)


class Memory:
    """One consumer over all its connections: what it saw, and the id it saw last."""

    def __init__(self, rng, number):
        self.rng = rng
        self.positions = number % 2 == 1
        self.socket = number % 3 == 2
        self.last = self.first = None  # ids: the first is that of `connect`, a position
        self.gaps = []
        self.seen = []  # offsets, in the order in which they came
        self.frames = 0

    def take(self, id_, offset):
        self.frames += 1
        if id_ is not None:
            self.last = id_
            self.first = self.first or id_
        if offset is not None:
            self.seen.append(offset)

    async def run(self, port, seconds):
        """Reconnect again and again, for a random number of frames each, until the time is over."""
        end = asyncio.get_running_loop().time() + seconds
        while (left := end - asyncio.get_running_loop().time()) > 0:
            stay = self.frames + self.rng.choice([0, 1, 2, 5, 50, 1000])
            with contextlib.suppress(TimeoutError, WebSocketException, *CUT):
                async with asyncio.timeout(left):
                    await (self._socket if self.socket else self._stream)(port, stay)

    async def _stream(self, port, stay):
        path = f"/channels/{CHANNEL}?x=1" + ("&$positions=1" if self.positions else "")
        headers = {} if self.last is None else {"Last-Event-ID": self.last}
        consumer = await Consumer.open(port, path, headers)
        try:
            while (frame := await consumer.frame()) is not None:
                self.gaps += [frame] if frame.event == "gap" else []
                offset = json.loads(frame.comment)["offset"] if frame.event == "data" else None
                self.take(frame.id, offset)
                if self.frames > stay:
                    return
        finally:
            consumer.writer.transport.abort()

    async def _socket(self, port, stay):
        at = "$positions=1" if self.last is None else f"$last-event-id={self.last}"
        url = f"ws://127.0.0.1:{port}/channels/{CHANNEL}?x=1&{at}"
        async with connect(url, subprotocols=["cloudevents.json"], close_timeout=0) as opened:
            async for text in opened:
                message = json.loads(text)
                self.gaps += [message] if message["type"] == "virta.gap" else []
                position = message["virtaposition"]
                published = not message["type"].startswith("virta.")
                self.take(position, int(position.split(".")[1]) - 1 if published else None)
                if self.frames > stay:
                    return


def made(rng):
    """An event: often one that was published before, at times one that does not match."""
    id_ = f"again {rng.randrange(3)}" if rng.random() < 0.6 else f"{rng.random()}"
    return event(id_, {"x": int(rng.random() < 0.7)})


async def publish(server, rng, seconds):
    """Publish until the time is over or the server has ended; some ids repeatedly, some filtered out."""
    end = asyncio.get_running_loop().time() + seconds
    number = 0
    while asyncio.get_running_loop().time() < end:
        number += 1
        body = json.dumps(made(rng))
        with contextlib.suppress(*CUT):
            await asyncio.to_thread(
                server.request, "POST", f"/channels/{CHANNEL}", body, {"Content-Type": STRUCTURED}
            )


def check(memory, stored):
    """Everything from the first `connect` on was seen; only source+id may bring something twice."""
    assert memory.gaps == []
    first = int(memory.first.split(".")[1])
    expected = [offset for offset, _ in stored if offset >= first]
    assert sorted(set(memory.seen)) == expected
    if memory.positions or memory.socket:
        assert memory.seen == expected
    else:
        twice = {id_ for _, id_ in stored if id_.startswith("again")}
        assert len(memory.seen) == len(expected) or twice


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_skipped_over_kills_and_reconnects(start, seed):
    """Consumers of every kind, cut at random, by themselves and by SIGKILL, see every event that matched."""
    rng = random.Random(seed)
    memories = [Memory(random.Random(rng.random()), n) for n in range(CONSUMERS)]
    server = start(*FLAGS)

    async def turn(server, *, kill):
        tasks = [memory.run(server.port, 1.7) for memory in memories]
        publishing = asyncio.ensure_future(publish(server, rng, 1.5))
        if kill:
            asyncio.get_running_loop().call_later(
                rng.uniform(0.5, 1.2), server.process.send_signal, signal.SIGKILL
            )
        await asyncio.gather(publishing, *tasks)

    for number in range(3):
        asyncio.run(turn(server, kill=number < 2))
        if number < 2:
            server.stop(signal.SIGKILL)
            with virta.open(server.data_dir / "log") as log:
                for _ in range(30):
                    log.append(CHANNEL, b"", json.dumps(made(rng)).encode())
            server = start(*FLAGS)

    async def finish():
        """Reconnect every consumer until it has received the last event."""
        await asyncio.to_thread(server.publish, CHANNEL, event("the end", {"x": 1}))
        last = len(stored()) and stored()[-1][0]
        for memory in memories:
            memory.rng = random.Random(0)
            async with asyncio.timeout(30):
                while last not in memory.seen:
                    await memory.run(server.port, 1)

    def stored():
        with virta.open(server.data_dir / "log", read_only=True) as log:
            records = [(r.offset, json.loads(r.value)) for r in log.read(topics=CHANNEL)]
        return [(offset, value["id"]) for offset, value in records if value["data"]["x"] == 1]

    asyncio.run(finish())
    for memory in memories:
        check(memory, stored())
