"""A hub over a real log, and a sink that records what it is sent."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import virta
from virta.filters import parse
from virta.hub.delivery import SSE_PLAIN, Delivery
from virta.hub.hub import Hub
from virta.hub.idempotency import Idempotency
from virta.hub.log_follower import LogFollower
from virta.hub.publisher import Publisher
from virta.hub.resume.replay import Replayer
from virta.hub.subscription import ChannelSubscription
from virta.log.group_commit import INLINE_S_MAX


class RecordingSink:
    """A sink that records what it is sent."""

    def __init__(self):
        self.received = []
        self.changed = asyncio.Event()

    def write(self, payload):
        for line in payload.decode().splitlines():
            if line.startswith("data: "):
                self.received.append(json.loads(line[6:]))
        self.changed.set()

    def end(self, reason):
        raise AssertionError(reason)

    async def ids(self, count):
        async with asyncio.timeout(60):
            while len(self.received) < count:
                self.changed.clear()
                await self.changed.wait()
        return [event["id"] for event in self.received]


class HubStack:
    """A hub with everything behind it, on a log in a directory."""

    def __init__(self, path, durability="none", log=None, inline_s_max=INLINE_S_MAX):
        loop = asyncio.get_running_loop()
        self.log = log or virta.open(path, visibility="committed")
        self.table = Idempotency(keys_max=1000, horizon_s=1000.0)
        self.hub = Hub()
        self.follower = LogFollower(self.log, loop, self.arrived, durability=durability)
        self.hub.position = self.follower.position
        self.publisher = Publisher(
            self.hub,
            self.follower,
            self.table,
            loop,
            outstanding_max=10,
            inline_s_max=inline_s_max,
        )
        self.executor = ThreadPoolExecutor(2)
        self.replayer = self.make_replayer(self.log)
        self.follower.start()

    def make_replayer(self, log, index=None):
        return Replayer(self.hub, log, self.table, self.executor, index=index)

    def arrived(self, records):
        self.publisher.arrived(records)

    def listen(self, channel, query="", dialect="query-string"):
        sink = RecordingSink()
        subscription = ChannelSubscription(
            "1-0", channel, parse(query, dialect), sink, encoding=SSE_PLAIN
        )
        return sink, subscription

    def attach(self, *arguments):
        sink, subscription = self.listen(*arguments)
        self.hub.attach(subscription)
        return sink

    async def publish(self, channel, *ids, data=None):
        done = asyncio.get_running_loop().create_future()
        drafts = [draft(channel, id_, data) for id_ in ids]
        self.publisher.submit(drafts, done.set_result)
        return await asyncio.wait_for(done, 60)

    async def close(self):
        await self.publisher.close()
        await asyncio.to_thread(self.follower.stop)
        self.executor.shutdown()
        self.log.close()


def draft(channel, id_, data=None):
    event = {"source": "s", "id": id_, "data": data or {}}
    return Delivery(channel, "s", id_, json.dumps(event).encode())


def run(scenario, tmp_path, **options):
    async def whole():
        stack = HubStack(tmp_path / "log", **options)
        try:
            return await scenario(stack)
        finally:
            await stack.close()

    return asyncio.run(whole())
