"""
The hub: whoever stands on a channel or a stream hears each event of it once, in the order of the log.

`deliver` is called with runs of events in log order and never twice for one offset; `position` is the
offset of the next event it expects. A subscription that is attached when `position` is p hears
exactly the matching events from p on: that is the seam on which replay and live delivery meet without
gap or duplicate. All methods are called from one thread (the event loop's); none blocks.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from virta.clock import now_us, time_text
from virta.errors import HubError
from virta.hub.channel import Channel
from virta.hub.delivery import META, STREAMS, Delivery
from virta.hub.resume.positions import ResumePosition, tag_of
from virta.streams import StreamIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.clock import Clock
    from virta.filters import Filter
    from virta.hub.event_batch import EventBatch
    from virta.hub.stream_consumer import StreamConsumer
    from virta.hub.subscription import ChannelSubscription

# More standing queries than this are refused: each costs memory and an index entry.
SUBSCRIPTIONS_MAX = 1_000_000
REGISTRATION = "name.djsweet.thorium.meta.query.registration"
REMOVAL = "name.djsweet.thorium.meta.query.removal"


class Hub:
    """Subscriptions, streams and the position in the log."""

    def __init__(
        self,
        *,
        position: int = 0,
        source_name: str = "//name.djsweet.thorium",
        clock_us: Clock = now_us,
        tag: str = "",
    ) -> None:
        self.position = position
        self.tag = tag or tag_of("")  # of the log
        self._tag = self.tag.encode()
        self.instance_id = base64.b64encode(os.urandom(15)).decode()
        self.delivered = 0  # copies handed to subscriptions and streams
        self.dropped = 0  # copies lost by consumers that are gone
        self.slow_disconnects = 0
        self.conjunctions = 0  # parts of standing queries, which is what Thorium counts
        self.routed = 0
        self.routing_seconds = 0.0
        self._source_name = source_name
        self._clock_us = clock_us
        self._channels: dict[str, Channel] = {}
        self._streams: StreamIndex[StreamConsumer] = StreamIndex()
        self._subscriptions: set[ChannelSubscription] = set()
        self._stream_consumers: set[StreamConsumer] = set()
        self._numbers = count()
        self._position_waiters: set[asyncio.Event] = set()

    # Subscriptions.

    def new_client_id(self) -> str:
        """An id that is unique in this process, shaped like Thorium's."""
        return f"{os.getpid()}-{next(self._numbers)}"

    def attach(self, subscription: ChannelSubscription) -> None:
        """Let a subscription hear everything from `position` on."""
        if len(self._subscriptions) >= SUBSCRIPTIONS_MAX:
            raise HubError(
                f"{SUBSCRIPTIONS_MAX} subscriptions stand already: no more are taken",
                code="too-many-subscriptions",
            )
        channel = self._channels.get(subscription.channel)
        if channel is None:
            channel = Channel(subscription.channel, self._tag)
            self._channels[subscription.channel] = channel
        channel.add(subscription)
        self._subscriptions.add(subscription)
        self.conjunctions += subscription.query.count(";") + 1

    def detach(self, subscription: ChannelSubscription) -> None:
        """Take a subscription away; fine when it never was attached."""
        subscription.close()
        if subscription not in self._subscriptions:
            return
        self._subscriptions.discard(subscription)
        self.dropped += subscription.dropped
        self.conjunctions -= subscription.query.count(";") + 1
        channel = self._channels[subscription.channel]
        channel.remove(subscription)
        if not channel:
            del self._channels[subscription.channel]

    def attach_streams(self, consumer: StreamConsumer) -> None:
        """Let a consumer hear its streams from now on."""
        for segments in consumer.streams:
            self._streams.add(segments, consumer)
        self._stream_consumers.add(consumer)

    def detach_streams(self, consumer: StreamConsumer) -> None:
        consumer.close()
        if consumer not in self._stream_consumers:
            return
        self._stream_consumers.discard(consumer)
        self.dropped += consumer.dropped
        for segments in consumer.streams:
            self._streams.remove(segments, consumer)

    def has_subscribers(self, channel: str) -> bool:
        """Tell whether anyone would be asked about an event of this channel."""
        if channel == STREAMS:
            return bool(self._stream_consumers)
        return channel in self._channels

    def filters(self, channel: str) -> list[Filter]:
        """The distinct filters that stand on a channel."""
        found = self._channels.get(channel)
        return found.filters() if found is not None else []

    def subscribers(self) -> dict[str, int]:
        """Return how many subscriptions each channel has; channels without any are left out."""
        return {name: channel.subscribers for name, channel in self._channels.items()}

    @property
    def subscription_count(self) -> int:
        return len(self._subscriptions)

    @property
    def stream_consumer_count(self) -> int:
        return len(self._stream_consumers)

    @property
    def dropped_total(self) -> int:
        """Copies lost to slow consumers, those of today's connections included."""
        return (
            self.dropped
            + sum(subscription.dropped for subscription in self._subscriptions)
            + sum(consumer.dropped for consumer in self._stream_consumers)
        )

    # The position.

    def position_text(self, offset: int) -> str:
        """Return the position of a consumer that has received everything below this offset."""
        return ResumePosition(self.tag, offset).text

    def advance(self, position: int) -> None:
        """Everything before this offset is (about to be) delivered."""
        self.position = position
        for waiter in self._position_waiters:
            waiter.set()

    async def wait_past(self, position: int) -> None:
        """Wait until there is something at this offset."""
        if self.position > position:
            return
        waiter = asyncio.Event()
        self._position_waiters.add(waiter)
        try:
            while self.position <= position:
                waiter.clear()
                await waiter.wait()
        finally:
            self._position_waiters.discard(waiter)

    # Events.

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Hand a run of events, in log order, to whoever asked for them."""
        runs: dict[str, list[Delivery]] = {}
        for delivery in deliveries:
            runs.setdefault(delivery.channel, []).append(delivery)
        self.deliver_runs(runs)

    def deliver_runs(self, runs: dict[str, list[Delivery]]) -> None:
        """Hand out runs by channel; consumers hear one channel, so its order is the log's."""
        began = time.monotonic()
        for name, run in runs.items():
            self.routed += len(run)
            if name == STREAMS:
                self._deliver_streams(run)
                continue
            channel = self._channels.get(name)
            if channel is not None:
                self.delivered += channel.deliver(run, began)
        self.routing_seconds += time.monotonic() - began

    def deliver_batch(self, batch: EventBatch, timestamp: int) -> None:
        """Hand the events of a batch, which stand in the log since `timestamp`, to whoever asked."""
        channel = self._channels.get(batch.channel)
        if channel is None:
            return
        began = time.monotonic()
        self.routed += len(batch)
        self.delivered += channel.deliver_batch(batch, timestamp, began)
        self.routing_seconds += time.monotonic() - began

    def announce(self, subscription: ChannelSubscription, *, registered: bool) -> None:
        """Tell the `meta` channel that a subscription came or went."""
        if META not in self._channels:
            return
        sign = "+" if registered else "-"
        now = self._clock_us()
        data = {
            "instanceID": self.instance_id,
            "channel": subscription.channel,
            "clientID": subscription.id,
            "queryID": subscription.id,
        }
        if registered:
            data["query"] = subscription.query
        event = {
            "source": self._source_name,
            "id": f"{self.instance_id} {sign}{subscription.id} {subscription.id}",
            "specversion": "1.0",
            "type": REGISTRATION if registered else REMOVAL,
            "time": time_text(now),
            "data": data,
        }
        value = msgspec.json.encode(event)
        self.deliver([Delivery(META, self._source_name, str(event["id"]), value, -1, now)])

    def _deliver_streams(self, messages: list[Delivery]) -> None:
        """Route messages; each consumer is given all its copies of this run at once."""
        first = messages[0].id
        if all(message.id == first for message in messages):
            hearers = self._streams.route(tuple(first.split(":")))
            if len(hearers) == len(set(hearers)):
                self._deliver_one_stream(messages, hearers)
                return
        copies: dict[StreamConsumer, list[bytes]] = {}
        for message in messages:
            hearers = self._streams.route(tuple(message.id.split(":")))
            if hearers:
                frames: dict[bool, bytes] = {}
                for hearer in hearers:
                    frame = frames.get(hearer.positions)
                    if frame is None:
                        frame = frames[hearer.positions] = hearer.frame(message, self._tag)
                    copies.setdefault(hearer, []).append(frame)
                self.delivered += len(hearers)
        for hearer, own in copies.items():
            hearer.offer(own)

    def _deliver_one_stream(
        self, messages: list[Delivery], hearers: Sequence[StreamConsumer]
    ) -> None:
        """Send all messages to consumers of one stream, encoding them once with positions and once without."""
        self.delivered += len(messages) * len(hearers)
        made: dict[bool, tuple[list[bytes], bytes]] = {}
        for hearer in hearers:
            both = made.get(hearer.positions)
            if both is None:
                frames = [hearer.frame(message, self._tag) for message in messages]
                both = made[hearer.positions] = (frames, b"".join(frames))
            if hearer.blocked:
                hearer.offer(both[0])
            else:
                hearer.put(both[1])
