"""A consumer of streams: one bounded queue, oldest dropped first, drops reported."""

from __future__ import annotations

import json
from math import inf

import pytest

from virta.hub.delivery import STREAMS, Delivery
from virta.hub.frames import websocket_text
from virta.hub.hub import Hub
from virta.hub.stream_consumer import QUEUED_MAX, StreamConsumer
from virta.streams import canonical_stream_id, parse_stream_id


class Sink:
    """Records writes; `fills` makes the consumer block after so many."""

    def __init__(self):
        self.written = []
        self.consumer = None
        self.fills = inf

    def write(self, payload):
        self.written.append(payload)
        self.fills -= 1
        if self.fills <= 0 and self.consumer is not None:
            self.consumer.block(0.0)

    def end(self, reason):
        raise AssertionError(reason)


def segments(stream):
    return parse_stream_id(stream if ":" in stream else f"{stream}:")


def made(*streams, queued=3, **named):
    sink = Sink()
    consumer = StreamConsumer(sink, [segments(s) for s in streams], queued, **named)
    sink.consumer = consumer
    return consumer, sink


def message(stream, text, offset=0):
    stream = canonical_stream_id(segments(stream))
    value = json.dumps({"publish_to": stream, "payload": text}).encode()
    return Delivery(STREAMS, "", stream, value, offset, 0)


def texts(sink):
    """Payloads of all messages that were written."""
    found = []
    for payload in sink.written:
        at = 0
        while at < len(payload):
            size = payload[at + 1]
            start = at + 2
            if size == 126:
                size = int.from_bytes(payload[at + 2 : at + 4], "big")
                start = at + 4
            found.append(json.loads(payload[start : start + size]))
            at = start + size
    return [one.get("payload", one) for one in found]


def test_messages_go_straight_to_the_sink():
    """While the sink accepts bytes nothing is queued."""
    consumer, sink = made("a")
    consumer.offer([b"1"])
    consumer.offer([b"2", b"3"])

    assert sink.written == [b"1", b"23"]


def test_the_oldest_are_dropped_and_counted():
    """A blocked consumer keeps its newest messages; the report comes before them."""
    consumer, sink = made("a", report_drops=True)
    consumer.block(0.0)
    for n in range(5):
        consumer.offer([b"%d" % n])
    consumer.unblock(0.0)

    assert consumer.dropped == 2
    assert sink.written == [websocket_text(b'{"dropped":2}'), b"2", b"3", b"4"]


def test_drops_within_one_offer_are_counted():
    """More messages at once than the queue has places for."""
    consumer, sink = made("a")
    consumer.block(0.0)
    consumer.offer([b"%d" % n for n in range(10)])
    consumer.unblock(0.0)

    assert (consumer.dropped, sink.written) == (7, [b"7", b"8", b"9"])


def test_a_sink_that_fills_again_leaves_the_rest_queued():
    """Unblocking stops when the sink is full again, and loses nothing."""
    consumer, sink = made("a", queued=4)
    consumer.block(0.0)
    consumer.offer([b"1", b"2", b"3", b"4"])
    sink.fills = 2
    consumer.unblock(0.0)
    first = list(sink.written)
    sink.fills = inf
    consumer.unblock(0.0)

    assert first == [b"1", b"2"]
    assert sink.written == [b"1", b"2", b"3", b"4"]
    assert consumer.dropped == 0


def test_a_closed_consumer_ignores_messages():
    """After `close` neither queue nor sink get anything."""
    consumer, sink = made("a")
    consumer.close()
    consumer.offer([b"1"])
    consumer.put(b"2")

    assert sink.written == []


@pytest.mark.parametrize("queued", [0, QUEUED_MAX + 1])
def test_the_queue_has_limits(queued):
    """The transport checks what the client asks for; this is the programmer's guarantee."""
    with pytest.raises(AssertionError):
        made("a", queued=queued)


def test_streams_that_are_equal_count_once():
    """A stream that is named twice delivers one copy."""
    consumer, sink = made("a:b", "a:b")
    hub = Hub()
    hub.attach_streams(consumer)
    hub.deliver([message("a:b:c", "once")])

    assert texts(sink) == ["once"]


def test_each_matching_stream_delivers_a_copy():
    """A consumer of a stream and of its parent gets a message of the child twice, as Subtub does."""
    consumer, sink = made("a", "a:b")
    hub = Hub()
    hub.attach_streams(consumer)
    hub.deliver([message("a:b", "m"), message("a:x", "n"), message("z", "o")])

    assert texts(sink) == ["m", "m", "n"]
    assert hub.delivered == 3


def test_positions_are_members_of_messages():
    """A consumer with positions gets the one after each message; one beside it gets none."""
    with_positions, one = made("a", positions=True)
    without, other = made("a")
    hub = Hub(tag="0" * 12)
    hub.attach_streams(with_positions)
    hub.attach_streams(without)
    hub.deliver([message("a", "m", 4), message("a", "n", 5)])

    assert [b'"position":"000000000000.5"' in p for p in one.written] == [True]
    assert b'"position":"000000000000.6"' in one.written[0]
    assert b"position" not in b"".join(other.written)
    assert texts(one) == texts(other) == ["m", "n"]


def test_a_blocked_consumer_holds_up_no_other():
    """Messages of one stream: the blocked consumer queues, the other gets them at once."""
    blocked, waiting = made("a")
    live, sink = made("a")
    hub = Hub()
    hub.attach_streams(blocked)
    hub.attach_streams(live)
    blocked.block(0.0)
    hub.deliver([message("a", "m"), message("a", "n")])

    assert texts(sink) == ["m", "n"]
    assert waiting.written == []
    blocked.unblock(0.0)
    assert texts(waiting) == ["m", "n"]


def test_a_detached_consumer_is_removed_from_every_stream():
    """What it dropped stays in the hub's total."""
    consumer, _ = made("a", "b", queued=1)
    hub = Hub()
    hub.attach_streams(consumer)
    consumer.block(0.0)
    consumer.offer([b"1", b"2"])
    hub.detach_streams(consumer)
    hub.detach_streams(consumer)

    assert hub.stream_consumer_count == 0
    assert not hub.has_subscribers(STREAMS)
    assert hub.dropped_total == 1
