"""The decoder of pgoutput reads what the manual describes, and refuses everything else with an error of ours."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.cdc.postgres import pgoutput
from virta.errors import CaptureError

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
TUPLES = st.lists(st.one_of(st.none(), st.just(pgoutput.UNCHANGED), TEXTS), max_size=8)
OIDS = st.integers(0, 2**32 - 1)


def encode_tuple(values):
    parts = [struct.pack(">h", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif value is pgoutput.UNCHANGED:
            parts.append(b"u")
        else:
            raw = value.encode()
            parts.append(b"t" + struct.pack(">i", len(raw)) + raw)
    return b"".join(parts)


@given(OIDS, TUPLES, TUPLES, st.sampled_from([b"K", b"O", b""]))
def test_rows_round_trip(oid, old, new, kind):
    """Inserts, updates with and without an old row, deletes."""
    head = struct.pack(">I", oid)
    assert pgoutput.decode(b"I" + head + b"N" + encode_tuple(new)) == pgoutput.Insert(oid, new)
    before = kind + encode_tuple(old) if kind else b""
    assert pgoutput.decode(b"U" + head + before + b"N" + encode_tuple(new)) == pgoutput.Update(
        oid, old if kind else None, kind == b"K", new
    )
    if kind:
        deleted = pgoutput.Delete(oid, old, kind == b"K")
        assert pgoutput.decode(b"D" + head + kind + encode_tuple(old)) == deleted


@given(OIDS, TEXTS, TEXTS, st.lists(st.tuples(TEXTS, OIDS, st.booleans()), max_size=5))
def test_relations_round_trip(oid, schema, name, columns):
    """Names, types and which columns are in the key."""
    raw = b"R" + struct.pack(">I", oid) + schema.encode() + b"\0" + name.encode() + b"\0d"
    raw += struct.pack(">h", len(columns))
    for column, type_oid, in_key in columns:
        raw += bytes([in_key]) + column.encode() + b"\0" + struct.pack(">Ii", type_oid, -1)

    found = pgoutput.decode(raw)
    assert (found.oid, found.schema, found.name) == (oid, schema or "pg_catalog", name)
    assert [(c.name, c.type_oid, c.in_key) for c in found.columns] == columns


def test_transactions_and_truncates():
    """Begin, commit and truncate; times are since 1970."""
    begin = b"B" + struct.pack(">QqI", 2**40, 0, 7)
    assert pgoutput.decode(begin) == pgoutput.Begin(2**40, 946_684_800_000_000, 7)
    commit = b"C" + struct.pack(">bQQq", 0, 5, 9, 0)
    assert pgoutput.decode(commit) == pgoutput.Commit(5, 9)
    truncate = b"T" + struct.pack(">ibII", 2, 1, 3, 4)
    assert pgoutput.decode(truncate) == pgoutput.Truncate([3, 4])
    assert pgoutput.decode(b"M").kind == "M"


@given(st.binary(max_size=60))
def test_any_bytes_give_a_message_or_an_error_of_ours(payload):
    """Nothing else escapes, whatever the server sends."""
    try:
        pgoutput.decode(payload)
    except CaptureError as error:
        assert error.code == "capture_protocol"  # noqa: PT017


def test_streaming_is_refused_with_a_reason():
    with pytest.raises(CaptureError, match="streaming of open transactions"):
        pgoutput.decode(b"S" + bytes(5))
