"""Events as JSON: the reader that all engines share."""

from __future__ import annotations

import json
from typing import Any

from virta.errors import EventError

# Bytes of one event; larger input is a mistake.
EVENT_BYTES_MAX = 64 << 20


def parse_event(data: bytes, position: int = 0) -> Any:
    """
    Return the JSON value of an event; raise EventError that names it by its `position` in the call.

    UTF-8 only. Of duplicate members the last counts. NaN and Infinity are refused; a number too large for a
    double is infinite. Escaped lone surrogates are allowed.
    """
    if len(data) > EVENT_BYTES_MAX:
        raise EventError(
            f"event {position} has {len(data)} bytes: at most {EVENT_BYTES_MAX} are allowed",
            code="event_too_large",
        )
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError as exc:
        raise too_deep(position) from exc
    except ValueError as exc:
        raise EventError(
            f"event {position} is not JSON: {exc}; got {data[:80]!r}", code="event_not_json"
        ) from exc


def lines(data: bytes) -> list[bytes]:
    """Return the lines of a buffer with one JSON event a line, without blank ones."""
    return [line for line in data.split(b"\n") if line.strip(b" \t\r")]


def too_deep(position: int | None = None) -> EventError:
    """Return the error for an event that nests too deeply."""
    which = "an event" if position is None else f"event {position}"
    return EventError(f"{which} nests too deep to be looked into", code="event_too_deep")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
