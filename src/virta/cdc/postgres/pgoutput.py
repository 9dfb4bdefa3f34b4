"""
Decode the messages of pgoutput, PostgreSQL's own plugin for logical decoding. No I/O.

    decode(payload) -> Begin | Commit | Relation | Insert | Update | Delete | Truncate | OtherMessage

Protocol versions 1 to 4 with streaming and two-phase commit off ("Logical Replication Message Formats" in the
manual). All integers are big-endian. A message starts with one byte:

    B  final LSN i64, commit time i64, xid i32          C  flags i8, commit LSN i64, end LSN i64, commit time i64
    R  oid i32, namespace z, name z, identity c, columns i16 of: flags i8, name z, type oid i32, modifier i32
    I  oid i32, 'N' tuple       U  oid i32, ['K'|'O' tuple], 'N' tuple       D  oid i32, 'K'|'O' tuple
    T  count i32, options i8, oid i32 …                 O, Y, M  origin, type, logical message: not needed here

    tuple: columns i16 of: 'n' (NULL) | 'u' (unchanged, stored out of line) | 't' length i32, text

Values stay texts; `virta.cdc.postgres.values` makes JSON of them.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from virta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable

# Microseconds between 1970 and 2000, where PostgreSQL's times begin.
EPOCH_US: Final = 946_684_800_000_000
COLUMNS_MAX: Final = 1664

_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_U32: Final = struct.Struct(">I")
_BEGIN: Final = struct.Struct(">QqI")
_COMMIT: Final = struct.Struct(">bQQq")
_COLUMN: Final = struct.Struct(">Ii")
_TRUNCATE: Final = struct.Struct(">ib")


class Missing(Enum):
    """A value that was not sent because it did not change (TOAST)."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Missing.UNCHANGED
TupleData = list[str | Missing | None]


class Begin(NamedTuple):
    commit_lsn: int
    commit_us: int  # since 1970
    xid: int


class Commit(NamedTuple):
    commit_lsn: int
    end_lsn: int


class RelationColumn(NamedTuple):
    name: str
    type_oid: int
    modifier: int
    in_key: bool


class Relation(NamedTuple):
    oid: int
    schema: str
    name: str
    identity: str  # d, n, f or i
    columns: list[RelationColumn]


class Insert(NamedTuple):
    oid: int
    new: TupleData


class Update(NamedTuple):
    oid: int
    old: TupleData | None
    old_is_key: bool
    new: TupleData


class Delete(NamedTuple):
    oid: int
    old: TupleData
    old_is_key: bool


class Truncate(NamedTuple):
    oids: list[int]


class OtherMessage(NamedTuple):
    kind: str


Message = Begin | Commit | Relation | Insert | Update | Delete | Truncate | OtherMessage


def decode(payload: bytes) -> Message:
    """
    Return one message.

    Raises:
        CaptureError: it is not one of these messages, or it is cut.
    """
    try:
        reader = _DECODERS.get(payload[0])
        if reader is None:
            raise _unknown(payload)
        return reader(payload)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise CaptureError(
            f"a message of PostgreSQL cannot be decoded ({error}): {payload[:40]!r}…",
            code="capture_protocol",
        ) from error


def _unknown(payload: bytes) -> CaptureError:
    return CaptureError(
        f"PostgreSQL sent a message of the unknown kind {payload[:1]!r}: streaming of open transactions and two-phase "
        "commit must be off",
        code="capture_protocol",
    )


def _begin(payload: bytes) -> Begin:
    lsn, time, xid = _BEGIN.unpack_from(payload, 1)
    return Begin(lsn, time + EPOCH_US, xid)


def _commit(payload: bytes) -> Commit:
    _, lsn, end, _ = _COMMIT.unpack_from(payload, 1)
    return Commit(lsn, end)


def _relation(payload: bytes) -> Relation:
    (oid,) = _U32.unpack_from(payload, 1)
    schema, at = _read_text(payload, 5)
    name, at = _read_text(payload, at)
    identity = chr(payload[at])
    (count,) = _I16.unpack_from(payload, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        flags = payload[at]
        column, at = _read_text(payload, at + 1)
        type_oid, modifier = _COLUMN.unpack_from(payload, at)
        columns.append(RelationColumn(column, type_oid, modifier, bool(flags & 1)))
        at += 8
    return Relation(oid, schema or "pg_catalog", name, identity, columns)


def _insert(payload: bytes) -> Insert:
    (oid,) = _U32.unpack_from(payload, 1)
    _expect(payload, 5, b"N")
    return Insert(oid, _tuple(payload, 6)[0])


def _update(payload: bytes) -> Update:
    (oid,) = _U32.unpack_from(payload, 1)
    kind = payload[5:6]
    old: TupleData | None = None
    at = 6
    if kind in {b"K", b"O"}:
        old, at = _tuple(payload, 6)
        at += 1
    _expect(payload, at - 1, b"N")
    return Update(oid, old, kind == b"K", _tuple(payload, at)[0])


def _delete(payload: bytes) -> Delete:
    (oid,) = _U32.unpack_from(payload, 1)
    kind = payload[5:6]
    if kind not in {b"K", b"O"}:
        raise ValueError(f"a deleted row is K or O, not {kind!r}")
    return Delete(oid, _tuple(payload, 6)[0], kind == b"K")


def _truncate(payload: bytes) -> Truncate:
    count, _ = _TRUNCATE.unpack_from(payload, 1)
    return Truncate([_U32.unpack_from(payload, 6 + 4 * at)[0] for at in range(count)])


def _other(payload: bytes) -> OtherMessage:
    return OtherMessage(chr(payload[0]))


_DECODERS: Final[dict[int, Callable[[bytes], Message]]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("R"): _relation,
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("O"): _other,
    ord("Y"): _other,
    ord("M"): _other,
}


def _tuple(payload: bytes, at: int) -> tuple[TupleData, int]:
    """Return the values of a row and where the next part begins."""
    (count,) = _I16.unpack_from(payload, at)
    if not 0 <= count <= COLUMNS_MAX:
        raise ValueError(f"{count} columns")
    at += 2
    values: TupleData = []
    append = values.append
    length_of = _I32.unpack_from
    for _ in range(count):
        kind = payload[at]
        at += 1
        if kind == 116:  # t
            (length,) = length_of(payload, at)
            at += 4
            end = at + length
            if length < 0 or end > len(payload):
                raise ValueError(f"a value of {length} bytes")
            append(payload[at:end].decode())
            at = end
        elif kind == 110:  # n
            append(None)
        elif kind == 117:  # u
            append(UNCHANGED)
        else:
            raise ValueError(f"a value of kind {kind}")
    return values, at


def _read_text(payload: bytes, at: int) -> tuple[str, int]:
    end = payload.index(b"\0", at)
    return payload[at:end].decode(), end + 1


def _expect(payload: bytes, at: int, kind: bytes) -> None:
    if payload[at : at + 1] != kind:
        raise ValueError(f"{kind!r} expected, not {payload[at : at + 1]!r}")
