"""
Fields of log lines from the standard library's `logging`.

Libraries log `logger.warning("append_failed code=%s: %s", code, reason)`: an event's name, fields, and a
reason. In a JSON line they are members:

    {"message": "append_failed", "code": "log_disk_full", "reason": "…"}

The template of a record has names and values apart, so fields are read from it. Lines of another shape
(uvicorn's, asyncio's) are not changed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging
    from collections.abc import MutableMapping

# An event's name has an underscore: the first word of a sentence has none.
EVENT = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?=[:\s]|$)")
# `%%`, or a placeholder for a value, with or without a name.
PLACE = re.compile(r"%%|(?:\b([a-z_][a-z0-9_]*)=)?(%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
REASON = "reason"
# Members of every line, which a field must not replace.
RESERVED = frozenset({"event", "message", "level", "timestamp", "exception"})


def spread_fields(
    _logger: object, _method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Turn the text of a standard-library record into an event with fields; a structlog processor."""
    record: logging.LogRecord | None = event_dict.get("_record")
    arguments = event_dict.pop("positional_args", None) or ()
    if record is None or not isinstance(record.msg, str) or not isinstance(arguments, tuple):
        return event_dict
    found = read_line(record.msg, arguments)
    if found is not None:
        event_dict["event"], fields = found
        for name, value in fields.items():
            event_dict[f"{name}_" if name in RESERVED else name] = value
    return event_dict


def read_line(template: str, arguments: tuple[object, ...]) -> tuple[str, dict[str, object]] | None:
    """
    Return the event's name and its fields; None for a line of another shape.

    Text outside of fields becomes the field `reason`. Numbers and strings keep their types.
    """
    start = EVENT.match(template)
    if start is None:
        return None
    fields: dict[str, object] = {}
    values = iter(arguments)
    text, at = "", start.end()
    try:
        for place in PLACE.finditer(template, at):
            text += template[at : place.start()]
            at = place.end()
            name, form = place.groups()
            if form is None:
                text += "%"
            elif name is None:
                text += form % (next(values),)
            else:
                fields[name] = _field_value(next(values), form)
    except (StopIteration, TypeError, ValueError):
        return None  # another convention
    reason = (text + template[at:]).strip(" :")
    if reason:
        fields[REASON] = reason
    return start.group(), fields


def _field_value(value: object, form: str) -> object:
    if isinstance(value, bool | int | float | str) and form in {"%s", "%d", "%i"}:
        return value
    text = form % (value,)
    # A number that the template rounds is still a number.
    return float(text) if isinstance(value, int | float) and form[-1] in "eEfFgG" else text
