"""
Records as lines, both ways: text lines, CloudEvents and record objects in, five ways of printing out.

A record object is `{"offset", "time", "topic", "key", "value"}`; a field that is not UTF-8 is there as
`topic_base64`, `key_base64` or `value_base64` instead. `export --format ndjson` writes these and
`append --format ndjson-records` takes them, so a log survives the trip byte for byte.
"""

from __future__ import annotations

import os
import select
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Final

import msgspec

from virta.cli.report import InputError, one_line
from virta.cli.units import show_time
from virta.errors import EventError
from virta.event import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virta.log import Record

# The largest value in Base64, and its names beside it.
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024

Row = tuple[bytes, bytes, bytes]


# In.


def read_lines(fd: int, batch: int) -> Iterator[list[bytes]]:
    """
    Lines of a file descriptor, in lists of at most `batch`.

    A list is handed on when it is full or when nothing more is waiting, so a slow writer's lines do
    not sit here. The last line needs no line break.
    """
    rest = b""
    pending: list[bytes] = []
    while chunk := os.read(fd, READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n") if b"\n" in chunk else (rest + chunk,)
        if len(rest) > LINE_BYTES_MAX:
            raise InputError(f"a line is longer than {LINE_BYTES_MAX} bytes")
        pending += lines
        while len(pending) >= batch:
            yield pending[:batch]
            pending = pending[batch:]
        if pending and not select.select([fd], [], [], 0)[0]:
            yield pending
            pending = []
    if rest:
        pending.append(rest)
    if pending:
        yield pending


def line_parser(
    form: str, *, topic: str | None, key: str | None, separator: str | None, lenient: bool
) -> Callable[[bytes], Row | None]:
    """A function from a line to a record, or to None for a line that holds none."""
    topic_bytes = None if topic is None else topic.encode()
    key_bytes = (key or "").encode()
    cut = None if separator is None else separator.encode()

    def text(line: bytes) -> Row:
        assert topic_bytes is not None
        if cut is None:
            return topic_bytes, key_bytes, line
        before, found, after = line.partition(cut)
        if not found:
            raise ValueError(f"has no key separator {separator!r}")
        return topic_bytes, before, after

    def event(line: bytes) -> Row | None:
        assert topic_bytes is not None
        if not line.strip():
            return None
        parsed = Event.from_json(line.strip(), lenient=lenient)
        return topic_bytes, parsed.partition_key.encode() or key_bytes, parsed.to_json()

    def record(line: bytes) -> Row | None:
        if not line.strip():
            return None
        members = msgspec.json.decode(line, type=dict[str, Any])
        found = _field(members, "topic")
        name = topic_bytes if found is None else found
        if name is None:
            raise ValueError("has no topic, and --topic does not give one")
        stored = _field(members, "key")
        return name, key_bytes if stored is None else stored, _field(members, "value") or b""

    return {"lines": text, "cloudevents": event, "ndjson-records": record}[form]


def parse_line(parse: Callable[[bytes], Row | None], line: bytes, number: int) -> Row | None:
    """Parse one line; what is wrong with it is told with its number."""
    try:
        return parse(line)
    except EventError as error:
        raise InputError(f"line {number}: {error.message}") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InputError(f"line {number}: {error}") from error


def _field(members: dict[str, Any], name: str) -> bytes | None:
    encoded = members.get(f"{name}_base64")
    value = members.get(name) if encoded is None else encoded
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"its {name} is not a string: quote it, or use {name}_base64")  # noqa: TRY004
    return value.encode() if encoded is None else b64decode(value, validate=True)


# Out.


def record_object(record: Record) -> dict[str, Any]:
    """A record as the JSON object that `ndjson-records` reads back."""
    members: dict[str, Any] = {"offset": record.offset, "time": show_time(record.timestamp)}
    for name, data in (("topic", record.topic), ("key", record.key), ("value", record.value)):
        try:
            members[name] = bytes(data).decode()
        except UnicodeDecodeError:
            members[f"{name}_base64"] = b64encode(data).decode()
    return members


def _json(record: Record) -> bytes:
    return msgspec.json.encode(record_object(record)) + b"\n"


def _full(record: Record) -> bytes:
    """For eyes: control characters of names and value are escaped, so a record stays on its line."""
    names = (str(record.topic), str(record.key), record.value.decode("utf-8", "replace"))
    shown = "\t".join(map(one_line, names))
    return f"{record.offset}\t{show_time(record.timestamp)}\t{shown}\n".encode()


def _event(record: Record) -> bytes:
    """The value on one line; a value that is not JSON cannot be put there."""
    try:
        line: bytes = msgspec.json.format(record.value, indent=-1)
    except msgspec.DecodeError as error:
        raise InputError(
            f"the value at offset {record.offset} is not JSON ({error}): use --format value or json"
        ) from error
    return line + b"\n"


WRITERS: Final[dict[str, Callable[[Record], bytes]]] = {
    "value": lambda record: record.value + b"\n",
    "raw": lambda record: record.value,
    "event": _event,
    "json": _json,
    "full": _full,
}
