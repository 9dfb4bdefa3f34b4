"""Read the row changes of events and records: natively where they are ordinary, else one by one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from virta import native
from virta.event.row_changes import RowChange, event_of, read_change, read_event_change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virta.event.document import RecordLike
    from virta.event.row_changes import KeyRule

_native = native.load("virta.views._native")


def read_changes(
    values: Sequence[bytes], offset: int, rule: KeyRule
) -> list[tuple[int, RowChange]]:
    """Return the row changes of events without record keys, each with its offset; the first has `offset`."""
    if _native is None or rule.steps:
        return [
            (at, read_event_change(b"", value, rule)) for at, value in enumerate(values, offset)
        ]
    plain = partial(_read_keyless, rule)
    changes: list[tuple[int, RowChange]] = _native.read_changes(
        list(values), offset, RowChange, plain
    )
    return changes


def read_record(record: RecordLike, rule: KeyRule) -> RowChange:
    """Return the row change of a record of the log."""
    value = record.value
    if _native is not None and _native.is_event(value):  # nothing has to be made of it
        return read_event_change(bytes(record.key), bytes(value), rule)
    return read_change(record, rule)


def event_value(record: RecordLike) -> bytes:
    """Return the event that a record is or is wrapped in, on one line."""
    value = record.value
    if _native is not None and _native.is_event(value):
        return bytes(value)
    return event_of(record).value


def _read_keyless(rule: KeyRule, value: bytes) -> RowChange:
    return read_event_change(b"", value, rule)
