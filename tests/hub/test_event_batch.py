"""Event batches: published without decoding each event, and the table of keys behind them, native and plain."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from hub_support import HubStack, draft, run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from virta import native as engines
from virta.errors import LogWriteError
from virta.event.rules import BATCH_EVENTS_MAX
from virta.hub.event_batch import BATCH_EVENTS_MIN, EventBatch, split_batch
from virta.hub.idempotency import KeyTable, PlainKeyTable, key_of
from virta.log.format import codec
from virta.log.limits import BATCH_HEADER_BYTES
from virta.server.event_input import SHORT_CHARS, read_structured

_native = engines.load("virta.hub._native")
native = pytest.mark.skipif(_native is None, reason="the native module is not built")

FILL = [b'{"source":"s","id":"fill-%d"}' % n for n in range(BATCH_EVENTS_MIN)]
# Events that are taken as they are: spaces, names twice, pairs of surrogates, wide characters, numbers.
TAKEN = [
    b'{"id":"a","source":"s","data":{"a":[1,-0.5,1e9,0,12E-3],"b":{},"c":[],"d":null,"e":true}}',
    b' {\t"source" : "s" , "id" : "spaces" , "x":[ 1 , { "y" : false } ] } ',
    b'{"source":"first","source":"s","id":"1","id":"twice","a":1,"a":2}',
    b'{"source":"s","id":"escapes","data":"\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e4\\ud83d\\ude00"}',
    '{"source":"sü","id":"wide 😀","name ä":"ä"}'.encode(),
    b'{"source":"","id":"","deep":%b1%b}' % (b"[" * 59, b"]" * 59),
]
# Others, which the plain reading takes, mends or refuses.
DECLINED = [
    b'{"source":"s","id":"lines",\n"a":1}',
    b'{"source":"s","id":"lone","a":"\\ud800"}',
    b'{"source":"s","id":"lone","a":"\\udc00"}',
    b'{"source":"s","id":"half","a":"\\ud83d\\n"}',
    b'{"source":"s","id":"escape \\u0041"}',
    b'{"sourc\\u0065":"s","id":"name"}',
    b'{"source":"s","id":7}',
    b'{"source":"s","id":null}',
    b'{"source":"s"}',
    b'{"source":"s","id":"key","partitionkey":"k"}',
    b'{"source":"s","id":"null key","partitionkey":null}',
    b'{"source":"s","id":"large","a":1e999}',
    b'{"source":"s","id":"digits","a":%b}' % (b"9" * 400),
    b'{"source":"s","id":"deep","a":%b1%b}' % (b"[" * 70, b"]" * 70),
    b'{"source":"s","id":"long","a":"%b"}' % (b"x" * 20_000),
    b'{"source":"s","id":"\xff"}',
    b'{"source":"s","id":"control","a":"\x01"}',
    b'{"source":"s","id":"a","a":01}',
    b'{"source":"s","id":"a","a":-}',
    b'{"source":"s","id":"a","a":1.}',
    b'{"source":"s","id":"a","a":1e}',
    b'{"source":"s","id":"a","a":"\\x"}',
    b'{"source":"s","id":"a","a":"\\u12g4"}',
    b'{"source":"s","id":"a","a":nul}',
    b'{"source":"s","id":"a","a":[1,]}',
    b'{"source":"s","id":"a","a":[1}',
    b'{"source":"s","id":"a","a":{"b"}}',
    b'{"source":"s","id":"a",}',
    b'{"source":"s","id":"a"',
    b'{"source":"s","id":"a"}x',
    b"{}",
    b"[]",
    b"7",
    b"",
]


def read_batch(channel, data, start=0):
    return split_batch(
        channel, data, start, events_max=BATCH_EVENTS_MAX, event_bytes_max=SHORT_CHARS
    )


def body_of(*events):
    return b"[%b]" % b",".join([*FILL, *events])


def check_batch(batch, body, channel="c"):
    """A batch is what the plain reading of the same body makes of it."""
    raws = msgspec.json.decode(body, type=list[msgspec.Raw])
    events = [read_structured(channel, bytes(raw)) for raw in raws]
    records = codec.encode([(channel, d.key, d.value) for d in events])[BATCH_HEADER_BYTES:]
    assert batch.records == records
    assert batch.values() == [event.value for event in events]
    assert len(batch) == len(events)
    assert batch.size == sum(len(event.value) for event in events)
    digest = _native.digest
    assert batch.digests == b"".join(digest(key_of(channel, e.source, e.id)) for e in events)
    again = [(d.channel, d.source, d.id, d.value, d.timestamp) for d in batch.deliveries(7)]
    assert again == [(channel, e.source, e.id, e.value, 7) for e in events]


@native
@pytest.mark.parametrize("event", TAKEN)
def test_usual_batches_become_event_batches(event):
    """With the records, lines and keys that their events have one by one."""
    for channel in ("c", "ein Kanal für Wörter", "x" * 1000):
        body = body_of(event, event)
        check_batch(read_batch(channel, body), body, channel)
    batch = read_batch("c", b"head" + body_of(event) + b" ", 4)
    check_batch(batch, body_of(event) + b" ")


@native
@pytest.mark.parametrize("event", DECLINED)
def test_other_batches_do_not(event):
    """One odd event in it, and the batch is read the plain way."""
    assert read_batch("c", body_of(event)) is None
    assert read_batch("c", b"[%b]" % b",".join([event, *FILL])) is None


@native
@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"[", b"[]", b"{}", b"]", body_of()[:-1], body_of() + b"]", body_of() + b"\r\n"],
)
def test_what_is_no_batch_is_not_split(body):
    """Nor is one that stops too early or goes on too long."""
    assert read_batch("c", body) is None


@native
def test_limits_of_an_event_batch(monkeypatch):
    """Small batches, too many events, records too large for one, channels that are none."""
    few = b"[%b]" % b",".join(FILL[1:])
    assert read_batch("c", few) is None
    assert _native.split("c", few, 0, 100, 100) is not None
    assert _native.split("c", few, 0, len(FILL) - 2, 100) is None
    assert _native.split("c", few, 0, 100, 10) is None
    assert _native.split("c", few, len(few) + 1, 100, 100) is None
    assert _native.split("\ud800", few, 0, 100, 100) is None
    for channel in ("\x1f", "x" * 1025):
        assert _native.split(channel, few, 0, 100, 100) is None
    many = b"[%b]" % b",".join(FILL * 1100)
    assert _native.split("x" * 1000, many, 0, 10**6, 100) is None
    assert _native.split("x", many, 0, 10**6, 100) is not None
    monkeypatch.setattr("virta.hub.event_batch._native", None)
    assert read_batch("c", body_of()) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(["source", "id", "data", "partitionkey", "type", "", "ä"])
EVENTS = st.dictionaries(NAMES, JSON, max_size=3).map(
    lambda more: {"source": "s", "id": "i", **more}
)


@native
@settings(max_examples=300, deadline=None)
@given(
    event=EVENTS,
    ascii_=st.booleans(),
    spaces=st.booleans(),
    at=st.floats(0, 1),
    change=st.none() | st.sampled_from([bytes([n]) for n in b'"\\,:[]{}0-.eu\x00\n\xff x']),
)
@example(event={"source": "s", "id": "i"}, ascii_=True, spaces=False, at=0.5, change=b"}")
def test_an_event_batch_is_never_anything_else(event, ascii_, spaces, at, change):
    """Whatever a batch is made of, and with any byte of it changed: equal to the plain reading, or none."""
    separators = (" , ", " : ") if spaces else (",", ":")
    text = json.dumps(event, ensure_ascii=ascii_, separators=separators)
    raw = text.encode("utf-8", "surrogatepass")
    if change is not None:
        place = int(at * len(raw))
        raw = raw[:place] + change + raw[place + 1 :]
    body = body_of(raw)
    batch = read_batch("c", body)
    if batch is not None:
        check_batch(batch, body)


# The table of keys.

KEYS = st.sampled_from(["a", "b", "c", "d", "ä", "\ud800", ""])
STEPS = st.lists(
    st.tuples(st.just("claim"), KEYS)
    | st.tuples(st.sampled_from(["claim_all", "release"]), st.lists(KEYS, max_size=4))
    | st.tuples(st.just("commit_run"), st.lists(KEYS, max_size=4), st.integers(0, 2**60))
    | st.tuples(st.just("forget"), st.integers(0, 3))
    | st.tuples(st.just("offset"), KEYS),
    max_size=40,
)


@native
@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(1, 6))
def test_the_tables_of_keys_agree(steps, most):
    """The native one answers as the plain one does, whatever is done to them."""
    one, other = _native.KeyTable(most), PlainKeyTable(most)
    for name, *arguments in steps:
        assert getattr(one, name)(*arguments) == getattr(other, name)(*arguments)
        assert len(one) == len(other)


@pytest.mark.parametrize("table", [PlainKeyTable, pytest.param(KeyTable, marks=native)])
def test_a_table_of_keys_grows_and_goes_round(table):
    """Many claims, many committed, the oldest forgotten again and again: none is lost, none stays."""
    held = table(10**6)
    names = [f"key-{n}" for n in range(20_000)]
    assert held.claim_all(names)
    assert not held.claim_all(names[-1:])
    held.release(names[10_000:])
    assert len(held) == 10_000
    for first in range(0, len(names), 500):
        assert held.commit_run(names[first : first + 500], first) == 500
        if first >= 3000:
            held.forget(500)
    kept = [n for n, name in enumerate(names) if held.offset(name) is not None]
    assert kept == list(range(17_000, 20_000))
    assert [held.offset(names[n]) for n in kept] == kept
    held.forget(10**9)
    assert len(held) == 0
    small = table(1024)
    for first in range(0, len(names), 500):
        assert small.commit_run(names[first : first + 500], first) == 500
    kept = [n for n, name in enumerate(names) if small.offset(name) is not None]
    assert kept == list(range(len(names) - 1024, len(names)))


@native
def test_keys_and_digests_are_the_same_keys():
    """A key taken as a text is held against its digest, and the other way round."""
    batch = read_batch("c", body_of())
    names = [key_of("c", d.source, d.id) for d in batch.deliveries()]
    held = KeyTable(100)
    assert held.claim(names[3])
    assert not held.claim_all(batch.digests)
    assert len(held) == 1
    held.release(names)
    assert held.claim_all(batch.digests)
    assert not any(held.claim(name) for name in names)
    held.commit_run(batch.digests, 100)
    assert [held.offset(name) for name in names] == list(range(100, 100 + len(names)))
    for wrong in (7, (), [7], ["a", None]):
        with pytest.raises(TypeError):
            held.claim_all(wrong)
    for most in (0, 2**31 + 1):
        with pytest.raises(ValueError, match="at least one key"):
            KeyTable(most)


# Through the publisher.


def event_batch(*ids, a=1):
    events = [{"source": "s", "id": id_, "data": {"a": a, "id": id_}} for id_ in ids]
    batch = read_batch("c", json.dumps(events).encode())
    assert isinstance(batch, EventBatch)
    return batch


def names(prefix, number=20):
    return [f"{prefix}{n}" for n in range(number)]


async def publish(stack: HubStack, *parts):
    """Take parts for one write and wait for its end."""
    done = asyncio.get_running_loop().create_future()
    stack.publisher.add(parts, done.set_result)
    stack.publisher.write()
    return await asyncio.wait_for(done, 10)


def stored(stack):
    return [json.loads(record.value)["id"] for record in stack.log.read()]


@native
@pytest.mark.parametrize("durability", ["none", "group"])
def test_an_event_batch_is_stored_and_received(tmp_path, durability):
    """Subscribers by channel, of everything, or by data receive it; others receive nothing."""

    async def scenario(stack):
        sinks = [
            stack.attach("c", "id=b7"),
            stack.attach("c", "id=b7;id=b3"),
            stack.attach("c", "id=nobody"),
            stack.attach("other", ""),
        ]
        assert await publish(stack, event_batch(*names("a"))) is None
        assert await publish(stack, event_batch(*names("b"))) is None
        everything = stack.attach("c", "")
        assert await publish(stack, event_batch(*names("c"))) is None
        document = stack.attach("c", {"equals": {"a": 2}}, "koncorde")
        assert await publish(stack, event_batch(*names("d"), a=2)) is None
        received = [
            [event["id"] for event in sink.received] for sink in (*sinks, everything, document)
        ]
        return received, stored(stack), stack.hub.routed, stack.hub.delivered, stack.hub.position

    received, kept, routed, delivered, position = run(scenario, tmp_path, durability=durability)
    assert received == [["b7"], ["b3", "b7"], [], [], names("c") + names("d"), names("d")]
    assert kept == names("a") + names("b") + names("c") + names("d")
    assert (routed, delivered, position) == (80, 3 + 40 + 20, 80)


@native
def test_a_subscriber_gets_the_same_bytes_from_an_event_batch(tmp_path):
    """As from the events one by one, times included."""

    async def scenario(stack):
        _, subscription = stack.listen("c", "a=1")
        payloads = []
        subscription.put = payloads.append
        stack.hub.attach(subscription)
        batch = event_batch(*names("a"))
        stack.hub.deliver_batch(batch, 1_700_000_000_000_000)
        stack.hub.deliver(batch.deliveries(1_700_000_000_000_000))
        return payloads

    one, other = run(scenario, tmp_path)
    assert one == other


@native
def test_order_in_one_write_is_the_order_of_submission(tmp_path):
    """Batches and single events: the log and the subscribers get them as they were published."""

    async def scenario(stack):
        sink, other = stack.attach("c", ""), stack.attach("c", "id=b2;id=y;id=x")
        first, last = event_batch(*names("a")), event_batch(*names("b"))
        between = [draft("c", "x", {"id": "x"}), draft("d", "z"), draft("c", "y", {"id": "y"})]
        assert await publish(stack, [], first, between, last, [draft("c", "end")]) is None
        offsets = [stack.table.offset(key_of("c", "s", id_)) for id_ in ("a0", "x", "b0", "end")]
        return (
            [e["id"] for e in sink.received],
            [e["id"] for e in other.received],
            stored(stack),
            offsets,
        )

    received, some, kept, offsets = run(scenario, tmp_path)
    assert kept == [*names("a"), "x", "z", "y", *names("b"), "end"]
    assert received == [id_ for id_ in kept if id_ != "z"]
    assert some == ["x", "y", "b2"]
    assert offsets == [0, 20, 23, 43]


@native
def test_repeats_are_taken_out_of_an_event_batch(tmp_path):
    """The whole of it again, some of it, one twice in it, and one that was published alone."""

    async def scenario(stack):
        sink = stack.attach("c", "")
        await publish(stack, [draft("c", "a3")])
        await publish(stack, event_batch(*names("a")))
        await publish(stack, event_batch(*names("a")))
        await publish(stack, event_batch(*names("b"), "b1", "a1"), [draft("c", "b2")])
        await publish(stack, event_batch(*names("c")), event_batch(*names("c")))
        publisher = stack.publisher
        kept = stored(stack)
        counts = (publisher.published, publisher.duplicates, publisher.outstanding)
        return [event["id"] for event in sink.received], kept, counts, publisher.outstanding_bytes

    received, kept, counts, outstanding_bytes = run(scenario, tmp_path)
    assert kept == ["a3", *[id_ for id_ in names("a") if id_ != "a3"], *names("b"), *names("c")]
    assert received == kept
    assert counts == (60, 1 + 20 + 3 + 20, 0)
    assert outstanding_bytes == 0


@native
def test_an_event_batch_that_was_not_written_may_come_again(tmp_path, monkeypatch):
    """All get the error; its events are not known, nor are those beside it."""

    async def scenario(stack):
        sink = stack.attach("c", "")
        append = stack.log.append_many

        def fail(*_arguments, **_named):
            raise LogWriteError("the disk is gone")

        monkeypatch.setattr(stack.log, "append_many", fail)
        parts = (event_batch(*names("a")), [draft("c", "x")])
        assert isinstance(await publish(stack, *parts), LogWriteError)
        assert isinstance(await publish(stack, parts[0]), LogWriteError)
        assert len(stack.table) == 0
        monkeypatch.setattr(stack.log, "append_many", append)
        assert await publish(stack, *parts) is None
        return [event["id"] for event in sink.received], stored(stack)

    received, kept = run(scenario, tmp_path)
    assert received == kept == [*names("a"), "x"]
