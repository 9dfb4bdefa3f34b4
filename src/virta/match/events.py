"""Events that arrive as JSON: one reader for both engines."""

from __future__ import annotations

from typing import Any

from virta.errors import EventError
from virta.jsontext import DEPTH_MAX, JsonDepthError, decode

# Bytes of one event that is matched. The matcher also works without `virta.event`, whose limit is lower.
TEXT_BYTES_MAX = 64 << 20


def parse_event(data: bytes, position: int = 0) -> Any:
    """
    Return the JSON value of an event, read as `virta.jsontext.decode` reads it.

    Raises:
        EventError: naming event number `position` of the call, if it is no JSON, too large or too deep.
    """
    if len(data) > TEXT_BYTES_MAX:
        raise EventError(
            f"event {position} has {len(data)} bytes: at most {TEXT_BYTES_MAX} are allowed",
            code="event_too_large",
        )
    try:
        return decode(data)
    except JsonDepthError as exc:
        raise too_deep(position) from exc
    except ValueError as exc:
        raise EventError(
            f"event {position} is not JSON: {exc}; got {data[:80]!r}", code="event_not_json"
        ) from exc


def lines(data: bytes) -> list[bytes]:
    """Return the events of a buffer with one JSON value a line; blank lines are none."""
    return [line for line in data.split(b"\n") if line.strip(b" \t\r")]


def too_deep(position: int | None = None) -> EventError:
    """Return the error for an event that nests too deeply."""
    which = "an event" if position is None else f"event {position}"
    return EventError(f"{which} nests deeper than {DEPTH_MAX} levels", code="event_too_deep")
