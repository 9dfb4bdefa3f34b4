"""
Records as lines: text, CloudEvents and record objects in, five formats out.

A record object is `{"offset", "time", "topic", "key", "value"}`; a field that is not UTF-8 is named
`topic_base64`, `key_base64` or `value_base64` instead. `export --format ndjson` writes these and
`append --format ndjson-records` reads them, so a log survives both byte for byte.
"""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from virta.cli.input_lines import read_lines
from virta.cli.report import InputError, one_line, text_member
from virta.cli.units import show_time
from virta.errors import EventError
from virta.event import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virta.log import Log, Record
    from virta.log.log import Durability

Row = tuple[bytes, bytes, bytes]


class AppendProgress(msgspec.Struct):
    """What has been appended so far."""

    records: int = 0
    bytes: int = 0
    first_offset: int | None = None
    next_offset: int | None = None
    durability: str | None = None


def append_lines(
    target: Log,
    source: BinaryIO,
    parse: Callable[[bytes], Row | None],
    done: AppendProgress,
    *,
    batch: int,
    durability: Durability | None,
) -> Iterator[int]:
    """
    Append lines in atomic batches, updating `done`; yield the bytes that were read after each batch.

    Raises:
        InputError: a line is no record; the batches before it are appended.
    """
    number = size = 0
    for lines in read_lines(source, batch):
        rows = [_parse_line(parse, line, number + i) for i, line in enumerate(lines, 1)]
        number += len(lines)
        size += sum(map(len, lines)) + len(lines)
        records = [row for row in rows if row is not None]
        if records:
            appended = target.append_many(records, durability=durability)
            if done.first_offset is None:
                done.first_offset = appended.offset
            done.next_offset = appended.offset + appended.count
            done.durability = appended.durability
            done.records += len(records)
            done.bytes += sum(len(value) for _, _, value in records)
        yield size


def line_parser(
    form: str, *, topic: str | None, key: str | None, separator: str | None, lenient: bool
) -> Callable[[bytes], Row | None]:
    """Return a function from a line to a record, or to None for a blank line."""
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


def _parse_line(parse: Callable[[bytes], Row | None], line: bytes, number: int) -> Row | None:
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


# Output.


def _json(record: Record) -> bytes:
    """Return the record object that `ndjson-records` reads."""
    members: dict[str, Any] = {"offset": record.offset, "time": show_time(record.timestamp)}
    for name, data in (("topic", record.topic), ("key", record.key), ("value", record.value)):
        members |= text_member(name, data)
    return msgspec.json.encode(members) + b"\n"


def _full(record: Record) -> bytes:
    """Return all fields on one line; control characters are escaped."""
    names = (str(record.topic), str(record.key), record.value.decode("utf-8", "replace"))
    shown = "\t".join(map(one_line, names))
    return f"{record.offset}\t{show_time(record.timestamp)}\t{shown}\n".encode()


def _event(record: Record) -> bytes:
    """Return the value, which has to be JSON, on one line."""
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
