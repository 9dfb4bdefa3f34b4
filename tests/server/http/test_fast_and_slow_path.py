"""The same requests on the fast path and through the parser: the same responses, the same log."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from server_harness import BATCH, STRUCTURED
from test_fast_publish import Talk

import virta

# What differs between any two answers: when they were given, their number, how long things took.
ITS_OWN = re.compile(rb"(ce-time|ce-id|Virta-Offset|Thorium-[A-Za-z-]+-Time): [^\r]*")
TEXTS = st.sampled_from(["a", "b", "ü", "\ud800", "x\ny", ""]) | st.text(max_size=6)
VALUES = TEXTS | st.sampled_from([None, 7, -0.5, True, [], {}])
EVENTS = st.fixed_dictionaries(
    {"source": TEXTS, "id": TEXTS},
    optional={"data": VALUES, "partitionkey": VALUES, "time": TEXTS},
) | st.dictionaries(st.sampled_from(["source", "id", "data"]), VALUES)
# So many that a batch goes as a whole, if nothing is odd about it.
MANY = [{"source": "s", "id": f"many-{n}"} for n in range(20)]
PRINTED = st.builds(
    lambda value, indent, ascii_: json.dumps(value, indent=indent, ensure_ascii=ascii_)
    .encode("utf-8", "replace"),
    EVENTS
    | st.lists(EVENTS, max_size=4)
    | st.lists(EVENTS, max_size=2).map(lambda some: MANY + some)
    | VALUES,
    st.sampled_from([None, None, None, 1]),
    st.booleans(),
)  # fmt: skip
BODIES = PRINTED | PRINTED.map(lambda body: body[:-1]) | st.binary(max_size=12)
KINDS = st.sampled_from(
    [STRUCTURED, STRUCTURED, BATCH, f"{STRUCTURED}; charset=utf-8", f"{BATCH};x", "text/plain"]
)
MORE = st.sampled_from(
    [b"", b"", b"", b"Origin: http://x\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n"]
)
ATTRIBUTES = st.lists(
    st.tuples(
        st.sampled_from([b"ce-source", b"ce-id", b"Ce-Id", b"CE-TIME", b"ce-x", b"ce-x-y"]),
        st.sampled_from(
            [b": a", b": b", b": b c", b":a", b": a ", b":", b": \xc3\xbc", b"", b": \x01"]
        ),
    ),
    max_size=3,
)
REQUESTS = st.lists(
    st.tuples(st.sampled_from([b"POST", b"PUT"]), KINDS, MORE, BODIES, st.integers(0, 400)),
    min_size=1,
    max_size=6,
)
# Lines of a head beside a source and an id of its own.
ODD_LINES = [
    b"ce-partitionkey: k\r\n",
    b"ce-datacontenttype: application/json\r\n",
    b"ce-datacontenttype: text/plain\r\n",
    b"ce-id: again\r\n",
    b"ce-x: \xfcml\xe4ut\r\n",
    b'ce-x: a%20"b \\" c"%C3%BC%2\r\n',
    b"ce-x: %ff\r\n",
    b"ce-type: t\r\n",
    b"ce-data: {}\r\n",
    b"ce-x: folded\r\n line\r\n",
    b"ce-x\r\n",
    b"ce-x: \x01\r\n",
    b"ce-x:\r\n",
    b"X: ce-id: 7\r\n",
    b"Connection: close\r\n",
]
_numbers = itertools.count(1)


def written(channel, way, request):
    method, kind, more, body, _ = request
    return b"%b /channels/%b HTTP/1.1\r\nHost: localhost\r\nWay: %b\r\n%bContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        method, channel, way, more, kind.encode(), len(body), body,
    )  # fmt: skip


def answers(server, pieces, expected):
    """Return the responses, up to the end of the connection."""
    with Talk(server) as talk:
        found = []
        try:
            for piece in pieces:
                talk.send(piece)
            while len(found) < expected:
                head = talk.read.readline()
                while head and not head.endswith(b"\r\n\r\n"):
                    head += talk.read.readline()
                if not head:
                    break
                if head.startswith(b"HTTP/1.1 100"):
                    continue
                length = int(re.search(rb"Content-Length: (\d+)", head)[1])
                found.append((ITS_OWN.sub(rb"\1", head), talk.read.read(length)))
        except ConnectionError:
            pass  # the server had closed before the rest was sent
        return found


def stored(server, channel):
    log = virta.open(server.data_dir / "log", visibility="committed")
    try:
        return [(bytes(r.key), bytes(r.value)) for r in log.read(topics=channel.decode())]
    finally:
        log.close()


def teach(server, channel, requests):
    """Have the heads cached, with bodies that are refused."""
    for method, kind, more, body, cut in requests:
        if body and b"close" not in more:
            answers(
                server, [written(channel, b"same", (method, kind, more, b"x" * len(body), cut))], 1
            )


@pytest.mark.parametrize("together", [False, True])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=REQUESTS)
@example(requests=[(b"POST", STRUCTURED, b"", b'{"source":"s","id":"1"}', 9)] * 3)
@example(requests=[(b"POST", STRUCTURED, b"", b'{"source":"s",\n"id":"\\ud800"}', 9)])
@example(requests=[(b"POST", STRUCTURED, b"", b'{"source":"s","id":1e1,"\\ud800":[1e999]}', 9)])
@example(requests=[(b"POST", BATCH, b"", b'[{"source":"s","id":"\\ud800","data":1e999} ]', 9)])
@example(requests=[(b"POST", STRUCTURED, b"", '{"source":"s","id":"1"}'.encode("utf-16-le"), 9)])
@example(
    requests=[
        (b"POST", BATCH, b"", json.dumps(MANY).encode(), 9),
        (b"POST", STRUCTURED, b"", b'{"source":"s","id":"many-3"}', 9),
        (b"POST", BATCH, b"", json.dumps([*MANY, {"source": "s", "id": "more"}]).encode(), 400),
        (b"POST", BATCH, b"", json.dumps([*MANY, {"source": "s"}]).encode(), 9),
        (b"POST", BATCH, b"", json.dumps([*MANY, {"source": "s", "id": 7}], indent=1).encode(), 9),
    ]
)
@example(
    requests=[(b"PUT", BATCH, b"", b'[{"source":"s","id":"1"},{"source":"s","id":1}]', 150)] * 2
)
def test_both_paths_agree(server, together, requests):
    """Any requests: single, in pieces, or pipelined."""
    number = next(_numbers)
    quick, slow = b"quick%06d" % number, b"slow!%06d" % number
    teach(server, quick, requests)
    found = {}
    for channel in (quick, slow):
        # The long way's heads are all new ones.
        whole = [
            written(channel, b"same" if channel is quick else b"%d.%d" % (number, at), request)
            for at, request in enumerate(requests)
        ]
        if together:
            found[channel] = answers(server, [b"".join(whole)], len(whole))
            continue
        found[channel] = []
        for data, request in zip(whole, requests, strict=True):
            found[channel] += answers(server, [data[: request[4]], data[request[4] :]], 1)
    assert found[quick] == found[slow]
    assert stored(server, quick) == stored(server, slow)


def binary(channel, way, attributes, body, kind=b"application/json"):
    return (
        b"POST /channels/%b HTTP/1.1\r\nHost: localhost\r\nWay: %b\r\n%b%bContent-Length: %d\r\n\r\n%b"
        % (channel, way, attributes, kind and b"Content-Type: %b\r\n" % kind, len(body), body)
    )


def check_binary(server, heads, cut, kind=b"application/json"):
    """Send binary events with these header lines on both paths."""
    number = next(_numbers)
    found = []
    for channel in (b"quick%06d" % number, b"slow!%06d" % number):
        quick = channel.startswith(b"q")
        said = []
        for turn in range(2):
            for at, (lines, body) in enumerate(heads):
                if quick:  # the same outline: other values in the same lines
                    usual = re.sub(
                        rb"(?m)^(ce-[a-z]+: )[ -~]+", rb"\1other", lines, flags=re.IGNORECASE
                    )
                    answers(server, [binary(channel, b"same", usual, b"x" * len(body), kind)], 1)
                way = b"same" if quick else b"%d.%d.%d" % (number, turn, at)
                data = binary(channel, way, lines, body, kind)
                said.append(answers(server, [data[:cut], data[cut:]], 1))
        # A head that is cached on the fast path is an event without a body too, unless its body has to be JSON.
        kept = [made for made in stored(server, channel) if b'"id":"other"' not in made[1]]
        found.append((said, kept))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("odd", [b"", *ODD_LINES])
def test_binary_events_on_both_paths(server, odd):
    """Attributes in headers, usual and odd ones: the same responses, the same log."""
    plain = b"ce-source: s\r\nCe-Id: %b\r\nce-time: 2026-01-01T00:00:00Z\r\n"
    bodies = [b'{"a":1}', b'{"a":\n1}', b'{"a"', b'"\\ud800"', b"\xff"]
    heads = [(plain % b"%d" % n + odd, body) for n, body in enumerate(bodies)]
    heads += [(odd + plain % b"a longer id", bodies[0]), (odd, bodies[0])]
    said, kept = check_binary(server, heads, 10**6)
    assert len(said) == 14
    if not odd:
        assert len(kept) == 4


@pytest.mark.parametrize(
    "kind",
    [b"", b"text/plain", b"image/png", b"Application/JSON ; x=1", b"text/xml;charset=latin1"],
)
def test_bodies_of_any_type_on_both_paths(server, kind):
    """Every content type, and none: the same responses, the same log."""
    plain = b"ce-source: s\r\nce-id: %b\r\n"
    bodies = [b'{"a":1}', b"[1,\n2]", b"{", b"\xc3\xbc", b"\xff\x00", b"", b'"\\ud800"', b"1e999"]
    heads = [(plain % b"%d" % n, body) for n, body in enumerate(bodies)]
    _, kept = check_binary(server, heads, 10**6, kind)
    ids = {json.loads(value)["id"] for _, value in kept}
    assert len(ids) == (4 if kind.startswith(b"App") else len(bodies))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(ATTRIBUTES, min_size=1, max_size=3), cut=st.integers(0, 300))
def test_both_paths_agree_on_attributes(server, lines, cut):
    """Any header lines."""
    own = b"ce-source: s\r\nce-id: 1\r\n"
    heads = [(own + b"".join(b"%b%b\r\n" % line for line in some), b"[1]") for some in lines]
    check_binary(server, heads, cut)


def test_the_plain_engine_agrees(start, tmp_path):
    """Without native code batches are read event by event: the same responses, the same log."""
    bodies = [
        MANY,
        [*MANY, {"source": "s", "id": "new", "partitionkey": "k"}],
        [{"source": "s", "id": f"ü{n}", "data": {"n": n % 7}} for n in range(300)],
        [*MANY, {"source": "s"}],
        [*MANY[:3]],
        [{"source": "s", "id": f"last-{n % 30}"} for n in range(60)],
    ]
    requests = [(b"POST", BATCH, b"", json.dumps(body).encode(), 0) for body in bodies * 2]
    found = []
    for plain in ("", "1"):
        with start(
            "--durability", "none", data_dir=tmp_path / f"p{plain}", environ={"VIRTA_PLAIN": plain}
        ) as server:
            said = [answers(server, [written(b"c", b"same", r)], 1) for r in requests]
            found.append((said, stored(server, b"c")))
    assert found[0] == found[1]
    assert len(found[0][1]) == 20 + 1 + 300 + 30


def test_nothing_behind_a_closing_refusal_is_published(server):
    """Pipelined in one write behind a response that ends the connection: not answered, so not stored."""
    number = next(_numbers)
    channel = b"behind%06d" % number
    refused = (b"POST", "text/plain", b"", b"no event", 0)
    good = (b"POST", STRUCTURED, b"", b'{"source":"s","id":"1"}', 0)
    for first in ([refused], [good, refused]):
        requests = [*first, (b"POST", STRUCTURED, b"", b'{"source":"s","id":"9"}', 0)]
        whole = b"".join(written(channel, b"%d" % number, request) for request in requests)

        assert len(answers(server, [whole], len(requests))) == len(first)
    assert [json.loads(value)["id"] for _, value in stored(server, channel)] == ["1"]
