"""The same record has the same answer: in the server, in the embedded matcher and in Spark's executors."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

import virta
from odd_records import FILTERS, ODD
from virta.errors import EventError
from virta.event import Event, document_of, filter_view, record_event
from virta.event.document import read_event
from virta.filters import parse
from virta.hub.delivery import from_record
from virta.match import Matcher
from virta.match.events import parse_event


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


@pytest.mark.parametrize("engine", ["native", "plain"])
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
