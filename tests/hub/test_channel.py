"""A channel: one match per distinct filter, one encoding per format, the order of the log."""

from __future__ import annotations

import json

import pytest

from virta.filters import parse
from virta.hub.channel import Channel
from virta.hub.delivery import SSE_PLAIN, WEBSOCKET, Delivery
from virta.hub.event_matcher import EventMatcher
from virta.hub.hub import Hub
from virta.hub.subscription import ChannelSubscription

TAG = b"0" * 12


class Payloads:
    """A sink that records payloads."""

    def __init__(self):
        self.written = []

    def write(self, payload):
        self.written.append(payload)

    def end(self, reason):
        raise AssertionError(reason)


def subscribed(channel, query="", dialect="query-string", encoding=SSE_PLAIN, id_="1"):
    sink = Payloads()
    subscription = ChannelSubscription(id_, "c", parse(query, dialect), sink, encoding=encoding)
    channel.add(subscription)
    return subscription, sink


def event(id_, data=None, **more):
    value = json.dumps({"id": id_, "source": "s", "type": "t", "data": data or {}} | more).encode()
    return Delivery("c", "s", id_, value, int(id_), 0)


def ids(sink):
    lines = b"".join(sink.written).splitlines()
    return [json.loads(line[6:])["id"] for line in lines if line.startswith(b"data: ")]


def test_equal_filters_are_matched_once(monkeypatch):
    """A thousand subscriptions with one filter cost one filter in the index."""
    added = []
    real = EventMatcher.add
    monkeypatch.setattr(EventMatcher, "add", lambda self, f: added.append(f) or real(self, f))
    channel = Channel(TAG)
    sinks = [subscribed(channel, "a=1")[1] for _ in range(50)]
    channel.deliver([event("1", {"a": 1})], 0.0)

    assert len(added) == len(channel.filters()) == 1
    assert [ids(sink) for sink in sinks] == [["1"]] * 50


def test_subscriptions_of_one_format_share_their_bytes():
    """The payload is the same object for all of them."""
    channel = Channel(TAG)
    (_, one), (_, two), (_, other) = (
        subscribed(channel, "a=1"),
        subscribed(channel, "a=1"),
        subscribed(channel, "a=1", encoding=WEBSOCKET),
    )
    sent = channel.deliver([event("1", {"a": 1}), event("2", {"a": 1})], 0.0)

    assert sent == 6
    assert one.written[0] is two.written[0]
    assert other.written[0][0] == 0x81


@pytest.mark.parametrize(
    ("query", "dialect", "expected"),
    [
        ("", "query-string", ["1", "2"]),
        ("a=1", "query-string", ["1"]),
        ({"equals": {"a": 2}}, "koncorde", ["2"]),
        ({}, "koncorde", ["1", "2"]),
        ("kind = 'x'", "cesql", ["2"]),
        ([{"exact": {"kind": "x"}}], "cloudevents", ["2"]),
    ],
)
def test_each_dialect_sees_its_own_part(query, dialect, expected):
    """Koncorde applies to the document, the others to the event; an empty filter to both."""
    channel = Channel(TAG)
    _, sink = subscribed(channel, query, dialect)
    channel.deliver([event("1", {"a": 1}), event("2", {"a": 2}, kind="x")], 0.0)

    assert ids(sink) == expected


def test_nothing_is_left_of_removed_subscriptions():
    """The last subscription of a filter removes the filter; removing twice is harmless."""
    channel = Channel(TAG)
    first, _ = subscribed(channel, "a=1")
    second, _ = subscribed(channel, "a=1")
    everything, _ = subscribed(channel)
    document, _ = subscribed(channel, {"equals": {"a": 1}}, "koncorde")

    for subscription in (first, first, everything, document):
        channel.remove(subscription)
    assert len(channel.filters()) == channel.subscribers == 1
    channel.remove(second)

    assert not channel
    assert channel.filters() == []


def test_a_subscription_that_closes_while_others_are_sent_to():
    """A send may detach another subscription of the same group: no one is skipped or sent to twice."""
    hub = Hub()
    sinks = [Payloads() for _ in range(3)]
    subscriptions = [
        ChannelSubscription(str(n), "c", parse("a=1", "query-string"), sink, encoding=SSE_PLAIN)
        for n, sink in enumerate(sinks)
    ]
    for subscription in subscriptions:
        hub.attach(subscription)
    subscriptions[0].put = lambda payload: hub.detach(subscriptions[1])
    hub.deliver([event("1", {"a": 1})])
    hub.deliver([event("2", {"a": 1})])

    assert ids(sinks[1]) == []
    assert ids(sinks[2]) == ["1", "2"]


def test_an_unreadable_event_satisfies_no_filter():
    """It is delivered where there is no filter, and the events beside it are matched."""
    channel = Channel(TAG)
    _, filtered = subscribed(channel, "a=1")
    _, everything = subscribed(channel)
    broken = Delivery("c", "s", "2", b"{not json", 2, 0)
    channel.deliver([event("1", {"a": 1}), broken, event("3", {"a": 1})], 0.0)

    assert ids(filtered) == ["1", "3"]
    assert b"{not json" in b"".join(everything.written)


def test_the_meta_channel_announces_subscriptions():
    """Thorium's registrations reach its subscribers, with the query on registration only."""
    hub = Hub(clock_us=lambda: 0)
    sink = Payloads()
    meta = ChannelSubscription("0", "meta", parse("", "query-string"), sink, encoding=SSE_PLAIN)
    hub.attach(meta)
    other = ChannelSubscription("1", "c", parse("a=1", "query-string"), Payloads(), query="a=1")
    hub.announce(other, registered=True)
    hub.announce(other, registered=False)

    lines = b"".join(sink.written).splitlines()
    data = [json.loads(line[6:])["data"] for line in lines if line.startswith(b"data: ")]
    assert [(one["clientID"], one.get("query")) for one in data] == [("1", "a=1"), ("1", None)]
