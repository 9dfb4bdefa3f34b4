"""
A channel: the subscriptions on one topic, grouped by filter, and the index that tells which hold.

Subscriptions with equal filters share one entry, so an event is matched once per distinct filter and
each payload is put together once per entry. Invariant: an entry lives exactly as long as it has a
subscription, and every entry is in exactly one of: the everything entry, the index over events, the
index over documents (Koncorde's filters speak of an event's data).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from virta.errors import EventError
from virta.filters.tree import Everything
from virta.hub.delivery import ENCODERS, Delivery
from virta.match import Matcher

if TYPE_CHECKING:
    from virta.filters import Filter
    from virta.hub.event_batch import EventBatch
    from virta.hub.subscription import ChannelSubscription

logger = logging.getLogger("virta.hub")

EVENT, DOCUMENT = "event", "document"


def root_of(filter_: Filter) -> str:
    """Which object a filter of this dialect is asked about."""
    if isinstance(filter_.tree, Everything):
        return EVENT  # what holds for every object need not look at one
    return DOCUMENT if filter_.dialect == "koncorde" else EVENT


class FilterGroup:
    """One distinct filter and its subscriptions, by the encoding they want."""

    __slots__ = ("filter", "hits", "indexed_as", "subscriptions")

    def __init__(self, filter_: Filter) -> None:
        self.filter = filter_
        self.indexed_as = ""
        self.subscriptions: dict[int, dict[ChannelSubscription, None]] = {}
        self.hits: list[Delivery] = []

    def __bool__(self) -> bool:
        return bool(self.subscriptions)

    def add(self, subscription: ChannelSubscription) -> None:
        group = self.subscriptions.get(subscription.encoding)
        if group is None:
            group = self.subscriptions[subscription.encoding] = {}
        group[subscription] = None

    def remove(self, subscription: ChannelSubscription) -> bool:
        """Take a subscription out; False when it was not in."""
        group = self.subscriptions.get(subscription.encoding, {})
        if subscription not in group:
            return False
        del group[subscription]
        if not group:
            del self.subscriptions[subscription.encoding]
        return True

    def flush(self, now: float, tag: bytes) -> int:
        """Send what was hit to every subscription; the bytes are made once per encoding."""
        hits, self.hits = self.hits, []
        count = len(hits)
        sent = 0
        # Copies, since a send may end a subscription and so change the groups.
        for encoding, subscriptions in tuple(self.subscriptions.items()):
            payload = ENCODERS[encoding](hits, tag)
            sent += count * len(subscriptions)
            for subscription in tuple(subscriptions):
                try:
                    if subscription.blocked_since is None:
                        subscription.written_at = now
                        subscription.put(payload)
                    else:
                        subscription.send(payload, count)
                except Exception:  # its own affair: everyone else is to hear the event
                    logger.exception("delivery_failed subscription=%s", subscription.id)
        return sent


class _Index:
    """A matcher and the entries behind its ids."""

    def __init__(self) -> None:
        self.matcher = Matcher()
        self.entries: dict[str, FilterGroup] = {}

    def add(self, entry: FilterGroup) -> None:
        added = self.matcher.add(entry.filter)
        # The same text, not a copy of it: there may be very many.
        entry.indexed_as = entry.filter.id if added == entry.filter.id else added
        self.entries[entry.indexed_as] = entry

    def match(self, values: list[bytes]) -> list[list[str]]:
        """Ids that hold for each value; what the matcher cannot read satisfies no filter."""
        try:
            # One buffer with an event a line: no value holds a line end.
            return self.matcher.match_many(b"\n".join(values))
        except EventError:
            return [self._match_one(value) for value in values]

    def hits(self, batch: EventBatch) -> list[tuple[int, FilterGroup]]:
        """Each event of a batch (its place) with each entry that holds; a batch is always readable."""
        numbers, ends = self.matcher.match_many(batch.lines, "uint32")
        if not numbers:
            return []
        found = []
        for place in range(len(batch)):
            for number in numbers[ends[place] : ends[place + 1]]:
                id_ = self.matcher.id_of(number)
                assert id_ is not None  # nobody else removes filters while we ask
                found.append((place, self.entries[id_]))
        return found

    def _match_one(self, value: bytes) -> list[str]:
        try:
            return self.matcher.match(value)
        except EventError as error:
            logger.warning("event_unreadable: %s", error.message)
            return []

    def remove(self, entry: FilterGroup) -> None:
        self.matcher.remove(entry.indexed_as)
        del self.entries[entry.indexed_as]


class Channel:
    """The subscriptions of one channel."""

    def __init__(self, name: str, tag: bytes) -> None:
        self.name = name
        self._tag = tag  # of the log, for positions
        self.subscribers = 0
        self._entries: dict[tuple[str, str], FilterGroup] = {}
        self._everything: FilterGroup | None = None
        self._indexes: dict[str, _Index] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def filters(self) -> list[Filter]:
        """The distinct filters that stand on the channel."""
        return [entry.filter for entry in self._entries.values()]

    def add(self, subscription: ChannelSubscription) -> None:
        filter_ = subscription.filter
        root = root_of(filter_)
        key = (root, filter_.id)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = FilterGroup(filter_)
            if isinstance(filter_.tree, Everything):
                self._everything = entry
            else:
                self._indexes.setdefault(root, _Index()).add(entry)
        entry.add(subscription)
        self.subscribers += 1

    def remove(self, subscription: ChannelSubscription) -> bool:
        """Take a subscription out; False when it was not in."""
        root = root_of(subscription.filter)
        key = (root, subscription.filter.id)
        entry = self._entries.get(key)
        if entry is None or not entry.remove(subscription):
            return False
        self.subscribers -= 1
        if not entry:
            del self._entries[key]
            if entry is self._everything:
                self._everything = None
            else:
                self._indexes[root].remove(entry)
        return True

    def deliver(self, deliveries: list[Delivery], now: float) -> int:
        """Match a run of events in order and send each to whoever asked; returns copies sent."""
        hit: list[FilterGroup] = []
        if self._everything is not None:
            self._everything.hits = list(deliveries)
            hit.append(self._everything)
        for root, index in self._indexes.items():
            if not index.entries:
                continue
            if root == DOCUMENT:
                values = [delivery.document() for delivery in deliveries]
            else:
                values = [delivery.value for delivery in deliveries]
            entries = index.entries
            for delivery, matched in zip(deliveries, index.match(values), strict=True):
                for found in matched:
                    entry = entries[found]
                    if not entry.hits:
                        hit.append(entry)
                    entry.hits.append(delivery)
        return sum([entry.flush(now, self._tag) for entry in hit])

    def deliver_batch(self, batch: EventBatch, timestamp: int, now: float) -> int:
        """The same for a batch, of which only the events that somebody asked for are looked at."""
        events, documents = self._indexes.get(EVENT), self._indexes.get(DOCUMENT)
        some = self._everything is None and (documents is None or not documents.entries)
        if events is None or not some:
            return self.deliver(batch.deliveries(timestamp), now)
        hits = events.hits(batch)
        if not hits:
            return 0
        values = batch.values()
        places = dict.fromkeys([place for place, _ in hits])
        picked = batch.pick(values, places, timestamp)
        deliveries = dict(zip(places, picked, strict=True))
        for place, entry in hits:
            entry.hits.append(deliveries[place])
        entries = dict.fromkeys([entry for _, entry in hits])
        return sum([entry.flush(now, self._tag) for entry in entries])
