"""
Rows of the table `virta_outbox` are events themselves: forward them to the channel they name.

`virta.outbox` writes them. A row whose channel or event cannot be used goes to `<server>.outbox-invalid` as an
ordinary change, with a warning: nothing is dropped.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from virta.event.document import read_event
from virta.log.limits import KEY_BYTES_MAX, TOPIC_BYTES_MAX, VALUE_BYTES_MAX
from virta.outbox import TABLE as OUTBOX_TABLE

if TYPE_CHECKING:
    from virta.cdc.events import CapturedTable, ChangeEvents, ChangeRecord, Origin, Row

INVALID: Final = "outbox-invalid"
RESERVED_PREFIX: Final = "$virta/"
__all__ = ["OUTBOX_TABLE", "forwarded", "is_outbox"]

_COLUMNS: Final = frozenset({"id", "channel", "key", "event"})

logger = logging.getLogger("virta.cdc")


def is_outbox(table: CapturedTable) -> bool:
    """Return whether the rows of a table are events to forward."""
    names = {column["name"] for column in table.columns}
    return table.name == OUTBOX_TABLE and names >= _COLUMNS


def forwarded(
    events: ChangeEvents, table: CapturedTable, op: str, after: Row | None, origin: Origin
) -> list[ChangeRecord]:
    """Return the record of an event in the outbox; nothing for rows that are changed or removed."""
    if op not in {"c", "r"} or after is None:
        return []
    channel, key, event = after["channel"], after["key"] or "", after["event"]
    problem = _why_invalid(channel, key, event)
    if not problem:
        return [(channel, key.encode(), event.encode())]
    logger.warning("outbox_row_invalid id=%s: %s", after["id"], problem)
    ((_, row_key, value),) = events.change(table, op, None, after, origin)
    return [(f"{events.server}.{INVALID}", row_key, value)]


def _why_invalid(channel: object, key: object, event: object) -> str:
    """Return why a row cannot be forwarded, empty if it can."""
    if not isinstance(channel, str) or not 1 <= len(channel.encode()) <= TOPIC_BYTES_MAX:
        return f"channel {channel!r:.80} must be a text of 1 to {TOPIC_BYTES_MAX} bytes"
    if (
        channel.startswith(RESERVED_PREFIX)
        or "\0" in channel
        or (len(channel) == 1 and channel < " ")
    ):
        return f"channel {channel!r:.80} is one of Virta's own"
    if not isinstance(key, str) or len(key.encode()) > KEY_BYTES_MAX:
        return f"key {key!r:.80} must be a text of at most {KEY_BYTES_MAX} bytes"
    if not isinstance(event, str) or len(event) > VALUE_BYTES_MAX:
        return f"event must be a text of at most {VALUE_BYTES_MAX} bytes"
    if read_event(event.encode()) is None:
        return f"event {event[:80]!r} is not a JSON object with source and id"
    return ""
