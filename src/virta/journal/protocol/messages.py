"""
The messages of the journal's protocol: functions, flags, types and fields.

Flags in these structures are only those with a meaning; `codec` computes the ones that say which fields follow
from the fields themselves, so the two always agree.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from virta.errors import JournalError

VERSION = 1
PORT = 8233
KEY_BYTES_MAX = 65_535
# An operation must fit one record of the log (10 MiB) together with its keys.
VALUE_DATA_BYTES_MAX = 8 * 1024 * 1024
PAIRS_MAX = 65_535
REPLY_BYTES_MAX = 16 * 1024 * 1024
# A reply of one pair may exceed the bound by the largest value and its keys.
REPLY_DECODE_BYTES_MAX = REPLY_BYTES_MAX + VALUE_DATA_BYTES_MAX + 4 * KEY_BYTES_MAX

# Flags of both directions that only say which fields follow.
KEY16 = 1 << 0
WIDTH_SHIFT = 1
TIMEOUT = 1 << 3
QUERY_SHIFT = 7
COUNT = 1 << 13
REQUEST_TTL = 1 << 14
REPLY_DETAILS = 1 << 14
REPLY_CURSOR = 1 << 5

# Request flags with a meaning.
TOUCH = 1 << 4
OVERWRITE = 1 << 5
WORKED_ON = 1 << 6
PERSIST = 1 << 9
DATA = 1 << 10
LISTEN = 1 << 11
PERSIST_ALIAS = 1 << 12  # read as PERSIST, never sent
DETAILS = 1 << 15
REQUEST_FLAGS = TOUCH | OVERWRITE | WORKED_ON | PERSIST | DATA | LISTEN | DETAILS

# Reply flags with a meaning; WORKED_ON, PERSIST and DATA are shared with requests.
DELETED = 1 << 4
NOTIFICATION = 1 << 11
LOCKED = 1 << 12
REPLY_FLAGS = DELETED | WORKED_ON | PERSIST | DATA | NOTIFICATION | LOCKED

COMMAND_KEY = b"virta:admin"  # a SET of it is a command of the administration

QUERY_KEY, QUERY_RANGE, QUERY_REGEX, QUERY_CURSOR = range(4)


class Function(IntEnum):
    NOP = 0
    QUIT = 1
    SET = 2
    GET = 3
    DELETE = 4
    ADD = 5
    NOT = 6
    TRUNCATE = 7
    LOCK = 8
    UNLOCK = 9
    RENAME = 10
    NEXT = 11
    PUSH = 12
    LINK = 13
    UNLINK = 14


class Type(IntEnum):
    VOID = 0
    BUFFER = 1
    STRING = 2
    INTEGER = 3
    FLOAT = 4
    BOOLEAN = 5


class Value(Struct, frozen=True, gc=False):
    type: int
    data: bytes


class Details(Struct, frozen=True, gc=False):
    """What the journal stores of a value besides its data; times in µs, 0 = never or no."""

    expires: int = 0
    ttl: int = 0
    created: int = 0
    modified: int = 0
    accessed: int = 0
    worked_until: int = 0
    size: int = 0
    attempts: int = 0
    bits: int = 0  # 1 persist, 2 locked, 4 worked on, 8 tombstone


class Request(Struct):
    function: int
    identifier: int = 0
    flags: int = 0  # only those with a meaning; framing bits follow from the fields
    timestamp: int = 0
    timeout: int | None = None
    ttl: int | None = None
    count: int | None = None
    key: bytes = b""
    key2: bytes = b""  # present iff query is 1
    value: Value | None = None
    query: int = QUERY_KEY


class Pair(Struct):
    key: bytes
    value: Value | None = None
    details: Details | None = None


class Reply(Struct):
    identifier: int
    flags: int = 0
    timestamp: int = 0
    timeout: int | None = None
    query: int = QUERY_KEY
    error: str = ""
    # None: a reply without count, holding no pair or one; a list: counted, even when empty.
    pairs: list[Pair] | None = None
    pair: Pair | None = None
    cursor: bytes | None = None

    def all_pairs(self) -> list[Pair]:
        if self.pairs is not None:
            return self.pairs
        return [] if self.pair is None else [self.pair]


class RefusedError(JournalError):
    """A request the journal does not carry out: `code` is the token that goes over the wire."""

    def __init__(
        self,
        code: str,
        detail: str = "",
        *,
        timestamp: int | None = None,
        timeout: int | None = None,
    ) -> None:
        super().__init__(f"{code}: {detail}" if detail else code, code=code)
        self.timestamp = timestamp  # of the stored version that was in the way
        self.timeout = timeout  # until when it will be


# Errors after which the same request may succeed later; a forwarder keeps the record.
RETRY_CODES = frozenset(
    {"worked-on", "locked", "out-of-memory", "disk", "not-primary", "shutting-down", "not-yet"}
    | {"no-copies"}
)
