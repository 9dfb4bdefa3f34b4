"""Attributes in headers (HTTP binding §3.1.3): quoting, percent-coding, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.errors import EventError
from virta.event.headers import header_pairs, header_value, read_headers, unescape

# What an attribute may contain, without surrogates, which no UTF-8 has.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(texts)
def test_a_value_is_read_back(text):
    """Whatever characters it has, its header is printable ASCII and means the same."""
    sent = header_value(text)

    assert sent.isascii()
    assert sent == "" or (sent.isprintable() and " " not in sent and '"' not in sent)
    assert unescape("subject", sent) == text


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        ("Euro%20%E2%82%AC%20%F0%9F%98%80", "Euro € 😀"),
        ('"Hello, World!"', "Hello, World!"),
        ('"with \\"quotes\\" and \\\\"', 'with "quotes" and \\'),
        ('a "b%20c" d', "a b c d"),
        ("100%", "100%"),
        ("%25%32%30", "%20"),
        ('one " alone', 'one " alone'),
    ],
)
def test_values_of_other_senders(value, meaning):
    """Quoted strings first, then one round of percent-decoding."""
    assert unescape("subject", value) == meaning


@pytest.mark.parametrize("value", ["%FF", "%C3", "a%E2%82"])
def test_percent_codes_that_are_not_utf8(value):
    with pytest.raises(EventError) as caught:
        unescape("subject", value)

    assert (caught.value.code, caught.value.attribute) == ("invalid-header", "subject")
    assert "ce-subject" in caught.value.message


@pytest.mark.parametrize(("value", "sent"), [(7, "7"), (True, "true"), ("a b", "a%20b")])
def test_numbers_and_booleans_are_their_json_text(value, sent):
    assert header_value(value) == sent


def test_headers_as_a_mapping_or_as_pairs():
    """Of a library or of the wire: names are in lower case, blanks around values are dropped."""
    expected = [("ce-id", "1"), ("content-type", "text/plain")]
    assert list(header_pairs({"CE-Id": " 1\t", "Content-Type": "text/plain"})) == expected
    assert list(header_pairs([(b"ce-ID", b"1 "), (b"content-type", b"text/plain")])) == expected


@pytest.mark.parametrize("pair", [("ce-id", "\ud800"), (b"ce-id", b"\xff"), (b"c\xc3\xa9", b"1")])
def test_headers_that_are_not_utf8(pair):
    with pytest.raises(EventError) as caught:
        list(header_pairs([pair]))

    assert caught.value.code == "invalid-header"


def test_a_header_twice():
    """The same value is one attribute; two values are an error, unless the reader is lenient: then the last."""
    same = [("ce-id", "1"), ("ce-id", "1")]
    assert read_headers(same, lenient=False, percent=True)[0] == {"id": "1"}
    two = [("ce-id", "1"), ("ce-id", "2")]
    assert read_headers(two, lenient=True, percent=True)[0] == {"id": "2"}
    with pytest.raises(EventError) as caught:
        read_headers(two, lenient=False, percent=True)
    assert (caught.value.code, caught.value.attribute) == ("duplicate-attribute", "id")


@pytest.mark.parametrize("name", ["data", "data_base64"])
def test_data_is_no_attribute(name):
    """Lenient readers ignore it: the body is the data."""
    headers = {"ce-id": "1", f"ce-{name}": "x"}
    assert read_headers(headers, lenient=True, percent=True)[0] == {"id": "1"}
    with pytest.raises(EventError) as caught:
        read_headers(headers, lenient=False, percent=True)
    assert caught.value.code == "invalid-attribute-name"


def test_percent_codes_are_left_alone_where_the_transport_has_none():
    headers = {"ce-subject": "100%25", "Content-Type": "application/json; charset=utf-8", "x": "y"}

    members, content_type = read_headers(headers, lenient=False, percent=False)

    assert members == {"subject": "100%25"}
    assert content_type == "application/json; charset=utf-8"
