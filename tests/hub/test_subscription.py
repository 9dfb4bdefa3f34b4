"""Slow consumers: what waits, what is dropped, who is disconnected; and Subtub's overflow vectors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from virta.filters import parse
from virta.hub.stream_consumer import StreamConsumer
from virta.hub.subscription import DROP_OLDEST, ChannelSubscription, SlowPolicy
from virta.streams import StreamIndex, canonical_stream_id, parse_stream_id

VECTORS = Path(__file__).parent.parent / "vectors" / "subtub-overflow-vectors.jsonl"


class SubscriberSink:
    """Accepts bytes; is full when the test sets it."""

    def __init__(self):
        self.written = []
        self.ended = None

    def write(self, payload):
        self.written.append(payload)

    def end(self, reason):
        self.ended = reason


def make(**policy):
    sink = SubscriberSink()
    held = SlowPolicy(**policy) if policy else None
    return sink, ChannelSubscription("1-0", "c", parse(""), sink, policy=held)


def test_live_payloads_go_straight_through():
    """Without back pressure nothing waits."""
    sink, subscription = make()
    subscription.send(b"a", 1)

    assert (sink.written, subscription.backlog_bytes) == ([b"a"], 0)


def test_blocked_payloads_wait_in_order():
    """What waited comes out first, in order."""
    sink, subscription = make()
    subscription.block(0.0)
    for payload in (b"a", b"b"):
        subscription.send(payload, 1)
    assert sink.written == []

    subscription.unblock(1.0)

    assert sink.written == [b"a", b"b"]
    assert subscription.backlog_bytes == 0


def test_disconnect_at_the_limit_of_bytes():
    """The policy `disconnect` ends the subscription and frees its memory."""
    sink, subscription = make(bytes_max=3)
    subscription.block(0.0)
    subscription.send(b"aa", 1)
    assert sink.ended is None

    subscription.send(b"bb", 1)

    assert "4 bytes were waiting, 3 are allowed" in sink.ended
    assert subscription.backlog_bytes == 0
    subscription.send(b"cc", 1)
    assert subscription.backlog_bytes == 0


def test_overdue_by_time():
    """`disconnect` has a limit of time, `drop-oldest` has none."""
    _, subscription = make(seconds_max=5.0)
    assert subscription.overdue_at == math.inf
    subscription.block(10.0)
    assert subscription.overdue_at == 15.0
    _, patient = make(action=DROP_OLDEST, seconds_max=5.0)
    patient.block(0.0)
    assert patient.overdue_at == math.inf


def test_drop_oldest_counts_and_reports_events():
    """Lost events are counted, not payloads, and the consumer gets the count first."""
    sink, subscription = make(action=DROP_OLDEST, bytes_max=3)
    subscription.block(0.0)
    subscription.send(b"aa", 7)
    subscription.send(b"bb", 1)
    subscription.send(b"c", 1)

    subscription.unblock(1.0)

    assert subscription.dropped == 7
    assert b'{"dropped":7,"total":7}' in sink.written[0]
    assert sink.written[1:] == [b"bb", b"c"]


def test_a_sink_that_fills_again_keeps_the_rest_waiting():
    """Handing over stops where the sink is full again."""
    sink, subscription = make()
    subscription.block(0.0)
    for payload in (b"a", b"b", b"c"):
        subscription.send(payload, 1)
    real = sink.write

    def full_after_one(payload):
        real(payload)
        subscription.block(1.0)

    sink.write = full_after_one
    subscription.unblock(1.0)

    assert sink.written == [b"a"]
    assert subscription.backlog_bytes == 2


@pytest.mark.parametrize(
    "vector", [json.loads(v) for v in VECTORS.read_text().splitlines()], ids=range(13)
)
def test_overflow_vectors(vector):
    """One queue for all streams of a connection; the newest copies stay."""
    sink = SubscriberSink()
    streams = [parse_stream_id(text) for text in vector["subscriptions"]]
    consumer = StreamConsumer(sink, streams, vector["max_queued"])
    index = StreamIndex()
    for segments in consumer.streams:
        index.add(segments, consumer)
    consumer.block(0.0)
    copies = 0
    for number, text in enumerate(vector["published"]):
        segments = parse_stream_id(text)
        for consumer in index.route(segments):
            consumer.offer([json.dumps([canonical_stream_id(segments), number]).encode()])
            copies += 1

    consumer.unblock(1.0)

    assert [json.loads(payload) for payload in sink.written] == vector["received"]
    assert consumer.dropped == copies - len(vector["received"])
