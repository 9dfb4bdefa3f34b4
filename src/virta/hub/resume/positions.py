"""
Positions: where a consumer continues, as a string that it can store.

    1f0c9be2a7d4.4711      TAG.OFFSET

TAG is derived from the log's id, so a position of another log is recognised. OFFSET is that of the
next record: everything below it was sent to this consumer or did not match. A consumer may also name
an event that it saw, by source and id, in the form in which `data` frames carry them (`EventId`).
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from typing import NamedTuple
from urllib.parse import unquote, unquote_plus

TAG_DIGITS = 12
# Offsets are 64-bit numbers.
OFFSET_DIGITS_MAX = 19
# A text has several blanks only if its source or id has; an id with more than this is not searched for.
SPLITS_MAX = 16
# In no log: a consumer that resumes with it gets a gap.
NOWHERE = "0" * TAG_DIGITS + ".0"

_POSITION = re.compile(rf"([0-9a-f]{{{TAG_DIGITS}}})\.([0-9]{{1,{OFFSET_DIGITS_MAX}}})")


class ResumePosition(NamedTuple):
    """An offset in the log with this tag."""

    tag: str
    offset: int

    @property
    def text(self) -> str:
        return f"{self.tag}.{self.offset}"


class EventId(NamedTuple):
    """An event that the consumer received: its source and id as one string."""

    text: str

    def pairs(self) -> list[tuple[str, str]]:
        """
        Return every (source, id) that the text can mean; empty if it names no event.

        Frames write a blank inside a part as `%20`, so their ids have one `+` and one meaning. Texts with more
        come from older servers, and texts with blanks were decoded by a client or proxy: those have one meaning
        for each blank where the source can end.
        """
        if self.text.count("+") == 1 and " " not in self.text:
            source, _, id_ = self.text.partition("+")
            return [(unquote(source), unquote(id_))]
        text = unquote_plus(self.text) if "+" in self.text else self.text
        pairs: list[tuple[str, str]] = []
        at = text.find(" ")
        while at >= 0 and len(pairs) < SPLITS_MAX:
            pairs.append((text[:at], text[at + 1 :]))
            at = text.find(" ", at + 1)
        return pairs


# Where a consumer may start: "earliest", "latest", an offset, a time, a position, or after an event.
Place = str | int | datetime | ResumePosition | EventId


def tag_of(log_id: str) -> str:
    """Return the tag of the log with this id."""
    return hashlib.sha256(log_id.encode()).hexdigest()[:TAG_DIGITS]


def parse_position(text: str) -> ResumePosition | None:
    """Parse a position; return None if the text is not one."""
    found = _POSITION.fullmatch(text)
    return ResumePosition(found[1], int(found[2])) if found else None


def parse_offset(text: str) -> int | None:
    """Parse a plain offset; return None if the text is not one."""
    if text.isascii() and text.isdigit() and len(text) <= OFFSET_DIGITS_MAX:
        return int(text)
    return None


def parse_last_event_id(text: str) -> Place:
    """Parse what a consumer received last: a position, an offset (of that record), or source and id."""
    position = parse_position(text)
    if position is not None:
        return position
    offset = parse_offset(text)
    return EventId(text) if offset is None else offset + 1
