"""The engine: whatever is asked, there is a reply; administration, settings and recurring jobs."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from journal_support import Clock, Console

from virta.journal.engine import JournalEngine
from virta.journal.protocol import commands
from virta.journal.protocol import messages as m
from virta.journal.protocol.codec import RequestParser, encode_reply, encode_request
from virta.journal.protocol.messages import Request, Type, Value
from virta.journal.protocol.rules import RULES, Rule
from virta.journal.sessions import Session
from virta.journal.storage import records as images

T0 = 1_700_000_000_000_000
KEYS = st.sampled_from(
    [
        b"",
        b"a",
        b"b",
        b"c",
        b"http://h/1",
        b"virta:domain:h",
        b"virta:cron:x",
        b"virta:admin",
        b"virta:done:x",
        b"h:000:%020d:%016x" % (T0, 1),
        b"h:000:%020d:%016x" % (T0, 2),
    ]
)
TIMES = st.none() | st.integers(T0 - 5, T0 + 50) | st.sampled_from([0, 2**64 - 1])
VALUES = st.none() | st.builds(
    Value,
    st.integers(1, 5),
    st.binary(max_size=9)
    | st.sampled_from([b"{}", b'{"do":"stats"}', b'{"do":"list"}', b'{"paused":true}', b"[]"])
    | st.sampled_from(
        [json.dumps({"do": do, "domain": "h"}).encode() for do in ("kick", "requeue", "drop")]
    ),
)


@st.composite
def any_request(draw):
    """Mostly of the shape its function wants, so that more than refusals is tried."""
    function = draw(st.integers(0, 15))
    rule = RULES.get(function, Rule())
    if draw(st.integers(0, 3)):
        return Request(
            function,
            1,
            draw(st.integers(0, 0xFFFF)) & rule.flags,
            draw(st.sampled_from([0, 0, T0, T0 + 1])),
            draw(TIMES) if rule.timeout else None,
            draw(st.none() | st.sampled_from([0, 5, 2**64 - 1])) if rule.ttl else None,
            draw(st.integers(0, 300)) if rule.count else 0 if rule.queries == (1,) else None,
            draw(KEYS),
            draw(KEYS),
            None if rule.value is None else draw(VALUES),
            draw(st.sampled_from(rule.queries)),
        )
    return Request(
        function,
        1,
        draw(st.integers(0, 0xFFFF)) & m.REQUEST_FLAGS,
        draw(st.sampled_from([0, T0, T0 + 1, T0 + 10**10])),
        draw(TIMES),
        draw(st.none() | st.sampled_from([0, 5, 2**64 - 1])),
        draw(st.none() | st.integers(0, 300)),
        draw(KEYS),
        draw(KEYS),
        draw(VALUES),
        draw(st.integers(0, 3)),
    )


@settings(max_examples=300)
@given(st.lists(st.tuples(any_request(), st.booleans(), st.integers(0, 9)), max_size=30))
def test_any_request_gets_a_reply(steps):
    """Any sequence of any requests from a client and a peer: replies that encode, images that encode."""
    clock = Clock(T0)
    engine = JournalEngine(clock)
    engine.start_copying()
    sessions = [Session(lambda _: None), Session(lambda _: None)]
    sessions[1].link_to("p")
    for request, peer, pause in steps:
        # What the wire would make of it, so that only what can be sent is tried.
        if request.query != m.QUERY_RANGE:
            request.key2 = b""
        for parsed in RequestParser().feed(encode_request(request)):
            encode_reply(engine.handle(parsed, sessions[peer]))
        clock.now += pause
        engine.tick()
        images.drain(engine, clock.now)
    for outgoing in engine.replication.take(clock.now):
        encode_request(outgoing)
    for session in sessions:
        engine.close(session)


def test_touch_and_value_types_over_the_wire():
    """A void value has no data; a type is kept as it came."""
    console = Console()
    console.call(commands.set_("v", Value(Type.VOID, b"")))

    assert console.call(commands.get("v", default=1)) is None
