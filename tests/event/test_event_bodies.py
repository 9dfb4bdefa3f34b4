"""What a content type makes of a body."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.event.bodies import BodyKind, body_kind, body_text
from virta.event.rules import is_json_type


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        (None, BodyKind.UNKNOWN),
        ("", BodyKind.UNKNOWN),
        ("application/json", BodyKind.JSON),
        ("text/json", BodyKind.JSON),
        ("Application/CloudEvents+JSON; charset=UTF-8", BodyKind.JSON),
        ("application/jsonl", BodyKind.BYTES),
        ("text/plain", BodyKind.TEXT),
        ("TEXT/CSV ;header=present", BodyKind.TEXT),
        ("application/xml", BodyKind.TEXT),
        ("image/svg+xml", BodyKind.TEXT),
        ("application/xml-dtd", BodyKind.BYTES),
        ("application/octet-stream", BodyKind.BYTES),
        ("json", BodyKind.BYTES),
    ],
)
def test_kinds(content_type, kind):
    assert body_kind(content_type) is kind


@given(st.text(max_size=20))
def test_json_is_json_for_both(content_type):
    """The two functions that ask about JSON agree on every content type that there is."""
    assert (body_kind(content_type) is BodyKind.JSON) == (
        content_type != "" and is_json_type(content_type)
    )


@given(st.text(max_size=20), st.sampled_from([None, "text/plain", "text/plain;charset=utf8"]))
def test_utf8_is_text(text, content_type):
    """The encoding of any text is that text, if no other charset is named."""
    try:
        body = text.encode()
    except UnicodeEncodeError:
        return
    assert body_text(body, content_type) == text


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        (b"caf\xc3\xa9", 'text/plain; charset="UTF-8"', "café"),
        (b"caf\xc3\xa9", "text/plain; charset=latin-1", None),
        (b"cafe", "text/plain; charset=latin-1", "cafe"),
        (b"caf\xe9", "text/plain", None),
        (b"\xff\xfe", None, None),
    ],
)
def test_bytes_that_are_no_text(body, content_type, text):
    """ASCII is the same in every charset; other bytes are text only as UTF-8, where nothing else is named."""
    assert body_text(body, content_type) == text
