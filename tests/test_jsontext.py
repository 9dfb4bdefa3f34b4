"""`virta.jsontext`: lenient reading, the limit of nesting, surrogates."""

from __future__ import annotations

import json
import math
import sys
import threading
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.jsontext import (
    DEPTH_MAX,
    JsonDepthError,
    check_depth,
    decode,
    replace_lone_surrogates,
    valid_text,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('[]{}"\\ a'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('[]{}"\\ a'), inner),
    max_leaves=30,
)


def arrays(depth):
    return b"[" * depth + b"]" * depth


def objects(depth):
    return b'{"a":' * depth + b"1" + b"}" * depth


def depth_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


# Reading.


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "é😀", [], {}, {"a": [1, {"b": None}]}])
def test_json_is_read_from_bytes_and_text(value):
    """Ordinary JSON gives its value, from bytes in UTF-8 or from a text."""
    text = json.dumps(value, ensure_ascii=False)

    assert decode(text) == value
    assert decode(text.encode()) == value


def test_numbers_beyond_a_double():
    """A number that no double holds is infinite; an integer keeps all its digits up to 640."""
    assert decode(b"1e999") == math.inf
    assert decode(b"-1e999") == -math.inf
    assert decode(b"9" * 600) == int("9" * 600)
    assert decode(b"[1,-" + b"9" * 5000 + b"]") == [1, -math.inf]


def test_the_last_of_equal_members_counts():
    """Equal names are allowed, as in every reader of Virta."""
    assert decode(b'{"a":1,"a":2}') == {"a": 2}


def test_lone_surrogates_are_read():
    """A lone surrogate may be escaped."""
    assert decode(rb'"\ud800"') == "\ud800"


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"NaN", b"[Infinity]", b"[-Infinity]", b"01", b"'a'", b'{"a":1,}', b"1 2"),
        *(b'"\xff"', b"\xef\xbb\xbf1", "1".encode("utf-16"), "1".encode("utf-32-le")),
    ],
)
def test_anything_else_is_refused(text):
    """What is no JSON in UTF-8 raises ValueError, and not JsonDepthError."""
    with pytest.raises(ValueError, match=r".") as refused:
        decode(text)

    assert not isinstance(refused.value, JsonDepthError)


# Nesting.


@pytest.mark.parametrize("nested", [arrays, objects])
def test_the_limit_of_nesting(nested):
    """A text may nest DEPTH_MAX levels, not one more."""
    decode(nested(DEPTH_MAX))

    for depth in (DEPTH_MAX + 1, 1000, 5000, 200_000):
        with pytest.raises(JsonDepthError, match="900 levels"):
            decode(nested(depth))


def test_the_limit_is_the_same_on_a_deep_stack():
    """A caller whose own stack is deep gets the same error, not a RecursionError."""

    def at(frames):
        if frames:
            return at(frames - 1)
        with pytest.raises(JsonDepthError):
            decode(arrays(DEPTH_MAX + 1))
        with pytest.raises(JsonDepthError) if sys.version_info < (3, 12) else nullcontext():
            decode(arrays(DEPTH_MAX))
        return True

    done = []
    thread = threading.Thread(target=lambda: done.append(at(300)))
    thread.start()
    thread.join()

    assert done == [True]


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b",".join([b"{}"] * 5000) + b"]",
        b'["' + b"[" * 5000 + b'"]',
        b'["' + b'\\"[' * 5000 + b'"]',
        b'["\\\\",' + b",".join([b"[[]]"] * 1000) + b"]",
        b"[" + b",".join([b"[" * 20 + b"]" * 20] * 400) + b"]",
        b"[" + b",".join([arrays(DEPTH_MAX - 1)] * 20) + b"]",
        b'{"a\\\\":' + b"[[]," * 500 + b"1" + b"]" * 500 + b"}",
    ],
)
def test_many_brackets_that_are_not_deep(text):
    """Wide texts, and brackets in strings, are within the limit."""
    check_depth(text)
    decode(text)


@pytest.mark.parametrize(
    "text",
    [
        b'["\\\\",' + arrays(DEPTH_MAX) + b"]",
        b'{"a":"]]]]]]","b":' + arrays(DEPTH_MAX) + b"}",
        b"[" * (DEPTH_MAX + 1),
        b"[" + b",".join([b"{}"] * 5000) + b"," + objects(DEPTH_MAX) + b"]",
    ],
)
def test_deep_texts_with_distractions(text):
    """Closing brackets in strings do not count, and neither does a missing end."""
    with pytest.raises(JsonDepthError):
        check_depth(text)


@given(VALUES, st.integers(0, 4))
def test_depth_agrees_with_the_value(value, limit):
    """The scan of a text finds the depth of its value."""
    text = json.dumps(value).encode()
    if depth_of(value) > limit:
        with pytest.raises(JsonDepthError):
            check_depth(text, limit)
    else:
        check_depth(text, limit)


# Surrogates.


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (rb'"\ud800"', b'"?"'),
        (rb'"a\uDFFFb"', b'"a?b"'),
        (rb'"\ud83d\ude00"', rb'"\ud83d\ude00"'),
        (rb'"\ud83d\ud83d\ude00"', rb'"?\ud83d\ude00"'),
        (rb'"\\ud800"', rb'"\\ud800"'),
        (rb'"\n\u00e9"', rb'"\n\u00e9"'),
    ],
)
def test_lone_surrogates_become_question_marks(raw, expected):
    """Only lone surrogates change; pairs and other escapes stay."""
    assert replace_lone_surrogates(raw) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abc", "abc"), ("é😀", "é😀"), ("a\ud800b", "a\ufffdb"), ("\udfff\ud800", "\ufffd\ufffd")],
)
def test_text_that_utf_8_encodes(text, expected):
    """Lone surrogates become U+FFFD."""
    assert valid_text(text) == expected
