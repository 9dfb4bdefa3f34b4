"""Texts of PostgreSQL as JSON values."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.cdc.postgres.table_read import Visibility, parse_copy_line
from virta.cdc.postgres.values import TypeTable
from virta.errors import CaptureError

TYPES = TypeTable()
TYPES.load(
    [
        (1007, "_int4", "b", 0, 23, ","),
        (1009, "_text", "b", 0, 25, ","),
        (1020, "_box", "b", 0, 603, ","),
        (603, "box", "b", 0, 0, ";"),
        (23, "int4", "b", 0, 0, ","),
        (25, "text", "b", 0, 0, ","),
        (9001, "amount", "d", 9002, 0, ","),
        (9002, "inner", "d", 23, 0, ","),
        (9003, "_amount", "b", 0, 9001, ","),
    ]
)


@pytest.mark.parametrize(
    ("oid", "text", "value"),
    [
        (16, "t", True), (16, "f", False), (20, "-9223372036854775808", -(2**63)), (23, "7", 7),
        (701, "0.1", 0.1), (701, "NaN", "NaN"), (701, "-Infinity", "-Infinity"), (1700, "1.500", "1.500"),
        (1114, "2026-01-31 12:30:00.5", "2026-01-31T12:30:00.5"), (1114, "infinity", "infinity"),
        (1184, "2026-01-31 12:30:00.5+00", "2026-01-31T12:30:00.5Z"), (1184, "-infinity", "-infinity"),
        (1184, "0044-03-15 00:00:00+00 BC", "0044-03-15T00:00:00Z BC"), (17, "\\x00ff", "AP8="),
        (1082, "2026-01-31", "2026-01-31"), (1186, "P1DT2H", "P1DT2H"), (9001, "5", 5),
        (1007, "{1,NULL,-3}", [1, None, -3]), (1007, "{}", []), (1007, "[0:1]={7,8}", [7, 8]),
        (1007, "{{1,2},{3,4}}", [[1, 2], [3, 4]]), (9003, "{5,6}", [5, 6]),
        (1009, '{a,"b c","d\\"e\\\\f","NULL",NULL,""}', ["a", "b c", 'd"e\\f', "NULL", None, ""]),
        (1020, "{(2,2),(1,1);(3,3),(0,0)}", ["(2,2),(1,1)", "(3,3),(0,0)"]),
        (99999, "anything", "anything"),
    ],
)  # fmt: skip
def test_values(oid, text, value):
    """Each type has one JSON form."""
    found = TYPES.converter(oid)(text)

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.50, null]}', b'{"a":[1,2.50,null]}'),
        ('"\\ud800"', b'"\\"\\\\ud800\\""'),
        ("[" * 600 + "]" * 600, None),
    ],
)
def test_json_keeps_its_numbers_and_what_is_no_strict_json_stays_a_text(text, value):
    """Numbers keep their digits; a lone surrogate or deep nesting makes it a text."""
    found = msgspec.json.encode(TYPES.converter(3802)(text))

    assert found == (value if value is not None else msgspec.json.encode(text))


@pytest.mark.parametrize("text", ["", "1", "{1", "{1,2}x", '{"a', "{1;2"])
def test_broken_arrays_are_errors(text):
    with pytest.raises(CaptureError, match="cannot be decoded"):
        TYPES.converter(1009)(text)


@given(
    st.lists(st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]))), min_size=1)
)
def test_copy_lines_round_trip(values):
    """COPY's escapes, as PostgreSQL writes them."""
    escapes = {
        "\\": "\\\\",
        "\b": "\\b",
        "\f": "\\f",
        "\n": "\\n",
        "\r": "\\r",
        "\t": "\\t",
        "\v": "\\v",
    }
    line = "\t".join("\\N" if v is None else "".join(escapes.get(c, c) for c in v) for v in values)

    assert parse_copy_line(line) == values


def test_snapshots_say_which_transactions_they_have():
    """Also across the wrap-around of 32-bit numbers."""
    seen = Visibility("10:20:11,15")
    assert [xid for xid in range(8, 22) if seen.has(xid)] == [8, 9, 10, 12, 13, 14, 16, 17, 18, 19]
    wrapped = Visibility(f"{2**32 - 2}:{2**32 + 3}:{2**32 + 1}")
    assert wrapped.has(2**32 - 3)
    assert wrapped.has(0)
    assert not wrapped.has(1)
    assert wrapped.has(2)
    assert not wrapped.has(3)
