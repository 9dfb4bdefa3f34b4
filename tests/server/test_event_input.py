"""What publishers send, read without a server: whatever is taken can be read again by everyone."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_harness import BATCH, STRUCTURED

from virta import native
from virta.errors import EventError, RequestError
from virta.event import BATCH_EVENTS_MAX, decode_batch
from virta.event.document import document_of
from virta.filters import parse
from virta.hub.delivery import Delivery, from_record
from virta.hub.event_batch import EventBatch
from virta.hub.event_matcher import all_satisfy, read_heads
from virta.log.record import Name, Record
from virta.match import Matcher
from virta.server.event_input import read_events, read_small, read_structured

_native = native.load("virta.hub._native")
ODD = [
    b'{"source":"s","id":"\\ud800","data":{"a":1}}',
    b'{"source":"s",\n"id":"lines","data":{"a":"\\udc00\\ud83d\\ude00"}}',
    b'{"source":"s","id":7,"x\\ud800":1e999,"data":{"a":1e999}}',
    b'{"source":"s","id":"subject","subject":1e999,"data":{"a":1}}',
    b'{"source":"s","id":"digits","subject":%b,"data":{"a":%b}}' % (b"9" * 400, b"9" * 400),
    b'[{"source":"s","id":"in","data":{"a":1e999}}, {"source":"s","id":"x\\ud801","data":{"a":1}}]',
]


def kept(draft):
    """The event as it is read from the log, by a consumer of history or after a restart."""
    return from_record(Record(Name(b"c"), Name(b""), draft.value, 7, 1_000_000))


@pytest.mark.parametrize("body", ODD)
def test_odd_events_are_the_same_to_everyone(body):
    """JSON that UTF-8 or a double cannot hold: the log has the event that was heard, filters can read it."""
    mode = BATCH.encode() if body.startswith(b"[") else STRUCTURED.encode()
    matcher = Matcher()
    matcher.add(parse({"exists": "a"}, "koncorde"))
    for draft in read_events("c", [], mode, mode, body):
        again = kept(draft)
        assert (again.source, again.id, again.value) == (draft.source, draft.id, draft.value)
        assert len(matcher.match(document_of(draft.value, draft.id))) == 1


def test_halves_of_pairs_become_question_marks():
    """Only they: pairs, other escapes and the rest of the spelling stay."""
    body = b'{"source": "s", "id": "\\ud800", "data": "\\\\ud800 \\ud83d\\ude00 \\udc00 \\n"}'
    (draft,) = read_events("c", [], STRUCTURED.encode(), STRUCTURED.encode(), body)
    wanted = b'{"source": "s", "id": "?", "data": "\\\\ud800 \\ud83d\\ude00 ? \\n"}'
    assert (draft.id, draft.value) == ("?", wanted)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("odd", [b"", b"\n"])
def test_a_batch_has_one_limit(more, odd):
    """As a whole, event by event and in the library: the same number of events, or a refusal."""
    count = BATCH_EVENTS_MAX + more
    one = b'{"specversion":"1.0","type":"t","source":"s","id":"%d"%b}'
    body = b"[" + b",".join(one % (n, odd) for n in range(count)) + b"]"
    mode = BATCH.encode()

    if not more:
        events = read_events("c", [], mode, mode, body)
        assert isinstance(events, list if odd or _native is None else EventBatch)
        assert len(events) == len(decode_batch(body)) == count
        return
    with pytest.raises(RequestError) as refused:
        read_events("c", [], mode, mode, body)
    with pytest.raises(EventError) as caught:
        decode_batch(body)
    assert (refused.value.status, refused.value.code) == (413, caught.value.code)
    assert refused.value.members == {"maxEvents": BATCH_EVENTS_MAX}


JSON_WORDS = (
    rb'{ } [ ] , : " \\ "source" "id" "partitionkey" "data" "user" "someone" "s" "1" 1 -0 1e999 1.0 null true NaN'
    rb' "\ud800" "\u0000" {"source":"s","id":"i","data":{"user":"someone"}} "\u00fc"'
)
JSON_PIECES = [*JSON_WORDS.split(), b" ", b"\n", b"\r", b"\t", b"\0"]
JSON_PIECES += [b"\xef\xbb\xbf", b"\xc3\xbc", b"\xff", b"\xed\xa0\x80"]
MEMBERS = st.sampled_from(
    [
        b'"source":"s"', b'"source":""', b'"source":7', b'"source":"\\ud83d\\ude00"', b'"s\\u006furce":"t"',
        b'"id":"i"', b'"id":"\xc3\xbc"', b'"id":7', b'"id":null', b'"id":1e999', b'"id" : "\\n"',
        b'"partitionkey":"p"', b'"partitionkey":7', b'"partitionkey":"%b"' % (b"k" * 40_000),
        b'"data":{"user":"someone"}', b'"data":{"user":"other","user":"someone"}',
        b'"data":{"user":"someone","user":"other"}', b'"data":{"user":["someone"]}', b'"data":1e999',
        b'"data":{"user":"\\u0073omeone"}', b'"data":"%b"' % (b"x" * 9000), b'"data":%b1%b' % (b"[" * 950, b"]" * 950),
        b'"data.user":"someone"', b'"":{"data":{"user":"someone"}}', b'"id":"%b"' % (b"i" * 5000),
    ]
)  # fmt: skip
BODIES = st.lists(MEMBERS, max_size=6).map(lambda members: b"{%b}" % b",".join(members)) | st.lists(
    st.sampled_from(JSON_PIECES), max_size=12
).map(b"".join)
ROW_FILTER = parse("user=someone")
DOCUMENT_FILTER = parse({"equals": {"user": "someone"}}, "koncorde")


def outcome(read):
    """What was read, or how it was refused."""
    try:
        return read()
    except RequestError as error:
        return error.status, error.code, error.message, error.members


@settings(max_examples=400, deadline=None)
@given(
    bodies=st.lists(BODIES | st.binary(max_size=8), min_size=1, max_size=9), cut=st.integers(0, 40)
)
@example(
    bodies=[b'{"source":"s","id":"1","data":{"user":"someone"}},{"source":"s","id":"2"}'] * 2, cut=0
)
@example(
    bodies=[b'{"source":"s","id":"1"}\n{"source":"s","id":"2","data":{"user":"someone"}}'] * 2,
    cut=0,
)
def test_events_read_together_are_those_read_alone(bodies, cut):
    """Any bytes: the same event or refusal, and an event satisfies the row filter together only if alone."""
    bodies = [*bodies, bodies[0][:cut]]
    for row_filter in (None, ROW_FILTER, DOCUMENT_FILTER):
        heads = read_heads(row_filter, bodies)
        assert len(heads) == len(bodies)
        for body, head in zip(bodies, heads, strict=True):
            alone = outcome(lambda body=body: read_structured("c", body))
            assert outcome(lambda body=body, head=head: read_small("c", body, head)) == alone
            if head is None:
                continue
            assert _native is not None
            if isinstance(alone, Delivery) and head[2] is not None:
                satisfied = row_filter is not None and all_satisfy(row_filter, [alone])
                assert bool(head[0]) == satisfied


@pytest.mark.parametrize("row_filter", [ROW_FILTER, DOCUMENT_FILTER, parse("")])
def test_which_events_are_read_together(row_filter):
    """The common form, with any filter."""
    if _native is None:
        pytest.skip("needs the native engine")
    common = b'{"source":"s","id":"\xc3\xbc","partitionkey":"k","data":{"user":"someone"}}'
    head, none = read_heads(row_filter, [common, b'{"source":"s",\n"id":"1"}'])
    assert head == (int(row_filter.id != parse("").id), "s", "ü", "k")
    assert none is None
    draft = read_small("c", common, head)
    assert (draft.source, draft.id, draft.key, draft.value) == ("s", "ü", b"k", common)
