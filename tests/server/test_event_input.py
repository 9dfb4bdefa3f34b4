"""What publishers send, read without a server: whatever is taken can be read again by everyone."""

from __future__ import annotations

import pytest
from server_harness import BATCH, STRUCTURED

from virta import native
from virta.errors import EventError, RequestError
from virta.event import BATCH_EVENTS_MAX, decode_batch
from virta.event.document import document_of
from virta.filters import parse
from virta.hub.delivery import from_record
from virta.hub.event_batch import EventBatch
from virta.log.record import Name, Record
from virta.match import Matcher
from virta.server.event_input import read_events

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
