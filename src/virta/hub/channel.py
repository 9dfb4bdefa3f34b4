"""
A channel: the subscriptions to one topic of the log, grouped by filter.

Subscriptions with equal filters share one group, so an event is matched once per distinct filter and each payload
is encoded once per group and output format. Invariant: a group exists exactly as long as it has a subscription,
and every group is in exactly one of: the group for all events, the index over events, the index over documents.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from virta.hub.delivery import ENCODERS, Delivery
from virta.hub.event_matcher import (
    DOCUMENT,
    EVENT,
    EventMatcher,
    matches_everything,
    root_of,
    single_matcher,
)

if TYPE_CHECKING:
    from virta.filters import Filter
    from virta.hub.event_batch import EventBatch
    from virta.hub.subscription import ChannelSubscription

logger = logging.getLogger("virta.hub")


class FilterGroup:
    """One distinct filter and its subscriptions, by output format."""

    __slots__ = ("filter", "hits", "id", "limited", "sent", "subscriptions")

    def __init__(self, filter_: Filter) -> None:
        self.filter = filter_
        # Subscriptions with a row filter that is not part of the filter, by its id (rare).
        self.limited: dict[str, tuple[Filter, FilterGroup]] | None = None
        self.id = ""  # in the index
        self.subscriptions: dict[int, dict[ChannelSubscription, None]] = {}
        self.hits: list[Delivery] = []
        self.sent = 0  # events that matched while there were subscribers

    def __bool__(self) -> bool:
        return bool(self.subscriptions or self.limited)

    def add(self, subscription: ChannelSubscription) -> None:
        row_filter = subscription.row_filter
        if row_filter is not None:
            if self.limited is None:
                self.limited = {}
            found = self.limited.setdefault(row_filter.id, (row_filter, FilterGroup(self.filter)))
            group = found[1]
            group.subscriptions.setdefault(subscription.encoding, {})[subscription] = None
            subscription.sent_before = group.sent
            return
        self.subscriptions.setdefault(subscription.encoding, {})[subscription] = None
        subscription.sent_before = self.sent

    @property
    def size(self) -> int:
        """How many subscriptions it has."""
        limited = sum(group.size for _, group in (self.limited or {}).values())
        return limited + sum(len(same) for same in self.subscriptions.values())

    def remove(self, subscription: ChannelSubscription) -> bool:
        """Remove a subscription; return False if it is not in the group."""
        if subscription.row_filter is not None:
            return self._remove_limited(subscription, subscription.row_filter)
        return self._remove(subscription)

    def _remove_limited(self, subscription: ChannelSubscription, row_filter: Filter) -> bool:
        found = (self.limited or {}).get(row_filter.id)
        if found is None or not found[1]._remove(subscription):  # noqa: SLF001 - of the same class
            return False
        if not found[1] and self.limited is not None:
            del self.limited[row_filter.id]
        return True

    def _remove(self, subscription: ChannelSubscription) -> bool:
        same = self.subscriptions.get(subscription.encoding, {})
        if subscription not in same:
            return False
        del same[subscription]
        if not same:
            del self.subscriptions[subscription.encoding]
        return True

    def flush(self, now: float, tag: bytes) -> int:
        """Send the hits to every subscription, encoded once per output format; return the copies sent."""
        hits, self.hits = self.hits, []
        count = len(hits)
        self.sent += count
        sent = 0
        if self.limited:
            sent = self._flush_limited(hits, now, tag)
        # Copies: a send may close a subscription and so change the group.
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
                except Exception:  # the other subscriptions get the event all the same
                    logger.exception("delivery_failed subscription=%s", subscription.id)
        return sent

    def _flush_limited(self, hits: list[Delivery], now: float, tag: bytes) -> int:
        sent = 0
        for row_filter, group in tuple((self.limited or {}).values()):
            matched = single_matcher(row_filter, root_of(row_filter)).match(hits)
            group.hits = [hit for hit, ids in zip(hits, matched, strict=True) if ids]
            if group.hits:
                sent += group.flush(now, tag)
        return sent


class FilterIndex:
    """A matcher and the groups behind its ids."""

    def __init__(self, root: str) -> None:
        self.matcher = EventMatcher(root)
        self.groups: dict[str, FilterGroup] = {}

    def add(self, group: FilterGroup) -> None:
        group.id = self.matcher.add(group.filter)
        self.groups[group.id] = group

    def remove(self, group: FilterGroup) -> None:
        self.matcher.remove(group.id)
        del self.groups[group.id]


class Channel:
    """The subscriptions of one channel."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag  # of the log, for positions
        self.subscribers = 0
        self._groups: dict[tuple[str, str], FilterGroup] = {}
        self._everything: FilterGroup | None = None
        self._indexes: dict[str, FilterIndex] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def filters(self) -> list[Filter]:
        """Return the distinct filters of the channel."""
        return [group.filter for group in self._groups.values()]

    def groups(self) -> list[FilterGroup]:
        """Return the distinct filters with their subscriptions."""
        return list(self._groups.values())

    def add(self, subscription: ChannelSubscription) -> None:
        filter_ = subscription.filter
        root = root_of(filter_)
        key = (root, filter_.id)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = FilterGroup(filter_)
            if matches_everything(filter_):
                self._everything = group
            else:
                if root not in self._indexes:
                    self._indexes[root] = FilterIndex(root)
                self._indexes[root].add(group)
        group.add(subscription)
        self.subscribers += 1

    def remove(self, subscription: ChannelSubscription) -> bool:
        """Remove a subscription; return False if it is not in the channel."""
        root = root_of(subscription.filter)
        key = (root, subscription.filter.id)
        group = self._groups.get(key)
        if group is None or not group.remove(subscription):
            return False
        self.subscribers -= 1
        if not group:
            del self._groups[key]
            if group is self._everything:
                self._everything = None
            else:
                self._indexes[root].remove(group)
        return True

    def matching(self, event: Delivery) -> list[FilterGroup]:
        """Return the groups whose filter an event satisfies; nothing is delivered."""
        found = [] if self._everything is None else [self._everything]
        for index in self._indexes.values():
            if index.groups:
                found += [index.groups[id_] for id_ in index.matcher.match([event])[0]]
        return found

    def deliver(self, deliveries: list[Delivery], now: float) -> int:
        """Match events in order and send each to the subscriptions that match; return the copies sent."""
        hit: list[FilterGroup] = []
        if self._everything is not None:
            self._everything.hits = list(deliveries)
            hit.append(self._everything)
        for index in self._indexes.values():
            groups = index.groups
            if not groups:
                continue
            for delivery, ids in zip(deliveries, index.matcher.match(deliveries), strict=True):
                for id_ in ids:
                    group = groups[id_]
                    if not group.hits:
                        hit.append(group)
                    group.hits.append(delivery)
        return sum([group.flush(now, self._tag) for group in hit])

    def deliver_batch(self, batch: EventBatch, timestamp: int, now: float) -> int:
        """Do the same for a batch, of which only events that match become deliveries."""
        events, documents = self._indexes.get(EVENT), self._indexes.get(DOCUMENT)
        if events is None or self._everything is not None or (documents and documents.groups):
            return self.deliver(batch.deliveries(timestamp), now)
        hits = events.matcher.match_batch(batch)
        if not hits:
            return 0
        indexes = list(dict.fromkeys([index for index, _ in hits]))
        deliveries = dict(zip(indexes, batch.pick(indexes, timestamp), strict=True))
        hit: dict[FilterGroup, None] = {}
        for index, id_ in hits:
            group = events.groups[id_]
            hit[group] = None
            group.hits.append(deliveries[index])
        return sum([group.flush(now, self._tag) for group in hit])
