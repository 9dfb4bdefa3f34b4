"""
The hub: deliver each event to the subscribers of its channel or stream once, in the order of the log.

`deliver` is called with runs of events in log order and never twice for one offset; `position` is the offset of the
next event it expects. A subscription that is attached when `position` is p gets exactly the matching events from p on:
there replay and live delivery meet without gap or duplicate. All methods are called in the event loop; none blocks.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from itertools import count
from typing import TYPE_CHECKING, Protocol

import msgspec

from virta.clock import now_us, time_text
from virta.errors import HubError
from virta.hub.channel import Channel
from virta.hub.delivery import META, STREAMS, Delivery
from virta.hub.resume.positions import ResumePosition, tag_of
from virta.streams import StreamIndex

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from virta.clock import Clock
    from virta.filters import Filter
    from virta.hub.channel import FilterGroup
    from virta.hub.event_batch import EventBatch
    from virta.hub.stream_consumer import StreamConsumer
    from virta.hub.subscription import ChannelSubscription
    from virta.log import Record

# Each costs memory and an index entry; more are refused.
SUBSCRIPTIONS_MAX = 1_000_000
# Types of the events on the `meta` channel, and Thorium's.
REGISTRATION, REMOVAL = "virta.query.registration", "virta.query.removal"
THORIUM_META = "name.djsweet.thorium.meta."


class RowFeed(Protocol):
    """What follows all records of some channels, repeats included, where the position advances."""

    @property
    def channels(self) -> Collection[str]:
        """The channels that it follows."""

    def append(self, channel: str, offset: int, key: bytes, value: bytes) -> None:
        """Take an event of this process."""

    def append_batch(self, channel: str, offset: int, values: Sequence[bytes]) -> None:
        """Take events of this process without record keys; the first has this offset."""

    def append_record(self, record: Record) -> None:
        """Take a record of another process."""

    def advance(self, position: int) -> None:
        """End a step: everything below this offset was given."""


class Hub:
    """Subscriptions, streams and the position in the log."""

    def __init__(
        self,
        *,
        position: int = 0,
        source_name: str = "//virta",
        thorium: bool = False,
        clock_us: Clock = now_us,
        tag: str = "",
    ) -> None:
        self.position = position
        self.tag = tag or tag_of("")  # of the log
        self._tag = self.tag.encode()
        self.instance_id = base64.b64encode(os.urandom(15)).decode()
        self.delivered = 0  # copies sent to subscriptions and stream consumers
        self.dropped = 0  # copies dropped for consumers that have left
        self.slow_disconnects = 0
        self.conjunctions = 0  # parts of queries, which is what Thorium counts
        self.routed = 0
        self.routing_seconds = 0.0
        self._source_name = source_name
        self._thorium = thorium  # use Thorium's names
        self._clock_us = clock_us
        self._channels: dict[str, Channel] = {}
        self._streams: StreamIndex[StreamConsumer] = StreamIndex()
        self._subscriptions: set[ChannelSubscription] = set()
        self._stream_consumers: set[StreamConsumer] = set()
        self._numbers = count()
        self._position_waiters: set[asyncio.Event] = set()
        self.rows: RowFeed | None = None  # live views

    # Subscriptions.

    def new_client_id(self) -> str:
        """Return an id that is unique in this process, in Thorium's form."""
        return f"{os.getpid()}-{next(self._numbers)}"

    def attach(self, subscription: ChannelSubscription) -> None:
        """Deliver matching events from `position` on to a subscription; raises HubError beyond the limit."""
        if len(self._subscriptions) >= SUBSCRIPTIONS_MAX:
            raise HubError(
                f"{SUBSCRIPTIONS_MAX} subscriptions stand already: no more are taken",
                code="too-many-subscriptions",
            )
        name = subscription.channel
        if name not in self._channels:
            self._channels[name] = Channel(self._tag)
        self._channels[name].add(subscription)
        subscription.since = self._clock_us() / 1e6
        self._subscriptions.add(subscription)
        self.conjunctions += subscription.query.count(";") + 1

    def detach(self, subscription: ChannelSubscription) -> None:
        """Close a subscription and remove it, if it is attached."""
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
        """Deliver messages of its streams to a consumer from now on."""
        for segments in consumer.streams:
            self._streams.add(segments, consumer)
        self._stream_consumers.add(consumer)

    def detach_streams(self, consumer: StreamConsumer) -> None:
        """Close a consumer and remove it, if it is attached."""
        consumer.close()
        if consumer not in self._stream_consumers:
            return
        self._stream_consumers.discard(consumer)
        self.dropped += consumer.dropped
        for segments in consumer.streams:
            self._streams.remove(segments, consumer)

    def has_subscribers(self, channel: str) -> bool:
        """Return whether a channel, or any stream, has subscribers."""
        if channel == STREAMS:
            return bool(self._stream_consumers)
        return channel in self._channels

    def filters(self, channel: str) -> list[Filter]:
        """Return the distinct filters of a channel."""
        found = self._channels.get(channel)
        return found.filters() if found is not None else []

    def groups(self, channel: str | None = None) -> list[tuple[str, FilterGroup]]:
        """Return the distinct filters of a channel, or of all, each with the channel's name."""
        names = list(self._channels) if channel is None else [channel]
        return [
            (name, group)
            for name in names
            if name in self._channels
            for group in self._channels[name].groups()
        ]

    def matching(self, channel: str, event: Delivery) -> list[FilterGroup]:
        """Return the filters of a channel that an event satisfies; nothing is delivered."""
        found = self._channels.get(channel)
        return found.matching(event) if found is not None else []

    def subscription(self, id_: str) -> ChannelSubscription | None:
        """Return the subscription with this id."""
        return next((one for one in self._subscriptions if one.id == id_), None)

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
        """Copies dropped for slow consumers so far, connected ones included."""
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
        """Move the position: everything before it is delivered in this step of the loop."""
        self.position = position
        for waiter in self._position_waiters:
            waiter.set()

    async def wait_past(self, position: int) -> None:
        """Wait until the position is past this offset."""
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
        """Deliver events, in log order."""
        runs: dict[str, list[Delivery]] = {}
        for delivery in deliveries:
            runs.setdefault(delivery.channel, []).append(delivery)
        self.deliver_runs(runs)

    def deliver_runs(self, runs: dict[str, list[Delivery]]) -> None:
        """Deliver runs by channel: a subscriber has one channel, so the order of its events is the log's."""
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
        """Deliver the events of a batch that was written at `timestamp`."""
        channel = self._channels.get(batch.channel)
        if channel is None:
            return
        began = time.monotonic()
        self.routed += len(batch)
        self.delivered += channel.deliver_batch(batch, timestamp, began)
        self.routing_seconds += time.monotonic() - began

    def announce(self, subscription: ChannelSubscription, *, registered: bool) -> None:
        """Publish to the `meta` channel that a subscription was registered or removed."""
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
            "type": self._meta_type(REGISTRATION if registered else REMOVAL),
            "time": time_text(now),
            "data": data,
        }
        value = msgspec.json.encode(event)
        self.deliver([Delivery(META, self._source_name, str(event["id"]), value, -1, now)])

    def _meta_type(self, type_: str) -> str:
        return THORIUM_META + type_.removeprefix("virta.") if self._thorium else type_

    def _deliver_streams(self, messages: list[Delivery]) -> None:
        """Deliver messages; each consumer gets all its copies at once."""
        first = messages[0].id
        if all(message.id == first for message in messages):
            consumers = self._streams.route(tuple(first.split(":")))
            if len(consumers) == len(set(consumers)):
                self._deliver_one_stream(messages, consumers)
                return
        copies: dict[StreamConsumer, list[bytes]] = {}
        for message in messages:
            consumers = self._streams.route(tuple(message.id.split(":")))
            self.delivered += len(consumers)
            for consumer in consumers:
                copies.setdefault(consumer, []).append(consumer.frame(message, self._tag))
        for consumer, frames in copies.items():
            consumer.offer(frames)

    def _deliver_one_stream(
        self, messages: list[Delivery], consumers: Sequence[StreamConsumer]
    ) -> None:
        """Deliver messages of one stream to consumers, which share the joined frames."""
        self.delivered += len(messages) * len(consumers)
        shared: dict[bool, tuple[list[bytes], bytes]] = {}
        for consumer in consumers:
            if consumer.positions not in shared:
                frames = [consumer.frame(message, self._tag) for message in messages]
                shared[consumer.positions] = (frames, b"".join(frames))
            frames, joined = shared[consumer.positions]
            if consumer.blocked:
                consumer.offer(frames)
            else:
                consumer.put(joined)
