"""
Commands as a user writes them: Python values and seconds in, Python values out.

Each function builds a request together with the decoder of its reply; clients only carry them, so all of them
give the same results. Times are Unix seconds, durations seconds; `str` keys are UTF-8, with `surrogateescape`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from virta.clock import now_us
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
# Plain numbers for the frequent ones: reading a member of an enumeration is slow.
PUSH, NEXT, DELETE = int(Function.PUSH), int(Function.NEXT), int(Function.DELETE)
BUFFER = int(Type.BUFFER)
Plain = None | bool | int | float | str | bytes | Value


class Command(msgspec.Struct, Generic[T], frozen=True):
    """A request and the decoder of its reply."""

    request: Request
    decode: Callable[[Reply], T]
    missing: Any = ...  # the result for a key that does not exist; ...: that is an error

    def result(self, reply: Reply) -> T:
        """Return what the reply says; raise RefusedError for a refusal."""
        if reply.error:
            code, _, detail = reply.error.partition(": ")
            if code == "does-not-exist" and self.missing is not ...:
                result: T = self.missing
                return result
            raise RefusedError(code, detail, timestamp=reply.timestamp, timeout=reply.timeout)
        return self.decode(reply)


class Lease(NamedTuple):
    """A reserved job: acknowledge it by `key` before `deadline` (Unix seconds)."""

    key: bytes
    uri: bytes
    payload: Any
    deadline: float
    attempts: int


class Next(NamedTuple):
    """Reserved jobs, or when to ask again (Unix seconds; None: no job is waiting)."""

    jobs: list[Lease]
    wake_up: float | None


class Page(NamedTuple):
    """Keys with their values, and the cursor of the next page (None: this is the last)."""

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
    """Store a value; return the timestamp (µs) of the stored version, later if that is a newer one."""
    flags = overwrite * OVERWRITE | persist * PERSIST | listen * LISTEN
    request = Request(
        Function.SET,
        0,
        flags,
        timestamp,
        _optional_us(expires),
        _optional_us(ttl),
        key=to_bytes(key),
        value=to_value(value),
    )
    return Command(request, _read_timestamp)


def get(
    key: Key, *, touch: float | bool = False, listen: bool = False, default: Any = None
) -> Command[Any]:
    """Return the value of a key or `default`; `touch` extends its expiry by that many seconds."""
    flags = DATA | (TOUCH if touch is not False else 0) | listen * LISTEN
    ttl = None if isinstance(touch, bool) else _optional_us(touch)
    request = Request(Function.GET, flags=flags, key=to_bytes(key), ttl=ttl)
    return Command(request, _only_value, default)


class DetailedValue(NamedTuple):
    """A value, its details and its timestamp."""

    value: Value
    details: Details
    timestamp: int


def get_detailed(key: Key, *, touch: bool = False) -> Command[DetailedValue | None]:
    """Return a key's value and details in one step; None if there is none."""
    request = Request(
        Function.GET, flags=DATA | DETAILS | (TOUCH if touch else 0), key=to_bytes(key)
    )
    return Command(request, _detailed_value, None)


def details(key: Key) -> Command[Details | None]:
    """Return what the journal keeps of a key besides its data."""
    request = Request(Function.GET, flags=DETAILS, key=to_bytes(key))
    return Command(request, lambda reply: reply.pair.details if reply.pair else None, None)


def scan(lower: Key = b"", upper: Key = b"", *, count: int = 1000) -> Command[Page]:
    """Return keys from `lower` up to, not including, `upper` (empty: no end)."""
    request = Request(
        Function.GET,
        flags=DATA,
        key=to_bytes(lower),
        key2=to_bytes(upper),
        count=count,
        query=QUERY_RANGE,
    )
    return Command(request, _read_page)


def search(pattern: Key, *, count: int = 1000) -> Command[Page]:
    """Return the keys in which a regular expression (RE2) is found."""
    request = Request(
        Function.GET, flags=DATA, key=to_bytes(pattern), count=count, query=QUERY_REGEX
    )
    return Command(request, _read_page)


def more(cursor: bytes, *, count: int | None = None) -> Command[Page]:
    """Return the page after one with a cursor, with the same `count` unless given."""
    request = Request(Function.GET, flags=DATA, key=cursor, count=count, query=QUERY_CURSOR)
    return Command(request, _read_page)


def delete(key: Key, *, complete: bool = False, timestamp: int = 0) -> Command[bool]:
    """Remove a value or a job; return whether there was one. `complete` leaves no tombstone."""
    request = Request(
        Function.DELETE, 0, OVERWRITE if complete else 0, timestamp, key=to_bytes(key)
    )
    return Command(request, _was_deleted)


def add(key: Key, amount: float) -> Command[Any]:
    """Add to a number, which starts at 0; return the sum."""
    request = Request(Function.ADD, key=to_bytes(key), value=to_value(amount))
    return Command(request, _only_value)


def invert(key: Key) -> Command[Any]:
    """Invert a boolean (NOT); return its new value."""
    return Command(Request(Function.NOT, key=to_bytes(key)), _only_value)


def truncate(key: Key, size: int) -> Command[int]:
    """Cut a string or buffer to `size` bytes, or fill it up with zeros."""
    request = Request(Function.TRUNCATE, key=to_bytes(key), value=to_value(size))
    return Command(request, _read_timestamp)


def lock(key: Key, *, seconds: float | None = None) -> Command[int]:
    """Keep others from changing a value until it is unlocked, `seconds` pass or this connection ends."""
    until = None if seconds is None else _deadline_us(seconds)
    return Command(Request(Function.LOCK, key=to_bytes(key), timeout=until), _read_timestamp)


def unlock(key: Key) -> Command[int]:
    """Release a lock of this connection."""
    return Command(Request(Function.UNLOCK, key=to_bytes(key)), _read_timestamp)


def rename(key: Key, new: Key, *, overwrite: bool = False) -> Command[int]:
    """Move a value to another key."""
    return Command(
        _two_keys(Function.RENAME, key, new, OVERWRITE if overwrite else 0), _read_timestamp
    )


def link(key: Key, additional: Key) -> Command[int]:
    """Add another key of the same value."""
    return Command(_two_keys(Function.LINK, key, additional), _read_timestamp)


def unlink(key: Key) -> Command[bool]:
    """Remove one key of a value; return whether that removed the value, as it was the last."""
    return Command(Request(Function.UNLINK, key=to_bytes(key)), _was_deleted)


def ping() -> Command[int]:
    """Return the daemon's time (µs)."""
    return Command(Request(Function.NOP), _read_timestamp)


def authenticate(token: str) -> Command[int]:
    """Identify a connection by a token, before every other command."""
    return Command(Request(Function.NOP, key=b"auth:" + token.encode()), _read_timestamp)


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
    Add a job for a uri, due at `start` or `delay` seconds from now; it replaces a waiting job of that uri.

    The domain is the uri's host unless given. Small priorities (0 to 255) go first.
    """
    due = None
    if start is not None:
        due = _optional_us(start)
    elif delay:
        due = _deadline_us(delay)
    request = Request(
        PUSH,
        0,
        PERSIST if persist else 0,
        timestamp,
        due,
        None,
        priority,
        to_bytes(uri),
        to_bytes(domain) if domain else b"",
        None if payload is None else to_value(payload),
        QUERY_RANGE,
    )
    return Command(request, _read_timestamp)


def next_(
    domain: Key = b"",
    *,
    count: int = 1,
    work_for: float | None = None,
    listen: bool = False,
    remove: bool = False,
) -> Command[Next]:
    """
    Reserve up to `count` due jobs for `work_for` seconds (by default the domain's deadline).

    With `listen` a notification follows when a job becomes due earlier than announced; with `remove` a job counts
    as done when it is reserved.
    """
    flags = DATA | DETAILS | listen * LISTEN | remove * OVERWRITE
    until = None if work_for is None else _deadline_us(work_for)
    request = Request(NEXT, 0, flags, 0, until, None, count, to_bytes(domain))
    return Command(request, _next_reply)


def done(key: Key) -> Command[bool]:
    """Acknowledge a job; refused with `does-not-exist` if that attempt is over."""
    request = Request(DELETE, 0, OVERWRITE, 0, None, None, None, to_bytes(key))
    return Command(request, _was_deleted)


def extend(key: Key, seconds: float) -> Command[bool]:
    """Extend a job's deadline to `seconds` from now."""
    until = _deadline_us(seconds)
    request = Request(Function.GET, key=to_bytes(key), timeout=until)
    return Command(request, lambda reply: bool(reply.flags & WORKED_ON))


def give_back(key: Key) -> Command[bool]:
    """Return a job to the queue, due at once."""
    return Command(Request(Function.GET, key=to_bytes(key), timeout=0), lambda _: True)


def admin(do: str, **fields: Any) -> Command[dict[str, Any]]:
    """Run an administrative command, see `virta.journal.admin`."""
    value = Value(Type.STRING, msgspec.json.encode({"do": do, **fields}))
    request = Request(Function.SET, key=COMMAND_KEY, value=value)
    return Command(request, _read_json)


def fail(
    key: Key, reason: str, *, delay: float | None = None, traceback: str = "", dead: bool = False
) -> Command[dict[str, Any]]:
    """
    Report a failed attempt: it is counted, and the job is tried again or becomes dead.

    The next attempt is after `delay` seconds or the domain's back-off; with `dead` there is none. The end of
    `traceback` is stored with the job.
    """
    name = to_bytes(key).decode(errors="replace")
    fields: dict[str, Any] = {"traceback": traceback} if traceback else {}
    if dead:
        fields["dead"] = True
    return admin("fail", key=name, reason=reason, delay=delay, **fields)


# Conversions.


def to_bytes(key: Key) -> bytes:
    """Return a key as bytes."""
    if type(key) is bytes:
        return key
    return key.encode("utf-8", "surrogateescape") if isinstance(key, str) else _bytes(key, "a key")


def to_value(plain: Plain) -> Value:
    """Return a Python value with its wire type; integers take 8 bytes."""
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
    """Return bytes-like objects as bytes; refuse numbers and lists, from which `bytes()` makes something else."""
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    right = "str or bytes" if what == "a key" else "None, bool, int, float, str, bytes or Value"
    raise RefusedError("type-mismatch", f"{what} is {right}, not {type(given).__name__}")


def to_plain(value: Value) -> Any:
    """Return a Python value; data that does not fit its type stays bytes."""
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


def _optional_us(seconds: float | None) -> int | None:
    return None if seconds is None else _microseconds(seconds)


def own_time() -> int:
    """Return this process's time (µs), which durations start from; the daemon's may differ."""
    return now_us()


def _deadline_us(seconds: float) -> int:
    return own_time() + _microseconds(seconds)


def _microseconds(seconds: float) -> int:
    try:
        return int(seconds * 1_000_000)
    except (OverflowError, ValueError) as error:
        raise RefusedError("overflow", f"{seconds} is no number of seconds") from error


def _two_keys(function: Function, key: Key, key2: Key, flags: int = 0) -> Request:
    return Request(
        function, flags=flags, key=to_bytes(key), key2=to_bytes(key2), count=0, query=QUERY_RANGE
    )


def _read_timestamp(reply: Reply) -> int:
    return reply.timestamp


def _was_deleted(reply: Reply) -> bool:
    return bool(reply.flags & DELETED)


def _only_value(reply: Reply) -> Any:
    assert reply.pair is not None
    assert reply.pair.value is not None
    return to_plain(reply.pair.value)


def _detailed_value(reply: Reply) -> DetailedValue:
    pair = reply.pair
    assert pair is not None
    assert pair.value is not None
    assert pair.details is not None
    return DetailedValue(pair.value, pair.details, reply.timestamp)


def _read_json(reply: Reply) -> dict[str, Any]:
    assert reply.pair is not None
    assert reply.pair.value is not None
    answer: dict[str, Any] = msgspec.json.decode(reply.pair.value.data)
    return answer


def _read_page(reply: Reply) -> Page:
    items = [(pair.key, to_plain(pair.value)) for pair in reply.all_pairs() if pair.value]
    return Page(items, reply.cursor)


def _next_reply(reply: Reply) -> Next:
    """Decode jobs: a pair each, followed by a pair without key if it has a payload."""
    deadline = (reply.timeout or 0) / 1e6
    jobs: list[Lease] = []
    payload: Any = None
    make = tuple.__new__  # saves a Python call per job
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
