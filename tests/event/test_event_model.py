"""The CloudEvents model: rules, forms, round trips, and agreement with the official SDK."""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest
from cloudevents.core.bindings import http as sdk_http
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from virta.errors import EventError, VirtaError
from virta.event import (
    BATCH_EVENTS_MAX,
    BATCH_TYPE,
    EVENT_BYTES_MAX,
    STRUCTURED_TYPE,
    UNSET,
    Event,
    decode_batch,
    encode_batch,
    format_time,
    from_http,
    is_json_type,
    parse_time,
)
from virta.event.rules import ATTRIBUTE_CHARS_MAX, CONTEXT, DATA_MEMBERS, EXTENSIONS_MAX

MINIMAL = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}


def text(**changes) -> bytes:
    members = {**MINIMAL, **changes}
    return json.dumps({k: v for k, v in members.items() if v is not ...}).encode()


def refused(call, *args, **kwargs) -> EventError:
    with pytest.raises(EventError) as caught:
        call(*args, **kwargs)
    return caught.value


def test_examples_of_the_documentation(tmp_path, monkeypatch):
    """The code in docs/events.md runs unchanged, one example after the other."""
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    monkeypatch.chdir(tmp_path)

    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})


# The value.


def test_event_is_immutable():
    """Neither a field nor an extension of an event can be set."""
    event = Event(id="1", source="/s", type="t", extensions={"a": 1})

    with pytest.raises(AttributeError):
        event.id = "2"
    with pytest.raises(TypeError):
        event.extensions["a"] = 2


def test_extensions_are_copied():
    """Changing the mapping an event was made from does not change the event."""
    mine = {"a": 1}
    event = Event(id="1", source="/s", type="t", extensions=mine)
    mine["a"] = 2

    assert event.extensions == {"a": 1}


def test_equality_is_by_meaning():
    """Spelling does not matter, the data's kind does, and equal events have equal hashes."""
    made = Event(id="1", source="/s", type="t", data={"a": 1.5})
    parsed = Event.from_json(
        b'{ "data": {"a":1.50}, "type":"t","source":"/s","id":"1","specversion":"1.0"}'
    )

    assert made == parsed
    assert hash(made) == hash(parsed)
    assert made != made.replace(data=UNSET)
    assert made.replace(data=b"x") != made.replace(data="x")
    assert made.replace(data=None) != made.replace(data=UNSET)
    assert made != "event"


def test_new_fills_in_id_and_time():
    """`Event.new` makes distinct events that happen now, other attributes become extensions."""
    before = datetime.now(UTC)
    one = Event.new("t", "/s", {"a": 1}, subject="x", partitionkey="k")
    two = Event.new("t", "/s")

    assert one.id != two.id
    assert before <= one.moment <= datetime.now(UTC)
    assert (one.subject, one.partition_key, two.partition_key) == ("x", "k", "")
    assert one.has_data
    assert not two.has_data


def test_datetimes_and_bytes_become_canonical_text():
    """Timestamps are RFC 3339 with Z, Binary is Base64 (core, Type System)."""
    moment = datetime(2018, 4, 5, 17, 31, tzinfo=UTC)
    event = Event(
        id="1", source="/s", type="t", time=moment, extensions={"a": moment, "b": b"\x00\xff"}
    )

    assert event.time == "2018-04-05T17:31:00Z"
    assert event.extensions == {"a": "2018-04-05T17:31:00Z", "b": "AP8="}
    assert (
        format_time(moment.astimezone(timezone(timedelta(hours=2)))) == "2018-04-05T19:31:00+02:00"
    )
    assert refused(format_time, datetime(2018, 4, 5)).code == "invalid-time"  # noqa: DTZ001


def test_replace_checks_again():
    """A changed copy obeys the rules too, and does not carry stale bytes."""
    event = Event.from_json(text(a="x"))
    changed = event.replace(subject="new")

    assert json.loads(changed.to_json())["subject"] == "new"
    assert refused(event.replace, source="").attribute == "source"


# Rules.


@pytest.mark.parametrize(
    ("changes", "code", "attribute"),
    [
        ({"id": ...}, "missing-event-id", "id"),
        ({"id": None}, "missing-event-id", "id"),
        ({"id": ""}, "missing-event-id", "id"),
        ({"id": True}, "missing-event-id", "id"),
        ({"id": {}}, "missing-event-id", "id"),
        ({"source": ...}, "missing-event-source", "source"),
        ({"source": ""}, "missing-event-source", "source"),
        ({"source": 5}, "missing-event-source", "source"),
        ({"source": "a b"}, "invalid-uri", "source"),
        ({"source": "http://[x"}, "invalid-uri", "source"),
        ({"source": "1:a"}, "invalid-uri", "source"),
        ({"source": "/a%zz"}, "invalid-uri", "source"),
        ({"source": "/a#b#c"}, "invalid-uri", "source"),
        ({"source": "/ä"}, "invalid-uri", "source"),
        ({"type": ...}, "missing-event-type", "type"),
        ({"type": ""}, "missing-event-type", "type"),
        ({"type": "a\nb"}, "invalid-attribute", "type"),
        ({"type": "a\x7fb"}, "invalid-attribute", "type"),
        ({"type": "a\ufffeb"}, "invalid-attribute", "type"),
        ({"type": "a\U0001ffffb"}, "invalid-attribute", "type"),
        ({"specversion": ...}, "missing-event-specversion", "specversion"),
        ({"specversion": "0.3"}, "unsupported-specversion", "specversion"),
        ({"specversion": 1.0}, "invalid-attribute", "specversion"),
        ({"subject": ""}, "invalid-attribute", "subject"),
        ({"subject": 5}, "invalid-attribute", "subject"),
        ({"dataschema": "/relative"}, "invalid-uri", "dataschema"),
        ({"dataschema": ""}, "invalid-attribute", "dataschema"),
        ({"datacontenttype": "json"}, "invalid-content-type", "datacontenttype"),
        ({"datacontenttype": "a/b; x"}, "invalid-content-type", "datacontenttype"),
        ({"time": "yesterday"}, "invalid-time", "time"),
        ({"Ext": "x"}, "invalid-attribute-name", "Ext"),
        ({"my_ext": "x"}, "invalid-attribute-name", "my_ext"),
        ({"": "x"}, "invalid-attribute-name", ""),
        ({"a" * 129: "x"}, "invalid-attribute-name", "a" * 129),
        ({"ext": 1.5}, "invalid-attribute", "ext"),
        ({"ext": [1]}, "invalid-attribute", "ext"),
        ({"ext": {"a": 1}}, "invalid-attribute", "ext"),
        ({"ext": 2**31}, "invalid-attribute", "ext"),
        ({"ext": "x" * (ATTRIBUTE_CHARS_MAX + 1)}, "attribute-too-long", "ext"),
        ({f"e{n}": "x" for n in range(EXTENSIONS_MAX + 5)}, "too-many-attributes", None),
        ({"data": 1, "data_base64": "AA=="}, "invalid-data-field", "data"),
        ({"data_base64": 5}, "invalid-data-field", "data"),
        ({"data_base64": "A"}, "invalid-data-field", "data"),
        ({"data_base64": "A-_="}, "invalid-data-field", "data"),
        ({"data": {"a": 1}, "datacontenttype": "text/plain"}, "invalid-data-field", "data"),
    ],
)
def test_bad_events_are_refused(changes, code, attribute):
    """Each rule has its code and names its attribute; the message is a sentence for people."""
    error = refused(Event.from_json, text(**changes))

    assert (error.code, error.attribute) == (code, attribute)
    assert isinstance(error, VirtaError)
    assert 10 < len(error.message) < 250


@pytest.mark.parametrize(
    "source",
    [
        "https://github.com/cloudevents",
        "mailto:cncf-wg-serverless@lists.cncf.io",
        "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66",
        "/cloudevents/spec/pull/123",
        "/sensors/tn-1234567/alerts",
        "1-555-123-4567",
        "//host:8080/a?b=c#d",
        "http://user@[::1]:80/",
        "a/b:c",
        "?q",
        "#f",
        "%C3%A4",
        "s:",
    ],
)
def test_sources_of_the_core_are_accepted(source):
    """URI references of every shape pass, first those the specification lists."""
    assert Event.from_json(text(source=source)).source == source


@pytest.mark.parametrize(
    ("written", "micros"),
    [
        ("2018-04-05T17:31:00Z", 0),
        ("2018-04-05t17:31:00z", 0),
        ("2018-04-05T17:31:00.1Z", 100_000),
        ("2018-04-05T17:31:00.1234567899+02:00", 123_456),
        ("2018-04-05T17:31:00-23:59", 0),
        ("2016-12-31T23:59:60Z", 999_999),
    ],
)
def test_times_of_rfc_3339(written, micros):
    """Any fraction, either case, any zone and a leap second; the text itself is kept."""
    event = Event.from_json(text(time=written))

    assert event.time == written
    assert event.moment.microsecond == micros
    assert event.moment.tzinfo is not None


@pytest.mark.parametrize(
    "written",
    [
        "2018-04-05", "2018-04-05 17:31:00Z", "2018-04-05T17:31Z", "2018-04-05T17:31:00",
        "2018-02-30T00:00:00Z", "2018-04-05T24:00:00Z", "2018-04-05T17:31:61Z", "2018-W14-4T17:31:00Z",
        "2018-04-05T17:31:00+24:00", "2018-04-05T17:31:00.Z", "٢٠١٨-04-05T17:31:00Z", "0000-01-01T00:00:00Z",
    ],
)  # fmt: skip
def test_times_that_are_not(written):
    """ISO 8601 has more forms than RFC 3339; those are refused."""
    assert refused(parse_time, written).code == "invalid-time"


def test_null_attributes_are_unset():
    """A null attribute is as good as absent, a null payload is a payload (JSON format §2.2, §3.1.1)."""
    event = Event.from_json(text(subject=None, ext=None, time=None, data=None))

    assert (event.subject, event.time, dict(event.extensions)) == (None, None, {})
    assert event.has_data
    assert event.data is None
    assert Event.from_json(text()).data is UNSET


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (None, True), ("application/json", True), ("Text/JSON; charset=utf-8", True),
        ("application/vnd.x+json", True), ("application/xml", False), ("text/plain", False),
        ("application/jsonl", False),
    ],
)  # fmt: skip
def test_which_content_types_are_json(content_type, expected):
    """`*/json` and `*/*+json` hold JSON values, and so does an event without one (§3.1.1)."""
    assert is_json_type(content_type) is expected


def test_fields_are_not_extensions():
    """An attribute of the specification cannot be smuggled in as an extension."""
    error = refused(Event, id="1", source="/s", type="t", extensions={"subject": "x"})

    assert error.code == "invalid-attribute-name"


# JSON.


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"nul", b"[]", b'"x"', b"5", b"null", b"{}x", b"\xff", b'{"id":"\\ud800"}', b'{"a":NaN}',
        b"[" * 100_000, b'{"a":' * 50_000, b'{"x":"\xff"}',
    ],
    ids=lambda raw: repr(raw[:12]),
)  # fmt: skip
def test_not_an_event_at_all(raw):
    """Anything but one JSON object is `invalid-json-body`, however deep or garbled."""
    assert refused(Event.from_json, raw).code == "invalid-json-body"


def test_bytes_are_kept():
    """What was parsed is written back byte for byte; a line of it has no line breaks."""
    raw = text(data={"a": "b\n"}).replace(b", ", b",\r\n  ").replace(b'"b', b'"\\u0062')
    event = Event.from_json(raw)

    assert event.to_json() == raw == event.raw
    assert b"\n" not in event.to_line()
    assert b"\r" not in event.to_line()
    assert Event.from_json(event.to_line()) == event
    assert Event.from_json(raw.decode()) == event
    assert Event.from_json(memoryview(raw)) == event


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        ("7", "7"),
        ("-1", "-1"),
        ("1.5", "1.5"),
        ("12345678901234567890123", "12345678901234567890123"),
    ],
)
def test_number_ids_become_text(number, expected):
    """A JSON number as id is its text from then on, also in the JSON; data keeps its spelling."""
    raw = (
        b'{"id":%s,"specversion":"1.0","source":"/s","type":"t","data":{"n":1.10}}'
        % number.encode()
    )
    for lenient in (False, True):
        event = Event.from_json(raw, lenient=lenient)

        assert event.id == expected
        assert event.to_json() == raw.replace(number.encode(), b'"%s"' % expected.encode(), 1)


def test_limits():
    """An event or a batch over its limit is refused before it is parsed."""
    assert refused(Event.from_json, b" " * (EVENT_BYTES_MAX + 1)).code == "event-too-large"
    assert refused(Event.from_binary, {}, b" " * (EVENT_BYTES_MAX + 1)).code == "event-too-large"
    batch = b"[" + b"0," * BATCH_EVENTS_MAX + b"0]"
    assert refused(decode_batch, batch).code == "batch-too-large"


def test_lenient_takes_what_thorium_takes():
    """Lenient parsing needs only source and id; other members stay, whatever their name or type."""
    raw = b'{"source":"a b","id":"1","My_Ext":[1],"subject":5,"data":{"x":1}}'
    event = Event.from_json(raw, lenient=True)

    assert (event.source, event.id, event.type, event.subject) == ("a b", "1", "", None)
    assert event.extensions == {"My_Ext": [1], "subject": 5}
    assert event.to_json() == raw
    assert event.to_dict() == json.loads(raw)
    assert refused(Event.from_json, b'{"id":"1"}', lenient=True).code == "missing-event-source"
    assert refused(Event.from_json, b'{"source":"a"}', lenient=True).code == "missing-event-id"


def test_lenient_keeps_data_that_is_none():
    """What cannot be data stays a member; a number beyond a double is infinite."""
    bad = Event.from_json(b'{"source":"a","id":"1","data_base64":"!!"}', lenient=True)
    both = Event.from_json(b'{"source":"a","id":"1","data":1,"data_base64":"AA=="}', lenient=True)
    huge = Event.from_json(b'{"source":"a","id":"1","data":-1e999}', lenient=True)

    assert (bad.has_data, dict(bad.extensions)) == (False, {"data_base64": "!!"})
    assert (both.data, dict(both.extensions)) == (1, {"data_base64": "AA=="})
    assert huge.data == float("-inf")
    for raw in (b'{"source":"a","id":"1","data":NaN}', b'{"source":"a","id":"1","data":1e999,}'):
        assert refused(Event.from_json, raw, lenient=True).code == "invalid-json-body"
    assert refused(Event.from_json, huge.raw).code == "invalid-json-body"


def test_lenient_event_cannot_break_a_header():
    """Names and types that are not header-safe never reach a header, even from a lenient event."""
    name = Event.from_json(b'{"source":"a","id":"1","x\\r\\ny":"z"}', lenient=True)
    kind = Event.from_json(
        b'{"source":"a","id":"1","datacontenttype":"a\\r\\nb","data":"z"}', lenient=True
    )

    assert refused(name.to_binary).code == "invalid-attribute-name"
    assert refused(kind.to_binary).code == "invalid-content-type"


# Batches.


def test_batch_keeps_each_event_as_it_was():
    """Elements keep their bytes; an empty batch is a batch (JSON format §4.3)."""
    raw = b'[ {"specversion":"1.0","id":"1", "source":"/s","type":"t"} ,\n' + text(id="2") + b"]"
    events = decode_batch(raw)

    assert [event.id for event in events] == ["1", "2"]
    assert decode_batch(encode_batch(events)) == events
    assert events[1].to_json() == text(id="2")
    assert decode_batch(b"[]") == []
    assert encode_batch([]) == b"[]"


def test_batch_names_its_bad_element():
    """The first bad element refuses the batch; its place is in `index` and in the message."""
    error = refused(decode_batch, b"[" + text() + b"," + text(id=...) + b"]")

    assert (error.code, error.attribute, error.index) == ("missing-event-id", "id", 1)
    assert "event 1" in error.message
    assert refused(decode_batch, b"[5]").code == "invalid-json-body"
    assert refused(decode_batch, b"{}").code == "invalid-json-body"


# Binary HTTP.

HEADERS = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t"}


def test_percent_coding_example_of_the_binding():
    """HTTP binding §3.1.3.2: space, quote, percent and all that is not printable ASCII."""
    event = Event(id="1", source="/s", type="t", subject="Euro € 😀", extensions={"q": 'a"b%c~!'})
    headers = dict(event.to_binary()[0])

    assert headers["ce-subject"] == "Euro%20%E2%82%AC%20%F0%9F%98%80"
    assert headers["ce-q"] == "a%22b%25c~!"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Euro%20%e2%82%ac", "Euro €"), ("%41", "A"), ('"a \\"b\\" c"', 'a "b" c'), ('"a%20b"', "a b"),
        ("100%", "100%"), ("%2525", "%25"), ("  padded\t", "padded"), ("ü", "ü"),
    ],
)  # fmt: skip
def test_header_values_are_decoded_once(written, meant):
    """Quotes first, then one round of percent-decoding; needless encoding is accepted (§3.1.3.2)."""
    assert Event.from_binary({**HEADERS, "ce-subject": written}, b"").subject == meant
    pairs = [(k.encode(), v.encode()) for k, v in {**HEADERS, "CE-Subject": written}.items()]
    assert Event.from_binary(pairs, b"").subject == meant


@pytest.mark.parametrize("bad", [b"%C0%A0", b"%ff", b"\xff"])
def test_header_values_that_are_not_utf8(bad):
    """Overlong and broken UTF-8 must be rejected (§3.1.3.2)."""
    pairs = [(k.encode(), v.encode()) for k, v in HEADERS.items()]

    assert refused(Event.from_binary, [*pairs, (b"ce-subject", bad)], b"").code == "invalid-header"
    assert (
        refused(Event.from_binary, {**HEADERS, "ce-subject": "\udcff"}, b"").code
        == "invalid-header"
    )


def test_binary_refusals():
    """Contradictions and missing attributes in headers have their codes."""
    json_type = {"content-type": "application/json"}

    assert refused(Event.from_binary, {}, b"").code == "missing-event-source"
    assert refused(Event.from_binary, {**HEADERS, **json_type}, b"{").code == "invalid-json-body"
    assert (
        refused(Event.from_binary, {**HEADERS, "ce-data": "x"}, b"").code
        == "invalid-attribute-name"
    )
    conflict = {**HEADERS, **json_type, "ce-datacontenttype": "text/plain"}
    assert refused(Event.from_binary, conflict, b"1").code == "conflicting-data-type-headers"
    twice = [*HEADERS.items(), ("ce-id", "2")]
    assert refused(Event.from_binary, twice, b"").code == "duplicate-attribute"
    assert Event.from_binary(twice, b"", lenient=True).id == "2"


def test_binary_as_thorium_reads_it():
    """Without percent-decoding values stay as sent, and the JSON has the headers' order, data last."""
    headers = [
        ("ce-id", "a%20b"),
        ("ce-source", "//s"),
        ("ce-x", "1"),
        ("Content-Type", "application/json; charset=utf-8"),
    ]
    event = Event.from_binary(headers, b'{"n": 1.10}', lenient=True, percent=False)

    assert event.to_json() == (
        b'{"id":"a%20b","source":"//s","x":"1","datacontenttype":"application/json; charset=utf-8","data":{"n": 1.10}}'
    )
    assert event.data == {"n": 1.1}


@pytest.mark.parametrize(
    ("content_type", "body", "data"),
    [
        ("application/json", b'"quoted"', "quoted"), ("application/json", b"null", None),
        ("application/xml", b"<a/>", "<a/>"), ("text/plain", b"\xff", b"\xff"),
        ("application/octet-stream", b"abc", b"abc"), ("text/plain", b"", UNSET), (None, b"\xff", b"\xff"),
        ("text/plain; charset=UTF-8", "ü".encode(), "ü"), ("text/plain; charset=latin1", b"\xc3\xbc", b"\xc3\xbc"),
        ("text/plain; charset=latin1", b"abc", "abc"), ("image/svg+xml", b"<a/>", "<a/>"),
        ("Application/VND.x+JSON ; v=1", b"[1]", [1]), (None, b"", UNSET),
    ],
)  # fmt: skip
def test_kinds_of_bodies(content_type, body, data):
    """JSON types give values, text and XML strings, all else bytes; and all go back as they came."""
    headers = HEADERS | ({"content-type": content_type} if content_type else {})
    event = Event.from_binary(headers, body)

    assert event.data == data if data is not UNSET else event.data is UNSET
    assert event.to_binary()[1] == body
    assert dict(event.to_binary()[0]) == headers
    assert Event.from_json(event.to_json()) == event


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b'{"a":1}', {"a": 1}),
        (b"1", 1),
        (b'"x"', "x"),
        (b"abc", "abc"),
        (b"{", "{"),
        (b"\xff", b"\xff"),
    ],
)
def test_bodies_without_a_content_type(body, data):
    """JSON when it is, else text when it is UTF-8, else bytes: as the SDKs read what they send."""
    event = Event.from_binary(HEADERS, body)
    sdk = sdk_http.from_binary(sdk_http.HTTPMessage(HEADERS, body), JSONFormat())

    assert event.datacontenttype is None
    assert event.data == data == sdk.get_data()
    assert Event.from_json(event.to_json()) == event


def test_a_declared_type_counts_without_a_content_type():
    """A stray ce-datacontenttype, which the binding forbids, is the type when there is no other."""
    event = Event.from_binary({**HEADERS, "ce-datacontenttype": "image/png"}, b"1")

    assert (event.datacontenttype, event.data) == ("image/png", b"1")


def test_from_http_tells_the_modes_apart():
    """The content type decides between structured, batch and binary (HTTP binding §3)."""
    event = Event.from_json(text(data={"a": 1}))
    headers, body = event.to_binary()

    assert from_http({"Content-Type": f"{STRUCTURED_TYPE}; charset=UTF-8"}, event.to_json()) == [
        event
    ]
    assert from_http({"content-type": BATCH_TYPE.upper()}, b"[]") == []
    assert from_http(headers, body) == [event.replace(datacontenttype="application/json")]
    avro = refused(from_http, {"content-type": "application/cloudevents+avro"}, b"")
    assert avro.code == "invalid-content-type"


# The examples of the JSON format, §3.2 and §4.3, each with its HTTP binary form.

COMMON = {
    "specversion": "1.0", "type": "com.example.someevent", "source": "/mycontext",
    "time": "2018-04-05T17:31:00Z", "comexampleextension1": "value", "comexampleothervalue": 5,
}  # fmt: skip
EXAMPLES = [
    (
        {
            "id": "A234-1234-1234",
            "datacontenttype": "application/vnd.apache.thrift.binary",
            "data_base64": "AAEC/w==",
        },
        "application/vnd.apache.thrift.binary",
        b"\x00\x01\x02\xff",
    ),
    (
        {
            "id": "B234-1234-1234",
            "unsetextension": None,
            "datacontenttype": "application/xml",
            "data": '<much wow="xml"/>',
        },
        "application/xml",
        b'<much wow="xml"/>',
    ),
    (
        {
            "id": "C234-1234-1234",
            "subject": None,
            "datacontenttype": "application/json",
            "data": {"appinfoA": "abc", "appinfoB": 123},
        },
        "application/json",
        b'{"appinfoA":"abc","appinfoB":123}',
    ),
    (
        {"id": "D234-1234-1234", "subject": None, "data": "I'm just a string"},
        "application/json",
        b'"I\'m just a string"',
    ),
]


@pytest.mark.parametrize(("members", "content_type", "body"), EXAMPLES, ids="ABCD")
def test_examples_of_the_json_format(members, content_type, body):
    """Each example of §3.2 has exactly the HTTP binary form printed beside it."""
    event = Event.from_json(json.dumps(COMMON | members))

    headers, written = event.to_binary()
    assert written == body
    assert dict(headers) == {
        "ce-specversion": "1.0", "ce-type": "com.example.someevent", "ce-source": "/mycontext",
        "ce-id": members["id"], "ce-time": "2018-04-05T17:31:00Z", "ce-comexampleextension1": "value",
        "ce-comexampleothervalue": "5", "content-type": content_type,
    }  # fmt: skip


def test_example_of_a_batch():
    """The batch of §4.3: binary data beside JSON data."""
    raw = json.dumps([COMMON | EXAMPLES[0][0], COMMON | EXAMPLES[2][0]]).encode()
    first, second = decode_batch(raw)

    assert first.data == b"\x00\x01\x02\xff"
    assert second.data == {"appinfoA": "abc", "appinfoB": 123}


# Round trips.

attribute_text = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]).filter(
        lambda c: not (0xFDD0 <= ord(c) <= 0xFDEF) and ord(c) & 0xFFFE != 0xFFFE
    ),
    min_size=1, max_size=20,
)  # fmt: skip
names = st.from_regex(r"\A[a-z0-9]{1,20}\Z").filter(lambda n: n not in CONTEXT | DATA_MEMBERS)
extension_values = attribute_text | st.integers(-(2**31), 2**31 - 1) | st.booleans()
json_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | json_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(json_text, inner, max_size=4),
    max_leaves=8,
)
moments = st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-5, minutes=-30))]))
payloads = st.one_of(
    st.tuples(st.none() | st.just("application/json"), json_values),
    st.tuples(
        st.just("application/xml"), st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    ),
    st.tuples(st.just("application/octet-stream"), st.binary(min_size=1)),
    st.tuples(st.none(), st.just(UNSET)),
)


@st.composite
def events(draw):
    content_type, data = draw(payloads)
    return Event(
        id=draw(attribute_text),
        source=draw(st.sampled_from(["/s", "https://example.com/a?b#c", "urn:x:y", "1-2"])),
        type=draw(attribute_text),
        subject=draw(st.none() | attribute_text),
        time=draw(st.none() | moments),
        dataschema=draw(st.none() | st.just("https://example.com/schema")),
        datacontenttype=content_type,
        data=data,
        extensions=draw(st.dictionaries(names, extension_values, max_size=4)),
    )


def over_http(event: Event) -> Event:
    """What an event becomes by HTTP: strings for all attributes, an explicit content type."""
    extensions = {
        n: v if isinstance(v, str) else msgspec.json.encode(v).decode()
        for n, v in event.extensions.items()
    }
    content_type = event.datacontenttype or ("application/json" if event.has_data else None)
    return event.replace(extensions=extensions, datacontenttype=content_type)


@given(events())
@settings(deadline=None)
def test_json_round_trip(event):
    """Writing and parsing gives an equal event, strictly and leniently."""
    assert Event.from_json(event.to_json()) == event
    assert Event.from_json(event.to_json(), lenient=True) == event


@given(events())
@settings(deadline=None)
def test_binary_round_trip(event):
    """Headers hold only printable ASCII, and the event comes back with its attributes as text."""
    headers, body = event.to_binary()

    assert all(
        0x20 < ord(c) < 0x7F for name, value in headers if name != "content-type" for c in value
    )
    if body:
        assert Event.from_binary(headers, body) == over_http(event)


@given(st.lists(events(), max_size=5))
@settings(max_examples=30, deadline=None)
def test_batch_round_trip(batch):
    """A batch of any events comes back equal and in order."""
    assert decode_batch(encode_batch(batch)) == batch


@given(st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()))
@settings(deadline=None)
def test_garbage_never_crashes(raw):
    """Whatever the bytes, the answer is an event or an EventError."""
    for parse in (Event.from_json, decode_batch):
        for lenient in (False, True):
            try:
                parse(raw, lenient=lenient)
            except EventError as error:
                assert error.code  # noqa: PT017


# The official SDK agrees. It knows no explicit null, takes time as a datetime, and has no batch of
# its own: a batch is an array of its events.


def sdk_event(event: Event) -> CloudEvent:
    attributes = event.attributes()
    if event.time:
        attributes["time"] = event.moment
    return CloudEvent(attributes, None if event.data is UNSET else event.data)


def same_as_sdk(ours: Event, theirs: CloudEvent) -> None:
    attributes = dict(theirs.get_attributes())
    written = attributes.pop("time")
    assert ours.time is None or ours.moment == written
    mine = ours.attributes()
    mine.pop("time", None)
    assert mine == attributes
    assert (None if ours.data is UNSET else ours.data) == theirs.get_data()


comparable = events().filter(lambda e: e.data is not None)


@given(comparable)
@settings(max_examples=60, deadline=None)
def test_sdk_agrees_on_structured(event):
    """The SDK reads our JSON as the same event, and we read the SDK's JSON as the same event."""
    same_as_sdk(event, JSONFormat().read(None, event.to_json()))

    theirs = sdk_event(event)
    same_as_sdk(Event.from_json(JSONFormat().write(theirs)), theirs)


@given(
    comparable.filter(
        lambda e: isinstance(e.data, dict | bytes) or e.datacontenttype == "application/xml"
    )
)
@settings(max_examples=60, deadline=None)
def test_sdk_agrees_on_binary(event):
    """The SDK writes the same headers and reads ours as the same attributes, both bodies are equal."""
    headers, body = event.to_binary()
    ours = sdk_http.HTTPMessage(dict(headers), body)
    theirs = sdk_http.from_binary_event(ours)
    assert Event.from_binary(ours.headers, body) == over_http(event)
    expected = over_http(event).attributes()
    if event.time:
        expected["time"] = event.moment
    assert {n: v for n, v in theirs.get_attributes().items() if n in expected} == expected

    written = sdk_http.to_binary_event(sdk_event(event))
    back = Event.from_binary(written.headers, written.body)
    assert back.subject == event.subject
    assert back.id == event.id
    if isinstance(event.data, dict) and event.datacontenttype:
        assert back.data == event.data
    else:
        assert written.body == body or isinstance(event.data, dict)


@given(st.lists(comparable, max_size=4))
@settings(max_examples=30, deadline=None)
def test_sdk_agrees_on_batches(batch):
    """Each element of our batch is the SDK's event, and a batch of SDK events is ours."""
    elements = json.loads(encode_batch(batch))
    assert len(elements) == len(batch)
    for event, element in zip(batch, elements, strict=True):
        same_as_sdk(event, JSONFormat().read(None, json.dumps(element)))

    theirs = [sdk_event(event) for event in batch]
    written = b"[" + b",".join(JSONFormat().write(event) for event in theirs) + b"]"
    for ours, event in zip(decode_batch(written), theirs, strict=True):
        same_as_sdk(ours, event)


def test_base64_is_the_sdks():
    """Binary data is standard Base64 with padding, as the SDK writes it."""
    event = Event(id="1", source="/s", type="t", datacontenttype="a/b", data=b"\xfb\xff")

    assert (
        json.loads(event.to_json())["data_base64"]
        == base64.b64encode(b"\xfb\xff").decode()
        == "+/8="
    )
