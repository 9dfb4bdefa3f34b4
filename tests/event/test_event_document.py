"""The same record has the same answer: in the server, in the embedded matcher and in Spark's executors."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

import virta
from odd_records import FILTERS, ODD
from virta import native
from virta.errors import EventError
from virta.event import Event, decode_batch, document_of, filter_view, record_event
from virta.event.document import read_event, read_published
from virta.filters import parse
from virta.hub.delivery import from_record
from virta.match import Matcher
from virta.match.events import parse_event

ENGINES = ["plain"] if native.load("virta.match._core") is None else ["native", "plain"]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The odd values as records of a log."""
    with virta.open(tmp_path_factory.mktemp("odd") / "log") as log:
        log.append_many([("odd", "", value) for value, _ in ODD])
        return list(log.read())


@pytest.mark.parametrize(("value", "is_event"), ODD)
def test_what_is_an_event(value, is_event):
    """The log's readers and `Event.from_json` agree on what is an event, and on its source and id."""
    found = read_event(value)

    assert (found is not None) is is_event
    try:
        event = Event.from_json(value, lenient=True)
    except EventError:
        assert not is_event
        return
    assert (event.source, event.id) == (found.source, found.id)
    assert parse_event(found.value) == parse_event(event.to_json())


def test_delivery_is_the_event_of_the_record(records):
    """What consumers of a channel get is what filters were asked about."""
    for record in records:
        delivery, event = from_record(record), record_event(record)
        assert (delivery.source, delivery.id) == (event.source, event.id)
        assert parse_event(delivery.value) == parse_event(event.value)
        document = document_of(event.value, event.id)
        assert parse_event(document_of(delivery.value, delivery.id)) == parse_event(document)
        assert delivery.value.decode().splitlines() == [delivery.value.decode()]


def test_numbers_and_records_that_are_no_events(records):
    """A number becomes the text it is written as; what is no event is wrapped, with all that is known."""
    by_value = {bytes(record.value): record for record in records}
    number = record_event(by_value[b'{"id": 7e0 ,"source":"s","data":{"a":1}}'])
    plain = by_value[b"plain text"]
    wrapped = json.loads(record_event(plain).value)

    assert (number.id, json.loads(number.value)["id"]) == ("7e0", "7e0")
    assert wrapped["type"] == "virta.record"
    assert (wrapped["source"], wrapped["id"]) == ("/log/odd", str(plain.offset))
    assert wrapped["data_base64"] == "cGxhaW4gdGV4dA=="
    assert filter_view(by_value[b'{"a":1}'], "koncorde") == (
        b'{"_id":"%d","a":1}' % by_value[b'{"a":1}'].offset
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("dialect", "text"), FILTERS)
def test_both_engines_agree_with_the_evaluator(records, engine, dialect, text):
    """The matcher's answers about every record's view are those of the filter itself."""
    filter_ = parse(text, dialect)
    matcher = Matcher(engine=engine)
    matcher.add(filter_)
    for record in records:
        view = filter_view(record, dialect)
        assert bool(matcher.match(view)) is filter_.matches(parse_event(view)), record.value


@pytest.mark.parametrize(("dialect", "text"), FILTERS)
def test_executors_agree_with_the_matcher(records, dialect, text, tmp_path):
    """Spark's filter sets, as its workers use them, answer as the matcher does about every event."""
    from virta.spark.matching.filter_set import opened_set, texts_of, write_set

    filter_ = parse(text, dialect)
    found = opened_set(write_set({"f": filter_}, str(tmp_path)))
    events = [record for record in records if read_event(bytes(record.value)) is not None]
    column = pa.array([bytes(record.value) for record in events], pa.binary())
    on = "data" if dialect == "koncorde" else "event"

    hits = found.hits(texts_of(column, on, text_ids=found.sees_ids)).tolist()

    assert hits == [filter_.matches(parse_event(filter_view(record, dialect))) for record in events]


def test_what_is_no_event_matches_nothing_in_spark():
    """Spark shows records that are no events as `invalid` and matches none of them, whatever the filter."""
    from virta.spark.matching.filter_set import document_of as spark_document

    assert {spark_document(value) for value, is_event in ODD if not is_event} == {b""}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"source":"s","id":"1"}', ("s", "1", b'{"source":"s","id":"1"}', None)),
        (b'{"source":"s","id":7}', ("s", "7", b'{"source":"s","id":"7"}', None)),
        (b'{"source":"s","id":1e999}', ("s", "1e999", b'{"source":"s","id":"1e999"}', None)),
        (b'{"source":"s",\n"id":"1"}', ("s", "1", b'{"source":"s","id":"1"}', None)),
        (
            b'{"source":"s","id":"1","partitionkey":"k"}',
            ("s", "1", b'{"source":"s","id":"1","partitionkey":"k"}', "k"),
        ),
        (
            b'{"source":"s","id":"1","partitionkey":5}',
            ("s", "1", b'{"source":"s","id":"1","partitionkey":5}', None),
        ),
        (
            b'{"source":"s","id":"\\ud800","data":"\\udfff"}',
            ("s", "?", b'{"source":"s","id":"?","data":"?"}', None),
        ),
    ],
)
def test_what_publishers_may_send(raw, expected):
    """Ids that are numbers, line ends and lone surrogates are accepted, and stored as every reader accepts them."""
    event = read_published(raw)

    assert (event.source, event.id, event.value, event.partition_key) == expected
    assert read_event(event.value) is not None


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid-json-body"),
        (b"[]", "invalid-json-body"),
        (b"5", "invalid-json-body"),
        (b'{"source":"s","id":"1","n":NaN}', "invalid-json-body"),
        (b'{"source":"s","id":"1","data":%b%b}' % (b"[" * 900, b"]" * 900), "invalid-json-body"),
        (b'{"id":"1"}', "missing-event-source"),
        (b'{"source":5,"id":"1"}', "missing-event-source"),
        (b'{"source":"s"}', "missing-event-id"),
        (b'{"source":"s","id":null}', "missing-event-id"),
        (b'{"source":"s","id":true}', "missing-event-id"),
        (b'{"source":"\\ud800"}', "missing-event-id"),
    ],
)
def test_what_publishers_may_not_send(raw, code):
    """Each refusal has its code."""
    with pytest.raises(EventError) as refused:
        read_published(raw)

    assert refused.value.code == code


@pytest.mark.parametrize("depth", [10, 899, 900, 901, 3000])
def test_the_limit_of_nesting_is_the_same_everywhere(depth):
    """Strict and lenient parsing, records and both engines of the matcher agree about an event's depth."""
    inner = b"[" * (depth - 1) + b"]" * (depth - 1)
    raw = b'{"specversion":"1.0","type":"t","source":"/s","id":"1","data":%b}' % inner

    def accepted(parse, *arguments):
        try:
            return parse(*arguments) is not None
        except EventError:
            return False

    outcomes = {
        "strict": accepted(Event.from_json, raw),
        "lenient": accepted(lambda: Event.from_json(raw, lenient=True)),
        "batch": accepted(decode_batch, b"[%b]" % raw),
        "binary": accepted(
            Event.from_binary,
            {"ce-specversion": "1.0", "ce-type": "t", "ce-source": "/s", "ce-id": "1"},
            inner,
        ),
        "published": accepted(read_published, raw),
        "record": accepted(read_event, raw),
        "plain": accepted(Matcher(engine="plain").match, raw),
        "auto": accepted(Matcher().match, raw),
    }

    if depth <= 900:
        assert set(outcomes.values()) == {True}
    else:
        outcomes.pop("binary")  # text without a content type that is no JSON is a string
        assert set(outcomes.values()) == {False}
