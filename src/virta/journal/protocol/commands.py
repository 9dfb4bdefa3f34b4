"""
Commands as a user thinks of them: Python values and seconds in, Python values out.

Each function builds the request and knows how to read the reply; the two clients only carry them, so
they cannot differ. Times are Unix seconds, durations seconds; `str` keys are UTF-8, and what Python made of
other bytes (`surrogateescape`) are those bytes again.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from virta.clock import now_us
from virta.journal.protocol.kernel import native
from virta.journal.protocol.messages import (
    COMMAND_KEY,
    DATA,
    DELETED,
    DETAILS,
    LISTEN,
    OVERWRITE,
    PERSIST,
    QUERY_CURSOR,
    QUERY_RANGE,
    QUERY_REGEX,
    TOUCH,
    WORKED_ON,
    Details,
    Function,
    RefusedError,
    Reply,
    Request,
    Type,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Key = str | bytes
# Members of an enumeration are looked up by name every time; numbers are just there.
PUSH, NEXT, DELETE = int(Function.PUSH), int(Function.NEXT), int(Function.DELETE)
BUFFER = int(Type.BUFFER)
Plain = None | bool | int | float | str | bytes | Value


# What a command wants of an ordinary reply, for the native half (native/journal_told.h), which spares the rest.
TOLD_REPLY, TOLD_TIMESTAMP, TOLD_DELETED, TOLD_NEXT = range(4)


class Command(msgspec.Struct, Generic[T], frozen=True):
    request: Request
    decode: Callable[[Reply], T]
    missing: Any = ...  # the result for a key that does not exist; ...: that is an error
    told: int = TOLD_REPLY

    def result(self, reply: Reply) -> T:
        if reply.error:
            code, _, detail = reply.error.partition(": ")
            if code == "does-not-exist" and self.missing is not ...:
                result: T = self.missing
                return result
            raise RefusedError(code, detail, timestamp=reply.timestamp, timeout=reply.timeout)
        return self.decode(reply)


class Lease(NamedTuple):
    """A job that was handed out: acknowledge it by `key` before `deadline` (Unix seconds)."""

    key: bytes
    uri: bytes
    payload: Any
    deadline: float
    attempts: int


class Next(NamedTuple):
    """What NEXT had: jobs, or when to ask again (Unix seconds; None: nothing is waiting at all)."""

    jobs: list[Lease]
    wake_up: float | None


if native is not None:
    native.set_told_types(Lease, Next)


class Page(NamedTuple):
    items: list[tuple[bytes, Any]]
    cursor: bytes | None


# Values.


def set_(
    key: Key,
    value: Plain,
    *,
    overwrite: bool = True,
    persist: bool = True,
    expires: float | None = None,
    ttl: float | None = None,
    listen: bool = False,
    timestamp: int = 0,
) -> Command[int]:
    """Store a value; the timestamp (µs) of what is stored now, larger if something newer was there."""
    flags = overwrite * OVERWRITE | persist * PERSIST | listen * LISTEN
    request = Request(
        Function.SET,
        0,
        flags,
        timestamp,
        _us(expires),
        _us(ttl),
        key=to_bytes(key),
        value=to_value(value),
    )
    return Command(request, _timestamp, ..., TOLD_TIMESTAMP)


def get(
    key: Key, *, touch: float | bool = False, listen: bool = False, default: Any = None
) -> Command[Any]:
    """The value of a key, `default` if there is none; `touch` extends its life by that many seconds."""
    flags = DATA | (TOUCH if touch is not False else 0) | listen * LISTEN
    ttl = None if isinstance(touch, bool) else _us(touch)
    request = Request(Function.GET, flags=flags, key=to_bytes(key), ttl=ttl)
    return Command(request, _only_value, default)


class Found(NamedTuple):
    value: Value
    details: Details
    timestamp: int


def look(key: Key, *, touch: bool = False) -> Command[Found | None]:
    """A key's value and all that is known of it in one step; None if there is none."""
    request = Request(
        Function.GET, flags=DATA | DETAILS | (TOUCH if touch else 0), key=to_bytes(key)
    )
    return Command(request, _found, None)


def details(key: Key) -> Command[Details | None]:
    """What is known of a key besides its data."""
    request = Request(Function.GET, flags=DETAILS, key=to_bytes(key))
    return Command(request, lambda reply: reply.pair.details if reply.pair else None, None)


def scan(lower: Key = b"", upper: Key = b"", *, count: int = 1000) -> Command[Page]:
    """Keys from `lower` up to, not including, `upper` (empty: no end)."""
    request = Request(
        Function.GET,
        flags=DATA,
        key=to_bytes(lower),
        key2=to_bytes(upper),
        count=count,
        query=QUERY_RANGE,
    )
    return Command(request, _page)


def search(pattern: Key, *, count: int = 1000) -> Command[Page]:
    """Keys that a regular expression (RE2) is found in."""
    request = Request(
        Function.GET, flags=DATA, key=to_bytes(pattern), count=count, query=QUERY_REGEX
    )
    return Command(request, _page)


def more(cursor: bytes, *, count: int | None = None) -> Command[Page]:
    """The page after one that had a cursor, as long as that unless `count` says otherwise."""
    request = Request(Function.GET, flags=DATA, key=cursor, count=count, query=QUERY_CURSOR)
    return Command(request, _page)


def delete(key: Key, *, complete: bool = False, timestamp: int = 0) -> Command[bool]:
    """Remove a value, or end a job; True if there was one. `complete` leaves no tombstone."""
    request = Request(
        Function.DELETE, 0, OVERWRITE if complete else 0, timestamp, key=to_bytes(key)
    )
    return Command(request, _deleted)


def add(key: Key, amount: float) -> Command[Any]:
    """Add to a number, which starts at 0; the sum."""
    request = Request(Function.ADD, key=to_bytes(key), value=to_value(amount))
    return Command(request, _only_value)


def invert(key: Key) -> Command[Any]:
    """NOT: flip a boolean; its new value."""
    return Command(Request(Function.NOT, key=to_bytes(key)), _only_value)


def truncate(key: Key, size: int) -> Command[int]:
    request = Request(Function.TRUNCATE, key=to_bytes(key), value=to_value(size))
    return Command(request, _timestamp)


def lock(key: Key, *, seconds: float | None = None) -> Command[int]:
    """Nobody else can change the value until unlocked, the time is over or this connection ends."""
    until = None if seconds is None else _later(seconds)
    return Command(Request(Function.LOCK, key=to_bytes(key), timeout=until), _timestamp)


def unlock(key: Key) -> Command[int]:
    return Command(Request(Function.UNLOCK, key=to_bytes(key)), _timestamp)


def rename(key: Key, new: Key, *, overwrite: bool = False) -> Command[int]:
    return Command(_two(Function.RENAME, key, new, OVERWRITE if overwrite else 0), _timestamp)


def link(key: Key, additional: Key) -> Command[int]:
    """Let another key lead to the same value."""
    return Command(_two(Function.LINK, key, additional), _timestamp)


def unlink(key: Key) -> Command[bool]:
    return Command(Request(Function.UNLINK, key=to_bytes(key)), _deleted)


def ping() -> Command[int]:
    return Command(Request(Function.NOP), _timestamp)


# Jobs.


def push(
    uri: Key,
    *,
    domain: Key = b"",
    priority: int = 0,
    start: float | None = None,
    delay: float = 0,
    payload: Plain = None,
    persist: bool = True,
    timestamp: int = 0,
) -> Command[int]:
    """
    Ask for work on a uri, `delay` seconds from now or at `start`; asking again replaces what waits.

    The domain is the uri's host unless given. Small priorities (0 to 255) go first.
    """
    due = None
    if start is not None:
        due = _us(start)
    elif delay:
        due = _later(delay)
    request = Request(
        PUSH,
        0,
        PERSIST if persist else 0,
        timestamp,
        due,
        None,
        priority,
        uri.encode("utf-8", "surrogateescape") if isinstance(uri, str) else to_bytes(uri),
        to_bytes(domain) if domain else b"",
        None if payload is None else to_value(payload),
        QUERY_RANGE,
    )
    return Command(request, _timestamp, ..., TOLD_TIMESTAMP)


def next_(
    domain: Key = b"",
    *,
    count: int = 1,
    work_for: float | None = None,
    listen: bool = False,
    remove: bool = False,
) -> Command[Next]:
    """
    Up to `count` due jobs, to be done within `work_for` seconds (the domain's default if not given).

    With `listen` a message follows when something becomes due earlier than announced; with `remove`
    a job counts as done when it is handed out.
    """
    flags = DATA | DETAILS | listen * LISTEN | remove * OVERWRITE
    until = None if work_for is None else _later(work_for)
    request = Request(NEXT, 0, flags, 0, until, None, count, to_bytes(domain))
    return Command(request, _next_reply, ..., TOLD_NEXT)


def done(key: Key) -> Command[bool]:
    """The work is done; refused with `does-not-exist` if that attempt is over."""
    request = Request(DELETE, 0, OVERWRITE, 0, None, None, None, to_bytes(key))
    return Command(request, _deleted, ..., TOLD_DELETED)


def extend(key: Key, seconds: float) -> Command[bool]:
    """Heartbeat: that many more seconds from now."""
    until = _later(seconds)
    request = Request(Function.GET, key=to_bytes(key), timeout=until)
    return Command(request, lambda reply: bool(reply.flags & WORKED_ON))


def give_back(key: Key) -> Command[bool]:
    """Let somebody else do it, at once."""
    return Command(Request(Function.GET, key=to_bytes(key), timeout=0), lambda _: True)


def admin(do: str, **fields: Any) -> Command[dict[str, Any]]:
    """A command of the journal's administration, see `virta.journal.admin`."""
    value = Value(Type.STRING, msgspec.json.encode({"do": do, **fields}))
    request = Request(Function.SET, key=COMMAND_KEY, value=value)
    return Command(request, _json)


def fail(
    key: Key, reason: str, *, delay: float | None = None, traceback: str = "", dead: bool = False
) -> Command[dict[str, Any]]:
    """
    Report a failed attempt: it is counted, and the job is tried again or becomes dead.

    It is tried again after `delay` seconds, or the domain's back-off; never with `dead`. The end of `traceback`
    is kept with the job.
    """
    name = to_bytes(key).decode(errors="replace")
    fields: dict[str, Any] = {"traceback": traceback} if traceback else {}
    if dead:
        fields["dead"] = True
    return admin("fail", key=name, reason=reason, delay=delay, **fields)


# Conversions.


def to_bytes(key: Key) -> bytes:
    if type(key) is bytes:
        return key
    return key.encode("utf-8", "surrogateescape") if isinstance(key, str) else _bytes(key, "a key")


def to_value(plain: Plain) -> Value:
    """The wire's type for a Python value; integers take 8 bytes."""
    if type(plain) is bytes:
        return Value(1, plain)
    if isinstance(plain, Value):
        return plain
    if plain is None:
        return Value(Type.VOID, b"")
    if isinstance(plain, bool):
        return Value(Type.BOOLEAN, b"\1" if plain else b"\0")
    if isinstance(plain, int):
        try:
            return Value(Type.INTEGER, plain.to_bytes(8, "big", signed=True))
        except OverflowError as error:
            raise RefusedError("overflow", f"{plain} does not fit 8 bytes") from error
    if isinstance(plain, float):
        return Value(Type.FLOAT, struct.pack(">d", plain))
    if isinstance(plain, str):
        return Value(Type.STRING, plain.encode("utf-8", "surrogateescape"))
    return Value(Type.BUFFER, _bytes(plain, "a value"))


def _bytes(given: Any, what: str) -> bytes:
    """Of anything like bytes; numbers and lists, which Python would make zeros and bytes of, are mistakes."""
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    right = "str or bytes" if what == "a key" else "None, bool, int, float, str, bytes or Value"
    raise RefusedError("type-mismatch", f"{what} is {right}, not {type(given).__name__}")


def to_plain(value: Value) -> Any:
    """A Python value; what does not fit its type stays bytes."""
    kind, data = value.type, value.data
    if kind == Type.VOID:
        return None
    if kind == Type.STRING:
        return data.decode(errors="surrogateescape")
    if kind == Type.INTEGER and data:
        return int.from_bytes(data, "big", signed=True)
    if kind == Type.FLOAT and len(data) in (4, 8):
        return struct.unpack(">f" if len(data) == 4 else ">d", data)[0]
    if kind == Type.BOOLEAN and len(data) == 1:
        return data != b"\0"
    return data


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else _whole(seconds)


def own_time() -> int:
    """Return this process's time (µs), from which durations are counted; the daemon's may differ."""
    return now_us()


def _later(seconds: float) -> int:
    return own_time() + _whole(seconds)


def _whole(seconds: float) -> int:
    try:
        return int(seconds * 1_000_000)
    except (OverflowError, ValueError) as error:
        raise RefusedError("overflow", f"{seconds} is no number of seconds") from error


def _two(function: Function, key: Key, key2: Key, flags: int = 0) -> Request:
    return Request(
        function, flags=flags, key=to_bytes(key), key2=to_bytes(key2), count=0, query=QUERY_RANGE
    )


def _timestamp(reply: Reply) -> int:
    return reply.timestamp


def _deleted(reply: Reply) -> bool:
    return bool(reply.flags & DELETED)


def _only_value(reply: Reply) -> Any:
    assert reply.pair is not None
    assert reply.pair.value is not None
    return to_plain(reply.pair.value)


def _found(reply: Reply) -> Found:
    pair = reply.pair
    assert pair is not None
    assert pair.value is not None
    assert pair.details is not None
    return Found(pair.value, pair.details, reply.timestamp)


def _json(reply: Reply) -> dict[str, Any]:
    assert reply.pair is not None
    assert reply.pair.value is not None
    answer: dict[str, Any] = msgspec.json.decode(reply.pair.value.data)
    return answer


def _page(reply: Reply) -> Page:
    items = [(pair.key, to_plain(pair.value)) for pair in reply.all_pairs() if pair.value]
    return Page(items, reply.cursor)


def _next_reply(reply: Reply) -> Next:
    """Pairs are jobs, each followed by a pair without key if it has a payload."""
    deadline = (reply.timeout or 0) / 1e6
    jobs: list[Lease] = []
    payload: Any = None
    make = tuple.__new__  # a call of Python less per job
    for pair in reversed(reply.all_pairs()):
        key, value = pair.key, pair.value
        assert value is not None
        if key:
            details = pair.details
            attempts = details.attempts if details is not None else 0
            jobs.append(make(Lease, (key, value.data, payload, deadline, attempts)))
            payload = None
        else:
            payload = value.data if value.type == BUFFER else to_plain(value)
    jobs.reverse()
    if jobs or reply.timeout is None:
        return Next(jobs, None)
    return Next([], reply.timeout / 1e6)
